# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages of the docs as tests read them: their code blocks, and the commands in those run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from iree.compiler.tools.binaries import find_tool

from tests.docs.commands import blocks_in

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language in a Markdown text; commands have none."""
    return [block.code for block in blocks_in(page) if block.language == language]


def install_programs(folder: Path) -> None:
    """Programs under the names that pages call them by, in ``folder``'s ``bin``."""
    programs = {
        "block32": f'exec {sys.executable} -m block32 "$@"',
        "block32-opt": f'exec {sys.executable} -m block32.tools.opt "$@"',
        "python": f'exec {sys.executable} "$@"',
        "iree-compile": f'exec {find_tool("iree-compile")} "$@"',
        "iree-import-onnx": f'exec {sys.executable} -m iree.compiler.tools.import_onnx "$@"',
    }
    (folder / "bin").mkdir()
    for name, command in programs.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o755)


def run(folder: Path, *command: str) -> str:
    """What a command prints, run in ``folder`` with its programs; it has to succeed."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout
