# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""4-bit weights times small activations as integers: every code, scale and number of rows."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from block32.lowering.cpu import digits
from block32.lowering.cpu.select import profiles
from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import Processor, run
from tests.numbers import Operands, random_operands

FP4 = "f4E2M1FN"
#: AMX has one row as a stream, the others a few.
PROCESSORS = pytest.mark.parametrize(
    "processor",
    [
        Processor("amx", "sapphirerapids"),
        Processor("avx512_bf16", "znver4"),
        Processor("avx512_vbmi", "icelake-server"),
    ],
    ids=lambda p: p.profile,
)
LHS = pytest.mark.parametrize("lhs", ["f8E4M3FN", FP4])
#: Several chunks of 128 K and a short one, shared scales and ones for each row.
SHARED = ScaledMatmul(None, 48, 320, rhs=FP4)
ROWS = ScaledMatmul(None, 21, 300, rhs=FP4, rhs_block=(1, 32))


def result(operands: Operands, processor: Processor) -> np.ndarray:
    return run(operands.problem, processor, *operands.arrays())


@PROCESSORS
@LHS
@pytest.mark.parametrize("problem", [SHARED, ROWS], ids=["shared", "rows"])
def test_agrees_with_the_reference(processor: Processor, lhs: str, problem: ScaledMatmul) -> None:
    problem = dataclasses.replace(problem, lhs=lhs)
    for m in (1, 3, 8):
        operands = random_operands(problem, m, seed=m)
        comparison = reference.compare(result(operands, processor), operands.expected(), "f32")
        assert comparison.ok, f"M = {m}: {comparison}"


@pytest.mark.parametrize("k", [2, 30, 64, 126, 130, 14000])
def test_any_k(k: int) -> None:
    """Short chunks, and a K whose factors have no place on the stack."""
    problem = ScaledMatmul(1, 5, k, rhs=FP4)
    operands = random_operands(problem, 1)
    got = result(operands, Processor("amx", "sapphirerapids"))
    assert reference.compare(got, operands.expected(), "f32").ok


@PROCESSORS
def test_each_code_of_x_at_each_place_of_a_chunk(processor: Processor) -> None:
    """Every row of w picks one K: its column of y is the value of x there, exactly."""
    n = 128
    problem = ScaledMatmul(1, n, n, rhs=FP4)
    operands = random_operands(problem, 1)
    one = 2
    weights = np.zeros((n, n), np.uint8)
    np.fill_diagonal(weights, one)
    operands.rhs[:] = weights[:, ::2] | weights[:, 1::2] << 4
    operands.lhs_scale[:] = operands.rhs_scale[:] = 127
    finite = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    for first in (0, n - 2):
        operands.lhs[0] = finite[first : first + n]
        expected = operands.lhs[0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert np.array_equal(result(operands, processor)[0], expected)


@PROCESSORS
@pytest.mark.parametrize("byte", [127, 0], ids=["folded", "exact"])
def test_the_largest_sums_fit(processor: Processor, byte: int) -> None:
    """448 times 6 at every K, with either sign."""
    problem = ScaledMatmul(1, 16, 128, rhs=FP4)
    operands = random_operands(problem, 1)
    operands.lhs[:] = 0x7E
    operands.lhs_scale[:], operands.rhs_scale[:] = byte, 254 - byte
    for code, sign in ((0x77, 1), (0xFF, -1)):
        operands.rhs[:] = code
        expected = np.full((1, 16), sign * 128 * 448 * 6, np.float32)
        assert np.array_equal(result(operands, processor), expected)


@PROCESSORS
@pytest.mark.parametrize("scale", [127, 0], ids=["folded", "exact"])
def test_a_nan_of_x_spoils_its_row_alone(processor: Processor, scale: int) -> None:
    """Integers have no NaN: it reaches y through the scale of its lane, also times a zero."""
    operands = random_operands(SHARED, 3)
    operands.lhs_scale[:], operands.rhs_scale[:] = scale, 254 - scale
    operands.lhs[:] = 0x38
    operands.lhs[1, 77] = 0xFF
    operands.rhs[:, 77 // 2] = 0
    got = result(operands, processor)
    assert np.isnan(got[1]).all() and not np.isnan(got[[0, 2]]).any()


@PROCESSORS
@LHS
def test_every_scale_byte(processor: Processor, lhs: str) -> None:
    """One block with each byte beside blocks of ordinary scales, in x and in w."""
    problem = dataclasses.replace(ROWS, lhs=lhs)
    operands = random_operands(problem, 1)
    for byte in (0, 1, 82, 83, 171, 172, 253, 254):
        for scales in (operands.lhs_scale, operands.rhs_scale):
            scales[:] = 127
        operands.lhs_scale[0, 1], operands.rhs_scale[:, 1] = byte, 254 - byte
        got = result(operands, processor)
        assert reference.compare(got, operands.expected(), "f32").ok, byte


def test_which_matmuls_it_serves() -> None:
    """4-bit weights and activations of three digits on tiers that have the products."""
    tiers = {
        profile.name: tier
        for profile in profiles()
        for tier in profile.tiers
        if tier.form == "stream"
    }
    served = {name for name, tier in tiers.items() if digits.serves(SHARED, tier)}
    assert served == {"amx", "avx512_bf16", "avx512_vbmi"}
    quantized = ScaledMatmul(1, 5, 64, "bf16", FP4, lhs_scaled=False, lhs_quantize="rceil")
    assert digits.serves(quantized, tiers["amx"])
    for changes in ({"rhs": "f8E4M3FN"}, {"lhs": "f8E5M2"}, {"lhs": "bf16", "lhs_scaled": False}):
        assert not digits.serves(dataclasses.replace(SHARED, **changes), tiers["amx"])
