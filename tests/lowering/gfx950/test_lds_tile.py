# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""x in LDS: what lanes read is what they need, and without bank conflicts."""

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.lds_tile import load_offsets, read_chunk
from block32.lowering.problem import ScaledMatmul

MMAS = ((16, 16, 128), (32, 32, 64))


def geometry(block_m: int, block_k: int, mma: tuple[int, int, int], waves: int = 4) -> Geometry:
    tier = KernelTier("tiled", tile=(block_m, 64, block_k), warps=waves, stages=2, mma=mma)
    return Geometry(ScaledMatmul(m=256, n=64, k=4096), tier)


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize("block_k", [128, 256, 512, 1024])
def test_reads_find_the_chunk_that_a_load_brought(block_k: int, mma: tuple[int, int, int]):
    g = geometry(64, block_k, mma)
    chunks = block_k // 16
    memory_offset_of_slot = {}
    for wave in range(g.waves):
        for lane in range(64):
            for number, offset in enumerate(load_offsets(g, lane, wave)):
                memory_offset_of_slot[(number * g.waves + wave) * 64 + lane] = offset
    assert sorted(memory_offset_of_slot) == list(range(64 * chunks)), "every slot is filled once"
    for row in range(64):
        for group in range(g.atom.groups):
            for instruction in range(g.instructions):
                for chunk in range(2):
                    slot = row * chunks + read_chunk(g, row, group, instruction, chunk)
                    number, inside = divmod(instruction, g.window.spread)
                    k = number * g.window.k + g.window.chunk_k(group, chunk, inside, 8)
                    assert memory_offset_of_slot[slot] == row * 4096 + k


@pytest.mark.parametrize("block_k", [128, 256, 512])
def test_sixteen_rows_of_one_chunk_column_spread_over_the_banks(block_k: int):
    """A read of 16 bytes in 64 lanes takes four rounds of 16 lanes; 64 banks of 4 bytes a round."""
    g = geometry(64, block_k, MMAS[0])
    for group in range(4):
        banks = [
            (row * block_k + read_chunk(g, row, group, 0, 0) * 16) // 16 % 16 for row in range(16)
        ]
        assert len(set(banks)) == 16
