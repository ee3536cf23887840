# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scale bytes: every value, every place, NaN, and what lies past the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from block32.lowering.problem import ScaledMatmul
from tests.lowering.gfx950.kernels import assert_matches_reference, needs_executor, run_matmul
from tests.lowering.gfx950.test_numbers import PACKED, TILED, TILED_32
from tests.numbers import Operands, random_operands

pytestmark = needs_executor

ONE = 0x38  # 1.0 in e4m3
NAN = 0x7F
FORMS = {"tiled": TILED, "tiled 32x32x64": TILED_32, "packed": PACKED}

all_forms = pytest.mark.parametrize("form", FORMS)


def ones(problem: ScaledMatmul) -> Operands:
    """Ones everywhere with scales of 1."""
    operands = random_operands(problem)
    operands.lhs[:] = operands.rhs[:] = ONE
    operands.lhs_scale[:] = operands.rhs_scale[:] = 127
    return operands


@all_forms
def test_smallest_times_largest_scale_is_exact(form: str):
    operands = ones(ScaledMatmul(m=4, n=8, k=32))
    for lhs, rhs in ((0, 254), (254, 0), (1, 253)):
        operands.lhs_scale[:], operands.rhs_scale[:] = lhs, rhs
        y = run_matmul(operands.problem, [FORMS[form]], operands)
        np.testing.assert_array_equal(y, 32.0)


@all_forms
def test_all_scale_bytes(form: str):
    """Row m of x has scale byte m; columns have scales that keep the product a normal number."""
    problem = ScaledMatmul(m=256, n=32, k=32, rhs_block=(1, 32))
    operands = ones(problem)
    operands.lhs_scale[:, 0] = np.arange(256)
    operands.rhs_scale[:16], operands.rhs_scale[16:] = 137, 107
    y = run_matmul(problem, [FORMS[form]], operands)
    byte = np.arange(255, dtype=np.float64)
    np.testing.assert_array_equal(y[:128, 0], (32.0 * 2.0 ** (byte - 117))[:128])
    np.testing.assert_array_equal(y[128:255, 31], (32.0 * 2.0 ** (byte - 147))[128:])
    assert np.isnan(y[255]).all()
    assert not np.isnan(y[:255]).any()


@all_forms
@pytest.mark.parametrize("k", [544])
def test_one_nan_scale_makes_its_row_nan_and_no_other(form: str, k: int):
    problem = ScaledMatmul(m=20, n=24, k=k, rhs_block=(1, 32))
    operands = random_operands(problem)
    operands.lhs_scale[3, k // 32 - 1] = 255
    operands.rhs_scale[17, 2] = 255
    y = run_matmul(problem, [FORMS[form]], operands)
    expected = np.zeros((20, 24), bool)
    expected[3], expected[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(y), expected)
    assert_matches_reference(problem, y, operands)


@all_forms
@pytest.mark.parametrize("rhs", ["f8E4M3FN", "f4E2M1FN"])
def test_every_row_and_block_has_another_power_of_two(form: str, rhs: str):
    """A wrong lane, a wrong byte of a scale word or a swapped K chunk changes the result."""
    problem = ScaledMatmul(m=16, n=32, k=1024, rhs=rhs, rhs_block=(1, 32))
    operands = random_operands(problem)
    row, block = np.meshgrid(np.arange(16), np.arange(32), indexing="ij")
    operands.lhs_scale[:] = 120 + (row + 4 * block) % 16
    row, block = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    operands.rhs_scale[:] = 118 + (3 * row + 5 * block) % 17
    y = run_matmul(problem, [FORMS[form]], operands)
    assert_matches_reference(problem, y, operands)


@all_forms
def test_blocks_of_very_different_scale_in_one_row(form: str):
    problem = ScaledMatmul(m=2, n=16, k=64)
    operands = ones(problem)
    operands.lhs_scale[:, 0], operands.lhs_scale[:, 1] = 137, 117
    y = run_matmul(problem, [FORMS[form]], operands)
    np.testing.assert_array_equal(y, 32 * 2.0**10 + 32 * 2.0**-10)


@pytest.mark.parametrize("k", [40, 1312])
@all_forms
def test_neighbouring_rows_of_nan_do_not_leak_past_the_end_of_k(form: str, k: int):
    """What a load brings from behind a row's end is the next row: NaN here, in x, w and scales."""
    problem = ScaledMatmul(m=6, n=36, k=k, rhs_block=(1, 32))
    operands = random_operands(problem)
    for array, fill in ((operands.lhs, NAN), (operands.rhs, NAN)):
        array[1::2] = fill
    operands.lhs_scale[1::2] = operands.rhs_scale[1::2] = 255
    y = run_matmul(problem, [FORMS[form]], operands)
    clean = replace(
        operands,
        problem=replace(problem, m=3, n=18),
        m=3,
        lhs=operands.lhs[::2],
        rhs=operands.rhs[::2],
        lhs_scale=operands.lhs_scale[::2],
        rhs_scale=operands.rhs_scale[::2],
    )
    assert_matches_reference(problem, y[::2, ::2], clean)
    assert np.isnan(y[1::2]).all()
    assert np.isnan(y[:, 1::2]).all()


def test_packed_panels_do_not_mix():
    """The unwanted products of a packed instruction may be NaN: they are selected away."""
    problem = ScaledMatmul(m=4, n=16, k=1024)
    operands = random_operands(problem)
    operands.lhs[:, 256:512] = NAN
    y = run_matmul(problem, [PACKED], operands)
    assert np.isnan(y).all()
    operands.lhs[:] = random_operands(problem).lhs
    operands.lhs[1, 300] = NAN
    y = run_matmul(problem, [PACKED], operands)
    assert np.isnan(y[1]).all()
    assert not np.isnan(y[[0, 2, 3]]).any()
