# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls (mixture of experts): the machine code in the executor against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.gfx950 import select
from block32.lowering.gfx950.geometry import geometry_of
from block32.lowering.gfx950.target import GEMM
from block32.lowering.kernel_module import EXECUTABLE_PREFIX
from block32.lowering.problem import Grouping, ScaledMatmul
from block32.lowering.target import RESULT, DeviceFacts
from block32.runtime import reference
from block32.tools.gfx950_launch import Outcome, launch_matmul
from tests.lowering.gfx950.kernels import (
    TARGET,
    compile_kernels,
    kernel_module_text,
    needs_executor,
)
from tests.numbers import random_codes

pytestmark = needs_executor

TILED = KernelTier("tiled", tile=(32, 64, 128), warps=2, stages=2)
PACKED = KernelTier("packed", tile=(8, 16, 128), k_pack=2, warps=2, stages=2)
UNSCALED = KernelTier("packed", tile=(16, 32, 128), warps=2, stages=2)
FACTS = DeviceFacts()

#: experts, (N, K), tokens of each group, expert of each group, rows before and after all groups.
SHAPES: list[tuple[int, tuple[int, int], list[int], list[int], tuple[int, int]]] = [
    (4, (128, 64), [3, 0, 5, 2], [2, 0, 3, 1], (0, 0)),
    (4, (70, 40), [7, 0, 20], [1, 0, 3], (2, 3)),
    (2, (70, 40), [16, 24], [0, -1], (0, 1)),
    (16, (64, 96), [1, 2, 3, 1, 1, 3, 2, 2], [9, 3, 15, 3, 0, 7, 1, 2], (0, 0)),
]

#: x, the tier that multiplies it.
KINDS: dict[str, tuple[dict[str, Any], KernelTier]] = {
    "tiled": ({}, TILED),
    "packed": ({"rhs": "f4E2M1FN", "rhs_block": (1, 32)}, PACKED),
    "unscaled": ({"lhs": "bf16", "lhs_scaled": False}, UNSCALED),
    "quantised": (
        {"lhs": "bf16", "lhs_scaled": False, "lhs_quantize": "rceil"},
        replace(PACKED, quantize="fused"),
    ),
    "quantised before": (
        {"lhs": "f32", "lhs_scaled": False, "lhs_quantize": "rceil", "result": "bf16"},
        replace(TILED, quantize="separate"),
    ),
}
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}
ELEMENTS: dict[str, Any] = {"f8E4M3FN": "e4m3", "f4E2M1FN": "e2m1"}


def grouped(n: int, k: int, experts: int, groups: int, **fields: Any) -> ScaledMatmul:
    return ScaledMatmul(m=None, n=n, k=k, grouping=Grouping(experts, groups), **fields)


def operands_of(
    problem: ScaledMatmul, tokens: list[int], experts: list[int], outside: tuple[int, int] = (0, 0)
) -> dict[str, npt.NDArray[Any]]:
    """Random operands by name; ``init`` holds a number that no product is."""
    assert problem.grouping is not None
    rng = np.random.default_rng(sum(tokens))
    offsets = outside[0] + np.cumsum([0, *tokens])
    m = int(offsets[-1]) + outside[1]
    weights = problem.grouping.experts
    operands: dict[str, npt.NDArray[Any]] = {
        "rhs": random_codes(rng, (weights, problem.n, problem.rhs_row_bytes), problem.rhs),
        "rhs_scale": rng.integers(118, 136, (weights, *problem.rhs_scale_shape), dtype=np.uint8),
        "offsets": offsets.astype(np.int32),
        "expert_ids": np.array(experts, np.int32),
        "init": np.full((m, problem.n), 7.5, DTYPES[problem.result]),
    }
    if problem.lhs_scaled:
        operands["lhs"] = random_codes(rng, (m, problem.k), problem.lhs)
        operands["lhs_scale"] = rng.integers(118, 136, (m, problem.k_blocks), dtype=np.uint8)
    else:
        operands["lhs"] = rng.normal(size=(m, problem.k)).astype(DTYPES[problem.lhs])
    return operands


def expected(problem: ScaledMatmul, operands: dict[str, Any]) -> npt.NDArray[np.float64]:
    x, x_scale = operands["lhs"], operands.get("lhs_scale")
    if problem.lhs_quantize:
        x, x_scale = reference.quantize(x)
    return reference.grouped_matmul(
        x,
        x_scale,
        operands["rhs"],
        operands["rhs_scale"],
        operands["offsets"],
        operands["expert_ids"],
        operands["init"],
        rhs_block=problem.rhs_block,
        rhs_element=ELEMENTS[problem.rhs],
    )


