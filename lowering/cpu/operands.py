# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operands of a CPU kernel as memrefs, and walks along K."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iree.compiler import ir

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.common.weight_layout import WeightLayout
from block32.lowering.cpu import ops
from block32.lowering.cpu.fold import FoldCheck
from block32.lowering.cpu.isa import InstructionSet, instruction_set
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ELEMENT_BITS, ScaledMatmul, ceil_div

#: One step along K: (chunk number, codes in it, carried values) to the next carried values.
ChunkBody = Callable[[Index, int, list[ir.Value]], Sequence[ir.Value]]


def rhs_codes(kernel: KernelContext) -> ir.Value:
    """The weight as bytes, ``memref<N x row bytes x i8>``."""
    problem = kernel.problem
    return kernel.memref("rhs", f"memref<{problem.n}x{problem.rhs_row_bytes}xi8>")


def rhs_pieces(kernel: KernelContext, layout: WeightLayout) -> ir.Value:
    """The weight in a layout, ``memref<pieces x bytes of a piece x i8>``."""
    problem = kernel.problem
    pieces = problem.n * problem.rhs_row_bytes // layout.piece
    return kernel.memref("rhs", f"memref<{pieces}x{layout.piece}xi8>")


def rhs_bytes(kernel: KernelContext, layout: WeightLayout | None) -> ir.Value:
    """The weight in the order that it is stored in: rows, or pieces of a layout."""
    return rhs_codes(kernel) if layout is None else rhs_pieces(kernel, layout)


def rhs_scales(kernel: KernelContext) -> ir.Value:
    """The scale bytes of w."""
    rows, columns = kernel.problem.rhs_scale_shape
    return kernel.memref("rhs_scale", f"memref<{rows}x{columns}xi8>")


def lhs_elements(kernel: KernelContext) -> ir.Value:
    """The activation: bytes for 4 and 8-bit formats, else its own elements."""
    problem = kernel.problem
    if ELEMENT_BITS[problem.lhs] <= 8:
        return _row_memref(kernel, "lhs", problem.lhs_row_bytes, "i8")
    return _row_memref(kernel, "lhs", problem.k, problem.lhs)


def lhs_scales(kernel: KernelContext) -> ir.Value:
    """The scale bytes of x."""
    return _row_memref(kernel, "lhs_scale", kernel.problem.k_blocks, "i8")


def flat_scales(kernel: KernelContext, name: str) -> ir.Value:
    """The scale bytes ``lhs_scale`` or ``rhs_scale`` as one row."""
    rows, blocks = kernel.problem.rhs_scale_shape
    count = rows * blocks if name == "rhs_scale" else kernel.m * blocks
    if isinstance(count, int):
        return kernel.memref(name, f"memref<{count}xi8>")
    return kernel.memref(name, "memref<?xi8>", (count,))


def lhs_fold_check(kernel: KernelContext) -> FoldCheck:
    """Whether scales of x may be folded."""
    scales = flat_scales(kernel, "lhs_scale")
    lhs = kernel.problem.lhs
    return FoldCheck(kernel.problem, lhs, lhs_elements(kernel), scales, kernel.m, share=1)


def rhs_fold_check(kernel: KernelContext, layout: WeightLayout | None = None) -> FoldCheck:
    """Whether scales of w may be folded."""
    problem = kernel.problem
    scales = flat_scales(kernel, "rhs_scale")
    share = problem.rhs_block[0]
    codes = rhs_bytes(kernel, layout)
    return FoldCheck(problem, problem.rhs, codes, scales, problem.n, share, layout)


def group_may_fold(kernel: KernelContext, column: IndexValue, rows: Index) -> ir.Value:
    """Whether ``rows`` rows of w from ``column`` on may be folded: blocks of 32 share one scale."""
    share = kernel.problem.rhs_block[0]
    return rhs_fold_check(kernel).may_fold(column // share, rows if share == 1 else 1)


def panel_may_fold(
    kernel: KernelContext, column: Index, rows: int, layout: WeightLayout | None = None
) -> ir.Value:
    """Whether the rows of w that exist of ``rows`` from ``column`` on may be folded."""
    scale_rows, _ = kernel.problem.rhs_scale_shape
    share = kernel.problem.rhs_block[0]
    first = column // share
    count = minimum(scale_rows - first, ceil_div(rows, share))
    return rhs_fold_check(kernel, layout).may_fold(first, count)


def _row_memref(kernel: KernelContext, name: str, columns: int, element: str) -> ir.Value:
    """A memref with a row for each row of x."""
    if isinstance(kernel.m, int):
        return kernel.memref(name, f"memref<{kernel.m}x{columns}x{element}>")
    return kernel.memref(name, f"memref<?x{columns}x{element}>", (kernel.m,))


def existing_row(problem: ScaledMatmul, row: Index, multiple: int) -> Index:
    """The row of w, or the last one: columns past N are computed from it and never stored.

    There are none where N is a multiple of the ``multiple`` rows that are taken together.
    """
    return row if problem.n % multiple == 0 else minimum(row, problem.n - 1)


def padded_k(problem: ScaledMatmul, isa: InstructionSet) -> int:
    """K rounded up to whole chunks."""
    return ceil_div(problem.k, isa.chunk) * isa.chunk


def panel_k(problem: ScaledMatmul, tier: KernelTier) -> int:
    """The part of K that a panel of the tiled and the matrix kernel holds."""
    assert tier.tile is not None
    return min(tier.tile[2], padded_k(problem, instruction_set(tier.isa)))


def for_chunks(k: int, chunk: int, carried: Sequence[ir.Value], body: ChunkBody) -> list[ir.Value]:
    """Walk K in chunks: a loop over the full ones, then a copy of the body for a short last one."""
    full, tail = divmod(k, chunk)
    values = list(carried)
    if full:
        values = ops.for_range(0, full, 1, values, lambda i, inner: body(i, chunk, inner))
    if tail:
        values = list(body(full, tail, values))
    return values


def whole_or_short(
    k: int, size: int, chunk: Index, width: int, load: Callable[[int], ir.Value]
) -> ir.Value:
    """``load(count)``, where ``count`` elements of K exist in a chunk: ``size``, or a short last.

    Args:
        k: Elements of K in all.
        size: Elements of a chunk.
        chunk: The chunk's number, known only at run time.
        width: Bytes that ``load`` gives.
        load: Reads ``count`` elements.
    """
    full, tail = divmod(k, size)
    if not tail:
        return load(size)
    if not full:
        return load(tail)
    types = [ops.vector_type(width, ops.i8())]
    is_whole = ops.is_below(chunk, full)
    (value,) = ops.choose_values(is_whole, types, lambda: [load(size)], lambda: [load(tail)])
    return value


def load_chunk_scales(
    scales: ir.Value, row: Index, chunk: Index, count: int, size: int
) -> ir.Value:
    """The scale bytes of a row in one chunk of ``size`` K, of which ``count`` elements exist."""
    blocks = size // BLOCK_K
    present = ceil_div(count, BLOCK_K)
    return ops.load_first(scales, [row, chunk * blocks], present, blocks)


def spread_blocks(isa: InstructionSet, values: ir.Value) -> ir.Value:
    """One value a block of a chunk, copied to the lanes that the block's elements are in."""
    blocks = ops.length(values)
    lanes = [lane * blocks // isa.lanes for lane in range(isa.lanes)]
    return ops.shuffle(values, values, lanes)
