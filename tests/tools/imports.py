# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running ``block32 import checkpoint`` in tests, and what it wrote."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.tools.cli import main


def import_checkpoint(path: Path, folder: Path, *options: str) -> int:
    """Import into ``folder``'s ``l.mlir`` and ``l.irpa``; the exit code."""
    outputs = ["-o", f"{folder}/l.mlir", f"--output-params={folder}/l.irpa", "--quiet"]
    return main(["import", "checkpoint", str(path), *outputs, *options])


def call(folder: Path, function: str, *arguments: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Compile what was imported for this CPU, and call a function of it."""
    vmfb = _compiled((folder / "l.mlir").read_bytes())
    module = block32.load(vmfb, parameters={"model": folder / "l.irpa"})
    return np.asarray(module[function](*arguments))


@lru_cache(maxsize=16)
def _compiled(text: bytes) -> bytes:
    return block32.compile(text, target="cpu")


def refused(path: Path, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line of the error; nothing may be left behind."""
    before = sorted(item.name for item in folder.iterdir())
    assert import_checkpoint(path, folder, *options) == 1
    assert sorted(item.name for item in folder.iterdir()) == before
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if ": note: " not in line]
    assert len(lines) == 1 and ": error: " in lines[0], error
    return error
