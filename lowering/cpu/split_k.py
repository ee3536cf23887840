# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K: workgroups that share columns of y, each on a range of K, and the launch that adds.

With few columns there would be fewer workgroups than threads. Each range's sums are a *slot*
``[range][row][column]``. The last launch adds the slots of an element in the order of K, so that y
has the same bits however many threads run and whichever ends first.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, ceil_div, minimum
from block32.lowering.common.partition import SplitPartition
from block32.lowering.cpu import digits, ops, pack
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul

SLOTS = "slots"
#: Columns that a workgroup of the adding launch takes.
_COLUMNS = 256


def chunk(problem: ScaledMatmul, tier: KernelTier) -> int:
    """Elements of K that the stream kernel of a tier takes in one step."""
    return digits.CHUNK if digits.serves(problem, tier) else instruction_set(tier.isa).chunk


def partition(problem: ScaledMatmul, tier: KernelTier) -> SplitPartition:
    """The whole chunks of K as ranges of chunks; what is left of K goes to the last range."""
    chunks = problem.k // chunk(problem, tier)
    return SplitPartition.create(max(chunks, 1), tier.splits, 1)


def verify(problem: ScaledMatmul, tier: KernelTier) -> str | None:
    """Why a tier's ``splits`` and ``reduce`` are refused, or None."""
    if tier.splits == 1:
        is_default = tier.reduce == "in_launch"
        return None if is_default else f"expected no reduce without splits but got '{tier.reduce}'"
    if not pack.packs_rows(tier):
        return f"expected splits 1 for a kernel whose lanes run along N but got {tier.splits}"
    if problem.grouping:
        return f"expected splits 1 for groups of rows but got {tier.splits}"
    if tier.reduce != "second_launch":
        return f"expected reduce 'second_launch' with splits but got '{tier.reduce}'"
    step = chunk(problem, tier)
    if tier.splits > problem.k // step or partition(problem, tier).count != tier.splits:
        return f"expected splits that share out {problem.k // step} steps of {step} K, none empty"
    return None


def slots_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """f32 elements of all slots."""
    return m * (tier.splits * _padded_n(problem)) if tier.splits > 1 else 0


def workgroups(problem: ScaledMatmul, tier: KernelTier, any_row: Index) -> Index:
    """The grid of the adding launch; ``any_row`` is 0 where M is, otherwise 1."""
    return any_row * ceil_div(problem.n, _COLUMNS) if tier.splits > 1 else 0


def _padded_n(problem: ScaledMatmul) -> int:
    return -(-problem.n // GROUP) * GROUP


def _slots(kernel: KernelContext, tier: KernelTier) -> ir.Value:
    rows, sizes = ("?", (kernel.m,)) if isinstance(kernel.m, IndexValue) else (kernel.m, ())
    shape = f"{tier.splits}x{rows}x{_padded_n(kernel.problem)}"
    return kernel.memref(SLOTS, f"memref<{shape}xf32>", sizes)


class SlotStore:
    """Stores rows of 16 columns of one range's sums, where a kernel without splits stores y."""

    def __init__(self, kernel: KernelContext, tier: KernelTier, split: Index):
        """Bind the slots; this workgroup has range ``split``."""
        self._slots = _slots(kernel, tier)
        self._split = split

    def store(self, values: ir.Value, row: Index, column: Index) -> None:
        """Keep 16 sums; see ``ResultStore.store``."""
        ops.store(values, self._slots, [self._split, row, column], 64)


def emit_reduce(tier: KernelTier, kernel: KernelContext) -> None:
    """Write the adding kernel: a workgroup adds and finishes some columns of all rows."""
    slots, result = _slots(kernel, tier), ResultStore(kernel)
    first = kernel.workgroup_id() * _COLUMNS
    last = minimum(first + _COLUMNS, kernel.problem.n)

    def group(row: IndexValue, column: IndexValue) -> None:
        total = ops.load(slots, [0, row, column], GROUP, 64)
        for split in range(1, tier.splits):
            total = arith.addf(total, ops.load(slots, [split, row, column], GROUP, 64))
        result.store(total, row, column)

    ops.repeat(
        0,
        kernel.m,
        1,
        lambda row: ops.repeat(first, last, GROUP, lambda column: group(row, column)),
    )
