# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmul (mixture of experts): each group of rows of x is multiplied by one expert's w.

Group z holds rows ``row_offsets[z]`` to ``row_offsets[z + 1]`` and belongs to ``expert_ids[z]``.
The grid is (tiles along N, tiles along the rows of the longest group, groups): an empty group's
threadgroups return at once, expert -1 stores zeros and reads no weight, rows of no group stay as
they are.
"""

from __future__ import annotations

from iree.compiler import ir

from block32.lowering.apple import builder
from block32.lowering.apple.builder import AirKernel, Pointer, Word, either, less, when, wide
from block32.lowering.apple.dense import THREADS, TILE
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import KernelError, KernelSignature
from block32.lowering.apple.simdgroup_tile import SIMDGROUP_TILE, Operand, SimdgroupTile, clamp
from block32.lowering.apple.tile_scales import Scales
from block32.lowering.problem import ceil_div


def signature(matmul: Matmul, name: str) -> KernelSignature:
    """The kernel's parameters; push constant 0 counts the rows of x, of all groups together."""
    if not matmul.grouped:
        raise KernelError("the grouped form needs a grouped matmul")
    return KernelSignature(name, matmul.buffers(), 1, THREADS)


def grid(matmul: Matmul, longest_group: int, groups: int) -> tuple[int, int, int]:
    """Threadgroups; the rows of all groups together will do for ``longest_group``."""
    return ceil_div(matmul.n, TILE), ceil_div(longest_group, TILE), groups


def write(matmul: Matmul, kernel: AirKernel) -> None:
    """Writes the kernel's body."""
    group = kernel.threadgroup(2)
    total = kernel.constant(0)
    offsets = kernel.buffer("row_offsets").at(group)
    # An offset beyond x would let a wrong table write outside y.
    first, end = (clamp(Word(offsets.at(i).load()), total + 1) for i in range(2))
    assert isinstance(first, Word) and isinstance(end, Word)
    nonempty = less(first, end)
    rows = builder.choose(nonempty, end - first, 0)
    m0 = kernel.threadgroup(1) * TILE + (kernel.simdgroup >> 1) * SIMDGROUP_TILE
    n0 = kernel.threadgroup(0) * TILE + (kernel.simdgroup & 1) * SIMDGROUP_TILE
    assert isinstance(rows, Word)
    inside = builder.both(less(m0, rows), less(n0, matmul.n))
    when(inside, lambda: _tile(matmul, kernel, group, (m0, n0), first, rows))


def _tile(
    matmul: Matmul,
    kernel: AirKernel,
    group: Word,
    origin: tuple[Word, Word],
    first: Word,
    rows: Word,
) -> None:
    """One simdgroup's tile of a group that has rows there."""
    expert = Word(kernel.buffer("expert_ids").at(group).load())

    def tile(base: Pointer, scales: Scales | None) -> SimdgroupTile:
        lhs = Operand(rows_from(kernel.buffer("lhs"), first, matmul.k), rows, matmul.k)
        return SimdgroupTile(kernel, matmul, lhs, Operand(base, matmul.n, matmul.k), origin, scales)

    def multiply() -> None:
        weights = part_of_expert(kernel.buffer("rhs"), expert, matmul.n, matmul.k)
        work = tile(weights, _scales(matmul, kernel, expert, first, rows))
        work.run(lambda accumulators: work.store(accumulators, first, expert))

    def zeros() -> None:
        tile(kernel.buffer("rhs"), None).store_zeros(first)

    either(builder.is_negative(expert), zeros, multiply)


def _scales(
    matmul: Matmul, kernel: AirKernel, expert: Word, first: Word, rows: Word
) -> Scales | None:
    """Where the scales of this group's rows and of its expert lie."""
    if not matmul.is_scaled:
        return None
    lhs = None
    if matmul.lhs_scaled:
        lhs = rows_from(kernel.buffer("lhs_scale"), first, matmul.k_blocks)
    rhs = kernel.buffer("rhs_scale")
    rhs = part_of_expert(rhs, expert, matmul.rhs_scale_rows, matmul.k_blocks)
    return Scales(lhs, rhs, rows)


def rows_from(buffer: Pointer, first: Word, columns: int) -> Pointer:
    """The address of row ``first`` of a matrix; offsets may pass 2^32."""
    return buffer.at(wide(first) * columns)


def part_of_expert(buffer: Pointer, expert: Word, rows: int, columns: int) -> Pointer:
    """The address of an expert's matrix among those of all; offsets may pass 2^32."""
    return buffer.at(wide(expert) * (rows * columns))


def build(matmul: Matmul, name: str) -> tuple[KernelSignature, ir.Module]:
    """The kernel's signature and its ops."""
    kernel_signature = signature(matmul, name)
    module = builder.build_kernel(kernel_signature, lambda kernel: write(matmul, kernel))
    return kernel_signature, module
