# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising x in a launch of its own and in the kernel: the bits of the two separate steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.gfx950 import select
from block32.lowering.kernel_module import EXECUTABLE_PREFIX
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.gfx950_executor import mutate
from block32.tools.gfx950_launch import Outcome, launch_matmul
from tests.lowering.gfx950.kernels import TARGET, compile_kernels, needs_executor
from tests.numbers import random_codes

pytestmark = needs_executor

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
PACKED = KernelTier("packed", tile=(8, 16, 128), k_pack=2, warps=2, stages=2)
TILED = KernelTier("tiled", tile=(32, 32, 128), warps=2, stages=2)
FACTS = DeviceFacts()


def quantizing(m: int | None, n: int, k: int, lhs: str, rule: str = "rceil", **fields: Any):
    return ScaledMatmul(m=m, n=n, k=k, lhs=lhs, lhs_scaled=False, lhs_quantize=rule, **fields)


def activation(m: int, k: int, lhs: str) -> npt.NDArray[Any]:
    """Values of all magnitudes; zeros, subnormals, infinities and NaNs where there is room."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(m, k)) * np.exp2(rng.integers(-9, 6, (m, k)))
    x[0, : min(k, 32)] = 0
    if k > 128 and m > 3:
        x[0, 32:64] *= 2.0**-130
        x[1, 40:42] = np.inf, -np.inf
        x[2, 70] = np.nan
        x[3, 64:96] = np.nan
        x[3, 100] = -448.5
    return x.astype(DTYPES[lhs])


def operands_of(problem: ScaledMatmul, m: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(1)
    return {
        "lhs": activation(m, problem.k, problem.lhs),
        "rhs": random_codes(rng, (problem.n, problem.rhs_row_bytes), problem.rhs),
        "rhs_scale": rng.integers(100, 120, problem.rhs_scale_shape, dtype=np.uint8),
    }


def run(problem: ScaledMatmul, tiers: tuple[KernelTier, ...], operands: dict[str, Any], **options):
    hsaco = options.pop("hsaco", None) or compile_kernels(problem, tiers)
    return launch_matmul(hsaco, problem, tiers, operands, EXECUTABLE_PREFIX, **options)


def in_two_steps(problem: ScaledMatmul, tier: KernelTier, operands: dict[str, Any]) -> Outcome:
    """The reference's codes and scales, and the kernel for an x with scales."""
    codes, scales = reference.quantize(operands["lhs"], problem.lhs_quantize)  # type: ignore[arg-type]
    scaled = {**operands, "lhs": codes, "lhs_scale": scales}
    return run(problem.quantized(), (replace(tier, quantize="none"),), scaled)


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
def test_the_launch_writes_the_bytes_of_the_rule(rule: str):
    lhs = {"rceil": "bf16", "floor": "f32", "ceil": "f16", "even": "bf16"}[rule]
    problem = quantizing(70, 16, 200, lhs, rule)
    operands = operands_of(problem, 70)
    outcome = run(problem, (replace(TILED, quantize="separate"),), operands)
    codes, scales = reference.quantize(operands["lhs"], rule)  # type: ignore[arg-type]
    np.testing.assert_array_equal(
        outcome.buffers[quantize_launch.SCALES].reshape(scales.shape), scales
    )
    np.testing.assert_array_equal(
        outcome.buffers[quantize_launch.CODES].reshape(codes.shape), codes
    )


@pytest.mark.parametrize("tier", [PACKED, TILED])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 48, 416), (3, 33, 75), (40, 16, 31)])
def test_a_separate_launch_and_the_kernel_after_it(tier: KernelTier, m: int, n: int, k: int):
    problem = quantizing(m, n, k, "f32")
    operands = operands_of(problem, m)
    tier = replace(tier, quantize="separate")
    y = run(problem, (tier,), operands).y
    np.testing.assert_array_equal(y, in_two_steps(problem, tier, operands).y)


