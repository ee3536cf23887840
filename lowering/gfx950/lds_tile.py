# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""x in LDS: how a step of it gets there, and where a lane finds its chunks.

A buffer is ``[BLOCK_M][BLOCK_K]`` bytes in 16-byte chunks. A load to LDS puts the lanes' chunks one
after the other, so the order of chunks is chosen on the memory side: chunk c of row r lies at
position ``c ^ swizzle(r)`` of the row. Sixteen lanes that read one chunk column of 16 rows then
touch all banks evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iree.compiler import ir

from block32.lowering.common.index import Index, IndexValue
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import CHUNK_BYTES, WAVE_LANES

#: Rows after which the swizzle repeats.
SWIZZLE_PERIOD = 16


def swizzle(row: Index, chunks: int) -> Index:
    """What a chunk's number is xor-ed with in this row.

    Rows of 128 bytes (8 chunks) are two to a round over the 64 banks, longer ones are not.
    """
    return row // 2 % 8 if chunks == 8 else row % SWIZZLE_PERIOD


@dataclass(frozen=True)
class LdsTile:
    """The buffers of x in LDS, as one lane writes and reads them.

    Attributes:
        geometry: Sizes.
        source: x in memory, from the tile's first row on.
        buffers: A memref of i32 for each stage.
        load_offsets: For each load of the wave where its lane's chunk lies in memory, at K = 0.
        load_target: Where the wave's first load goes, in bytes from the buffer's start.
        row: The lane's row of the tile in the wave's first fragment.
        group: The lane's group.
    """

    geometry: Geometry
    source: ops.Buffer
    buffers: tuple[ir.Value, ...]
    load_offsets: tuple[Index, ...]
    load_target: Index
    row: Index
    group: Index

    @classmethod
    def create(
        cls, geometry: Geometry, source: ops.Buffer, thread: Index, wave: IndexValue, row: Index
    ) -> LdsTile:
        """Allocate the buffers and set up a wave's addresses."""
        words = geometry.block_m * geometry.block_k // 4
        buffers = [ops.allocate_lds(words, ops.i32_type()) for _ in range(geometry.tier.stages)]
        lane = thread % WAVE_LANES
        return cls(
            geometry,
            source,
            tuple(buffers),
            load_offsets(geometry, lane, wave),
            wave * (WAVE_LANES * CHUNK_BYTES),
            row,
            lane // geometry.atom.m,
        )

    def loads(self, k: Index, buffer: int) -> list[Callable[[], None]]:
        """This wave's loads of one step of x, each to be started by a call."""
        address = ops.lds_address(self.buffers[buffer]) + self.load_target
        apart = self.geometry.waves * WAVE_LANES * CHUNK_BYTES
        return [
            lambda target=address + number * apart, offset=offset: self.source.load_to_lds(
                target, offset, k
            )
            for number, offset in enumerate(self.load_offsets)
        ]

    def read(self, buffer: int, instruction: int, fragment: int) -> list[ir.Value]:
        """The chunks of one fragment of x for one instruction of the step."""
        words = self.geometry.block_k // 4
        fragment_words = fragment * self.geometry.atom.m * words
        return [
            ops.load_lds(
                self.buffers[buffer],
                4,
                ops.i32_type(),
                self.row * words
                + read_chunk(self.geometry, self.row, self.group, instruction, chunk) * 4
                + fragment_words,
            )
            for chunk in range(self.geometry.atom.chunks(self.geometry.lhs_bits))
        ]


def load_offsets(geometry: Geometry, lane: Index, wave: Index) -> tuple[Index, ...]:
    """For each load to LDS of a wave, the byte offset in x of the chunk that a lane brings.

    Load j of wave w fills the chunks from ``64 * (j * waves + w)`` on.
    """
    chunks = geometry.block_k // CHUNK_BYTES
    loads = geometry.block_m * chunks // (WAVE_LANES * geometry.waves)
    offsets = []
    for number in range(loads):
        slot = wave * WAVE_LANES + lane + number * geometry.waves * WAVE_LANES
        row, position = slot // chunks, slot % chunks
        chunk = position ^ (swizzle(row, chunks) % chunks)
        offsets.append(row * geometry.problem.lhs_row_bytes + chunk * CHUNK_BYTES)
    return tuple(offsets)


def read_chunk(geometry: Geometry, row: Index, group: Index, instruction: int, chunk: int) -> Index:
    """Where in its row of the buffer a lane finds a chunk of an instruction, in chunks."""
    window = geometry.window
    number, inside = divmod(instruction, window.spread)
    k = number * window.k + window.chunk_k(group, chunk, inside, geometry.lhs_bits)
    chunks = geometry.block_k // CHUNK_BYTES
    return (k // CHUNK_BYTES) ^ (swizzle(row, chunks) % chunks)
