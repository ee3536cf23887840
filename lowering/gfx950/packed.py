# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The packed form, for small M: the weight streams past the matrix unit at full memory width.

A matrix instruction has 16 rows of x and M has fewer, so ``k_pack`` K panels fill the spare rows
(``lowering/common/packing.py``). The waves of a workgroup share its tile and take K steps in turn;
x and w go from memory to registers, ``stages`` steps ahead, and no barrier is met before the end.
There the products whose panels agree are selected (not multiplied by 0: a NaN elsewhere must not
leak), summed over panels and over waves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import amdgpu, arith, memref, rocdl

from block32.lowering.common.index import Index, IndexValue, equal, less, minimum
from block32.lowering.gfx950 import ops, split_k
from block32.lowering.gfx950.epilogue import Piece, extract_values, store_result
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import WAVE_LANES
from block32.lowering.gfx950.tiled import (
    guarded_operands,
    multiply,
    weight_scale_rows,
    zero_accumulator,
)
from block32.lowering.gfx950.workgroup import Lane, Workgroup, locate
from block32.lowering.kernel_context import KernelContext


def emit_packed(geometry: Geometry, kernel: KernelContext) -> None:
    """Write the kernel's body."""
    workgroup = locate(geometry, kernel)

    def compute(_: list[ir.Value]) -> list[ir.Value]:
        thread = ops.thread_id()
        wave = ops.wave_id(thread)
        loop = PackedLoop.create(workgroup, Lane.create(geometry, thread % WAVE_LANES, wave))
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


def result_pieces(geometry: Geometry, lane: Lane, accumulators: Sequence[ir.Value]) -> list[Piece]:
    """The wanted values of a wave's accumulators, summed over panels.

    In a lane of packed column j (x) the register of packed row i (w) is wanted where both are on
    one panel. The lanes of one token are neighbours; all of them get the sum, the first stores it.
    """
    k_pack, atom = geometry.packing.k_pack, geometry.atom
    columns_in_fragment = atom.m // k_pack
    columns_in_lane = atom.result_registers // k_pack
    panel = lane.row % k_pack
    is_owner = equal(panel, 0)
    pieces = []
    for m in range(geometry.fragments_m):
        row = geometry.packing.row(lane.row + m * atom.m)
        for n in range(geometry.fragments_n):
            registers = extract_values(
                accumulators[m * geometry.fragments_n + n], range(atom.result_registers)
            )
            values = [
                _sum_over_panels(_select_panel(registers[first : first + k_pack], panel), k_pack)
                for first in range(0, atom.result_registers, k_pack)
            ]
            column = lane.group * columns_in_lane + n * columns_in_fragment
            pieces.append(Piece(row, column, tuple(values), is_owner))
    return pieces


def _select_panel(registers: Sequence[ir.Value], panel: Index) -> ir.Value:
    """The register of this lane's panel."""
    chosen = registers[0]
    for number, register in enumerate(registers[1:], start=1):
        chosen = arith.select(equal(panel, number), register, chosen)
    return chosen


#: Which lane of four each lane adds, for the first and the second round of a sum over panels.
_NEIGHBOURS = ("1 : i32, 0 : i32, 3 : i32, 2 : i32", "2 : i32, 3 : i32, 0 : i32, 1 : i32")


def _sum_over_panels(value: ir.Value, panels: int) -> ir.Value:
    """The sum over the neighbouring lanes of one token, in all of them."""
    for neighbours in _NEIGHBOURS[: panels.bit_length() - 1]:
        other = amdgpu.dpp(
            value,
            value,
            ops.attribute("#amdgpu.dpp_perm<quad_perm>"),
            perm_argument=ops.attribute(f"[{neighbours}]"),
        )
        value = arith.addf(value, other)
    return value


