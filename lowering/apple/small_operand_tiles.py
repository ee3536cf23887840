# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A lane's parts of the operands of 8x8x8 matrix instructions, decoded where they are fp8.

The instruction wants x as [m, k] and w as [k, n], two neighbours of a row in a lane: two k of one
row of x, and one k of two rows of w. Four instructions make a step of 32 K. Which of the 32 an
instruction takes in which place does not matter, as long as both operands agree; so place p of
instruction i is k = 4 p + i, and a lane finds what it needs for all four in runs: 8 neighbours of
its row of x, and 4 of each of its rows of w.

Rows beyond the matrix are clamped, and K is masked, as in ``operand_tiles``.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.apple import builder, fp8
from block32.lowering.apple.atoms import SmallAtom
from block32.lowering.apple.builder import Int, Pointer, Word, less, wide
from block32.lowering.apple.epilogue import run_alignment
from block32.lowering.apple.operand_tiles import Operand, clamp

#: Tiles of an operand that a simdgroup's 32 rows make.
TILES = 4

#: Instructions of a step, which is as deep as a block of scales; and neighbours in a run.
INSTRUCTIONS = RUN = 4
DEPTH = 32


class SmallOperandTiles:
    """A lane's addresses of one operand for the four atom tiles of its simdgroup."""

    step = DEPTH

    def __init__(
        self,
        operand: Operand,
        atom: SmallAtom,
        element: str,
        first: Word,
        lane: Word,
        is_lhs: bool,
    ):
        """Computes the addresses.

        Args:
            operand: The matrix.
            atom: The instruction.
            element: MLIR name of the matrix's element.
            first: The simdgroup's first row.
            lane: Index of the thread in its simdgroup.
            is_lhs: The matrix is x: two runs of one row; else w: a run of each of two rows.
        """
        self.operand = operand
        self.element = element
        self.multiplied = atom.lhs if is_lhs else atom.rhs
        self.elements = atom.lane_elements
        self.row, self.column = atom.first_row(lane), atom.first_column(lane)
        self.starts = [first + tile * atom.size for tile in range(TILES)]
        # The places along K that a lane's two runs begin at, and their rows in the tile.
        places = (self.column, self.column + 1) if is_lhs else (self.row, self.row)
        rows = (self.row, self.row) if is_lhs else (self.column, self.column + 1)
        self.places = [place * RUN for place in places]
        self.bases = [[self._row(start + row) for row in rows] for start in self.starts]

    def _row(self, row: Int) -> Pointer:
        """Where a row begins; one beyond the matrix is taken for the last."""
        return self.operand.base.at(wide(clamp(row, self.operand.rows)) * self.operand.k)

    def load(self, k: Int, offset: int = 0, count: int = DEPTH) -> list[list[ir.Value]]:
        """The four tiles at ``k + offset``, of which ``count`` columns lie inside K.

        Returns:
            For each of the step's four matrix instructions the operand of each tile.
        """
        pairs = [self._runs(tile, k, offset, count) for tile in range(TILES)]
        return [
            [self._operand(first, second, number) for first, second in pairs]
            for number in range(INSTRUCTIONS)
        ]

    def _operand(self, first: ir.Value, second: ir.Value, number: int) -> ir.Value:
        """What an instruction takes: the lane's two elements, in a vector of all of the tile's."""
        element = builder.element_type(self.multiplied)
        tile = builder.zero(builder.vector_type(self.elements, element))
        for slot, run in enumerate((first, second)):
            value = builder.extract(run, number)
            tile = vector.insert(value, tile, dynamic_position=[], static_position=[slot])
        return tile

    def _runs(self, tile: int, k: Int, offset: int, count: int) -> list[ir.Value]:
        """A lane's two runs of a tile, in the type that is multiplied."""
        runs = [
            self._load(base, k, offset, place, count)
            for base, place in zip(self.bases[tile], self.places, strict=True)
        ]
        return [as_type(run, self.element, self.multiplied) for run in runs]

    def _load(self, base: Pointer, k: Int, offset: int, place: Int, count: int) -> ir.Value:
        if count == DEPTH:
            alignment = run_alignment(self.operand.k, base.element, RUN)
            return base.at(place).at(k).at(offset).load(RUN, alignment)
        zero = builder.zero(builder.element_type(base.element))
        elements: list[ir.Value] = []
        for index in range(RUN):
            position = place + index
            value = base.at(k + offset + clamp(position, count)).load()
            elements.append(arith.select(less(position, count), value, zero))
        return builder.from_elements(elements)


def as_type(values: ir.Value, element: str, wanted: str) -> ir.Value:
    """A vector of stored elements as another floating-point type that holds each exactly.

    Args:
        values: A vector of the element's storage type (i8 for fp8).
        element: MLIR name of the element.
        wanted: ``bf16`` or ``f16`` for an fp8, ``f32`` for any; or the element itself.
    """
    if element == wanted:
        return values
    decoded = fp8.decode(values, element)
    if wanted == "f32":
        return decoded
    count = ir.VectorType(values.type).shape[0]
    if wanted == "f16":
        scalars = [builder.extract(decoded, index) for index in range(count)]
        half = builder.element_type("f16")
        return builder.from_elements([arith.truncf(half, scalar) for scalar in scalars])
    words = builder.vector_type(count, builder.i32())
    halves = builder.vector_type(count, ir.IntegerType.get_signless(16))
    upper = arith.shrui(arith.bitcast(words, decoded), builder.splat_integer(16, words))
    brain = builder.vector_type(count, builder.element_type("bf16"))
    return arith.bitcast(brain, arith.trunci(halves, upper))
