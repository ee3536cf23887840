# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Register arithmetic that the kernels share: dot products, lane sums and transposes."""

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
        return ops.intrinsic(isa.dot_intrinsic, sums.type, [sums, a, b])
    return scale_and_add(isa, sums, a, b)


def multiply_pairs(sums: ir.Value, x: ir.Value, weights: ir.Value) -> ir.Value:
    """2x2 ``sums`` plus products of two rows of x and two of w, four bf16 of each (``bfmmla``).

    A register holds the first row's sums with both rows of w, then the second's.
    """
    return ops.intrinsic("llvm.aarch64.neon.bfmmla", sums.type, [sums, x, weights])


def scale_and_add(
    isa: InstructionSet, totals: ir.Value, sums: ir.Value, factors: ir.Value
) -> ir.Value:
    """``totals + sums * factors``, all f32."""
    if isa.fused:
        return math.fma(sums, factors, totals)
    return arith.addf(totals, arith.mulf(sums, factors))


def broadcast_operand(isa: InstructionSet, element: ir.Value) -> ir.Value:
    """An operand whose lanes all hold ``element``: an f32, or a bf16 pair as i32."""
    return as_operand(isa, ops.broadcast(element, isa.lanes))


def as_operand(isa: InstructionSet, words: ir.Value) -> ir.Value:
    """A register of words (see ``InstructionSet.word``) as an operand."""
    return ops.bitcast(words, ir.BF16Type.get()) if isa.dot == "bf16" else words


def lane_sums(vectors: list[ir.Value]) -> list[ir.Value]:
    """The sum of each vector's elements, as scalars; always added in the same order.

    Vectors are merged in pairs: each round halves both their number and the lanes that hold the
    partial sums of one of them, so that 16 vectors of 16 lanes take 15 additions.
    """
    lanes = ops.length(vectors[0])
    sums: list[ir.Value] = []
    for first in range(0, len(vectors), lanes):
        group = vectors[first : first + lanes]
        merged = _merged_sums(group, lanes)
        sums += [ops.element(merged, i) for i in range(len(group))]
    return sums


def _merged_sums(group: list[ir.Value], lanes: int) -> ir.Value:
    """A vector whose first elements are the sums of the vectors of ``group``."""
    group = group + [group[-1]] * ((1 << (len(group) - 1).bit_length()) - len(group))
    segment = lanes
    while segment > 1:
        half = segment // 2
        starts = range(0, ops.length(group[0]), segment)
        low = [start + i for start in starts for i in range(half)]
        high = [i + half for i in low]
        if len(group) > 1:
            length = ops.length(group[0])
            low += [i + length for i in low]
            high += [i + length for i in high]
            pairs = list(zip(group[::2], group[1::2], strict=True))
        else:
            pairs = [(group[0], group[0])]
        group = [arith.addf(ops.shuffle(a, b, low), ops.shuffle(a, b, high)) for a, b in pairs]
        segment = half
    return group[0]


def transpose(rows: list[ir.Value], blocks: int = 1) -> list[ir.Value]:
    """Transpose square matrices, given and returned as rows of all; their size is a power of two.

    Each round interleaves row i with row i + size/2 (a perfect shuffle of the rows); after
    log2(size) rounds every element has moved to its transposed place.

    Args:
        rows: As many as a matrix has.
        blocks: Matrices that lie side by side.
    """
    size, lanes = len(rows), len(rows) * blocks
    starts = range(0, lanes, size)
    low = [start + i // 2 + lanes * (i % 2) for start in starts for i in range(size)]
    high = [i + size // 2 for i in low]
    for _ in range(size.bit_length() - 1):
        pairs = zip(rows[: size // 2], rows[size // 2 :], strict=True)
        rows = [ops.shuffle(a, b, order) for a, b in pairs for order in (low, high)]
    return rows
