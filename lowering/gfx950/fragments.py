# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Matrix operands and scales straight from memory to the registers of one wave.

A *fragment* is what one matrix instruction takes of an operand: 16 or 32 rows. Every lane keeps
the byte offset of its row for each fragment; a K position is added in scalar registers. Rows that
do not exist lie past the end of their buffer and come as zeros.

Two ways to load: inside whole K steps with the widest loads and no check, and near the end of K
with a check for each piece, so that nothing past the end of a row reaches an operand. Zeros in
their place add nothing, and scale bytes past the end come as 0, which is no NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.index import Index, less
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.atoms import KWindow, ScaledAtom
from block32.lowering.gfx950.machine import CHUNK_BYTES
from block32.lowering.problem import BLOCK_K


def aligned_width(row_bytes: int, widest: int) -> int:
    """The widest power of two, up to ``widest``, that all row starts are aligned to."""
    return min(widest, row_bytes & -row_bytes)


@dataclass(frozen=True)
class OperandRows:
    """The rows of x or w that one wave multiplies.

    Attributes:
        buffer: The memory; offset 0 is the first row of the workgroup's tile.
        element: MLIR name of the element type.
        bits: Bits of an element.
        row_bytes: Bytes from row to row.
        rows: For each fragment, where this lane's row starts, in bytes.
        group: The lane's group in the instruction.
        panel_k: First K of the lane's panel in a step (0 without packing).
    """

    buffer: ops.Buffer
    element: str
    bits: int
    row_bytes: int
    rows: tuple[Index, ...]
    group: Index
    panel_k: Index = 0

    def bytes_of(self, k: Index) -> Index:
        """Bytes from the start of a row to element ``k``, an even one where two share a byte."""
        return k * (self.bits // 8) if self.bits >= 8 else k * self.bits // 8

    def lane_offsets(self, window: KWindow) -> tuple[Index, ...]:
        """For each fragment the offset of the lane's first chunk of a window at K = 0."""
        first = self.panel_k + window.chunk_k(self.group, 0, 0, self.bits)
        return tuple(row + self.bytes_of(first) for row in self.rows)

    def load(
        self, lane_offset: Index, window: KWindow, instruction: int, k: Index
    ) -> list[ir.Value]:
        """The chunks of one instruction, whose window starts at ``k`` in all lanes."""
        chunk_type = ops.vector_type(window.atom.chunk_bytes(self.bits) // 4, ops.i32_type())
        return [
            self.buffer.load(chunk_type, lane_offset, self._uniform(window, chunk, instruction, k))
            for chunk in range(window.atom.chunks(self.bits))
        ]

    def _uniform(self, window: KWindow, chunk: int, instruction: int, k: Index) -> Index:
        return self.bytes_of(k) + self.bytes_of(window.chunk_step(chunk, instruction, self.bits))

    def load_guarded(self, fragment: int, atom: ScaledAtom, k: Index) -> list[ir.Value]:
        """The chunks of one instruction at K = ``k``, with zeros from the end of the row on."""
        chunk_bytes = atom.chunk_bytes(self.bits)
        starts = [k + atom.chunk_k(self.group, c, self.bits) for c in range(atom.chunks(self.bits))]
        return [self.load_chunk_guarded(fragment, start, chunk_bytes) for start in starts]

    def load_chunk_guarded(self, fragment: int, k: Index, chunk_bytes: int) -> ir.Value:
        """The bytes of a chunk in pieces that are wholly inside the row or wholly outside."""
        width = aligned_width(self.row_bytes, CHUNK_BYTES)
        if width < CHUNK_BYTES or chunk_bytes < CHUNK_BYTES:
            width = min(4, width)
        start = self.bytes_of(self.panel_k + k)
        pieces = []
        for byte in range(0, chunk_bytes, width):
            is_inside = less(start + byte, self.row_bytes)
            offset = self.rows[fragment] + start + byte
            pieces.append(
                self.buffer.load(piece_type(width), ops.or_out_of_bounds(is_inside, offset))
            )
        return join_pieces(pieces, width)


def piece_type(width: int) -> ir.Type:
    """What a load of ``width`` bytes gives: an integer, or a vector of four i32."""
    if width == CHUNK_BYTES:
        return ops.vector_type(4, ops.i32_type())
    return ir.IntegerType.get_signless(8 * width)


def join_pieces(pieces: list[ir.Value], width: int) -> ir.Value:
    """A vector of i32, or one i32, from pieces of 1, 2, 4 or 16 bytes in memory order."""
    if width == CHUNK_BYTES:
        return pieces[0]
    in_word = 4 // width
    words = [
        join_word(pieces[first : first + in_word], width)
        for first in range(0, len(pieces), in_word)
    ]
    if len(words) == 1:
        return words[0]
    return vector.from_elements(ops.vector_type(len(words), ops.i32_type()), words)


def join_word(pieces: list[ir.Value], width: int) -> ir.Value:
    """One i32 from 1-, 2- or 4-byte pieces, the first in the low bits."""
    if width == 4:
        return pieces[0]
    word = arith.extui(ops.i32_type(), pieces[0])
    for position, piece in enumerate(pieces[1:], start=1):
        shift = ops.i32_value(8 * width * position)
        word = arith.ori(word, arith.shli(arith.extui(ops.i32_type(), piece), shift))
    return word


@dataclass(frozen=True)
class ScaleRows:
    """The scale bytes of one operand for one wave. Fragments that share a row share a load.

    Attributes:
        buffer: The memory; offset 0 is the first scale row of the workgroup's tile.
        row_bytes: Bytes from scale row to scale row: the K blocks.
        rows: Where this lane's scale row starts, for each distinct one.
        row_of_fragment: Which of ``rows`` a fragment uses.
        group: The lane's group in the instruction.
        panel_k: First K of the lane's panel in a step.
    """

    buffer: ops.Buffer
    row_bytes: int
    rows: tuple[Index, ...]
    row_of_fragment: tuple[int, ...]
    group: Index
    panel_k: Index = 0

    def lane_offsets(self, window: KWindow) -> tuple[Index, ...]:
        """For each distinct row the offset of the lane's first byte of a window at K = 0."""
        block = self.panel_k // BLOCK_K + window.scale_block(self.group)
        return tuple(row + block for row in self.rows)

    def load(self, lane_offset: Index, window: KWindow, k: Index) -> ir.Value:
        """A register whose byte s is the scale of the window's instruction s."""
        loaded = ir.IntegerType.get_signless(8 * window.spread)
        scales = self.buffer.load(loaded, lane_offset, k // BLOCK_K)
        return ops.widen_undefined(scales)

    def load_guarded(self, row: int, atom: ScaledAtom, k: Index) -> ir.Value:
        """A register whose low byte is the scale of one instruction, 0 past the last block."""
        block = (self.panel_k + k) // BLOCK_K + KWindow(atom, 1).scale_block(self.group)
        is_inside = less(block, self.row_bytes)
        offset = ops.or_out_of_bounds(is_inside, self.rows[row] + block)
        return ops.widen_undefined(self.buffer.load(ir.IntegerType.get_signless(8), offset))


def scale_spread(k_blocks: int, instructions: int) -> int:
    """How many instructions can share a scale load: an aligned load of 1, 2 or 4 bytes.

    Args:
        k_blocks: Bytes of a row of scales.
        instructions: Matrix instructions along one K step.
    """
    spread = aligned_width(k_blocks, 4)
    while instructions % spread:
        spread //= 2
    return spread
