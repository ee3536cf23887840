# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising x in a launch and in the kernel: the bytes of the rule, and one result for both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.kernel_module import EXECUTABLE_PREFIX, export_name
from block32.lowering.problem import ScaledMatmul
from block32.lowering.targets import target_named
from block32.runtime import reference
from block32.tools.ptx_executor import launch, parse_ptx
from tests.lowering.nvidia.kernels import STREAM, TILED, WGMMA, ptx_text, run_kernels
from tests.lowering.nvidia.test_numbers import assert_close
from tests.numbers import random_operands

DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
PROBLEM = ScaledMatmul(None, 40, 288, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil")


def awkward_values(m: int, k: int, element: str) -> npt.NDArray[Any]:
    """Values of all magnitudes, with blocks that rules are tried by."""
    rng = np.random.default_rng(k)
    scale = np.exp2(rng.integers(-20, 12, (m, -(-k // 32))).repeat(32, axis=1)[:, :k])
    x = (rng.standard_normal((m, k)) * scale).astype(DTYPES[element])
    x[0, :32] = 0
    x[0, 2] = -0.0
    x[m - 1, 3] = np.nan
    x[m - 1, 32:40] = [448, 449, 464, 480, -496, 633, 1, 897]
    if m > 2:
        x[1, 5] = -np.inf
        x[2, :32] = float(ml_dtypes.finfo(DTYPES[element]).smallest_subnormal)
    return x


def run_quantize_launch(
    problem: ScaledMatmul, x: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes and scales that the launch writes."""
    m, target, tier = len(x), target_named("sm_90a"), replace(TILED, quantize="separate")
    kernels = parse_ptx(ptx_text(problem, "sm_90a", tier))
    codes = np.full((m, problem.k), 0xEE, np.uint8)
    scales = np.full((m, problem.k_blocks), 0xEE, np.uint8)
    grid = target.workgroups(problem, tier, quantize_launch.LAUNCH, m)[0]
    assert isinstance(grid, int)
    name = export_name(EXECUTABLE_PREFIX, quantize_launch.LAUNCH, 0)
    launch(kernels[name], grid, [x, codes, scales], [False, True, True], [m])
    return codes, scales


def without_nan_signs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.where(codes & 0x7F == 0x7F, np.uint8(0x7F), codes)


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("k", [96, 40, 77])
def test_the_launch_writes_the_bytes_of_the_rule(element: str, k: int):
    x = awkward_values(9, k, element)
    codes, scales = run_quantize_launch(replace(PROBLEM, lhs=element, k=k), x)
    want_codes, want_scales = reference.quantize(x)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(without_nan_signs(codes), without_nan_signs(want_codes))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_the_launch_knows_every_rule(rule: Any):
    x = awkward_values(4, 96, "f32")
    codes, scales = run_quantize_launch(replace(PROBLEM, lhs="f32", k=96, lhs_quantize=rule), x)
    want_codes, want_scales = reference.quantize(x, rule)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(without_nan_signs(codes), without_nan_signs(want_codes))


FUSED = replace(STREAM, quantize="fused")
LARGE_STEP = KernelTier("stream", tile=(16, 16, 256), warps=2, stages=2, quantize="fused")

FUSED_CASES: dict[str, tuple[ScaledMatmul, str, KernelTier, int]] = {
    "bf16": (PROBLEM, "sm_90a", FUSED, 5),
    "f16": (replace(PROBLEM, lhs="f16"), "sm_90a", FUSED, 8),
    "f32": (replace(PROBLEM, lhs="f32"), "sm_90a", FUSED, 3),
    "fp8 instructions": (replace(PROBLEM, result="bf16"), "sm_89", FUSED, 8),
    "two tiles of rows": (replace(PROBLEM, n=33), "sm_90a", FUSED, 11),
    "steps of 256": (replace(PROBLEM, k=544), "sm_90a", LARGE_STEP, 11),
    "fp4 weights": (replace(PROBLEM, rhs="f4E2M1FN", k=296), "sm_90a", FUSED, 3),
    "fp4 weights, f32": (replace(PROBLEM, rhs="f4E2M1FN", lhs="f32"), "sm_89", FUSED, 3),
    "1x32, short last block": (replace(PROBLEM, rhs_block=(1, 32), k=136), "sm_90a", FUSED, 7),
    "odd K": (replace(PROBLEM, k=77), "sm_90a", FUSED, 2),
    "another rule": (replace(PROBLEM, lhs_quantize="floor"), "sm_90a", FUSED, 4),
    "split": (replace(PROBLEM, k=640), "sm_90a", replace(FUSED, splits=3), 4),
}


def quantized_operands(problem: ScaledMatmul, x: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Operands of the matmul after the reference quantised x."""
    operands = random_operands(problem.quantized(), len(x))
    codes, scales = reference.quantize(x, problem.lhs_quantize)  # type: ignore[arg-type]
    weights = {"rhs": operands.rhs, "rhs_scale": operands.rhs_scale}
    return {"lhs": codes, "lhs_scale": scales, **weights}


@pytest.mark.parametrize("case", FUSED_CASES)
def test_the_kernel_gives_the_result_of_quantising_before(case: str):
    problem, target, tier, m = FUSED_CASES[case]
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((m, problem.k)) * 3).astype(DTYPES[problem.lhs])
    x[m // 2, problem.k // 2] = 1000
    arrays = quantized_operands(problem, x)
    before = run_kernels(problem.quantized(), target, replace(tier, quantize="none"), arrays, m)
    weights = {name: arrays[name] for name in ("rhs", "rhs_scale")}
    y = run_kernels(problem, target, tier, {"lhs": x, **weights}, m)
    assert y.tobytes() == before.tobytes()
    separate = replace(tier, quantize="separate")
    assert run_kernels(problem, target, separate, {"lhs": x, **weights}, m).tobytes() == y.tobytes()


@pytest.mark.parametrize("tier", [TILED, WGMMA], ids=["tiled", "wgmma"])
def test_a_launch_before_the_forms_for_many_rows(tier: KernelTier):
    x = np.random.default_rng(3).standard_normal((33, 288)).astype(DTYPES["bf16"])
    arrays = quantized_operands(PROBLEM, x)
    operands = replace(
        random_operands(PROBLEM.quantized(), 33), lhs=arrays["lhs"], lhs_scale=arrays["lhs_scale"]
    )
    magnitude = replace(operands, lhs=operands.lhs & 0x7F, rhs=operands.rhs & 0x7F).expected()
    weights = {name: arrays[name] for name in ("rhs", "rhs_scale")}
    tier = replace(tier, quantize="separate")
    y = run_kernels(PROBLEM, "sm_90a", tier, {"lhs": x, **weights}, 33)
    assert_close(y, operands.expected(), magnitude, "f32")


def test_what_is_no_number_stays_in_its_row():
    x = awkward_values(8, 288, "bf16")
    arrays = quantized_operands(PROBLEM, x)
    weights = {name: arrays[name] for name in ("rhs", "rhs_scale")}
    y = run_kernels(PROBLEM, "sm_90a", FUSED, {"lhs": x, **weights}, 8)
    before = run_kernels(PROBLEM.quantized(), "sm_90a", STREAM, arrays, 8)
    np.testing.assert_array_equal(y, before)
    assert np.isnan(y[7]).all() and not np.isnan(y[:7]).any()


def test_tiers_that_quantise_here_and_there_share_a_plan():
    target = target_named("sm_90a")
    tiers: tuple[KernelTier, ...] = (replace(FUSED, max_m=8), replace(TILED, quantize="separate"))
    plan = target.plan(PROBLEM, tiers)
    assert [step.name for step in plan.launches] == ["quantize", "gemm"]
    assert "lhs" in plan.launches[1].reads and quantize_launch.CODES in plan.launches[1].reads
    grids = [target.workgroups(PROBLEM, tier, plan.launches[0], 70)[0] for tier in tiers]
    assert grids == [0, -(-70 * 9 // 64)]
    alone = target.plan(PROBLEM, tiers[:1])
    assert [step.name for step in alone.launches] == ["gemm"] and not alone.buffers
