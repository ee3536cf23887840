# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the README tells a reader to type does what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, install_programs, run

SECTION = re.search(
    r"^## Five minutes.*?(?=^## )", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
assert SECTION is not None
PAGE = SECTION[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and programs under the names that the README calls them by."""
    folder = tmp_path_factory.mktemp("readme")
    (model,) = blocks(PAGE, "mlir")
    (folder / "linear.mlir").write_text(model)
    install_programs(folder)
    return folder


def test_the_commands_work(folder: Path) -> None:
    for commands in blocks(PAGE, ""):
        commands = commands.replace(". .venv/bin/activate\n", "")
        run(folder, "sh", "-e", "-c", commands)
    shown = run(folder, "block32", "run", "linear.vmfb", "--dim=M=2")
    assert "result 0: 2x4096xf32" in shown


def test_the_python_code_gives_the_error_of_quantising(folder: Path) -> None:
    (code,) = blocks(PAGE, "python")
    assert 0.01 < float(run(folder, sys.executable, "-c", code)) < 0.06
