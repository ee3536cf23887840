# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The orders that the bytes of a weight may be stored in, by name.

A weight is ``[N, row bytes]``. In the layout ``nRkB`` it is cut into pieces of R rows by B bytes,
which lie one after the other: ``[N / R][row bytes / B][R][B]``. A piece is a register whose lanes
run along N, and the pieces of R rows are one stream. The size stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from block32.lowering.common.index import Index

#: The name of the order of rows, as every program has it.
PLAIN: Final = "plain"

#: Rows hold a whole number of these: what a cache line and the longest step along K have.
ROW_MULTIPLE: Final = 64


@dataclass(frozen=True)
class WeightLayout:
    """One order of bytes.

    Attributes:
        rows: Rows of a piece.
        row_bytes: Neighbouring bytes of each row in a piece.
    """

    rows: int
    row_bytes: int

    @property
    def name(self) -> str:
        """What ``block32.layout`` and ``weight_layout`` call it."""
        return f"n{self.rows}k{self.row_bytes}"

    @property
    def piece(self) -> int:
        """Bytes of a piece."""
        return self.rows * self.row_bytes

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a weight of ``(rows, bytes of a row)`` may have this layout."""
        return shape[0] % self.rows == 0 and shape[1] % ROW_MULTIPLE == 0

    def pack(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[rows, bytes]`` in this layout, in an array of the same shape."""
        rows, row_bytes = codes.shape
        pieces = codes.reshape(-1, self.rows, self.pieces_of_row(row_bytes), self.row_bytes)
        return np.ascontiguousarray(pieces.transpose(0, 2, 1, 3)).reshape(rows, row_bytes)

    def pieces_of_row(self, bytes_of_row: int) -> int:
        """Pieces side by side along K."""
        return bytes_of_row // self.row_bytes

    def piece_of(self, row: Index, byte: Index, bytes_of_row: int) -> Index:
        """The number of the piece that holds a byte of a row."""
        return row // self.rows * self.pieces_of_row(bytes_of_row) + byte // self.row_bytes

    def offset(self, row: Index, byte: Index, bytes_of_row: int) -> Index:
        """Where a byte of a row is stored."""
        inside = row % self.rows * self.row_bytes + byte % self.row_bytes
        return self.piece_of(row, byte, bytes_of_row) * self.piece + inside


#: Every layout but the plain one, by name.
LAYOUTS: Final[dict[str, WeightLayout]] = {
    layout.name: layout for layout in (WeightLayout(16, 1), WeightLayout(16, 4))
}
