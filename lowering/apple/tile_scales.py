# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The scales that one lane needs for the four accumulators of its simdgroup.

A lane's part of an accumulator lies in two rows of x and four rows of w. Its scales are read as
words, four blocks of K at a time, and turned into f32 factors once, in vectors along K; a block
then picks its factors with a shuffle, which is a choice of registers and no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.apple import block_scaled, builder
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.block_scaled import Factors
from block32.lowering.apple.builder import Int, Pointer, wide
from block32.lowering.apple.epilogue import run_alignment
from block32.lowering.apple.matmul import Matmul

#: Blocks of K whose scale bytes are read as one word.
WORD = 4


@dataclass(frozen=True)
class Scales:
    """Where the E8M0 bytes of a scaled matmul lie.

    Attributes:
        lhs: x's bytes, [M, K/32], or None.
        rhs: w's bytes, [N or N/32, K/32].
        lhs_rows: Rows of x.
    """

    lhs: Pointer | None
    rhs: Pointer
    lhs_rows: Int


class TileScales:
    """A lane's rows of scale bytes."""

    def __init__(
        self, matmul: Matmul, lhs: Sequence[Pointer], rhs: Sequence[Pointer], atoms: tuple[int, int]
    ):
        """Takes the addresses of the bytes of K block 0.

        Args:
            matmul: What is computed.
            lhs: The lane's rows of x, tile by tile and run by run; none where x has no scales.
            rhs: The lane's rows of w, tile by tile, or one where they share a block.
            atoms: Tiles along M and N.
        """
        self.matmul = matmul
        self.lhs = lhs
        self.rhs = rhs
        self.atoms = atoms

    def load(self, block: Int, count: int) -> BlockScales:
        """Reads the bytes of ``count`` blocks from ``block`` on; ``WORD`` of them as words."""
        lhs = [self._codes(row, block, count) for row in self.lhs]
        rhs = [self._codes(row, block, count) for row in self.rhs]
        return BlockScales(self.matmul, lhs, rhs, self.atoms)

    def _codes(self, row: Pointer, block: Int, count: int) -> ir.Value:
        """The bytes as a vector; single ones are repeated up to a power of two."""
        start = row.at(block if isinstance(block, int) else wide(block))
        if count == WORD:
            return start.load(WORD, run_alignment(self.matmul.k_blocks, "i8", WORD))
        size = max(2, 1 << (count - 1).bit_length())
        loaded = [start.at(index).load() for index in range(count)]
        return builder.from_elements(loaded + loaded[-1:] * (size - count))


class BlockScales:
    """The factors of a few blocks of K.

    Rows of x, and of w where they share blocks, are kept as vectors along K. Many rows of w are
    kept as bytes, and gathered across the rows for the block that is asked for.
    """

    def __init__(
        self,
        matmul: Matmul,
        lhs: list[ir.Value],
        rhs: list[ir.Value],
        atoms: tuple[int, int],
    ):
        self.atom: SimdgroupAtom = matmul.atom
        self.keep_infinity = "f8E5M2" in (matmul.lhs, matmul.rhs)
        self.atoms = atoms
        self.length = ir.VectorType(rhs[0].type).shape[0]
        self.rows = [block_scaled.factors(_words(codes)) for codes in lhs]
        self.uniform: Factors | None = None
        self.columns: list[ir.Value] = []
        if len(rhs) > 1:
            self.columns = _concatenate_pairs(rhs)
            return
        self.uniform = block_scaled.factors(_words(rhs[0]), larger_first=True)
        if self.rows:
            self.rows = [self._product(row, self.uniform) for row in self.rows]

    def _product(self, lhs: Factors, rhs: Factors) -> Factors:
        return block_scaled.combine(lhs, rhs, self.keep_infinity)

    def at(self, block: int) -> list[Factors]:
        """The factors of every accumulator, (m, n) with n fastest, at one of the blocks."""
        tiles_m, tiles_n = self.atoms
        lhs = [self._rows_of_tile(m, block) for m in range(tiles_m)] if self.rows else []
        if self.uniform is not None:
            every = lhs or [self._same_everywhere(self.uniform, block)] * tiles_m
            return [every[m] for m in range(tiles_m) for _ in range(tiles_n)]
        rhs = self._columns_of_tiles(block)
        if not lhs:
            return rhs * tiles_m
        return [self._product(x, w) for x in lhs for w in rhs]

    def _rows_of_tile(self, tile: int, block: int) -> Factors:
        """A row's factor in each of its slots."""
        runs, run = self.atom.slots // self.atom.run, self.atom.run
        rows = self.rows[runs * tile : runs * (tile + 1)]
        mask = [self.length * row + block for row in range(runs) for _ in range(run)]
        return Factors(
            vector.shuffle(rows[0].first, rows[-1].first, mask),
            vector.shuffle(rows[0].second, rows[-1].second, mask),
        )

    def _same_everywhere(self, uniform: Factors, block: int) -> Factors:
        return _pick(uniform, [block] * self.atom.slots)

    def _columns_of_tiles(self, block: int) -> list[Factors]:
        """Each tile's factors, one a column, repeated in the slots of the lane's second row."""
        tiles, run = self.atoms[1], self.atom.run
        first, second = self.columns
        mask = [self.length * column + block for column in range(tiles * run)]
        codes = _words(vector.shuffle(first, second, mask))
        columns = block_scaled.factors(codes, larger_first=True)
        runs = self.atom.slots // run
        return [
            _pick(columns, list(range(tile * run, (tile + 1) * run)) * runs)
            for tile in range(tiles)
        ]


def _words(codes: ir.Value) -> ir.Value:
    """A vector of bytes as i32."""
    return arith.extui(
        builder.vector_type(ir.VectorType(codes.type).shape[0], builder.i32()), codes
    )


def _pick(source: Factors, mask: list[int]) -> Factors:
    return Factors(
        vector.shuffle(source.first, source.first, mask),
        vector.shuffle(source.second, source.second, mask),
    )


def _concatenate_pairs(vectors: list[ir.Value]) -> list[ir.Value]:
    """Neighbours joined until two vectors are left; their number is a power of two."""
    while len(vectors) > 2:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.concatenate(low, high) for low, high in pairs]
    return vectors
