# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which of the multiplying kernels a tier names."""

from __future__ import annotations

from block32.dialects.kernel import KernelTier
from block32.lowering.cpu import digits, pack
from block32.lowering.cpu.columns import emit_columns
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.matrix import emit_matrix
from block32.lowering.cpu.pairs import emit_pairs
from block32.lowering.cpu.stream import emit_stream
from block32.lowering.cpu.stream_digits import emit_stream_digits
from block32.lowering.cpu.tiled import decodes_in_registers, emit_tiled
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul


def emit_gemm(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel that multiplies packed x with w."""
    if digits.serves(problem, tier):
        emit_stream_digits(problem, tier, kernel)
    elif pack.packs_rows(tier):
        emit_stream(problem, tier, kernel)
    elif tier.form == "stream":
        emit_columns(problem, tier, kernel)
    elif instruction_set(tier.isa).tiles:
        emit_matrix(problem, tier, kernel)
    elif decodes_in_registers(tier):
        emit_pairs(problem, tier, kernel)
    else:
        emit_tiled(problem, tier, kernel)
