# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Settings that all tests share, and the collection of ``.mlir`` tests (see ``tests/lit.py``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.lit import SHELL, LitFile
from tests.lit_shell import Shell

# A machine that is busy is no bug, and a failure has to come back on every run.
settings.register_profile("block32", deadline=None, derandomize=True)
settings.load_profile("block32")

_SOURCES = Path(__file__).parents[1] / "src"


def pytest_configure(config: pytest.Config) -> None:
    # Programs that tests start import what the tests import.
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCES), inherited]))
    shell = Shell()
    config.stash[SHELL] = shell
    config.add_cleanup(shell.close)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return LitFile.from_parent(parent, path=file_path) if file_path.suffix == ".mlir" else None
