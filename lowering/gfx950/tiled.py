# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiled form: a workgroup owns BLOCK_M x BLOCK_N of y and walks K, software-pipelined.

x goes straight from memory to LDS, where every wave reads its fragments; w goes straight to the
registers of the wave that multiplies it; both ``stages - 1`` steps ahead. One barrier a step. The
rest of K after the last whole step, and matrices whose rows are not aligned, are loaded with a
check on every piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, rocdl

from block32.lowering.common.index import Index, IndexValue, less, minimum
from block32.lowering.gfx950 import ops, split_k
from block32.lowering.gfx950.epilogue import Piece, extract_values, store_result
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.grouped import locate_workgroup
from block32.lowering.gfx950.lds_tile import LdsTile
from block32.lowering.gfx950.workgroup import Lane, Workgroup
from block32.lowering.kernel_context import KernelContext


def emit_tiled(geometry: Geometry, kernel: KernelContext) -> None:
    """Write the kernel's body."""
    workgroup = locate_workgroup(geometry, kernel)

    def compute(_: list[ir.Value]) -> list[ir.Value]:
        thread = ops.thread_id()
        wave = ops.wave_id(thread)
        main_loop = TiledLoop.create(workgroup, thread, wave)
        accumulators = main_loop.run()
        _finish(workgroup, wave, accumulators)
        return []

    ops.if_then(workgroup.has_tile, [], compute)


def _finish(workgroup: Workgroup, wave: IndexValue, accumulators: Sequence[ir.Value]) -> None:
    """Store y, or this range's part of it."""
    geometry = workgroup.geometry
    lane = ops.lane_id()
    pieces = result_pieces(geometry, Lane.create(geometry, lane, wave), accumulators)
    if geometry.splits == 1:
        store_result(workgroup, pieces)
    elif geometry.tier.reduce == "second_launch":
        split_k.publish_partial(workgroup, pieces)
    else:
        thread = wave * 64 + lane
        split_k.reduce_in_launch(workgroup, pieces, thread, geometry.waves)


def result_pieces(geometry: Geometry, lane: Lane, accumulators: Sequence[ir.Value]) -> list[Piece]:
    """Where a wave's accumulators belong in the tile: four columns of one row in each register."""
    atom = geometry.atom
    first_row, first_column = wave_origin(geometry, lane.wave)
    pieces = []
    for m in range(geometry.fragments_m):
        for n in range(geometry.fragments_n):
            accumulator = accumulators[m * geometry.fragments_n + n]
            for register in range(0, atom.result_registers, 4):
                row = first_row + m * atom.m + lane.row
                column = first_column + n * atom.m + atom.result_row(lane.group, register)
                values = extract_values(accumulator, range(register, register + 4))
                pieces.append(Piece(row, column, tuple(values)))
    return pieces


def wave_origin(geometry: Geometry, wave: Index) -> tuple[Index, Index]:
    """The first row and column of a wave's part of the tile."""
    wave_m, wave_n = wave // geometry.waves_n, wave % geometry.waves_n
    rows = geometry.fragments_m * geometry.atom.m
    columns = geometry.fragments_n * geometry.atom.m
    return wave_m * rows, wave_n * columns


@dataclass
class Step:
    """The operands of one K step that are in registers: w's chunks and all scale words.

    Attributes:
        weights: For each instruction and fragment of N, its chunks.
        x_scales: For each window and fragment of M, a word.
        w_scales: For each window and distinct scale row, a word.
    """

    weights: list[ir.Value]
    x_scales: list[ir.Value]
    w_scales: list[ir.Value]

    def values(self) -> list[ir.Value]:
        """All values, as a loop carries them."""
        return self.weights + self.x_scales + self.w_scales

    def with_values(self, values: Sequence[ir.Value]) -> Step:
        """The same step with other values."""
        weights, x = len(self.weights), len(self.x_scales)
        return Step(
            list(values[:weights]),
            list(values[weights : weights + x]),
            list(values[weights + x :]),
        )


