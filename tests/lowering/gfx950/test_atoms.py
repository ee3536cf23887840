# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lane maps of the matrix instructions are bijections, and spreading K blocks keeps them so."""

import pytest

from block32.lowering.common.index import as_integer
from block32.lowering.gfx950.atoms import ATOMS, MFMA_16X16X128, KWindow, ScaledAtom

ALL = list(ATOMS.values())


def lane_elements(window: KWindow, group: int, instruction: int, bits: int) -> list[int]:
    """K of a lane's 32 elements in the order of its registers."""
    length = 128 // bits
    starts = [
        as_integer(window.chunk_k(group, chunk, instruction, bits))
        for chunk in range(window.atom.chunks(bits))
    ]
    return [start + i for start in starts for i in range(length)]


@pytest.mark.parametrize("atom", ALL)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("spread", [1, 2, 4])
def test_lanes_hold_every_k_once(atom: ScaledAtom, bits: int, spread: int):
    window = KWindow(atom, spread)
    held = [
        k
        for instruction in range(spread)
        for group in range(atom.groups)
        for k in lane_elements(window, group, instruction, bits)
    ]
    assert sorted(held) == list(range(window.k))


@pytest.mark.parametrize("atom", ALL)
def test_result_registers_cover_every_row_once(atom: ScaledAtom):
    rows = [
        as_integer(atom.result_row(group, register))
        for group in range(atom.groups)
        for register in range(atom.result_registers)
    ]
    assert sorted(rows) == list(range(atom.m))


def test_eight_bit_operands_have_two_chunks_half_the_instruction_apart():
    window = KWindow(MFMA_16X16X128, 1)
    expected = [*range(16, 32), *range(80, 96)]
    assert lane_elements(window, group=1, instruction=0, bits=8) == expected
    assert lane_elements(window, group=1, instruction=0, bits=4) == list(range(32, 64))


@pytest.mark.parametrize("atom", ALL)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("spread", [1, 2, 4])
def test_the_scale_an_instruction_applies_is_that_of_the_elements(
    atom: ScaledAtom, bits: int, spread: int
):
    """The matrix unit scales instruction block b with the byte of group b's lane."""
    window = KWindow(atom, spread)
    for instruction in range(spread):
        for group in range(atom.groups):
            for chunk in range(atom.chunks(bits)):
                block_in_instruction = atom.chunk_k(group, chunk, bits) // 32
                true_block = window.chunk_k(group, chunk, instruction, bits) // 32
                applied = window.scale_block(block_in_instruction) + instruction
                assert applied == true_block


@pytest.mark.parametrize("atom", ALL)
@pytest.mark.parametrize("bits", [4, 8])
def test_chunk_steps_are_the_same_in_every_lane(atom: ScaledAtom, bits: int):
    window = KWindow(atom, 4)
    for instruction in range(4):
        for chunk in range(atom.chunks(bits)):
            step = window.chunk_step(chunk, instruction, bits)
            for group in range(atom.groups):
                first = window.chunk_k(group, 0, 0, bits)
                assert window.chunk_k(group, chunk, instruction, bits) == first + step
