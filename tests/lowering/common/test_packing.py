# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Packed rows: every (row, K) of a step lies in one packed row."""

import pytest

from block32.lowering.common.index import as_integer
from block32.lowering.common.packing import Packing


@pytest.mark.parametrize("k_pack", [1, 2, 4])
def test_packed_rows_hold_every_element_once(k_pack: int):
    packing, rows = Packing(k_pack, block_k=128), 8
    seen = set()
    for packed_row in range(rows * k_pack):
        first = as_integer(packing.panel_k(packed_row))
        seen |= {(packing.row(packed_row), k) for k in range(first, first + packing.block_k)}
    assert seen == {(row, k) for row in range(rows) for k in range(packing.step)}


def test_rows_of_one_panel_meet_on_both_sides():
    packing = Packing(4, block_k=128)
    assert [packing.panel(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [packing.row(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