@dataclass(frozen=True)
class TiledLoop:
    """The walk along K of one wave.

    Attributes:
        workgroup: Tile and range of K.
        x_tile: x in LDS, or None where rows are not aligned.
        x: The wave's rows of x in memory, for the checked loads.
        w: The wave's rows of w.
        x_scales: The scales of those rows of x.
        w_scales: The scales of those rows of w.
    """

    workgroup: Workgroup
    x_tile: LdsTile | None
    x: OperandRows
    w: OperandRows
    x_scales: ScaleRows
    w_scales: ScaleRows

    @classmethod
    def create(cls, workgroup: Workgroup, thread: Index, wave: IndexValue) -> TiledLoop:
        """Set up the addresses of a wave."""
        geometry, problem = workgroup.geometry, workgroup.geometry.problem
        lane = Lane.create(geometry, thread % 64, wave)
        first_row, first_column = wave_origin(geometry, wave)
        rows = [first_row + m * geometry.atom.m + lane.row for m in range(geometry.fragments_m)]
        columns = [
            first_column + n * geometry.atom.m + lane.row for n in range(geometry.fragments_n)
        ]
        x = activation_rows(workgroup, rows, lane.group)
        w = weight_rows(workgroup, columns, lane.group)
        x_scales = ScaleRows(
            workgroup.x_scales(),
            problem.k_blocks,
            tuple(row * problem.k_blocks for row in rows),
            tuple(range(geometry.fragments_m)),
            lane.group,
        )
        w_scales = weight_scale_rows(workgroup, columns, geometry.atom.m, lane.group)
        x_tile = None
        if not geometry.is_narrow and geometry.last_whole_step >= 0:
            x_tile = LdsTile.create(geometry, x.buffer, thread, wave, first_row + lane.row)
        return cls(workgroup, x_tile, x, w, x_scales, w_scales)

    @property
    def geometry(self) -> Geometry:
        """The kernel's sizes."""
        return self.workgroup.geometry

    def run(self) -> list[ir.Value]:
        """The accumulators over the workgroup's range of K, fragment (m, n) at m * count_n + n."""
        count = self.geometry.fragments_m * self.geometry.fragments_n
        accumulators = [zero_accumulator(self.geometry.atom.result_registers)] * count
        start, end = self.workgroup.k_start, self.workgroup.k_end
        if self.x_tile is None:
            return self._guarded_loop(start, end, accumulators)
        whole = (end - start) // self.geometry.block_k
        pipeline = _Pipeline(self, self.x_tile, start)
        accumulators = pipeline.run(whole, accumulators)
        if not self.geometry.tail:
            return accumulators
        k = self.geometry.last_whole_step + self.geometry.block_k
        has_tail = less(k, end)
        return ops.if_then(has_tail, accumulators, lambda state: self._guarded_steps(k, state))

    def _guarded_loop(
        self, start: Index, end: Index, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """The whole range of K with checked loads, one instruction after the other."""
        return ops.for_range(
            start,
            end,
            self.geometry.atom.k,
            accumulators,
            lambda k, state: self._guarded_step(k, state),
        )

    def _guarded_steps(self, k: int, accumulators: list[ir.Value]) -> list[ir.Value]:
        """The rest of K from ``k`` on."""
        while k < self.geometry.problem.k:
            accumulators = self._guarded_step(k, accumulators)
            k += self.geometry.atom.k
        return accumulators

    def _guarded_step(self, k: Index, accumulators: list[ir.Value]) -> list[ir.Value]:
        """One instruction along K with checked loads."""
        atom = self.geometry.atom
        w = guarded_operands(self.w, self.w_scales, atom, k)
        x = guarded_operands(self.x, self.x_scales, atom, k)
        return multiply(self.geometry, w, x, accumulators)


def zero_accumulator(registers: int) -> ir.Value:
    """An accumulator of zeros."""
    accumulator = ir.VectorType.get([registers], ir.F32Type.get())
    zero = ir.FloatAttr.get(ir.F32Type.get(), 0.0)
    return arith.constant(accumulator, ir.DenseElementsAttr.get_splat(accumulator, zero))


def activation_rows(workgroup: Workgroup, rows: Sequence[Index], group: Index) -> OperandRows:
    """The rows of x for a wave's fragments: ``rows`` has this lane's row of the tile for each."""
    geometry, problem = workgroup.geometry, workgroup.geometry.problem
    buffer, row_bytes = workgroup.x(), problem.lhs_row_bytes
    starts = tuple(row * row_bytes for row in rows)
    return OperandRows(buffer, problem.lhs, geometry.lhs_bits, row_bytes, starts, group)


def weight_rows(
    workgroup: Workgroup, columns: Sequence[Index], group: Index, panel_k: Index = 0
) -> OperandRows:
    """The rows of w for a wave's fragments.

    Args:
        workgroup: The tile.
        columns: For each fragment this lane's column of the tile.
        group: The lane's group.
        panel_k: First K of the lane's panel in a step.
    """
    geometry, problem = workgroup.geometry, workgroup.geometry.problem
    buffer, row_bytes = workgroup.w(), problem.rhs_row_bytes
    starts = tuple(column * row_bytes for column in columns)
    return OperandRows(buffer, problem.rhs, geometry.rhs_bits, row_bytes, starts, group, panel_k)


def weight_scale_rows(
    workgroup: Workgroup,
    columns: Sequence[Index],
    columns_apart: int,
    group: Index,
    panel_k: Index = 0,
) -> ScaleRows:
    """The scale rows of w for a wave's fragments, those that are the same loaded once.

    Args:
        workgroup: The tile.
        columns: For each fragment this lane's column of the tile.
        columns_apart: How many columns lie between two fragments.
        group: The lane's group.
        panel_k: First K of the lane's panel in a step.
    """
    problem = workgroup.geometry.problem
    in_block = max(1, problem.rhs_block[0] // columns_apart)
    if workgroup.geometry.block_n % problem.rhs_block[0]:
        in_block = len(columns)
    row_of_fragment = tuple(n // in_block for n in range(len(columns)))
    distinct = [columns[n] for n in range(0, len(columns), in_block)]
    rows = tuple(workgroup.w_scale_row(column) * problem.k_blocks for column in distinct)
    return ScaleRows(workgroup.w_scales(), problem.k_blocks, rows, row_of_fragment, group, panel_k)


def guarded_operands(
    rows: OperandRows, scales: ScaleRows, atom: ops.ScaledAtom, k: Index
) -> list[ops.MatrixOperand]:
    """For each fragment the operand of one instruction, zeros from the end of K on."""
    words = [scales.load_guarded(row, atom, k) for row in range(len(scales.rows))]
    operands = []
    for fragment in range(len(rows.rows)):
        elements = ops.lane_operand(rows.load_guarded(fragment, atom, k), rows.element)
        word = words[scales.row_of_fragment[fragment]]
        operands.append(ops.MatrixOperand(elements, word, 0))
    return operands


def multiply(
    geometry: Geometry,
    w: Sequence[ops.MatrixOperand],
    x: Sequence[ops.MatrixOperand],
    accumulators: Sequence[ir.Value],
) -> list[ir.Value]:
    """One instruction for every pair of fragments."""
    pairs = [(m, n) for m in range(len(x)) for n in range(len(w))]
    return [
        ops.scaled_mfma(geometry.atom, w[n], x[m], accumulator)
        for (m, n), accumulator in zip(pairs, accumulators, strict=True)
    ]


@dataclass(frozen=True)
class _Pipeline:
    """The whole steps, with the operands of ``stages - 1`` of them on their way.

    x is on its way to LDS, w and the scales to registers. The loop is unrolled by ``stages``, so
    that every LDS buffer and every register set has a fixed place in it.
    """

    loop: TiledLoop
    x_tile: LdsTile
    start: Index

    @property
    def geometry(self) -> Geometry:
        return self.loop.geometry

    @property
    def stages(self) -> int:
        return self.geometry.tier.stages

    def run(self, steps: Index, accumulators: list[ir.Value]) -> list[ir.Value]:
        """The accumulators after ``steps`` whole steps."""
        on_their_way: list[Step] = []
        for stage in range(self.stages - 1):
            k = self._k(self.start, stage)
            for load in self._x_loads(k, stage):
                load()
            on_their_way.append(self._load_step(k))
        self._next_step_is_ready()
        block_k = self.geometry.block_k
        rounds_end = self.start + steps // self.stages * (self.stages * block_k)

        def round_of_steps(k: IndexValue, state: list[ir.Value]) -> list[ir.Value]:
            for stage in range(self.stages):
                state = self._step(k, stage, state, on_their_way)
            return state

        state = accumulators + [value for step in on_their_way for value in step.values()]
        state = ops.for_range(self.start, rounds_end, self.stages * block_k, state, round_of_steps)
        state = self._remaining_steps(rounds_end, steps % self.stages, state, on_their_way)
        return state[: len(accumulators)]

    def _remaining_steps(
        self, k: Index, steps: Index, state: list[ir.Value], template: list[Step]
    ) -> list[ir.Value]:
        """Up to ``stages - 1`` steps after the last full round."""

        def from_stage(stage: int, state: list[ir.Value]) -> list[ir.Value]:
            if stage == self.stages - 1:
                return state
            has_next = stage < self.stages - 2
            return ops.if_then(
                less(stage, steps),
                state,
                lambda state: from_stage(
                    stage + 1, self._step(k, stage, state, template, has_next)
                ),
            )

        return from_stage(0, state)

    def _k(self, k: Index, steps_ahead: int) -> Index:
        """Where a step starts; past the end the last one again, whose data nobody will use."""
        return minimum(k + steps_ahead * self.geometry.block_k, self.geometry.last_whole_step)

    def _step(
        self,
        k: Index,
        stage: int,
        state: list[ir.Value],
        template: list[Step],
        has_next: bool = True,
    ) -> list[ir.Value]:
        """Multiply one step while the loads for a later one set off.

        Args:
            k: Where the round of steps starts.
            stage: The step's number in the round.
            state: The accumulators, then the values of the steps on their way.
            template: Steps of the shape of those in ``state``.
            has_next: Whether a step may follow, so that there is something to load and wait for.
        """
        count = self.geometry.fragments_m * self.geometry.fragments_n
        size = len(template[0].values())
        now = template[0].with_values(state[count : count + size])
        if not has_next:
            return self._multiply(stage, state[:count], now, []) + state[count:]
        following = Step([], [], [])
        ahead = self.stages - 1
        k_ahead = self._k(k, stage + ahead)
        loads = self._x_loads(k_ahead, (stage + ahead) % self.stages)
        loads += self._step_loads(k_ahead, following)
        accumulators = self._multiply(stage, state[:count], now, loads)
        self._next_step_is_ready()
        return accumulators + state[count + size :] + following.values()

    def _next_step_is_ready(self) -> None:
        """The next step's x is in LDS for all waves, and all are done with this step's."""
        ops.wait_loads_to_lds(self.stages - 2)
        ops.barrier()

    def _x_loads(self, k: Index, buffer: int) -> list[Callable[[], None]]:
        """Start one step of x on its way to LDS, one load at a time."""
        loads = self.x_tile.loads(k, buffer)
        last = loads.pop()

        def last_and_mark() -> None:
            last()
            ops.mark_loads_to_lds()

        return [*loads, last_and_mark]

    def _step_loads(self, k: Index, step: Step) -> list[Callable[[], None]]:
        """Load w and the scales of one step into ``step``, one load at a time.

        In the order of their first use: loads arrive in order, so that the next step's first
        instructions need not wait for its last weights.
        """
        geometry, window = self.geometry, self.geometry.window
        w, x_scales, w_scales = self.loop.w, self.loop.x_scales, self.loop.w_scales
        w_offsets = w.lane_offsets(window)
        loads: list[Callable[[], None]] = []
        windows = [
            k + first * geometry.atom.k for first in range(0, geometry.instructions, window.spread)
        ]
        for rows, words in ((x_scales, step.x_scales), (w_scales, step.w_scales)):
            loads += [
                lambda r=rows, ws=words, o=offset, k=window_k: ws.append(r.load(o, window, k))
                for window_k in windows
                for offset in rows.lane_offsets(window)
            ]
        loads += [
            lambda o=offset, i=instruction, k=window_k: step.weights.extend(w.load(o, window, i, k))
            for window_k in windows
            for instruction in range(window.spread)
            for offset in w_offsets
        ]
        return loads

    def _load_step(self, k: Index) -> Step:
        step = Step([], [], [])
        for load in self._step_loads(k, step):
            load()
        return step

    def _multiply(
        self,
        buffer: int,
        accumulators: list[ir.Value],
        step: Step,
        loads: list[Callable[[], None]],
    ) -> list[ir.Value]:
        """All matrix instructions of a step, in groups of one fragment of x.

        The loads are spread over the groups, and x is read from LDS some groups before it is used,
        so that neither is waited for.
        """
        geometry = self.geometry
        groups = [
            (instruction, m)
            for instruction in range(geometry.instructions)
            for m in range(geometry.fragments_m)
        ]
        accumulators = list(accumulators)
        ahead = geometry.groups_ahead
        x_chunks = [self.x_tile.read(buffer, *group) for group in groups[:ahead]]
        for position, (instruction, m) in enumerate(groups):
            for load in share(loads, position, len(groups)):
                load()
            if position + ahead < len(groups):
                x_chunks.append(self.x_tile.read(buffer, *groups[position + ahead]))
            self._multiply_group(instruction, m, x_chunks[position], step, accumulators)
            rocdl.sched_barrier(ops.attribute("#rocdl.sched_group_mask<none>"))
        return accumulators

    def _multiply_group(
        self,
        instruction: int,
        m: int,
        x_chunks: list[ir.Value],
        step: Step,
        accumulators: list[ir.Value],
    ) -> None:
        """One fragment of x with every fragment of w; accumulators are replaced in place."""
        geometry = self.geometry
        window, byte = divmod(instruction, geometry.window.spread)
        x_word = step.x_scales[window * geometry.fragments_m + m]
        x = ops.MatrixOperand(ops.lane_operand(x_chunks, self.loop.x.element), x_word, byte)
        chunk_count = geometry.atom.chunks(geometry.rhs_bits)
        w_scales = self.loop.w_scales
        for n in range(geometry.fragments_n):
            first = (instruction * geometry.fragments_n + n) * chunk_count
            chunks = step.weights[first : first + chunk_count]
            w_word = step.w_scales[window * len(w_scales.rows) + w_scales.row_of_fragment[n]]
            w = ops.MatrixOperand(ops.lane_operand(chunks, self.loop.w.element), w_word, byte)
            index = m * geometry.fragments_n + n
            accumulators[index] = ops.scaled_mfma(geometry.atom, w, x, accumulators[index])


def share(loads: list[Callable[[], None]], position: int, groups: int) -> list[Callable[[], None]]:
    """The part of ``loads`` that belongs to one of ``groups`` equal parts."""
    return loads[position * len(loads) // groups : (position + 1) * len(loads) // groups]
