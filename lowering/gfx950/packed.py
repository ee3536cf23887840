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
from iree.compiler.dialects import amdgpu, arith

from block32.lowering.common.index import Index, equal
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.epilogue import Piece, extract_values
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import WAVE_LANES
from block32.lowering.gfx950.stream import StreamLoop, finish
from block32.lowering.gfx950.tiled import (
    guarded_operands,
    multiply,
    weight_scale_rows,
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
        finish(workgroup, lane, wave, pieces)
        return []

    ops.if_then(workgroup.has_tile, [], compute)


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
class PackedLoop(StreamLoop):
    """The walk along K of one wave over scaled operands in K panels.

    Attributes:
        x: The wave's packed rows of x.
        w: The wave's packed rows of w.
        x_scales: The scales of those rows of x.
        w_scales: The scales of those rows of w.
    """

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

    def guarded_steps(
        self, k: Index, instructions: int, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step with checked loads; a panel may end early or be wholly empty."""
        for instruction in range(instructions):
            here = k + instruction * self.geometry.atom.k
            w = guarded_operands(self.w, self.w_scales, self.geometry.atom, here)
            x = guarded_operands(self.x, self.x_scales, self.geometry.atom, here)
            accumulators = multiply(self.geometry, w, x, accumulators)
        return accumulators

    def load(self, k: Index) -> list[ir.Value]:
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

    def multiply(self, loaded: list[ir.Value], accumulators: list[ir.Value]) -> list[ir.Value]:
        """All matrix instructions of a step whose operands ``load`` gave."""
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
