# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Register arithmetic that the stream and the tiled kernel share: dot products and lane sums."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, math

from block32.lowering.cpu import ops
from block32.lowering.cpu.isa import InstructionSet


def zero_accumulator(isa: InstructionSet) -> ir.Value:
    """A register of f32 zeros."""
    return ops.splat(0, ops.vector_type(isa.lanes, ops.f32()))


def multiply_add(isa: InstructionSet, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """``sums`` plus the products of two operands; a lane adds the products of its own elements."""
    if isa.dot == "bf16":
        return ops.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, [sums, a, b])
    if isa.fused:
        return math.fma(a, b, sums)
    return arith.addf(sums, arith.mulf(a, b))


def broadcast_operand(isa: InstructionSet, element: ir.Value) -> ir.Value:
    """An operand whose lanes all hold ``element``: an f32, or a bf16 pair as i32."""
    lanes = ops.broadcast(element, isa.lanes)
    return ops.bitcast(lanes, ir.BF16Type.get()) if isa.dot == "bf16" else lanes


def lane_sum(values: ir.Value) -> ir.Value:
    """The sum of a vector's elements, halves first: always in the same order."""
    while ops.length(values) > 1:
        half = ops.length(values) // 2
        values = arith.addf(ops.part(values, 0, half), ops.part(values, half, half))
    return ops.first_element(values)


def transpose(rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose a square matrix, given and returned as its rows; its size is a power of two.

    Each round interleaves row i with row i + size/2 (a perfect shuffle of the rows); after
    log2(size) rounds every element has moved to its transposed place.
    """
    size = len(rows)
    low = [i // 2 + size * (i % 2) for i in range(size)]
    high = [i + size // 2 for i in low]
    for _ in range(size.bit_length() - 1):
        pairs = zip(rows[: size // 2], rows[size // 2 :], strict=True)
        rows = [ops.shuffle(a, b, order) for a, b in pairs for order in (low, high)]
    return rows
