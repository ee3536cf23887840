# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K: the result does not depend on who arrives first, nor on who adds."""

from dataclasses import replace

import numpy as np
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.lowering.targets import target_named
from tests.lowering.nvidia.kernels import STREAM, TILED, WGMMA, run_kernels
from tests.lowering.nvidia.test_numbers import assert_close, scaled_operands

PROBLEM = ScaledMatmul(None, 40, 640)
FORMS = {"stream": (STREAM, 11), "tiled": (TILED, 33), "wgmma": (WGMMA, 33)}


@pytest.mark.parametrize("form", FORMS)
def test_all_schedules_and_both_reductions_give_the_same_bits(form: str):
    tier, m = FORMS[form]
    split = replace(tier, splits=3)
    arrays, want, magnitude = scaled_operands(PROBLEM, m)
    first = run_kernels(PROBLEM, "sm_90a", split, arrays, m)
    assert_close(first, want, magnitude, "f32")
    for seed in range(1, 4):
        again = run_kernels(PROBLEM, "sm_90a", split, arrays, m, seed)
        assert again.tobytes() == first.tobytes()
    second_launch = replace(split, reduce="second_launch")
    other = run_kernels(PROBLEM, "sm_90a", second_launch, arrays, m)
    assert other.tobytes() == first.tobytes()


def test_the_split_sum_is_the_sum_of_its_parts_in_order():
    arrays, _, _ = scaled_operands(PROBLEM, 8)
    split = replace(STREAM, splits=3)
    y = run_kernels(PROBLEM, "sm_90a", split, arrays, 8)
    total = np.zeros_like(y)
    for first, last in ((0, 256), (256, 512), (512, 640)):
        part = {n: a[:, first:last] for n, a in arrays.items() if "scale" not in n}
        part |= {n: a[:, first // 32 : last // 32] for n, a in arrays.items() if "scale" in n}
        part = {name: np.ascontiguousarray(array) for name, array in part.items()}
        problem = replace(PROBLEM, k=last - first)
        total += run_kernels(problem, "sm_90a", STREAM, part, 8)
    assert total.tobytes() == y.tobytes()


def test_a_plan_of_mixed_tiers_has_what_each_needs():
    target = target_named("sm_90a")
    tiers = (
        replace(STREAM, max_m=8, splits=2),
        replace(TILED, max_m=64, splits=2, reduce="second_launch"),
        WGMMA,
    )
    plan = target.plan(PROBLEM, tiers)
    assert [launch.name for launch in plan.launches] == ["gemm", "reduce"]
    assert plan.launches[1].updates == ("result",), "the tiers that reduce in the launch keep y"
    gemm, reduce_launch = plan.launches
    for m, tier in zip((8, 64, 640), tiers, strict=True):
        counters, slots = (plan.buffers[name].size(m) for name in ("counters", "slots"))
        assert isinstance(counters, int) and isinstance(slots, int)
        assert counters >= 2  # the stream's tiles, whatever M is
        assert slots >= (8 * 64 * 2 if m == 8 else 64 * 64 * 2)
        grid = target.workgroups(PROBLEM, tier, reduce_launch, m)[0]
        assert grid == (1 if tier.reduce == "second_launch" else 0)
    assert target.workgroups(PROBLEM, tiers[0], gemm, 8)[0] == 2 * 2


def test_slots_grow_with_the_rows_of_the_tier_that_splits():
    target = target_named("sm_90a")
    tiers: tuple[KernelTier, ...] = (replace(STREAM, max_m=8, splits=2), TILED)
    size = target.plan(PROBLEM, tiers).buffers["slots"].size
    assert size(8) == size(100_000) == 2 * 2 * 8 * 32
