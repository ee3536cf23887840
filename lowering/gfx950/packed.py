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

from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index, equal
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.epilogue import Piece, extract_values
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry, QuantizingGeometry
from block32.lowering.gfx950.packed_operands import PackedOperand, ScaledRows
from block32.lowering.gfx950.packed_quantize import QuantizedRows
from block32.lowering.gfx950.stream import StreamLoop, emit_streamed
from block32.lowering.gfx950.tiled import (
    multiply,
    weight_rows,
    weight_scale_rows,
)
from block32.lowering.gfx950.workgroup import Lane, Workgroup
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ELEMENT_BITS


def emit_packed(geometry: Geometry, kernel: KernelContext) -> None:
    """Write the kernel's body."""
    emit_streamed(geometry, kernel, PackedLoop.create, result_pieces)


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


def _sum_over_panels(value: ir.Value, panels: int) -> ir.Value:
    """The sum over the neighbouring lanes of one token, in all of them."""
    for neighbours in ops.QUAD_NEIGHBOURS[: panels.bit_length() - 1]:
        value = arith.addf(value, ops.quad_permute(value, neighbours))
    return value


@dataclass(frozen=True)
class PackedLoop(StreamLoop):
    """The walk along K of one wave over scaled operands in K panels.

    Attributes:
        x: The wave's packed rows of x.
        w: The wave's packed rows of w.
    """

    x: PackedOperand
    w: PackedOperand

    @classmethod
    def create(cls, workgroup: Workgroup, lane: Lane) -> PackedLoop:
        """Set up the addresses of a wave."""
        geometry = workgroup.geometry
        packing, atom = geometry.packing, geometry.atom
        panel_k = packing.panel_k(lane.row)
        columns = [packing.row(lane.row + n * atom.m) for n in range(geometry.fragments_n)]
        rows = weight_rows(workgroup, columns, lane.group, panel_k)
        columns_apart = atom.m // packing.k_pack
        scales = weight_scale_rows(workgroup, columns, columns_apart, lane.group, panel_k)
        w = ScaledRows(geometry, rows, scales)
        return cls(workgroup, lane.wave, activation(workgroup, lane), w)

    def guarded_steps(
        self, k: Index, instructions: int, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step with checked loads; a panel may end early or be wholly empty."""
        for instruction in range(instructions):
            here = k + instruction * self.geometry.atom.k
            w, x = self.w.guarded(here), self.x.guarded(here)
            accumulators = multiply(self.geometry, w, x, accumulators)
        return accumulators

    def load(self, k: Index) -> list[ir.Value]:
        """The operands of one step: w's elements, x's elements, scales of x and of w."""
        elements = self.w.load_elements(k) + self.x.load_elements(k)
        return elements + self.x.load_scales(k) + self.w.load_scales(k)

    def multiply(self, loaded: list[ir.Value], accumulators: list[ir.Value]) -> list[ir.Value]:
        """All matrix instructions of a step whose operands ``load`` gave."""
        values = iter(loaded)
        w_elements, x_elements = self.w.take_elements(values), self.x.take_elements(values)
        x_operands = self.x.operands(x_elements, values)
        w_operands = self.w.operands(w_elements, values)
        for w, x in zip(w_operands, x_operands, strict=True):
            accumulators = multiply(self.geometry, w, x, accumulators)
        return accumulators


def activation(workgroup: Workgroup, lane: Lane) -> PackedOperand:
    """A wave's packed rows of x: codes and scales, or what they are made of."""
    geometry = workgroup.geometry
    packing, problem = geometry.packing, geometry.problem
    panel_k = packing.panel_k(lane.row)
    rows = [packing.row(lane.row + m * geometry.atom.m) for m in range(geometry.fragments_m)]
    source = geometry.source if isinstance(geometry, QuantizingGeometry) else problem
    values = OperandRows(
        workgroup.x(),
        source.lhs,
        ELEMENT_BITS[source.lhs],
        source.lhs_row_bytes,
        tuple(row * source.lhs_row_bytes for row in rows),
        lane.group,
        panel_k,
    )
    if isinstance(geometry, QuantizingGeometry):
        return QuantizedRows(geometry, values)
    scales = ScaleRows(
        workgroup.x_scales(),
        problem.k_blocks,
        tuple(row * problem.k_blocks for row in rows),
        tuple(range(geometry.fragments_m)),
        lane.group,
        panel_k,
    )
    return ScaledRows(geometry, values, scales)
