# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling a program of single Apple kernels into a vmfb (``lowering.apple.program``)."""

from __future__ import annotations

from collections.abc import Mapping

from block32.lowering.apple.program import Entry, build_program
from block32.tools.compiler import CompileOptions, finish_module


def compile_kernels(entries: Mapping[str, Entry]) -> bytes:
    """A vmfb for IREE's Metal device with one function an entry.

    Args:
        entries: What each function computes, by its name; all for one architecture.

    Raises:
        KernelError: A form cannot compute its matmul.
        LlvmError: The package llvmlite is missing or of the wrong version.
        IreeCompileError: IREE refuses the module.
    """
    (target,) = {entry.matmul.architecture.name for entry in entries.values()}
    options = CompileOptions(target=target)
    return finish_module(build_program(entries), "<kernels>", options, phase="start")
