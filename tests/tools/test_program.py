# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What both programs make of errors that no command expects, and of other encodings."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence

import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.tools import cli, opt
from block32.tools.program import exit_code_of


def failing(error: BaseException) -> Callable[[Sequence[str]], int]:
    def run(_: Sequence[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DiagnosticError("a.mlir:1:2", "is wrong"), 1, "a.mlir:1:2: error: is wrong\n"),
        (MemoryError(), 1, "block32: error: the memory of this machine does not suffice\n"),
        (KeyboardInterrupt(), 130, "block32: interrupted\n"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(failing(error), []) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("main", [cli.main, opt.main])
def test_a_path_that_is_no_utf_8(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """IREE's bindings abort on such a string."""
    assert main(["run", "m\udcff.vmfb"]) == 1
    assert capsys.readouterr().err == "block32: error: expected UTF-8 but got 'm\\udcff.vmfb'\n"


def test_an_output_without_the_character(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))

    def run(_: Sequence[str]) -> int:
        print("5 µs", flush=True)
        return 0

    assert exit_code_of(run, []) == 0
    assert written.getvalue() == b"5 \\xb5s\n"


def test_opt_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert opt.main(["missing.mlir"]) == 1
    assert capsys.readouterr().err.startswith("missing.mlir: error: cannot read the input")
