# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What every form has in common: its place in the grid, split-K, and the store.

A form computes, in each thread, the same number of f32 values of its tile, and knows which element
of y each is. Everything else is here. With split-K the values go to a *slot* of device memory; the
last workgroup of a tile to arrive, or a second launch, reads the slots in split order and adds, so
the sum does not depend on which workgroup was first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.control import when
from block32.lowering.common.counters import wrapping_limit
from block32.lowering.common.group_tiles import group_tiles
from block32.lowering.common.index import (
    Condition,
    Index,
    IndexValue,
    ceil_div,
    choose,
    equal,
    minimum,
)
from block32.lowering.common.partition import SplitPartition
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.common.tile_order import split_position, split_workgroups, tile_position
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.grouped import group_rows
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import RESERVED_SHARED_BYTES, WARP_LANES, Chip
from block32.lowering.nvidia.operands import Operands
from block32.lowering.nvidia.result import ResultWriter
from block32.lowering.problem import ScaledMatmul

#: A multiprocessor's workgroups share one cache; there are no dies to keep splits on.
DIES = 1


@dataclass(frozen=True)
class TilePosition:
    """Where in y and in K a workgroup works.

    Attributes:
        tile: Number of the tile.
        split: Number of the range of K.
        first_m: Row of y of the tile's first row.
        first_n: Column of y of the tile's first column.
        end: One past the last row of y that the tile may have.
        exists: The tile has rows at all.
        expert: The weight that its rows are multiplied with, where there are several.
        has_expert: There is such a weight; where not, the results are zeros.
    """

    tile: Index
    split: Index
    first_m: Index
    first_n: Index
    end: Index
    exists: Condition = True
    expert: Index = 0
    has_expert: Condition = True