@dataclass(frozen=True)
class PackedLoop:
    """The walk along K of one wave, with steps that go round the waves of the workgroup.

    Attributes:
        workgroup: Tile and range of K.
        wave: The wave's number.
        x: The wave's packed rows of x.
        w: The wave's packed rows of w.
        x_scales: The scales of those rows of x.
        w_scales: The scales of those rows of w.
    """

    workgroup: Workgroup
    wave: Index
    x: OperandRows
    w: OperandRows
    x_scales: ScaleRows
    w_scales: ScaleRows

    @classmethod
    def create(cls, workgroup: Workgroup, lane: Lane) -> PackedLoop:
        """Set up the addresses of a wave."""
        geometry, problem = workgroup.geometry, workgroup.geometry.problem
        packing, atom = geometry.packing, geometry.atom
        panel_k = packing.panel_k(lane.row)
        rows = [packing.row(lane.row + m * atom.m) for m in range(geometry.fragments_m)]
        columns = [packing.row(lane.row + n * atom.m) for n in range(geometry.fragments_n)]
        x = OperandRows(
            workgroup.x(),
            problem.lhs,
            geometry.lhs_bits,
            problem.lhs_row_bytes,
            tuple(row * problem.lhs_row_bytes for row in rows),
            lane.group,
            panel_k,
        )
        w = OperandRows(
            workgroup.w(),
            problem.rhs,
            geometry.rhs_bits,
            problem.rhs_row_bytes,
            tuple(column * problem.rhs_row_bytes for column in columns),
            lane.group,
            panel_k,
        )
        x_scales = ScaleRows(
            workgroup.x_scales(),
            problem.k_blocks,
            tuple(row * problem.k_blocks for row in rows),
            tuple(range(geometry.fragments_m)),
            lane.group,
            panel_k,
        )
        columns_apart = atom.m // packing.k_pack
        w_scales = weight_scale_rows(workgroup, columns, columns_apart, lane.group, panel_k)
        return cls(workgroup, lane.wave, x, w, x_scales, w_scales)

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
            return self._guarded_steps(k, geometry.instructions, state)

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
                is_mine, state, lambda state: self._guarded_steps(k, instructions, state)
            )

        return ops.if_then(has_tail, accumulators, in_one_wave)

    def _guarded_steps(
        self, k: Index, instructions: int, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step with checked loads; a panel may end early or be wholly empty."""
        for instruction in range(instructions):
            here = k + instruction * self.geometry.atom.k
            w = guarded_operands(self.w, self.w_scales, self.geometry.atom, here)
            x = guarded_operands(self.x, self.x_scales, self.geometry.atom, here)
            accumulators = multiply(self.geometry, w, x, accumulators)
        return accumulators

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
        sets = [self._load(self._clamp(first + stage * apart)) for stage in range(stages)]
        size = len(sets[0])
        count = len(accumulators)

        def round_of_steps(k: IndexValue, state: list[ir.Value]) -> list[ir.Value]:
            accumulators, loaded = state[:count], state[count:]
            following: list[ir.Value] = []
            for stage in range(stages):
                now = loaded[stage * size : (stage + 1) * size]
                accumulators = self._multiply(now, accumulators)
                rocdl.sched_barrier(ops.attribute("#rocdl.sched_group_mask<none>"))
                following += self._load(self._clamp(k + (stage + stages) * apart))
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
                lambda state: from_stage(stage + 1, self._multiply(now, state)),
            )

        return from_stage(0, accumulators)

    def _clamp(self, k: Index) -> Index:
        """A step past the end becomes the last one, whose data nobody will use."""
        return minimum(k, self.geometry.last_whole_step)

    def _load(self, k: Index) -> list[ir.Value]:
        """The operands of one step: w's chunks, x's chunks, scale words of x and of w."""
        geometry, window = self.geometry, self.geometry.window
        values: list[ir.Value] = []
        for rows in (self.w, self.x):
            offsets = rows.lane_offsets(window)
            for instruction in range(geometry.instructions):
                number, inside = divmod(instruction, window.spread)
                for offset in offsets:
                    values += rows.load(offset, window, inside, k + number * window.k)
        for scales in (self.x_scales, self.w_scales):
            offsets = scales.lane_offsets(window)
            for number in range(geometry.instructions // window.spread):
                values += [scales.load(offset, window, k + number * window.k) for offset in offsets]
        return values

    def _multiply(self, loaded: list[ir.Value], accumulators: list[ir.Value]) -> list[ir.Value]:
        """All matrix instructions of a step whose operands ``_load`` gave."""
        geometry, spread = self.geometry, self.geometry.window.spread
        values = iter(loaded)
        w_elements = self._take_elements(values, self.w, geometry.rhs_bits)
        x_elements = self._take_elements(values, self.x, geometry.lhs_bits)
        windows = geometry.instructions // spread
        x_words = [[next(values) for _ in self.x_scales.rows] for _ in range(windows)]
        w_words = [[next(values) for _ in self.w_scales.rows] for _ in range(windows)]
        for instruction in range(geometry.instructions):
            window, byte = divmod(instruction, spread)
            w = _operands(w_elements[instruction], w_words[window], self.w_scales, byte)
            x = _operands(x_elements[instruction], x_words[window], self.x_scales, byte)
            accumulators = multiply(geometry, w, x, accumulators)
        return accumulators

    def _take_elements(
        self, values: Iterator[ir.Value], rows: OperandRows, bits: int
    ) -> list[list[ir.Value]]:
        """For each instruction and fragment the lane's elements."""
        chunks = self.geometry.atom.chunks(bits)
        return [
            [
                ops.lane_operand([next(values) for _ in range(chunks)], rows.element)
                for _ in rows.rows
            ]
            for _ in range(self.geometry.instructions)
        ]


def _operands(
    elements: Sequence[ir.Value], words: Sequence[ir.Value], scales: ScaleRows, byte: int
) -> list[ops.MatrixOperand]:
    """For each fragment the operand of one instruction."""
    return [
        ops.MatrixOperand(fragment, words[scales.row_of_fragment[number]], byte)
        for number, fragment in enumerate(elements)
    ]
