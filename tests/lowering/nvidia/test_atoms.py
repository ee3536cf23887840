# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lane maps cover what they claim, once; and shared tiles lose and collide on nothing."""

import pytest

from block32.lowering.common.index import as_integer
from block32.lowering.nvidia.atoms import LANE_ORDERS, MMA_16BIT, MMA_FP8, MmaAtom, wgmma_atom
from block32.lowering.nvidia.shared_tile import SharedTile
from block32.lowering.nvidia.stream import sum_offset


@pytest.mark.parametrize("atom", [MMA_16BIT, MMA_FP8, wgmma_atom(32), wgmma_atom(128)])
def test_results_cover_the_tile_once(atom: MmaAtom):
    lanes = 128 if atom.is_warpgroup else 32
    places = {
        (atom.result_row(lane, register), atom.result_column(lane, register))
        for lane in range(lanes)
        for register in range(atom.result_registers)
    }
    assert places == {(row, column) for row in range(atom.m) for column in range(atom.n)}
    assert len(places) == lanes * atom.result_registers


@pytest.mark.parametrize("bits", [4, 8])
def test_four_lanes_hold_a_block_of_k_once(bits: int):
    order = LANE_ORDERS[bits]
    held = [as_integer(order.element_k(c, element)) for c in range(4) for element in range(8)]
    assert sorted(held) == list(range(32))
    assert sorted(element for pair in order.pairs for element in pair) == list(range(8))


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128, 256])
def test_a_shared_tile_has_a_place_for_every_chunk(row_bytes: int):
    tile = SharedTile(16, row_bytes)
    places = {tile.chunk_offset(r, c) for r in range(16) for c in range(tile.chunks)}
    assert places == set(range(0, tile.bytes, 16))
    for row in range(8):
        assert tile.phase(row) == tile.phase(row + tile.phase_period)


@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256])
def test_eight_rows_of_one_chunk_use_all_banks(row_bytes: int):
    tile = SharedTile(8, row_bytes)
    for chunk in range(tile.chunks):
        banks = {tile.chunk_offset(row, chunk) % 128 // 16 for row in range(8)}
        assert len(banks) == 8


@pytest.mark.parametrize(("rows", "columns"), [(8, 16), (16, 32), (32, 64)])
def test_a_warp_s_shared_sums_have_a_place_each(rows: int, columns: int):
    groups = columns // 16
    places = {sum_offset(row, column, groups) for row in range(rows) for column in range(columns)}
    assert places == set(range(0, rows * columns * 4, 4))
