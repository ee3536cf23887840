# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Z-order (Morton) over a grid of tiles, so that neighbours in time share operands in the cache.

Plain arithmetic: the tests evaluate it on integers, the kernels on SSA values. The grid is padded
to powers of two; positions outside the true grid return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from block32.lowering.apple.builder import Int, choose, less

#: (shift, mask) steps that gather the even bits of a 32-bit word in its low half.
_COMPACTION = ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF))


def padded_bits(tiles: int) -> int:
    """Bits of the smallest power of two that is not below ``tiles``."""
    return (tiles - 1).bit_length()


def even_bits(word: Int) -> Int:
    """Bits 0, 2, 4, ... of a 32-bit word, moved together."""
    word = word & 0x55555555
    for shift, mask in _COMPACTION:
        word = (word | (word >> shift)) & mask
    return word


def tile_position(
    position: Int, bits_m: Int, bits_n: Int, select: Callable[[Any, Int, Int], Int] = choose
) -> tuple[Int, Int]:
    """Tile (m, n) that the threadgroup at ``position`` owns, in tiles.

    With ``low`` the smaller of the two bit counts, the even ones of the low ``2 * low`` bits go to
    n and the odd ones to m; the bits above go to the longer axis.

    Args:
        position: The threadgroup's place in the one-dimensional grid.
        bits_m: Bits of the padded number of tiles along M.
        bits_n: The same along N.
        select: How a value is chosen by a condition.
    """
    wider_n = less(bits_m, bits_n)
    low = select(wider_n, bits_m, bits_n)
    one: Int = 1
    mask = (one << (low * 2)) - 1
    square, beyond = position & mask, (position >> (low * 2)) << low
    tile_n, tile_m = even_bits(square), even_bits(square >> 1)
    return select(wider_n, tile_m, tile_m | beyond), select(wider_n, tile_n | beyond, tile_n)
