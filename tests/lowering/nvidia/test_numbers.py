# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The PTX of every form and type, run in the executor, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from tests.lowering.nvidia.kernels import STREAM, TILED, WGMMA, run_kernels
from tests.numbers import random_operands

#: Error over |x| |w| of f32 sums; the executor's wgmma adds exactly, so it is no worse here.
TOLERANCE = 1e-6

_ROUNDING = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11}


def scaled_operands(
    problem: ScaledMatmul, m: int, seed: int = 0
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Operands by name, the result in float64, and the |x| |w| that errors are measured by."""
    operands = random_operands(problem, m, seed)
    if problem.result == "f16":
        for scales in (operands.lhs_scale, operands.rhs_scale):
            scales[...] = 119 + scales % 3  # no overflow, few subnormals
    arrays = {
        "lhs": operands.lhs,
        "rhs": operands.rhs,
        "lhs_scale": operands.lhs_scale,
        "rhs_scale": operands.rhs_scale,
    }
    magnitudes = replace(operands, lhs=operands.lhs & 0x7F, rhs=_absolute(operands.rhs, problem))
    return arrays, operands.expected(), magnitudes.expected()


def _absolute(codes: npt.NDArray[np.uint8], problem: ScaledMatmul) -> npt.NDArray[np.uint8]:
    return codes & np.uint8(0x77 if problem.rhs == "f4E2M1FN" else 0x7F)


def assert_close(
    y: npt.NDArray[Any],
    want: npt.NDArray[np.float64],
    magnitude: npt.NDArray[np.float64],
    result: str,
) -> None:
    rounding = np.abs(want) * _ROUNDING[result] + (2.0**-25 if result == "f16" else 0.0)
    error = np.abs(y.astype(np.float64) - want) - rounding
    assert np.max(error / magnitude) < TOLERANCE


STREAM_16 = KernelTier("stream", tile=(16, 16, 256), warps=4, stages=2)
WIDE = KernelTier("tiled", tile=(128, 64, 32), warps=8, stages=3, order="m")

PROBLEM = ScaledMatmul(None, 40, 288)

CASES = {
    "stream": (PROBLEM, "sm_90a", STREAM, 5),
    "stream on fp8 mma": (PROBLEM, "sm_89", STREAM, 8),
    "stream, steps of 256": (replace(PROBLEM, n=33, k=544), "sm_90a", STREAM_16, 11),
    "stream, a last step of one word": (replace(PROBLEM, k=356), "sm_90a", STREAM_16, 20),
    "stream, more warps than steps": (replace(PROBLEM, k=40), "sm_90a", STREAM, 1),
    "stream, one column": (replace(PROBLEM, n=1, k=128), "sm_90a", STREAM, 3),
    "stream, odd K": (replace(PROBLEM, n=33, k=77), "sm_90a", STREAM, 3),
    "stream, 1x32": (replace(PROBLEM, rhs_block=(1, 32)), "sm_90a", STREAM, 7),
    "stream, fp4": (replace(PROBLEM, rhs="f4E2M1FN", k=296), "sm_90a", STREAM, 3),
    "stream, fp4, 1x32, known M": (
        ScaledMatmul(3, 40, 288, rhs="f4E2M1FN", rhs_block=(1, 32), result="bf16"),
        "sm_89",
        STREAM,
        3,
    ),
    "stream, two tiles of rows": (replace(PROBLEM, result="f16"), "sm_90a", STREAM, 19),
    "tiled": (replace(PROBLEM, n=72), "sm_90a", TILED, 70),
    "tiled on fp8 mma, e5m2": (replace(PROBLEM, lhs="f8E5M2", n=97), "sm_89", TILED, 33),
    "tiled, e5m2 weights": (replace(PROBLEM, rhs="f8E5M2", result="bf16"), "sm_90a", TILED, 5),
    "tiled, fp4": (replace(PROBLEM, rhs="f4E2M1FN", k=136), "sm_90a", TILED, 17),
    "tiled, 1x32": (replace(PROBLEM, rhs_block=(1, 32), n=66), "sm_90a", TILED, 64),
    "tiled, one block a step": (replace(PROBLEM, n=72, k=160), "sm_90a", WIDE, 130),
    "wgmma": (replace(PROBLEM, n=72), "sm_90a", WGMMA, 70),
    "wgmma, two warpgroups": (
        replace(PROBLEM, k=320, result="bf16"),
        "sm_90a",
        replace(WGMMA, tile=(128, 96, 128), warps=8, mma=(64, 96, 32)),
        100,
    ),
    "wgmma, 1x32, e5m2": (
        replace(PROBLEM, rhs_block=(1, 32), lhs="f8E5M2", k=136),
        "sm_90a",
        WGMMA,
        9,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_form_is_right(case: str):
    problem, target, tier, m = CASES[case]
    arrays, want, magnitude = scaled_operands(problem, m)
    y = run_kernels(problem, target, tier, arrays, m)
    assert_close(y, want, magnitude, problem.result)


@pytest.mark.parametrize("tier", [STREAM, TILED, WGMMA], ids=["stream", "tiled", "wgmma"])
def test_extreme_and_nan_scales(tier: KernelTier):
    problem = replace(PROBLEM, n=64, k=128)
    ones = np.full((9, 128), 0x38, np.uint8)
    arrays = {"lhs": ones, "rhs": np.full((64, 128), 0x38, np.uint8)}

    def run(lhs_scale: npt.NDArray[np.uint8], rhs_scale: npt.NDArray[np.uint8]):
        scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
        return run_kernels(problem, "sm_90a", tier, arrays | scales, 9)

    for a, b in ((254, 0), (0, 254), (1, 253)):
        y = run(np.full((9, 4), a, np.uint8), np.full((2, 4), b, np.uint8))
        assert (y == 128.0).all()
    lhs_scale = np.full((9, 4), 127, np.uint8)
    lhs_scale[7, 2] = 255
    is_nan = np.isnan(run(lhs_scale, np.full((2, 4), 127, np.uint8)))
    assert is_nan[7].all()
    assert is_nan.sum() == 64


@pytest.mark.parametrize("tier", [STREAM, TILED], ids=["stream", "tiled"])
def test_every_scale_byte_is_decoded_exactly(tier: KernelTier):
    # Column n sees block n alone, so that each byte of a word is met.
    problem = replace(PROBLEM, n=32, k=128)
    scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
    w = np.zeros((32, 4, 32), np.uint8)
    for column in range(4):
        w[column, column] = 0x38  # 1.0
    arrays = {
        "lhs": np.full((64, 128), 0x38, np.uint8),
        "rhs": w.reshape(32, 128),
        "lhs_scale": scales,
        "rhs_scale": np.full((1, 4), 127, np.uint8),
    }
    y = run_kernels(problem, "sm_90a", tier, arrays, 64)[:, :4]
    with np.errstate(over="ignore"):
        want = np.ldexp(np.float32(32), scales.astype(int) - 127).astype(np.float32)
    want[63] = np.nan  # byte 255 is in this row
    np.testing.assert_array_equal(y, want)


def test_blocks_of_far_apart_scales_are_scaled_one_by_one():
    problem = replace(PROBLEM, n=32, k=64)
    arrays, _, _ = scaled_operands(problem, 8)
    arrays["lhs_scale"][:, 0], arrays["lhs_scale"][:, 1] = 137, 117
    want = reference.scaled_matmul(
        arrays["lhs"], arrays["lhs_scale"], arrays["rhs"], arrays["rhs_scale"]
    )
    y = run_kernels(problem, "sm_90a", STREAM, arrays, 8)
    assert np.max(np.abs(y - want)) <= TOLERANCE * np.max(np.abs(want))


X_TYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def check_unquantised(
    problem: ScaledMatmul, target: str, tier: KernelTier, x: npt.NDArray[Any]
) -> None:
    """Multiply an x without scales by random weights, and compare with float64."""
    operands = random_operands(problem, len(x))
    arrays = {"lhs": x, "rhs": operands.rhs, "rhs_scale": operands.rhs_scale}
    element = "e2m1" if problem.rhs == "f4E2M1FN" else "e4m3"
    w = reference.dequantize(operands.rhs, operands.rhs_scale, problem.rhs_block, element)
    w = w[:, : problem.k]
    y = run_kernels(problem, target, tier, arrays, len(x))
    wide = x.astype(np.float64)
    assert_close(y, wide @ w.T, np.abs(wide) @ np.abs(w).T, problem.result)


@pytest.mark.parametrize("rhs", ["f8E4M3FN", "f4E2M1FN"])
@pytest.mark.parametrize("lhs", X_TYPES)
@pytest.mark.parametrize("tier", [STREAM, TILED], ids=["stream", "tiled"])
def test_unquantised_activations(lhs: str, rhs: str, tier: KernelTier):
    problem = replace(PROBLEM, lhs=lhs, lhs_scaled=False, rhs=rhs, k=136)
    x = np.random.default_rng(3).standard_normal((9, 136)).astype(X_TYPES[lhs])
    check_unquantised(problem, "sm_90a", tier, x)


F32 = replace(PROBLEM, lhs="f32", lhs_scaled=False)

F32_CASES = {
    "stream, two tiles of rows, 1x32": (
        replace(F32, rhs_block=(1, 32), n=33),
        "sm_90a",
        replace(STREAM, tile=(16, 16, 128)),
        19,
    ),
    "stream, odd K": (replace(F32, n=33, k=77), "sm_90a", STREAM, 3),
    "stream, split": (replace(F32, k=640), "sm_89", replace(STREAM, splits=3), 5),
    "tiled, 1x32, bf16": (
        replace(F32, rhs_block=(1, 32), n=66, result="bf16"),
        "sm_90a",
        TILED,
        65,
    ),
    "tiled, one block a step, odd K": (replace(F32, n=72, k=77), "sm_89", WIDE, 130),
    "tiled, split, fp4": (
        replace(F32, rhs="f4E2M1FN", k=640),
        "sm_90a",
        replace(TILED, splits=2, reduce="second_launch"),
        17,
    ),
    "known M": (replace(F32, m=3), "sm_90a", STREAM, 3),
}


@pytest.mark.parametrize("case", F32_CASES)
def test_an_f32_activation_keeps_all_of_its_bits(case: str):
    """Bits that one bf16 has not, and those that two have not, are in every element."""
    problem, target, tier, m = F32_CASES[case]
    x = np.random.default_rng(3).standard_normal((m, problem.k)).astype(np.float32)
    check_unquantised(problem, target, tier, x)


@pytest.mark.parametrize("tier", [STREAM, TILED], ids=["stream", "tiled"])
def test_f32_values_that_are_not_ordinary(tier: KernelTier):
    """Products without sums, so that each value comes back as it was."""
    values = np.array(
        [np.inf, -np.inf, np.nan, 0, 1 + 2.0**-23, -(2 - 2.0**-23), 3.4e38, 1.1e-38, 2.0**-149],
        np.float32,
    )
    # A NaN that the upper half does not show.
    values = np.append(values, np.array([0x7F80_0001], np.uint32).view(np.float32))
    x = np.zeros((len(values), 32), np.float32)
    x[:, 5] = values
    w = np.full((32, 32), 0x38, np.uint8)  # 1.0
    scales = np.full((1, 1), 127, np.uint8)
    problem = replace(F32, n=32, k=32)
    y = run_kernels(problem, "sm_90a", tier, {"lhs": x, "rhs": w, "rhs_scale": scales}, len(values))
    want = np.repeat(values[:, None], 32, axis=1)
    # Below 2^-110 the last part is no normal bf16.
    np.testing.assert_allclose(y, want, rtol=0, atol=2.0**-133)
    ordinary = np.abs(values) > 1e-30
    np.testing.assert_array_equal(y[ordinary], want[ordinary])


@pytest.mark.parametrize("tier", [STREAM, TILED], ids=["stream", "tiled"])
def test_the_epilogue_is_applied_before_the_rounding(tier: KernelTier):
    epilogue = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f16", activation="relu")
    problem = replace(PROBLEM, epilogue=epilogue, result="bf16")
    arrays, y, magnitude = scaled_operands(problem, 9)
    rng = np.random.default_rng(5)
    row_scale = rng.uniform(0.5, 2, 9).astype(np.float32)
    bias = rng.standard_normal(40).astype(ml_dtypes.bfloat16)
    residual = rng.standard_normal((9, 40)).astype(np.float16)
    arrays |= {
        "row_scale": row_scale,
        "scale": np.array([0.25], np.float32),
        "bias": bias,
        "residual": residual,
    }
    factor = row_scale.astype(np.float64)[:, None] * 0.25
    added = bias.astype(np.float64) + residual.astype(np.float64)
    want = np.maximum(y * factor + added, 0)
    result = run_kernels(problem, "sm_90a", tier, arrays, 9)
    assert_close(result, want, magnitude * factor + 1, "bf16")


def test_what_lies_behind_the_last_row_is_not_read():
    # The executor refuses any access outside a buffer: y's rows past M and w's past N as well.
    problem = replace(PROBLEM, n=65, k=96)
    arrays, want, magnitude = scaled_operands(problem, 66)
    assert_close(run_kernels(problem, "sm_90a", TILED, arrays, 66), want, magnitude, "f32")
