# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""E8M0 scales in kernels, byte by byte: what no random test would hit."""

from __future__ import annotations

import numpy as np
import pytest

from block32.lowering.apple.matmul import Matmul
from block32.tools.apple_cases import Case, Operands, compiled, execute, random_operands

K = 64


def _ones(case: Case) -> Operands:
    """Ones everywhere, in x, w and scales."""
    operands = random_operands(case)
    for name, one in (("lhs", 0x38), ("rhs", 0x38), ("lhs_scale", 127), ("rhs_scale", 127)):
        if name in operands.arrays and operands.arrays[name].dtype == np.uint8:
            operands.arrays[name][:] = one
    return operands


def _case(form: str = "tiled", m: int = 1, n: int = 33, k: int = K, **fields: object) -> Case:
    both = {"lhs": "f8E4M3FN", "lhs_scaled": True, "rhs_block": (1, 32), **fields}
    return Case(Matmul(n=n, k=k, **both), form, m)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["tiled", "gemv"])
@pytest.mark.parametrize(("lhs", "rhs"), [(254, 0), (0, 254), (1, 253), (127, 127), (200, 54)])
def test_scales_that_cancel_are_exact(form: str, lhs: int, rhs: int) -> None:
    """2^-127 is no normal f32 and would flush to zero."""
    operands = _ones(_case(form))
    operands.arrays["lhs_scale"][:] = lhs
    operands.arrays["rhs_scale"][:] = rhs
    np.testing.assert_array_equal(execute(compiled(operands.case), operands), np.float32(K))


@pytest.mark.parametrize("form", ["tiled", "gemv"])
def test_two_largest_scales_overflow_and_two_smallest_vanish(form: str) -> None:
    operands = _ones(_case(form))
    kernel = compiled(operands.case)
    operands.arrays["lhs_scale"][:] = operands.arrays["rhs_scale"][:] = 254
    assert np.isposinf(execute(kernel, operands)).all()
    operands.arrays["lhs_scale"][:] = operands.arrays["rhs_scale"][:] = 0
    assert (execute(kernel, operands) == 0).all()


@pytest.mark.parametrize("form", ["tiled", "gemv"])
def test_every_scale_byte_of_a_weight(form: str) -> None:
    """256 rows of w, each with its own byte; one row of x."""
    case = Case(Matmul(n=256, k=32, rhs_block=(1, 32)), form, 1)
    operands = random_operands(case)
    operands.arrays["lhs"][:] = 1
    operands.arrays["rhs"][:] = 0x38
    operands.arrays["rhs_scale"][:] = np.arange(256, dtype=np.uint8)[:, None]
    y = execute(compiled(case), operands)[0]
    expected = np.ldexp(32.0, np.arange(256) - 127)
    np.testing.assert_array_equal(y[:250], expected[:250].astype(np.float32))
    assert np.isposinf(y[250:255]).all()  # 32 * 2^123 and above pass f32's range
    assert np.isnan(y[255])


@pytest.mark.parametrize("side", ["lhs_scale", "rhs_scale"])
def test_a_nan_byte_poisons_its_row_and_no_other(side: str) -> None:
    case = _case(m=40, n=40)
    operands = random_operands(case)
    clean = execute(compiled(case), operands)
    operands.arrays[side][17, 1] = 255
    y = execute(compiled(case), operands)
    hit = np.zeros((40, 40), bool)
    hit[(17, slice(None)) if side == "lhs_scale" else (slice(None), 17)] = True
    assert np.isnan(y[hit]).all()
    np.testing.assert_array_equal(y[~hit], clean[~hit])


def test_every_row_and_block_has_its_own_power_of_two() -> None:
    case = _case(m=16, n=16, k=128)
    operands = _ones(case)
    row, block = np.indices((16, 4))
    scales = (120 + (row + 4 * block) % 16).astype(np.uint8)
    operands.arrays["lhs_scale"][:] = scales
    operands.arrays["rhs_scale"][:] = scales[::-1]
    factors = np.ldexp(1.0, scales.astype(int) - 127)
    expected = 32 * factors @ factors[::-1].T
    np.testing.assert_allclose(execute(compiled(case), operands), expected, rtol=2.0**-22)


def test_blocks_of_very_different_scales_in_one_row() -> None:
    operands = _ones(_case())
    operands.arrays["lhs_scale"][:] = np.array([[137, 117]], np.uint8)
    expected = 32 * (2.0**10 + 2.0**-10)
    np.testing.assert_array_equal(execute(compiled(operands.case), operands), np.float32(expected))


@pytest.mark.parametrize("form", ["tiled", "gemv"])
@pytest.mark.parametrize(("lhs", "rhs"), [(0, 0), (0, 1), (1, 0), (1, 1), (254, 254), (254, 253)])
def test_zeros_and_infinities_survive_the_most_extreme_scales(
    form: str, lhs: int, rhs: int
) -> None:
    """2^-254 flushes as a factor, 2^254 overflows: zero and infinity are what they are."""
    case = _case(form, lhs="f8E5M2", rhs="f8E5M2")
    operands = random_operands(case)
    operands.arrays["lhs"][:] = 0x3C  # 1.0
    operands.arrays["lhs_scale"][:], operands.arrays["rhs_scale"][:] = lhs, rhs
    for code, value in ((0x7C, np.inf), (0x00, 0.0)):
        operands.arrays["rhs"][:] = code
        np.testing.assert_array_equal(execute(compiled(case), operands), np.float32(value))


@pytest.mark.parametrize("k", [32, 64, 96, 128, 129, 160, 200, 256, 300, 500])
def test_every_block_of_k_has_its_own_scale(k: int) -> None:
    """Words of four blocks, what is left of them, and a short last block, whatever K is."""
    case = _case(m=33, n=35, k=k)
    operands = random_operands(case)
    operands.arrays["lhs"][:] = 0x38
    operands.arrays["rhs"][:] = 0x38
    x, w = (operands.arrays[name].astype(float) - 127 for name in ("lhs_scale", "rhs_scale"))
    lengths = np.minimum(32, k - 32 * np.arange(-(-k // 32)))
    expected = np.einsum("mb,nb,b->mn", np.exp2(x), np.exp2(w), lengths)
    y = execute(compiled(case), operands)
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def split_exponent(byte: int) -> tuple[int, int]:
    """Biased exponents of the two factors of a scale byte, the smaller one first."""
    return (byte + 127) // 2, (byte + 128) // 2


def test_halves_of_a_scale_are_normal_and_so_are_their_products() -> None:
    """x's smaller half meets w's larger one, in the kernel as here."""
    for x in range(255):
        small, large = split_exponent(x)
        assert small + large == x + 127 and 1 <= small <= large <= 254
        for w in range(255):
            w_small, w_large = split_exponent(w)
            products = small + w_large - 127, large + w_small - 127
            assert sum(products) == x + w and max(products) <= 254
            assert min(products) >= 1 or x + w < 2
