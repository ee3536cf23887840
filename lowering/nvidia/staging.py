# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies from device memory to shared memory: rows of an operand, and their scales.

Rows past the matrix and bytes past a row arrive as zeros and are never read. Rows whose length is a
multiple of 16 bytes are copied 16 bytes at a time; others in the widest pieces that both alignment
and the row's end allow, since no piece may straddle the end of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.control import for_loop, when
from block32.lowering.common.index import (
    Condition,
    Index,
    IndexValue,
    both,
    choose,
    less,
    minimum,
)
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.shared_tile import CHUNK_BYTES, SharedTile


@dataclass(frozen=True)
class GlobalRows:
    """A matrix in device memory as rows of bytes.

    Attributes:
        base: Its first byte.
        rows: How many rows it has.
        row_bytes: Bytes of a row, without padding.
    """

    base: Pointer
    rows: Index
    row_bytes: int

    @property
    def piece_bytes(self) -> int:
        """The widest power of two, up to 16, that rows are a multiple of."""
        return math.gcd(self.row_bytes, CHUNK_BYTES)


@dataclass(frozen=True)
class _RowCopy:
    """One chunk that a thread copies in every K step.

    Attributes:
        row: The first byte of its row.
        source: Its first byte in the first step.
        is_row: The matrix has the row; where it has not, zeros are written.
        is_in_tile: The tile has the row; where it has not, the thread has nothing to do.
        shared_offset: Where in the tile it goes.
    """

    row: Pointer
    source: Pointer
    is_in_tile: Condition
    is_row: Condition
    shared_offset: Index


