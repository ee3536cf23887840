# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling the kernels of one matmul into a module of their own, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir

from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.tools.iree_compile import run_iree_compile


def compile_standalone(spec: KernelSpec, flags: Sequence[str]) -> bytes:
    """The vmfb with a function ``main`` that takes the operands of the matmul and gives y.

    Args:
        spec: The matmul, its target and its tiers.
        flags: Of ``iree-compile``, which say the device.

    Raises:
        IreeCompileError: IREE refuses the module.
    """
    with ir.Context(), ir.Location.unknown():
        source = str(build_standalone_module(spec))
    return run_iree_compile(["-", *flags], stdin=source.encode())
