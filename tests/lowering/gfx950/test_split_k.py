# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K: right, the same in any schedule, and the same in both forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import RESULT
from block32.tools.gfx950_executor import Buffer, ExecutionError, Executor
from tests.lowering.gfx950.kernels import (
    TARGET,
    assert_matches_reference,
    compile_kernels,
    named_operands,
    needs_executor,
    run_matmul,
)
from tests.numbers import random_operands

pytestmark = needs_executor

PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=2, splits=4)
TILED = KernelTier("tiled", tile=(32, 32, 256), warps=4, stages=2, splits=3)
FORMS = {"packed": PACKED, "tiled": TILED}


@pytest.mark.parametrize("form", FORMS)
def test_twenty_schedules_and_the_second_launch_agree_bit_for_bit(form: str):
    problem = ScaledMatmul(m=4, n=40, k=4096)
    operands, tier = random_operands(problem), FORMS[form]
    first = run_matmul(problem, [tier], operands, seed=0)
    assert_matches_reference(problem, first, operands)
    for seed in range(1, 20):
        again = run_matmul(problem, [tier], operands, seed=seed)
        assert again.tobytes() == first.tobytes()
    second = run_matmul(problem, [replace(tier, reduce="second_launch")], operands)
    assert second.tobytes() == first.tobytes()


@pytest.mark.parametrize("reduce", ["in_launch", "second_launch"])
@pytest.mark.parametrize(
    ("m", "n", "k", "tier"),
    [
        (8, 16, 12800, replace(PACKED, splits=8)),
        (19, 48, 576, replace(TILED, splits=3)),
        (64, 64, 5120, replace(TILED, tile=(64, 64, 256), splits=5)),
        (33, 70, 1312, replace(TILED, tile=(64, 64, 128), mma=(32, 32, 64), order="m")),
        (3, 50, 1312, replace(PACKED, tile=(4, 32, 128), k_pack=4)),
    ],
)
def test_shapes(m: int, n: int, k: int, tier: KernelTier, reduce: str):
    problem = ScaledMatmul(m=m, n=n, k=k, result="bf16")
    operands = random_operands(problem)
    y = run_matmul(problem, [replace(tier, reduce=reduce)], operands)
    assert_matches_reference(problem, y, operands)


def test_tiers_with_and_without_splits_share_one_module():
    problem = ScaledMatmul(m=None, n=48, k=2048)
    tiers = [
        replace(PACKED, max_m=4),
        replace(TILED, max_m=40, reduce="second_launch"),
        KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2),
    ]
    for m in (1, 4, 5, 40, 41):
        operands = random_operands(problem, m)
        assert_matches_reference(problem, run_matmul(problem, tiers, operands), operands)


def test_buffers_hold_the_largest_need_of_any_tier():
    problem = ScaledMatmul(m=None, n=48, k=2048)
    tiers = (
        replace(PACKED, max_m=4),
        replace(TILED, max_m=40),
        KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2),
    )
    buffers = TARGET.plan(problem, tiers).buffers
    packed_slots, tiled_slots = 3 * 4 * 8 * 16, 2 * 2 * 3 * 32 * 32
    assert buffers["slots"].size(40) == max(packed_slots, tiled_slots)
    assert buffers["slots"].size(8192) == max(packed_slots, tiled_slots)
    assert buffers["counters"].size(1) == 3
    assert buffers["counters"].size(40) == 4


@pytest.mark.parametrize("form", FORMS)
def test_a_dirty_counter_is_caught(form: str):
    """A workgroup that takes itself for the last adds slots that nobody has written."""
    problem = ScaledMatmul(m=4, n=16, k=4096)
    with pytest.raises(ExecutionError, match=r"uninitialised value|race|stale read"):
        run_matmul(problem, [FORMS[form]], random_operands(problem), first_counter=2)


def test_a_hundred_runs_on_the_same_counters_are_right():
    """A replayed command buffer fills them again, but the kernel has left zeros anyway."""
    tier = KernelTier("packed", tile=(8, 16, 128), k_pack=2, warps=1, stages=1, splits=3)
    problem = ScaledMatmul(m=4, n=16, k=768)
    operands = random_operands(problem)
    arrays = named_operands(operands)
    arrays |= {RESULT: np.empty((4, 16), np.float32), "slots": np.empty((3, 8, 16), np.float32)}
    arrays["counters"] = np.zeros(1, np.int32)
    (launch,) = TARGET.plan(problem, (tier,)).launches
    executor = Executor(compile_kernels(problem, (tier,)))
    (grid, _, _) = TARGET.workgroups(problem, tier, launch, 4)
    results = set()
    for seed in range(100):
        buffers = [Buffer(arrays[n], initialised=n not in launch.writes) for n in launch.bindings]
        arrays[RESULT].fill(-1)
        executor.launch("gemm_tier0", [as_integer(grid)], buffers, seed=seed)
        assert not arrays["counters"].any()
        results.add(arrays[RESULT].tobytes())
    assert len(results) == 1
    assert_matches_reference(problem, arrays[RESULT], operands)