class TileKernel(ABC):
    """One form with one configuration: geometry on integers, and the kernels' bodies.

    Attributes:
        problem: The matmul, after x was quantised where it is.
        source: The matmul as it is asked for.
        tier: The configuration.
        chip: The machine.
        block_m: Rows of y that a workgroup owns.
        block_n: Columns of y that it owns.
        block_k: K elements that it takes in a step.
        threads: Threads of a workgroup.
        partition: The ranges of K.
    """

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, chip: Chip):
        """Read the geometry from ``tier``, whose tile must be set."""
        assert tier.tile is not None
        self.problem = problem.quantized() if problem.lhs_quantize else problem
        self.source = problem
        self.tier = tier
        self.chip = chip
        self.block_m, self.block_n, self.block_k = tier.tile
        self.threads = tier.warps * WARP_LANES
        self.partition = SplitPartition.create(problem.k, tier.splits, self.split_step)

    # Geometry.

    @property
    def split_step(self) -> int:
        """K elements that ranges of K are a multiple of."""
        return self.block_k

    @property
    def values_per_thread(self) -> int:
        """f32 values of the tile that each thread ends up with."""
        return self.block_m * self.block_n // self.threads

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold sums in the loop."""
        return self.values_per_thread

    @property
    def working_registers(self) -> int:
        """Registers of a thread beside them: fragments, scales, addresses."""
        return 96

    @property
    def tiles_n(self) -> int:
        """Tiles along N."""
        return -(-self.problem.n // self.block_n)

    def tiles_m(self, m: Index) -> Index:
        """Tiles along M; with groups as many as any division of ``m`` rows can need."""
        grouping = self.problem.grouping
        if grouping is not None:
            return group_tiles(m, self.block_m, grouping.groups)
        return ceil_div(m, self.block_m)

    def tiles(self, m: Index) -> Index:
        """Tiles of y for ``m`` rows."""
        return self.tiles_m(m) * self.tiles_n

    @property
    def is_split(self) -> bool:
        """Several workgroups share a tile."""
        return self.partition.count > 1

    @property
    def reduces_in_launch(self) -> bool:
        """The last workgroup to arrive at a tile adds the partial sums."""
        return self.is_split and self.tier.reduce == "in_launch"

    @property
    def reduces_in_second_launch(self) -> bool:
        """A second launch adds the partial sums."""
        return self.is_split and self.tier.reduce == "second_launch"

    def slot_elements(self, m: Index) -> Index:
        """f32 elements of all slots for ``m`` rows; 0 without split-K."""
        if not self.is_split:
            return 0
        return self.tiles(m) * (self.partition.count * self.block_m * self.block_n)

    def workgroups(self, m: Index) -> Index:
        """Workgroups of the launch that multiplies."""
        return split_workgroups(self.tiles(m), self.partition.count, DIES)

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""

    @property
    def resident_by_memory(self) -> int:
        """Workgroups that a multiprocessor's shared memory holds at once."""
        return self.chip.shared_memory_total // (self.shared_bytes + RESERVED_SHARED_BYTES)

    # Bodies.

    @abstractmethod
    def accumulate(self, kernel: KernelContext, position: TilePosition) -> list[ir.Value]:
        """Build the loop over K; the thread's values of the tile."""

    @abstractmethod
    def store(self, writer: ResultWriter, position: TilePosition, values: list[ir.Value]) -> None:
        """Store the thread's values where they belong."""

    def emit_gemm(self, kernel: KernelContext) -> None:
        """The body of the launch that multiplies."""
        workgroup = IndexValue(ptx.i32_value(kernel.workgroup_id()))
        tile, split = split_position(workgroup, self.partition.count, DIES)
        position = self._position(kernel, tile, split)
        if position.exists is False:
            return
        with when(position.exists):
            self._compute(kernel, position)

    def _compute(self, kernel: KernelContext, position: TilePosition) -> None:
        values = self.accumulate(kernel, position)
        if not self.is_split:
            self._store_result(kernel, position, values)
            return
        slots = self._slots(kernel)
        self._store_partials(slots, position, values)
        if self.reduces_in_launch:
            self._finish_if_last(kernel, slots, position)

    def _store_result(
        self, kernel: KernelContext, position: TilePosition, values: list[ir.Value]
    ) -> None:
        self.store(ResultWriter(kernel, position.end, self.block_n), position, values)

    def emit_reduce(self, kernel: KernelContext) -> None:
        """The body of the second launch: one workgroup a tile adds its slots."""
        tile = IndexValue(ptx.i32_value(kernel.workgroup_id()))
        position = self._position(kernel, tile, 0)
        values = self._sum_partials(self._slots(kernel), position)
        self._store_result(kernel, position, values)

    def _position(self, kernel: KernelContext, tile: Index, split: Index) -> TilePosition:
        m = ptx.as_i32(kernel.m)
        tile_m, tile_n = tile_position(tile, self.tiles_m(m), self.tiles_n, self.tier.order)
        first_n = tile_n * self.block_n
        if self.problem.grouping is None:
            return TilePosition(tile, split, tile_m * self.block_m, first_n, m)
        rows = group_rows(kernel, tile_m, self.block_m)
        return TilePosition(
            tile,
            split,
            rows.first,
            first_n,
            rows.end,
            rows.exist,
            rows.expert,
            rows.have_expert,
        )

    def operands(self, kernel: KernelContext, position: TilePosition) -> Operands:
        """What the workgroup multiplies."""
        names = (CODES, SCALES) if self.tier.quantize == "separate" else ("lhs", "lhs_scale")
        return Operands(self.problem, kernel, names, position.end, position.expert)

    def steps(self, position: TilePosition) -> tuple[Index, Index]:
        """The first K of the workgroup's range, and its K steps: none without a weight."""
        start = self.partition.start(position.split) if self.is_split else 0
        rest = self.problem.k - start
        count = ceil_div(minimum(rest, self.partition.size), self.block_k)
        if self.problem.grouping is not None:
            count = choose(position.has_expert, ptx.as_i32_value(count), 0)
        return start, count

    # Split-K.

    def _slots(self, kernel: KernelContext) -> Pointer:
        size = self.slot_elements(kernel.m) * 4
        return ptx.global_pointer(kernel, "slots", size)

    def _slot(self, slots: Pointer, position: TilePosition, split: Index) -> Pointer:
        """The thread's first byte of a slot: a vector of each thread in turn."""
        bytes_of_a_slot = self.block_m * self.block_n * 4
        number = position.tile * self.partition.count + split
        own = ptx.thread_id() * (4 * self._vector_width)
        return slots + ptx.row_offset(number, bytes_of_a_slot, own)

    @property
    def _vector_width(self) -> int:
        return next(width for width in (4, 2, 1) if self.values_per_thread % width == 0)

    def _store_partials(
        self, slots: Pointer, position: TilePosition, values: Sequence[ir.Value]
    ) -> None:
        slot = self._slot(slots, position, position.split)
        width = self._vector_width
        for first in range(0, len(values), width):
            place = slot + first * self.threads * 4
            place.store(ptx.make_vector(values[first : first + width]), alignment=4 * width)

    def _sum_partials(self, slots: Pointer, position: TilePosition) -> list[ir.Value]:
        """The values of all slots, added in split order."""
        width = self._vector_width
        vector_type = ir.VectorType.get([width], ptx.f32())
        sums: list[ir.Value] = []
        for split in range(self.partition.count):
            slot = self._slot(slots, position, split)
            for first in range(0, self.values_per_thread, width):
                place = slot + first * self.threads * 4
                loaded = place.load(vector_type, alignment=4 * width)
                for index, value in enumerate(ptx.vector_elements(loaded), first):
                    if split == 0:
                        sums.append(value)
                    else:
                        sums[index] = arith.addf(sums[index], value)
        return sums

    def _finish_if_last(
        self, kernel: KernelContext, slots: Pointer, position: TilePosition
    ) -> None:
        """Count the workgroup's arrival; the last one adds all partial sums and stores.

        The fences make the slots of all workgroups visible to the last one: each thread's stores
        before its workgroup's arrival, all arrivals before the loads of the last.
        """
        counters = ptx.global_pointer(kernel, "counters", self.tiles(kernel.m) * 4)
        arrivals = self._share_arrivals(counters + ptx.row_offset(position.tile, 4))
        with when(equal(arrivals, wrapping_limit(self.partition.count))):
            ptx.device_fence()
            values = self._sum_partials(slots, position)
            self._store_result(kernel, position, values)

    def _share_arrivals(self, counter: Pointer) -> IndexValue:
        """Arrivals before this workgroup's, in every thread; the counter wraps to 0 at the last."""
        flag = self.arrival_flag()
        ptx.device_fence()
        ptx.barrier()
        with when(equal(ptx.thread_id(), 0)):
            limit = wrapping_limit(self.partition.count)
            before = ptx.atomic_wrapping_increment(counter, limit)
            flag.store(before.value, alignment=4)
        ptx.barrier()
        return IndexValue(flag.load(ptx.i32(), alignment=4))

    @abstractmethod
    def arrival_flag(self) -> Pointer:
        """Four bytes of shared memory that nothing else uses any more."""
