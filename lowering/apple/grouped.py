# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmul (mixture of experts): each group of rows of x is multiplied by one expert's w.

Group g holds rows ``offsets[g]`` to ``offsets[g + 1]`` and belongs to ``expert_ids[g]``. Where the
groups begin is known on the device alone, so the grid has a slot for every tile that could have
rows: group g owns the slots from ``offsets[g] // TILE + g`` on, one for each of its tiles, and a
threadgroup finds the group of its slot by bisection. A number that is no expert makes zeros and
reads no weight; rows of no group stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir

from block32.lowering.apple import builder
from block32.lowering.apple.builder import AirKernel, Int, Pointer, Word, either, less, when, wide
from block32.lowering.apple.dense import THREADS, TILE
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.operand_tiles import Operand, clamp
from block32.lowering.apple.signature import KernelError, KernelSignature
from block32.lowering.apple.simdgroup_tile import SIMDGROUP_TILE, SimdgroupTile
from block32.lowering.apple.tile_scales import Scales
from block32.lowering.common.index import Index
from block32.lowering.problem import Grouping, ceil_div


def signature(matmul: Matmul, name: str) -> KernelSignature:
    """The kernel's parameters; push constant 0 counts the rows of x where M is not known."""
    _grouping(matmul)
    constants = 1 if matmul.m is None else 0
    return KernelSignature(name, matmul.buffers(), constants, THREADS, matmul.architecture)


def _grouping(matmul: Matmul) -> Grouping:
    if matmul.grouping is None:
        raise KernelError("the grouped form needs a grouped matmul")
    return matmul.grouping


def grid(matmul: Matmul, m: Index) -> tuple[Index, Index, int]:
    """Threadgroups along N, and one for each slot, for ``m`` rows of all groups together."""
    return ceil_div(matmul.n, TILE), m // TILE + _grouping(matmul).groups, 1


def first_slot(offset: Int, group: Int) -> Int:
    """The slot of a group's first tile, by the group's first row.

    Groups do not share slots: rows a to b make at most ``b // TILE - a // TILE + 1`` tiles.
    """
    return (offset >> (TILE.bit_length() - 1)) + group


def group_of(slot: Int, groups: int, offset_of: Callable[[Int], Int]) -> Int:
    """The last group whose first slot is not behind ``slot``; 0 where there is none.

    Args:
        slot: The threadgroup's place.
        groups: How many there are.
        offset_of: Reads the first row of a group.
    """
    group: Int = 0
    for bit in reversed(range((groups - 1).bit_length())):
        candidate = clamp(group + (1 << bit), groups)
        is_behind = less(slot, first_slot(offset_of(candidate), candidate))
        group = builder.choose(is_behind, group, candidate)
    return group


def write(matmul: Matmul, kernel: AirKernel) -> None:
    """Writes the kernel's body."""
    total: Int = kernel.constant(0) if matmul.m is None else matmul.m
    slot, offsets = kernel.threadgroup(1), kernel.buffer("offsets")

    def offset_of(group: Int) -> Word:
        return Word(offsets.at(group).load())

    group = group_of(slot, _grouping(matmul).groups, offset_of)
    # An offset beyond x would let a wrong table write outside y.
    start = offset_of(group)
    first, end = (clamp(offset, total + 1) for offset in (start, offset_of(group + 1)))
    assert isinstance(first, Word) and isinstance(end, Word)
    rows = builder.choose(less(first, end), end - first, 0)
    m0 = (slot - first_slot(start, group)) * TILE + (kernel.simdgroup >> 1) * SIMDGROUP_TILE
    n0 = kernel.threadgroup(0) * TILE + (kernel.simdgroup & 1) * SIMDGROUP_TILE
    assert isinstance(rows, Word)
    inside = builder.both(less(m0, rows), less(n0, matmul.n))
    when(inside, lambda: _tile(matmul, kernel, group, (m0, n0), first, rows))


def _tile(
    matmul: Matmul,
    kernel: AirKernel,
    group: Int,
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

    either(less(expert, _grouping(matmul).experts), multiply, zeros)


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