@pytest.mark.parametrize(
    ("tier", "rhs", "rhs_block"),
    [
        (PACKED, "f8E4M3FN", (32, 32)),
        (replace(PACKED, tile=(4, 32, 128), k_pack=4, warps=1, stages=1), "f4E2M1FN", (1, 32)),
        (replace(PACKED, tile=(16, 16, 256), k_pack=1, splits=2), "f8E5M2", (32, 32)),
    ],
)
@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
def test_the_kernel_that_quantises_gives_the_bits_of_two_steps(
    lhs: str, tier: KernelTier, rhs: str, rhs_block: tuple[int, int]
):
    problem = quantizing(5, 40, 1104, lhs, rhs=rhs, rhs_block=rhs_block)
    operands = operands_of(problem, 5)
    fused = replace(tier, quantize="fused")
    y = run(problem, (fused,), operands).y
    assert np.isfinite(y[[0, 4]]).all()
    np.testing.assert_array_equal(y, in_two_steps(problem, fused, operands).y)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 33, 33), (8, 16, 100), (7, 5, 66)])
def test_ragged_rows_are_quantised_alike(m: int, n: int, k: int):
    problem = quantizing(m, n, k, "bf16", rhs_block=(1, 32))
    operands = operands_of(problem, m)
    fused = replace(PACKED, quantize="fused")
    y = run(problem, (fused,), operands).y
    np.testing.assert_array_equal(y, in_two_steps(problem, fused, operands).y)


def test_one_plan_for_fused_and_separate_tiers():
    problem = quantizing(None, 64, 512, "bf16", result="bf16", epilogue=Epilogue(bias="f32"))
    config = select.select(problem, FACTS).config
    assert config is not None
    assert [tier.quantize for tier in config.tiers] == ["fused"] + ["separate"] * (
        len(config.tiers) - 1
    )
    launch = TARGET.plan(problem, config.tiers).launches[0]
    assert launch.name == quantize_launch.NAME
    for m, blocks in ((1, 0), (8, 0), (9, 16), (65, 32)):
        tier = config.tier_for(m)
        assert TARGET.workgroups(problem, tier, launch, m) == (blocks, 1, 1)
        operands = {**operands_of(problem, m), "bias": np.arange(64, dtype=np.float32)}
        outcome = run(problem, config.tiers, operands)
        assert (quantize_launch.NAME in outcome.reports) == (m > 8)
        two_steps = in_two_steps(problem, replace(tier, max_m=None), operands).y
        np.testing.assert_array_equal(outcome.y.astype(np.float32), two_steps.astype(np.float32))


@pytest.mark.parametrize(("n", "k"), [*select.tuned_tiers(), (4096, 4096), (33, 100)])
def test_the_structure_along_k_is_that_of_the_matmul_alone(n: int, k: int):
    for m in (1, 8):
        problem = quantizing(m, n, k, "bf16")
        fused, alone = (select.select(p, FACTS).config for p in (problem, problem.quantized()))
        assert fused is not None
        assert alone is not None
        (tier,), (other,) = fused.tiers, alone.tiers
        assert tier.quantize == "fused"
        assert replace(tier, quantize="none", stages=other.stages) == other
        assert select.verify(problem, tier, FACTS) is None


def test_rules_that_saturate_are_never_fused():
    config = select.select(quantizing(1, 64, 512, "bf16", "floor"), FACTS).config
    assert config is not None
    assert config.tiers[0].quantize == "separate"


@pytest.mark.parametrize(
    ("rule", "tier", "reason"),
    [
        ("rceil", replace(TILED, quantize="fused"), "form is 'tiled'; expected 'packed' for"),
        ("floor", replace(PACKED, quantize="fused"), "'fused' for rule 'floor'; expected rceil"),
        ("rceil", PACKED, "expected quantize 'fused' or 'separate'"),
    ],
)
def test_an_explicit_kernel_that_cannot_quantise_is_refused(
    rule: str, tier: KernelTier, reason: str
):
    problem = quantizing(4, 64, 512, "bf16", rule)
    assert reason in (TARGET.verify(problem, tier, FACTS) or "")


@pytest.mark.parametrize("exchange", ["v_permlane16_swap_b32", "v_permlane32_swap_b32"])
def test_without_an_exchange_of_lanes_the_result_is_another(exchange: str):
    problem = quantizing(8, 16, 512, "bf16")
    tier = replace(PACKED, quantize="fused")
    hsaco = broken = compile_kernels(problem, (tier,))
    found = [i for i in mutate.instructions(hsaco, "gemm_tier0") if i.name == exchange]
    assert found
    for instruction in found:
        broken = mutate.drop(broken, instruction)
    operands = operands_of(problem, 8)
    right = in_two_steps(problem, tier, operands).y
    assert not np.array_equal(run(problem, (tier,), operands, hsaco=broken).y, right)
