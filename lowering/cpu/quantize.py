# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising x in the packing launch: a workgroup quantises the rows that it then packs.

Codes and scales go to a buffer of their own, where the packing kernel reads them as if they had
been given, so that y has the bits of a quantisation before the launch.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.common.quantization import quantized_code, scale_byte
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.cpu import ops, pack
from block32.lowering.kernel_context import KernelContext, KernelView
from block32.lowering.problem import BLOCK_K, ScaledMatmul

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def codes_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """Bytes of the codes of all rows that are packed."""
    return pack.flags_size(tier, m) * problem.k


def scales_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """Bytes of their scales."""
    return pack.flags_size(tier, m) * problem.k_blocks


def emit_quantizing_pack(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the packing kernel for an x that is quantised first.

    A row that is packed as a copy of the last one is quantised again: the workgroup that has the
    last row may not be done with it.
    """
    rows_each = 1 if pack.packs_rows(tier) else _slab_rows(tier)
    rows = kernel.workgroup_count() * rows_each
    quantizer = RowQuantizer(problem, kernel, rows)
    first = kernel.workgroup_id() * rows_each
    ops.repeat(first, first + rows_each, 1, quantizer.quantize)
    renamed = kernel.renamed({"lhs": "unquantized", CODES: "lhs", SCALES: "lhs_scale"})
    quantized = problem.quantized()
    pack.emit_pack(quantized, tier, KernelView(renamed, quantized, rows))


def _slab_rows(tier: KernelTier) -> int:
    assert tier.mma is not None
    return tier.mma[0]


class RowQuantizer:
    """Quantises rows of x, a block of 32 at a time."""

    def __init__(self, problem: ScaledMatmul, kernel: KernelContext, rows: Index):
        """Bind x, and codes and scales of ``rows`` rows."""
        assert isinstance(rows, IndexValue)
        self._problem = problem
        self._m = kernel.m
        x_rows, sizes = (f"{kernel.m}", ()) if isinstance(kernel.m, int) else ("?", (kernel.m,))
        self._x = kernel.memref("lhs", f"memref<{x_rows}x{problem.k}x{problem.lhs}>", sizes)
        self._codes = kernel.memref(CODES, f"memref<?x{problem.k}xi8>", (rows,))
        self._scales = kernel.memref(SCALES, f"memref<?x{problem.k_blocks}xi8>", (rows,))

    def quantize(self, row: IndexValue) -> None:
        """Quantise row ``row``, or the last one where there is none."""
        source = minimum(row, self._m - 1)
        full, tail = divmod(self._problem.k, BLOCK_K)
        ops.repeat(0, full, 1, lambda block: self._block(source, row, block, BLOCK_K))
        if tail:
            self._block(source, row, full, tail)

    def _block(self, source: Index, row: Index, block: Index, count: int) -> None:
        """One block of ``count`` values; those past it are zeros, and no part of the codes."""
        values = ops.load_first(self._x, [source, block * BLOCK_K], count, BLOCK_K)
        if not isinstance(ops.element_type(values), ir.F32Type):
            values = ops.convert(arith.extf, values, ops.f32())
        element = self._problem.quantized().lhs
        byte = scale_byte(_largest_magnitude(values), self._problem.lhs_quantize, element)
        ops.store_scalar(arith.trunci(ops.i8(), byte), self._scales, [row, block])
        codes = quantized_code(values, ops.broadcast(byte, BLOCK_K), element)
        codes = ops.convert(arith.trunci, codes, ops.i8())
        ops.store_first(codes, self._codes, [row, block * BLOCK_K], count)


def _largest_magnitude(values: ir.Value) -> ir.Value:
    """The largest magnitude of a vector, NaNs passed over. Magnitudes order as their bits do."""
    bits = ops.bitcast(values, ops.i32())
    bits = arith.andi(bits, ops.splat(_MAGNITUDE, bits.type))
    is_nan = arith.cmpi(arith.CmpIPredicate.ugt, bits, ops.splat(_INFINITY, bits.type))
    bits = arith.select(is_nan, ops.splat(0, bits.type), bits)
    largest = vector.reduction(ops.i32(), vector.CombiningKind.MAXUI, bits)
    return arith.bitcast(ops.f32(), largest)
