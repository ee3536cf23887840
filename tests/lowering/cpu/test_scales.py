# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every scale byte is right, in the folded and in the exact form of each kernel."""

from __future__ import annotations

import numpy as np
import pytest

from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import Processor, every_processor, run, scales
from tests.numbers import Operands, random_operands

#: One module a processor serves most tests: its tiers are one row, a few rows, some and many.
SQUARE = ScaledMatmul(None, 64, 128)
ROWS = ScaledMatmul(None, 48, 96, rhs_block=(1, 32))
TIERS = pytest.mark.parametrize("m", [1, 4, 16, 33])

ONE = 0x38


def ones(problem: ScaledMatmul, m: int) -> Operands:
    """Operands of ones with scales of 1."""
    operands = random_operands(problem, m)
    operands.lhs[:] = operands.rhs[:] = ONE
    operands.lhs_scale[:] = operands.rhs_scale[:] = 127
    return operands


def result(operands: Operands, processor: Processor) -> np.ndarray:
    return run(operands.problem, processor, *operands.arrays())


def normal_or_zero(values: np.ndarray) -> np.ndarray:
    """What a flushing f32 unit gives for float64 sums: no subnormals."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    single[np.abs(single) < np.finfo(np.float32).tiny] = 0
    return single


@every_processor
@TIERS
@pytest.mark.parametrize(
    ("lhs", "rhs"), [(0, 254), (254, 0), (1, 253), (127, 127), (100, 154), (83, 171), (82, 172)]
)
def test_opposite_scales_cancel_exactly(processor: Processor, m: int, lhs: int, rhs: int) -> None:
    operands = ones(SQUARE, m)
    operands.lhs_scale[:], operands.rhs_scale[:] = lhs, rhs
    assert np.array_equal(result(operands, processor), np.full((m, 64), 128, np.float32))


@every_processor
@TIERS
def test_every_byte_of_the_activation(processor: Processor, m: int) -> None:
    operands = ones(SQUARE, m)
    for byte in range(0, 256, 1 if m == 1 else 13):
        operands.lhs_scale[:] = byte
        expected = normal_or_zero(operands.expected())
        assert np.array_equal(result(operands, processor), expected, equal_nan=True), byte


@every_processor
@TIERS
def test_every_byte_of_the_weight(processor: Processor, m: int) -> None:
    operands = ones(ROWS, m)
    for first in range(0, 256, 48):
        bytes_ = np.arange(first, first + 48).clip(max=255).astype(np.uint8)
        operands.rhs_scale[:] = bytes_[:, None]
        expected = normal_or_zero(operands.expected())
        assert np.array_equal(result(operands, processor), expected, equal_nan=True), first


@every_processor
@TIERS
def test_both_largest_scales_overflow_to_infinity(processor: Processor, m: int) -> None:
    operands = ones(SQUARE, m)
    operands.lhs_scale[:] = operands.rhs_scale[:] = 254
    assert np.all(np.isposinf(result(operands, processor)))


@every_processor
@TIERS
def test_a_nan_scale_of_x_spoils_its_row_alone(processor: Processor, m: int) -> None:
    operands = random_operands(SQUARE, m)
    operands.lhs_scale[m // 2, 2] = 255
    spoiled = result(operands, processor)
    assert np.isnan(spoiled).all(axis=1).tolist() == [row == m // 2 for row in range(m)]
    assert reference.compare(spoiled, operands.expected(), "f32").ok


@every_processor
@TIERS
def test_a_nan_scale_of_w_spoils_its_columns_alone(processor: Processor, m: int) -> None:
    operands = random_operands(SQUARE, m)
    operands.rhs_scale[1, 3] = 255
    spoiled = result(operands, processor)
    assert np.isnan(spoiled).all(axis=0).tolist() == [column >= 32 for column in range(64)]
    assert reference.compare(spoiled, operands.expected(), "f32").ok


@every_processor
@TIERS
def test_a_nan_scale_of_one_row_of_w_spoils_its_column_alone(processor: Processor, m: int) -> None:
    """No row is the first of those whose scales are looked at together."""
    for column in (21, 47):
        operands = random_operands(ROWS, m)
        operands.rhs_scale[column, 1] = 255
        spoiled = result(operands, processor)
        assert np.flatnonzero(np.isnan(spoiled).any(axis=0)).tolist() == [column]
        assert reference.compare(spoiled, operands.expected(), "f32").ok


@every_processor
@TIERS
def test_another_power_of_two_in_every_block(processor: Processor, m: int) -> None:
    for problem in (SQUARE, ROWS):
        operands = random_operands(problem, m)
        row, block = np.indices(operands.lhs_scale.shape)
        operands.lhs_scale[:] = 120 + (row + 4 * block) % 16
        row, block = np.indices(operands.rhs_scale.shape)
        operands.rhs_scale[:] = 119 + (3 * row + 5 * block) % 17
        comparison = reference.compare(result(operands, processor), operands.expected(), "f32")
        assert comparison.ok, comparison


@every_processor
@TIERS
def test_blocks_with_far_scales_in_one_row(processor: Processor, m: int) -> None:
    operands = random_operands(SQUARE, m)
    operands.lhs_scale[:, ::2], operands.lhs_scale[:, 1::2] = 137, 117
    assert reference.compare(result(operands, processor), operands.expected(), "f32").ok


@every_processor
@TIERS
def test_safe_and_unsafe_rows_side_by_side(processor: Processor, m: int) -> None:
    """Some slabs and panels take the folded form, others the exact one."""
    operands = random_operands(SQUARE, m)
    operands.lhs_scale[m // 2] = 40
    operands.rhs_scale[1] = 200
    assert reference.compare(result(operands, processor), operands.expected(), "f32").ok


@every_processor
@TIERS
def test_a_block_of_zeros_has_any_scale(processor: Processor, m: int) -> None:
    """Quantisers give byte 0 to zeros: 0 x 2^-127, and 0 x 2^127, are 0."""
    for byte in (0, 254):
        operands = random_operands(SQUARE, m)
        operands.lhs[:, 32:64], operands.lhs_scale[:, 1] = 0x80, byte
        operands.rhs[32:, 64:96], operands.rhs_scale[1, 2] = 0, byte
        assert reference.compare(result(operands, processor), operands.expected(), "f32").ok


@every_processor
@TIERS
def test_a_nan_scale_of_zeros_is_still_nan(processor: Processor, m: int) -> None:
    operands = random_operands(SQUARE, m)
    operands.rhs[:32, 64:96], operands.rhs_scale[0, 2] = 0, 255
    spoiled = result(operands, processor)
    assert np.all(np.isnan(spoiled[:, :32])) and np.all(np.isfinite(spoiled[:, 32:]))


@every_processor
def test_short_last_blocks_have_scales_of_their_own(processor: Processor) -> None:
    problem = ScaledMatmul(None, 40, 72)
    for m in (1, 3, 12):
        operands = random_operands(problem, m)
        operands.lhs_scale[:, -1], operands.rhs_scale[:, -1] = 250, 6
        assert reference.compare(result(operands, processor), operands.expected(), "f32").ok


def test_scales_view_keeps_bytes() -> None:
    assert scales(np.array([0, 254, 255], np.uint8)).view(np.uint8).tolist() == [0, 254, 255]
