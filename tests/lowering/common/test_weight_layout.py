# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A layout moves every byte of a weight to a place of its own, and pieces are what lanes hold."""

import pytest

from block32.lowering.common.index import as_integer
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN, WeightLayout

SHAPE = (48, 128)
ALL = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)


@ALL
def test_offsets_are_a_bijection(layout: WeightLayout) -> None:
    rows, row_bytes = SHAPE
    places = ((row, byte) for row in range(rows) for byte in range(row_bytes))
    offsets = [as_integer(layout.offset(row, byte, row_bytes)) for row, byte in places]
    assert sorted(offsets) == list(range(rows * row_bytes))


@ALL
def test_a_piece_is_some_bytes_of_16_rows(layout: WeightLayout) -> None:
    _, row_bytes = SHAPE
    found: dict[int, set[tuple[int, int]]] = {}
    for row in range(32, 48):
        for byte in range(row_bytes):
            number = as_integer(layout.offset(row, byte, row_bytes)) // layout.piece
            assert number == layout.piece_of(row, byte, row_bytes)
            found.setdefault(number, set()).add((row, byte // layout.row_bytes))
    for number, members in found.items():
        column = number % layout.pieces_of_row(row_bytes)
        assert members == {(row, column) for row in range(32, 48)}


def test_names_are_their_own() -> None:
    assert PLAIN not in LAYOUTS
    assert all(name == layout.name for name, layout in LAYOUTS.items())
    assert LAYOUTS["n16k4"].offset(17, 5, 64) == (16 + 1) * 64 + 4 + 1


@pytest.mark.parametrize("shape", [(40, 64), (48, 96), (8, 64)])
def test_other_shapes_do_not_fit(shape: tuple[int, int]) -> None:
    assert not any(layout.fits(shape) for layout in LAYOUTS.values())
    assert all(layout.fits(SHAPE) for layout in LAYOUTS.values())