def run(
    problem: ScaledMatmul, tiers: tuple[KernelTier, ...], operands: dict[str, Any], **options: Any
) -> Outcome:
    hsaco = compile_kernels(problem, tiers)
    return launch_matmul(hsaco, problem, tiers, operands, EXECUTABLE_PREFIX, **options)


def check(problem: ScaledMatmul, tiers: tuple[KernelTier, ...], operands: dict[str, Any]) -> None:
    y, wanted = run(problem, tiers, operands).y.astype(np.float64), expected(problem, operands)
    np.testing.assert_array_equal(y == 7.5, wanted == 7.5)
    rtol = {"f32": 3e-5, "bf16": 1.6e-2}[problem.result]
    np.testing.assert_allclose(y, wanted, rtol=rtol, atol=5e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind: str, shape):
    """Empty groups, repeated and missing experts, rows of no group before and after."""
    experts, (n, k), tokens, ids, outside = shape
    fields, tier = KINDS[kind]
    problem = grouped(n, k, experts, len(tokens), **fields)
    check(problem, (tier,), operands_of(problem, tokens, ids, outside))


def test_selected_kernels():
    problem = grouped(1856, 2688, 8, 6, result="bf16")
    config = select.select(problem, FACTS).config
    assert config is not None
    assert all(select.verify(problem, tier, FACTS) is None for tier in config.tiers)
    operands = operands_of(problem, [1, 1, 2, 0, 1, 1], [0, 3, 1, 4, 5, 2])
    tier = config.tier_for(6)
    geometry = geometry_of(problem, tier)
    tiles = as_integer(geometry.tiles(6))
    sample = [(w, 0, 0) for w in range(0, tiles, 29)]
    outcome = run(problem, config.tiers, operands, workgroups={GEMM: sample})
    y, wanted = outcome.y.astype(np.float64), expected(problem, operands)
    written = y != 7.5
    assert written.sum() >= 4 * geometry.block_n
    peak = np.abs(wanted).max()
    np.testing.assert_allclose(y[written], wanted[written], rtol=1.6e-2, atol=5e-5 * peak)


def test_tiers_follow_the_rows_of_a_group():
    few, many = (select.select(grouped(4096, 4096, 8, groups), FACTS).config for groups in (1, 64))
    assert few is not None
    assert many is not None
    assert [tier.max_m and tier.max_m * 64 for tier in few.tiers] == [t.max_m for t in many.tiers]
    assert {tier.splits for tier in many.tiers} == {1}


@pytest.mark.parametrize("groups", [63, 64, 65, 130])
def test_more_groups_than_lanes(groups: int):
    problem = grouped(16, 32, 3, groups, lhs="bf16", lhs_scaled=False)
    rng = np.random.default_rng(groups)
    tokens = rng.choice([0, 0, 1, 17, 33], groups, p=[0.3, 0.3, 0.3, 0.05, 0.05]).tolist()
    ids = rng.integers(-1, 4, groups).tolist()
    check(problem, (UNSCALED,), operands_of(problem, tokens, ids, (1, 1)))


def test_groups_without_an_expert_read_no_weight_and_give_zeros():
    problem = grouped(70, 64, 4, 2)
    operands = operands_of(problem, [5, 40], [-1, 4], (1, 2))
    outcome = run(problem, (TILED,), operands)
    assert (outcome.y[1:46] == 0).all()
    assert (outcome.y[[0, 46, 47]] == 7.5).all()
    assert not any("mfma" in name for name in outcome.reports[GEMM].mnemonics)


def test_offsets_past_the_rows_write_nothing_outside():
    """The executor refuses an access out of bounds."""
    problem = grouped(70, 64, 4, 3)
    operands = operands_of(problem, [5, 3, 2], [1, 2, 3])
    operands["offsets"] = np.array([2, 7, 5000, -1], np.int32)
    y = run(problem, (TILED,), operands).y
    clamped = {**operands, "offsets": np.array([2, 7, 10, 10], np.int32)}
    wanted = expected(problem, clamped)
    np.testing.assert_allclose(y, wanted, rtol=3e-5, atol=5e-5 * np.abs(wanted).max())


def test_no_rows_and_no_groups_launch_nothing():
    text = kernel_module_text(grouped(64, 64, 2, 3), (TILED,))
    assert "scf.if" in text, "M = 0 is a branch on the host"
    assert "flow.dispatch" in text
    assert "flow.dispatch" not in kernel_module_text(grouped(64, 64, 2, 0), (TILED,))


def test_the_result_is_updated_in_place():
    (launch,) = TARGET.plan(grouped(64, 64, 2, 3), (TILED,)).launches
    assert (launch.updates, launch.writes) == ((RESULT,), ())


def test_a_split_of_k_is_refused():
    reason = TARGET.verify(grouped(64, 1024, 2, 3), replace(TILED, splits=2), FACTS)
    assert reason == "splits is 2; expected 1 for groups of rows"
