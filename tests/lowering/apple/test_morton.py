# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Z-order of threadgroups, evaluated on integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block32.lowering.apple import dense
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.morton import even_bits, padded_bits, tile_position


def _walk(bits_m: int, bits_n: int) -> list[tuple[int, int]]:
    positions = [tile_position(i, bits_m, bits_n) for i in range(1 << (bits_m + bits_n))]
    return [(int(m), int(n)) for m, n in positions]  # type: ignore[arg-type]


@given(st.integers(0, 5), st.integers(0, 5))
def test_every_tile_is_visited_once(bits_m: int, bits_n: int) -> None:
    walk = _walk(bits_m, bits_n)
    assert sorted(walk) == [(m, n) for m in range(1 << bits_m) for n in range(1 << bits_n)]


def test_a_square_is_walked_in_z_order_with_n_first() -> None:
    assert _walk(1, 1) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert _walk(2, 2)[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]


def test_the_bits_above_the_square_go_to_the_longer_axis() -> None:
    assert _walk(1, 2)[4:6] == [(0, 2), (0, 3)]
    assert _walk(2, 1)[4:6] == [(2, 0), (2, 1)]
    assert _walk(0, 2) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert _walk(2, 0) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@given(st.integers(0, 2**32 - 1))
def test_even_bits(word: int) -> None:
    expected = sum((word >> (2 * i) & 1) << i for i in range(16))
    assert even_bits(word) == expected


@pytest.mark.parametrize(("tiles", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1148, 11)])
def test_padded_bits(tiles: int, bits: int) -> None:
    assert padded_bits(tiles) == bits


@given(st.integers(0, 5000), st.integers(1, 80000))
def test_grid_and_count_region_agree(m: int, n: int) -> None:
    """``grid`` is what the tests launch, ``next_power_of_two`` what the host computes."""
    tiles_m, tiles_n = -(-m // 64), -(-n // 64)
    product = dense.next_power_of_two(tiles_m) * dense.next_power_of_two(tiles_n)
    assert isinstance(product, int)
    assert dense.grid(Matmul(n=n, k=32), m) == (product, 1, 1)
    assert product == 0 if m == 0 else tiles_m * tiles_n <= product < 4 * tiles_m * tiles_n
