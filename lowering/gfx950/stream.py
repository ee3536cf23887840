# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Waves that share a tile and take K steps in turn, with operands straight from memory.

Steps go round the waves of a workgroup. A wave keeps ``stages`` of its steps on their way to
registers and meets no barrier before the end, where the first wave adds the sums of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, rocdl

from block32.lowering.common.index import Index, IndexValue, equal, less, minimum
from block32.lowering.gfx950 import ops, split_k
from block32.lowering.gfx950.epilogue import Piece, store_result
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.grouped import locate_workgroup
from block32.lowering.gfx950.machine import WAVE_LANES
from block32.lowering.gfx950.tiled import zero_accumulator
from block32.lowering.gfx950.workgroup import Lane, Workgroup
from block32.lowering.kernel_context import KernelContext


@dataclass(frozen=True)
class StreamLoop(ABC):
    """The walk along K of one wave, with steps that go round the waves of the workgroup.

    Attributes:
        workgroup: Tile and range of K.
        wave: The wave's number.
    """

    workgroup: Workgroup
    wave: Index

    @abstractmethod
    def load(self, k: Index) -> list[ir.Value]:
        """Start the loads of the whole step at ``k``; what ``multiply`` takes."""

    @abstractmethod
    def multiply(self, loaded: list[ir.Value], accumulators: list[ir.Value]) -> list[ir.Value]:
        """All matrix instructions of a step whose operands ``load`` gave."""

    @abstractmethod
    def guarded_steps(
        self, k: Index, instructions: int, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step with checked loads, up to so many instructions along K."""

    @property
    def geometry(self) -> Geometry:
        """The kernel's sizes."""
        return self.workgroup.geometry

    def run(self) -> list[ir.Value]:
        """The accumulators of this wave over its steps, fragment (m, n) at m * count_n + n."""
        geometry = self.geometry
        count = geometry.fragments_m * geometry.fragments_n
        accumulators = [zero_accumulator(geometry.atom.result_registers)] * count
        start, end = self.workgroup.k_start, self.workgroup.k_end
        if geometry.is_narrow or geometry.last_whole_step < 0:
            return self._guarded_loop(start, end, accumulators)
        whole = (end - start) // geometry.step
        accumulators = self._whole_steps(start, whole, accumulators)
        if not geometry.tail:
            return accumulators
        return self._tail(end, whole, accumulators)

    def _guarded_loop(
        self, start: Index, end: Index, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """The whole range of K with checked loads, a step at a time."""
        geometry = self.geometry
        mine = start + self.wave * geometry.step

        def step(k: IndexValue, state: list[ir.Value]) -> list[ir.Value]:
            return self.guarded_steps(k, geometry.instructions, state)

        return ops.for_range(mine, end, geometry.waves * geometry.step, accumulators, step)

    def _tail(self, end: Index, whole: Index, accumulators: list[ir.Value]) -> list[ir.Value]:
        """The rest of K after the last whole step, in the wave whose turn it is."""
        geometry = self.geometry
        k = geometry.last_whole_step + geometry.step
        has_tail = less(k, end)
        in_panel = min(geometry.tail, geometry.block_k)
        instructions = -(-in_panel // geometry.atom.k)

        def in_one_wave(state: list[ir.Value]) -> list[ir.Value]:
            is_mine = geometry.waves == 1 or equal(self.wave, whole % geometry.waves)
            return ops.if_then(
                is_mine, state, lambda state: self.guarded_steps(k, instructions, state)
            )

        return ops.if_then(has_tail, accumulators, in_one_wave)

    def _whole_steps(
        self, start: Index, whole: Index, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """This wave's whole steps: every ``waves``-th, ``stages`` of them on their way.

        The loop is unrolled by ``stages``; a register set is loaded again as soon as it is used.
        """
        geometry = self.geometry
        stages, apart = geometry.tier.stages, geometry.waves * geometry.step
        first = start + self.wave * geometry.step
        steps = (whole + (geometry.waves - 1) - self.wave) // geometry.waves
        sets = [self.load(self._clamp(first + stage * apart)) for stage in range(stages)]
        size = len(sets[0])
        count = len(accumulators)

        def round_of_steps(k: IndexValue, state: list[ir.Value]) -> list[ir.Value]:
            accumulators, loaded = state[:count], state[count:]
            following: list[ir.Value] = []
            for stage in range(stages):
                now = loaded[stage * size : (stage + 1) * size]
                accumulators = self.multiply(now, accumulators)
                rocdl.sched_barrier(ops.attribute("#rocdl.sched_group_mask<none>"))
                following += self.load(self._clamp(k + (stage + stages) * apart))
                rocdl.sched_barrier(ops.attribute("#rocdl.sched_group_mask<none>"))
            return accumulators + following

        end = first + steps // stages * (stages * apart)
        state = accumulators + [value for loaded in sets for value in loaded]
        state = ops.for_range(first, end, stages * apart, state, round_of_steps)
        return self._remaining_steps(steps % stages, state[:count], state[count:], size)

    def _remaining_steps(
        self, steps: Index, accumulators: list[ir.Value], loaded: list[ir.Value], size: int
    ) -> list[ir.Value]:
        """Up to ``stages - 1`` steps whose operands are in registers already."""

        def from_stage(stage: int, state: list[ir.Value]) -> list[ir.Value]:
            if stage == self.geometry.tier.stages - 1:
                return state
            now = loaded[stage * size : (stage + 1) * size]
            return ops.if_then(
                less(stage, steps),
                state,
                lambda state: from_stage(stage + 1, self.multiply(now, state)),
            )

        return from_stage(0, accumulators)

    def _clamp(self, k: Index) -> Index:
        """A step past the end becomes the last one, whose data nobody will use."""
        return minimum(k, self.geometry.last_whole_step)


def emit_streamed(
    geometry: Geometry,
    kernel: KernelContext,
    create_loop: Callable[[Workgroup, Lane], StreamLoop],
    result_pieces: Callable[[Geometry, Lane, Sequence[ir.Value]], list[Piece]],
) -> None:
    """Write a kernel's body: each wave's walk along K, then the sums of all in one.

    Args:
        geometry: The kernel's sizes.
        kernel: The launch.
        create_loop: Sets up a wave's walk, given where its lanes are.
        result_pieces: Where a wave's accumulators belong in the tile.
    """
    workgroup = locate_workgroup(geometry, kernel)

    def compute(_: list[ir.Value]) -> list[ir.Value]:
        thread = ops.thread_id()
        wave = ops.wave_id(thread)
        loop = create_loop(workgroup, Lane.create(geometry, thread % WAVE_LANES, wave))
        accumulators = loop.run()
        lane = ops.lane_id()
        pieces = result_pieces(geometry, Lane.create(geometry, lane, wave), accumulators)
        _finish(workgroup, lane, wave, pieces)
        return []

    ops.if_then(workgroup.has_tile, [], compute)


def _finish(workgroup: Workgroup, lane: Index, wave: Index, pieces: Sequence[Piece]) -> None:
    """Add the waves' sums in the first wave, which then stores y or this range's part of it."""
    geometry = workgroup.geometry

    def store(pieces: Sequence[Piece]) -> None:
        if geometry.splits == 1:
            store_result(workgroup, pieces)
        elif geometry.tier.reduce == "second_launch":
            split_k.publish_partial(workgroup, pieces)
        else:
            split_k.reduce_in_launch(workgroup, pieces, lane, waves=1)

    if geometry.waves == 1:
        store(pieces)
        return
    shared = _share_sums(geometry, lane, wave, pieces)
    ops.barrier()

    def first_wave(_: list[ir.Value]) -> list[ir.Value]:
        store(_sum_over_waves(geometry, lane, shared, pieces))
        return []

    ops.if_then(equal(wave, 0), [], first_wave)


def _share_sums(geometry: Geometry, lane: Index, wave: Index, pieces: Sequence[Piece]) -> ir.Value:
    """Put every wave's values in LDS: ``f32 [values][waves][lanes]``."""
    values = [value for piece in pieces for value in piece.values]
    shared = ops.allocate_lds(len(values) * geometry.threads, ir.F32Type.get())
    for number, value in enumerate(values):
        position = wave * WAVE_LANES + lane + number * geometry.threads
        memref.store(value, shared, [ops.as_index(position)])
    return shared


def _sum_over_waves(
    geometry: Geometry, lane: Index, shared: ir.Value, pieces: Sequence[Piece]
) -> list[Piece]:
    """The pieces with the values of all waves added in wave order."""
    summed = []
    number = 0
    for piece in pieces:
        values = []
        for _ in piece.values:
            first = number * geometry.threads
            parts = [
                memref.load(shared, [ops.as_index(lane + (first + wave * WAVE_LANES))])
                for wave in range(geometry.waves)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = arith.addf(total, part)
            values.append(total)
            number += 1
        summed.append(piece.with_values(values))
    return summed
