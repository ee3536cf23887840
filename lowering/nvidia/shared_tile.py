# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of bytes in shared memory, their 16-byte chunks permuted so that no two lanes collide.

Eight lanes that read the same chunk of eight rows would all hit the same 4 of the 32 banks. So
chunk c of row r lies where chunk ``c ^ phase(r)`` would: with rows of 128 bytes this is also the
128-byte swizzle that ``wgmma`` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from block32.lowering.common.index import Index

#: Bytes of one access of ``cp.async`` and of one row of ``ldmatrix``.
CHUNK_BYTES: Final = 16

#: Bytes that all 32 banks deliver at once.
BANK_BYTES: Final = 128


@dataclass(frozen=True)
class SharedTile:
    """``rows`` rows of ``row_bytes`` bytes, a power of two of at least 16."""

    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole tile."""
        return self.rows * self.row_bytes

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def phase_period(self) -> int:
        """Rows after which phases repeat."""
        return self._rows_of_a_phase * min(8, self.chunks)

    @property
    def _rows_of_a_phase(self) -> int:
        """Narrow rows share a line of all banks, and so a phase."""
        return max(1, BANK_BYTES // self.row_bytes)

    def phase(self, row: Index) -> Index:
        """What is xored to the chunk numbers of a row."""
        return row // self._rows_of_a_phase % min(8, self.chunks)

    def chunk_offset(self, row: Index, chunk: Index) -> Index:
        """Bytes from the tile's start to a chunk."""
        return row * self.row_bytes + (chunk ^ self.phase(row)) * CHUNK_BYTES