class TileCopier:
    """A team of threads that copies one K step of some rows into a ``SharedTile``.

    A thread takes the same chunk of every ``team // chunks``-th row.
    """

    def __init__(
        self,
        matrix: GlobalRows,
        tile: SharedTile,
        first_row: Index,
        first_byte: Index,
        member: Index,
        team: int,
    ):
        """Compute the addresses that do not change over K.

        Args:
            matrix: Where rows come from.
            tile: Where they go; its ``row_bytes`` are copied a step.
            first_row: The matrix row of the tile's row 0. A multiple of ``tile.rows``.
            first_byte: Where in a row the first step begins.
            member: The thread's number in the team.
            team: Threads in the team.
        """
        self.matrix = matrix
        self.tile = tile
        row_in_pass, chunk = member // tile.chunks, member % tile.chunks
        self._byte = first_byte + chunk * CHUNK_BYTES
        self._copies: list[_RowCopy] = []
        rows_of_a_pass = team // tile.chunks
        for first in range(0, tile.rows, rows_of_a_pass):
            is_whole = first + rows_of_a_pass <= tile.rows
            is_in_tile = is_whole or less(row_in_pass + first, tile.rows)
            self._add_pass(first_row, row_in_pass, first, chunk, is_in_tile)

    def _add_pass(
        self,
        first_row: Index,
        row_in_pass: Index,
        first: int,
        chunk: Index,
        is_in_tile: Condition,
    ) -> None:
        matrix, tile = self.matrix, self.tile
        row = first_row + row_in_pass + first
        if isinstance(matrix.rows, int) and matrix.rows % tile.rows == 0:
            is_row: Condition = True
        else:
            is_row = less(row, matrix.rows)
            row = minimum(row, matrix.rows - 1)
        row_start = matrix.base + ptx.row_offset(row, matrix.row_bytes)
        source = row_start + self._byte
        # Written as a sum with a constant where phases repeat, so that copies share an address.
        repeat = first // tile.phase_period * tile.phase_period
        offset = tile.chunk_offset(row_in_pass + (first - repeat), chunk)
        self._copies.append(
            _RowCopy(row_start, source, is_in_tile, is_row, offset + repeat * tile.row_bytes)
        )

    def start(self, destination: Pointer, step_bytes: Index, is_last_step_whole: bool) -> None:
        """Start the copies of a step.

        Args:
            destination: The tile's place in shared memory.
            step_bytes: Bytes of a row from the first step to this one.
            is_last_step_whole: No step reaches past the end of a row.
        """
        for copy in self._copies:
            with when(copy.is_in_tile):
                if self.matrix.piece_bytes >= 4:
                    self._start_pieces(copy, destination, step_bytes, is_last_step_whole)
                else:
                    self._copy_bytes(copy, destination, step_bytes)

    def _start_pieces(
        self, copy: _RowCopy, destination: Pointer, step_bytes: Index, is_last_step_whole: bool
    ) -> None:
        """Start one ``cp.async`` for each piece of a chunk."""
        piece = self.matrix.piece_bytes
        for part in range(0, CHUNK_BYTES, piece):
            is_valid = copy.is_row
            if not is_last_step_whole:
                byte = self._byte + step_bytes + part
                is_valid = both(is_valid, less(byte, self.matrix.row_bytes))
            valid_bytes = choose(is_valid, ptx.as_i32_value(piece), 0)
            ptx.copy_async(
                destination + copy.shared_offset + part,
                copy.source + step_bytes + part,
                piece,
                ptx.i32_value(valid_bytes),
            )

    def _copy_bytes(self, copy: _RowCopy, destination: Pointer, step_bytes: Index) -> None:
        """Copy a chunk in pieces of 1 or 2 bytes through a register: ``cp.async`` begins at 4.

        In a loop, since such rows are rare and the code would be long.
        """
        piece = self.matrix.piece_bytes
        element = ir.IntegerType.get_signless(8 * piece)

        def body(part: IndexValue, carried: list[ir.Value]) -> list[ir.Value]:
            offset = part * piece
            byte = self._byte + step_bytes + offset
            is_valid = both(copy.is_row, less(byte, self.matrix.row_bytes))
            source = copy.row + choose(is_valid, byte, 0)
            value = source.load(element, alignment=piece)
            assert isinstance(is_valid, ir.Value)
            value = arith.select(is_valid, value, arith.constant(element, 0))
            (destination + copy.shared_offset + offset).store(value, alignment=piece)
            return carried

        for_loop(CHUNK_BYTES // piece, [], body, ptx.i32())


@dataclass(frozen=True)
class ScaleRows:
    """The scale bytes of some rows: one row of them in device memory for each row of a tile.

    Attributes:
        base: The first byte of the scales.
        rows: How many rows of scales there are.
        row_bytes: ``ceil(K / 32)``.
        first_row: The scale row of the tile's row 0.
        count: Rows of scales in the tile.
    """

    base: Pointer
    rows: Index
    row_bytes: int
    first_row: Index
    count: int

    def row_pointer(self, row: Index) -> tuple[Pointer, Condition]:
        """The first byte of a tile's scale row, and whether the matrix has it ."""
        source_row = self.first_row + row
        is_row = less(source_row, self.rows)
        safe_row = minimum(source_row, self.rows - 1)
        return self.base + ptx.row_offset(safe_row, self.row_bytes), is_row


def load_scale_word(
    row: Pointer, row_bytes: int, block: Index, blocks: int, is_row: Condition
) -> ir.Value:
    """``blocks`` scale bytes (1 to 4) from ``block`` on as an i32; bytes past the row are 0.

    Byte 0 is 2^-127, which leaves the zeros that it belongs to what they are; 255 would be NaN.
    """
    if row_bytes % blocks == 0 and blocks in (1, 2, 4):
        in_row = both(is_row, less(block, row_bytes))
        element = ir.IntegerType.get_signless(8 * blocks)
        word = (row + choose(in_row, block, 0)).load(element, alignment=blocks)
        wide = arith.extui(ptx.i32(), word) if blocks < 4 else word
        return ptx.or_zero(wide, in_row)
    word = ptx.i32_value(0)
    for index in range(blocks):
        in_row = both(is_row, less(block + index, row_bytes))
        byte = (row + choose(in_row, block + index, 0)).load(
            ir.IntegerType.get_signless(8), alignment=1
        )
        wide = ptx.or_zero(arith.extui(ptx.i32(), byte), in_row)
        word = arith.ori(word, arith.shli(wide, ptx.i32_value(8 * index)))
    return word


class ScaleCopier:
    """Copies the scale bytes of each row to shared memory, four at a time: a word for 128 K.

    Rows are dealt out to a team of threads. Word r of the destination belongs to the r-th row of
    all ``sources`` taken together.
    """

    def __init__(
        self,
        sources: Sequence[ScaleRows],
        member: Index,
        team: int,
        first_block: Index,
        words: int,
    ):
        """Compute the addresses that do not change over K.

        Args:
            sources: Where the rows are.
            member: The thread's number in the team.
            team: Threads in the team.
            first_block: The first block of the first step.
            words: Words of a row that one step has.
        """
        self._is_last_step_whole = sources[0].row_bytes % (4 * words) == 0
        self._first_block = first_block
        self._passes: list[tuple[Index, Condition, Pointer, Condition, int]] = []
        total = sum(source.count for source in sources)
        for first in range(0, total, team):
            row = member + first
            pointer, is_row = pick_source(sources, row)
            in_tile = True if first + team <= total else less(row, total)
            self._passes.append((row, in_tile, pointer, is_row, sources[0].row_bytes))

    def start(self, destination: Pointer, step_block: Index) -> None:
        """Start the copies of the word whose first block is ``first_block + step_block``."""
        for row, in_tile, pointer, is_row, row_bytes in self._passes:
            with when(in_tile):
                target = destination + row * 4
                block = self._first_block + step_block
                if row_bytes % 4 == 0:
                    if not self._is_last_step_whole:
                        is_row = both(is_row, less(block, row_bytes))
                    size = choose(is_row, ptx.as_i32_value(4), 0)
                    ptx.copy_async(target, pointer + block, 4, ptx.i32_value(size))
                else:
                    word = load_scale_word(pointer, row_bytes, block, 4, is_row)
                    target.store(word, alignment=4)


def pick_source(sources: Sequence[ScaleRows], row: Index) -> tuple[Pointer, Condition]:
    """The source that a row of all sources together falls into."""
    pointer, is_row = sources[0].row_pointer(row)
    first = sources[0].count
    for source in sources[1:]:
        is_before = less(row, first)
        # Rows before this source wrap around below; their pointer is not taken.
        other, is_other_row = source.row_pointer(choose(is_before, 0, row - first))
        pointer, is_row = _select_row(is_before, (pointer, is_row), (other, is_other_row))
        first += source.count
    return pointer, is_row


def _select_row(
    condition: Condition, a: tuple[Pointer, Condition], b: tuple[Pointer, Condition]
) -> tuple[Pointer, Condition]:
    if isinstance(condition, bool):
        return a if condition else b
    i1 = ir.IntegerType.get_signless(1)
    conditions = [arith.constant(i1, int(c)) if isinstance(c, bool) else c for c in (a[1], b[1])]
    value = arith.select(condition, a[0].value, b[0].value)
    return Pointer(value, a[0].space), arith.select(condition, *conditions)
