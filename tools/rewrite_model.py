# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models on their way to a new model: imported to linalg, one pass of ours over them."""

from __future__ import annotations

from typing import Final

from iree.compiler import ir
from rich.console import Console

from block32.dialects.diagnostics import DiagnosticError
from block32.passes.base import Pass, Report
from block32.passes.pipeline import PassFailedError, run_pipeline
from block32.tools.compiler import parse_module, path_of
from block32.tools.iree_compile import run_iree_compile
from block32.tools.onnx_model import read_argument
from block32.tools.parameter_names import check_parameter_names

_FLAGS: Final = ("--compile-to=input", "--emit-mlir-bytecode", "--mlir-print-debuginfo")


def import_model(path: str, quiet: bool) -> tuple[ir.Module, str]:
    """A model in linalg on tensors, and its name for errors.

    Args:
        path: An ``.onnx`` file, or MLIR text or bytecode of any kind that ``iree-compile`` imports;
            ``-`` for stdin.
        quiet: Show no progress.

    Raises:
        DiagnosticError: It cannot be read or imported.
    """
    source, name = read_argument(path)
    check_parameter_names(source, name)
    with Console(stderr=True, quiet=quiet).status(f"{name}: importing"):
        imported = run_iree_compile(
            [path_of(source), *_FLAGS],
            stdin=source,
            input_name=name,
        )
        return parse_module(imported, name), name


def run_pass(module: ir.Module, name: str, current: Pass) -> bytes:
    """Run a pass over a model; the new model's text.

    Raises:
        DiagnosticError: The pass refuses the model.
        PassFailedError: The pass broke.
    """
    try:
        run_pipeline(module, [current], Report())
    except PassFailedError as error:
        if error.diagnostic is None:
            raise
        found = error.diagnostic
        location = name if found.location == "<module>" else found.location
        raise DiagnosticError(location, found.message, found.notes) from error
    return module.operation.get_asm(enable_debug_info=False).encode()
