# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the README tells a reader to type does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from iree.compiler.tools.binaries import find_tool

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = re.search(r"^## Five minutes.*?(?=^## )", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The section's code blocks of a language; commands have none."""
    assert SECTION is not None
    found = re.findall(r"^```(\w*)\n(.*?)^```", SECTION[0], re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and programs under the names that the README calls them by."""
    folder = tmp_path_factory.mktemp("readme")
    (model,) = blocks("mlir")
    (folder / "linear.mlir").write_text(model)
    programs = {
        "block32": f'exec {sys.executable} -m block32 "$@"',
        "iree-compile": f'exec {find_tool("iree-compile")} "$@"',
    }
    (folder / "bin").mkdir()
    for name, command in programs.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o755)
    return folder


def run(folder: Path, *command: str) -> str:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_work(folder: Path) -> None:
    for commands in blocks(""):
        commands = commands.replace(". .venv/bin/activate\n", "")
        run(folder, "sh", "-e", "-c", commands)
    shown = run(folder, "block32", "run", "linear.vmfb", "--dim=M=2")
    assert "result 0: 2x4096xf32" in shown


def test_the_python_code_gives_the_error_of_quantising(folder: Path) -> None:
    (code,) = blocks("python")
    assert 0.01 < float(run(folder, sys.executable, "-c", code)) < 0.06
