# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An activation without scales: the machine code in the executor against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import select
from block32.lowering.kernel_module import EXECUTABLE_PREFIX
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.gfx950_executor import mutate
from block32.tools.gfx950_launch import launch_matmul
from tests.lowering.gfx950.kernels import compile_kernels, needs_executor
from tests.numbers import random_codes

pytestmark = needs_executor

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
ELEMENTS: dict[str, Any] = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f4E2M1FN": "e2m1"}
SMALL = KernelTier("packed", tile=(16, 32, 128), warps=2, stages=2)
WIDE = KernelTier("packed", tile=(64, 64, 128), warps=4, stages=1)
#: Largest error of an element, in parts of what its products' magnitudes add up to.
TOLERANCE = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}


def unscaled(m: int | None, n: int, k: int, lhs: str, **fields: Any) -> ScaledMatmul:
    return ScaledMatmul(m=m, n=n, k=k, lhs=lhs, lhs_scaled=False, **fields)


def operands_of(problem: ScaledMatmul, m: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Random operands by their ABI name."""
    rng = np.random.default_rng(seed)
    return {
        "lhs": rng.normal(size=(m, problem.k)).astype(DTYPES[problem.lhs]),
        "rhs": random_codes(rng, (problem.n, problem.rhs_row_bytes), problem.rhs),
        "rhs_scale": rng.integers(110, 128, problem.rhs_scale_shape, dtype=np.uint8),
    }


def expected(problem: ScaledMatmul, operands: dict[str, Any]) -> npt.NDArray[np.float64]:
    return reference.scaled_matmul(
        operands["lhs"],
        None,
        operands["rhs"],
        operands["rhs_scale"],
        rhs_block=problem.rhs_block,
        rhs_element=ELEMENTS[problem.rhs],
    )


def run(
    problem: ScaledMatmul, tiers: tuple[KernelTier, ...], operands: dict[str, Any], **options: Any
) -> npt.NDArray[np.float64]:
    hsaco = options.pop("hsaco", None) or compile_kernels(problem, tiers)
    outcome = launch_matmul(hsaco, problem, tiers, operands, EXECUTABLE_PREFIX, **options)
    return outcome.y.astype(np.float64)


def check(problem: ScaledMatmul, *tiers: KernelTier, m: int | None = None) -> None:
    rows = problem.m if m is None else m
    assert rows is not None
    operands = operands_of(problem, rows)
    magnitudes = {**operands, "lhs": np.abs(operands["lhs"].astype(np.float64))}
    weight = operands["rhs"] & (0x77 if problem.rhs == "f4E2M1FN" else 0x7F)
    most = expected(problem, {**magnitudes, "rhs": weight})
    y = run(problem, tiers, operands)
    assert np.all(np.abs(y - expected(problem, operands)) <= TOLERANCE[problem.result] * most)


@pytest.mark.parametrize("tier", [SMALL, WIDE])
@pytest.mark.parametrize(
    ("lhs", "rhs", "rhs_block"),
    [
        ("bf16", "f8E4M3FN", (32, 32)),
        ("f16", "f4E2M1FN", (1, 32)),
        ("f32", "f8E5M2", (1, 32)),
        ("f32", "f8E4M3FN", (32, 32)),
    ],
)
def test_element_types(tier: KernelTier, lhs: str, rhs: str, rhs_block: tuple[int, int]):
    check(unscaled(20, 72, 656, lhs, rhs=rhs, rhs_block=rhs_block), tier)


@pytest.mark.parametrize(
    ("m", "n", "k", "lhs"),
    [
        (1, 1, 1, "f32"),
        (3, 33, 31, "bf16"),
        (17, 5, 33, "f16"),
        (5, 40, 66, "bf16"),
        (2, 96, 640, "f32"),
        (33, 16, 288, "f16"),
        (7, 130, 257, "f32"),
    ],
)
def test_any_shape(m: int, n: int, k: int, lhs: str):
    problem = unscaled(m, n, k, lhs, rhs_block=(1, 32) if k % 2 else (32, 32))
    check(problem, *chosen(problem))


def chosen(problem: ScaledMatmul) -> tuple[KernelTier, ...]:
    config = select.select(problem, DeviceFacts()).config
    assert config is not None
    return config.tiers


def test_a_dynamic_m_and_every_result_type():
    for result in ("f32", "bf16", "f16"):
        problem = unscaled(None, 64, 512, "bf16", result=result)
        assert len(chosen(problem)) == 3
        for m in (1, 16, 31, 65):
            check(problem, *chosen(problem), m=m)


@pytest.mark.parametrize("reduce", ["in_launch", "second_launch"])
def test_split_k_adds_in_split_order_under_every_schedule(reduce: str):
    problem = unscaled(9, 40, 1056, "bf16", epilogue=Epilogue(bias="f32", activation="relu"))
    tier = replace(SMALL, splits=3, reduce=reduce)
    operands = operands_of(problem, 9)
    operands["bias"] = np.arange(40, dtype=np.float32)
    first = run(problem, (tier,), operands)
    wanted = np.maximum(expected(problem, operands) + operands["bias"], 0)
    np.testing.assert_allclose(first, wanted, rtol=1e-4, atol=1e-4 * wanted.max())
    for seed in (1, 2):
        np.testing.assert_array_equal(run(problem, (tier,), operands, seed=seed), first)


@pytest.mark.parametrize("lhs", ["bf16", "f32"])
def test_every_scale_byte(lhs: str):
    """256 blocks with a byte each; x is as large as the scale is small."""
    problem = unscaled(2, 16, 512, lhs, rhs_block=(1, 32))
    operands = operands_of(problem, 2)
    operands["rhs_scale"] = (np.arange(16) * 16 + np.arange(16)[:, None]).astype(np.uint8)
    exponents = np.repeat(np.clip(127 - 8 - 16 * np.arange(16), -110, 110), 32)
    operands["lhs"] = np.ldexp(operands["lhs"].astype(np.float64), exponents).astype(DTYPES[lhs])
    y, wanted = run(problem, (SMALL,), operands), expected(problem, operands)
    np.testing.assert_array_equal(np.isnan(wanted), np.arange(16)[None] == [[15], [15]])
    np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-6 * np.nanmax(np.abs(wanted)))


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_one_extreme_scale(byte: int):
    problem = unscaled(1, 16, 32, "f32")
    operands = operands_of(problem, 1)
    operands["rhs_scale"][:] = byte
    operands["lhs"] = np.ldexp(operands["lhs"], np.clip(127 - byte, -60, 60)).astype(np.float32)
    y, wanted = run(problem, (SMALL,), operands), expected(problem, operands)
    assert np.abs(wanted).min() > 0
    np.testing.assert_allclose(y, wanted, rtol=1e-4)


def test_an_f32_activation_loses_no_bit():
    problem = unscaled(2, 16, 64, "f32")
    operands = operands_of(problem, 2)
    operands["lhs"][:] = 0
    operands["lhs"][:, :2] = [[1 + 2.0**-23, -1.0], [-(2.0**-100) * (1 + 2.0**-23), 2.0**-100]]
    operands["rhs"][:] = 0x38  # 1.0
    operands["rhs_scale"][:] = 127
    y = run(problem, (SMALL,), operands)
    np.testing.assert_array_equal(y, np.repeat([[2.0**-23], [-(2.0**-123)]], 16, axis=1))


@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
def test_infinities_and_nans_of_x_stay_in_their_row(lhs: str):
    problem = unscaled(4, 16, 64, lhs)
    operands = operands_of(problem, 4)
    operands["rhs"][:] = 0x38 + (np.arange(16)[:, None] % 8)
    operands["lhs"][1, 5], operands["lhs"][2, 40], operands["lhs"][3, 3] = np.inf, np.nan, -np.inf
    if lhs == "f32":
        operands["lhs"].view(np.uint32)[2, 40] = 0x7F800001  # only the last part can tell
    np.testing.assert_array_equal(
        run(problem, (SMALL,), operands)[1:],
        np.repeat([[np.inf], [np.nan], [-np.inf]], 16, axis=1),
    )


def test_padding_after_k_is_not_read():
    """A NaN in the spare nibble's place and beyond the rows is nobody's."""
    problem = unscaled(3, 7, 33, "bf16", rhs="f4E2M1FN", rhs_block=(1, 32))
    operands = operands_of(problem, 3)
    clean = operands["rhs"].copy()
    clean[:, -1] &= 0x0F
    operands["rhs"][:, -1] |= 0xF0
    np.testing.assert_array_equal(
        run(problem, (SMALL,), operands), run(problem, (SMALL,), {**operands, "rhs": clean})
    )


def test_a_wrong_half_of_the_weight_is_noticed():
    problem = unscaled(5, 32, 512, "bf16")
    wrong = hsaco = compile_kernels(problem, (SMALL,))
    for conversion in mutate.instructions(hsaco, "gemm_tier0"):
        if conversion.name == "v_cvt_scalef32_pk_bf16_fp8" and conversion["opsel"] & 1:
            wrong = mutate.change(wrong, conversion, opsel=conversion["opsel"] ^ 1)
    operands = operands_of(problem, 5)
    y, wanted = run(problem, (SMALL,), operands, hsaco=wrong), expected(problem, operands)
    assert np.abs(y - wanted).max() > 0.1 * np.abs(wanted).max()
