# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the packed form has its matrix operands from: codes and scales that lie in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iree.compiler import ir

from block32.lowering.common.index import Index
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.tiled import guarded_operands

#: For each instruction of a step and each fragment what its lanes were given.
Elements = list[list[list[ir.Value]]]


class PackedOperand(ABC):
    """One side of the multiplication, as one wave loads it."""

    @abstractmethod
    def load_elements(self, k: Index) -> list[ir.Value]:
        """Start the loads of the elements of the whole step at ``k``."""

    @abstractmethod
    def load_scales(self, k: Index) -> list[ir.Value]:
        """Start the loads of its scales."""

    @abstractmethod
    def take_elements(self, values: Iterator[ir.Value]) -> Elements:
        """What ``load_elements`` gave, taken from the front of ``values``."""

    @abstractmethod
    def operands(
        self, elements: Elements, values: Iterator[ir.Value]
    ) -> list[list[ops.MatrixOperand]]:
        """For each instruction and fragment its operand; takes the scales from ``values``."""

    @abstractmethod
    def guarded(self, k: Index) -> list[ops.MatrixOperand]:
        """For each fragment the operand of one instruction at ``k``, zeros from the end of K on."""


@dataclass(frozen=True)
class ScaledRows(PackedOperand):
    """Codes and scales in memory.

    Attributes:
        geometry: Sizes.
        rows: The wave's rows.
        scales: Their scales.
    """

    geometry: Geometry
    rows: OperandRows
    scales: ScaleRows

    def load_elements(self, k: Index) -> list[ir.Value]:
        """All chunks of one step."""
        geometry, window = self.geometry, self.geometry.window
        values: list[ir.Value] = []
        offsets = self.rows.lane_offsets(window)
        for instruction in range(geometry.instructions):
            number, inside = divmod(instruction, window.spread)
            for offset in offsets:
                values += self.rows.load(offset, window, inside, k + number * window.k)
        return values

    def load_scales(self, k: Index) -> list[ir.Value]:
        """A word for each window and distinct scale row."""
        geometry, window = self.geometry, self.geometry.window
        offsets = self.scales.lane_offsets(window)
        return [
            self.scales.load(offset, window, k + number * window.k)
            for number in range(geometry.instructions // window.spread)
            for offset in offsets
        ]

    def take_elements(self, values: Iterator[ir.Value]) -> Elements:
        """The chunks."""
        return take_chunks(self.geometry, values, len(self.rows.rows), self.rows.bits)

    def operands(
        self, elements: Elements, values: Iterator[ir.Value]
    ) -> list[list[ops.MatrixOperand]]:
        """Codes from chunks, and the byte of a scale word that is the instruction's."""
        spread = self.geometry.window.spread
        words = [
            [next(values) for _ in self.scales.rows]
            for _ in range(self.geometry.instructions // spread)
        ]
        return [
            self._of_instruction(fragments, words[number // spread], number % spread)
            for number, fragments in enumerate(elements)
        ]

    def _of_instruction(
        self, fragments: list[list[ir.Value]], words: Sequence[ir.Value], byte: int
    ) -> list[ops.MatrixOperand]:
        return [
            ops.MatrixOperand(
                ops.lane_operand(chunks, self.rows.element),
                words[self.scales.row_of_fragment[number]],
                byte,
            )
            for number, chunks in enumerate(fragments)
        ]

    def guarded(self, k: Index) -> list[ops.MatrixOperand]:
        """With checked loads."""
        return guarded_operands(self.rows, self.scales, self.geometry.atom, k)


def take_chunks(
    geometry: Geometry, values: Iterator[ir.Value], fragments: int, bits: int
) -> Elements:
    """Chunks in the order of their loads: instruction, fragment, chunk."""
    count = geometry.atom.chunks(bits)
    return [
        [[next(values) for _ in range(count)] for _ in range(fragments)]
        for _ in range(geometry.instructions)
    ]
