# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernel is chosen: a legal one for every M, and refusals that say what would work."""

from dataclasses import replace

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.nvidia import select
from block32.lowering.nvidia.machine import SM_89, SM_90A
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from tests.lowering.nvidia.kernels import STREAM, TILED, WGMMA

TARGETS = ("sm_89", "sm_90a", "sm_90a-f32")
SHAPES = [(4096, 4096), (1, 33), (24, 640), (73448, 2560), (130, 96), (1152, 5120), (7168, 16384)]
PROBLEM = ScaledMatmul(None, 4096, 4096)


def chosen(problem: ScaledMatmul, target: str) -> tuple[KernelTier, ...]:
    config = target_named(target).select(problem, DeviceFacts()).config
    assert config is not None
    return config.tiers


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_m_has_a_kernel_that_breaks_no_limit(target: str, n: int, k: int):
    for rhs in ("f8E4M3FN", "f4E2M1FN"):
        for block in ((1, 32), (32, 32)):
            problem = ScaledMatmul(None, n, k, rhs=rhs, rhs_block=block)
            unscaled = (replace(problem, lhs=x, lhs_scaled=False) for x in ("bf16", "f32"))
            for lhs in (problem, *unscaled):
                tiers = chosen(lhs, target)
                limits = [tier.max_m for tier in tiers]
                assert limits[-1] is None
                bounded = [limit for limit in limits[:-1] if limit is not None]
                assert bounded == sorted(set(bounded))
                assert len(bounded) == len(tiers) - 1
                for tier in tiers:
                    assert target_named(target).verify(lhs, tier, DeviceFacts()) is None


def test_a_known_m_gets_the_one_tier_that_serves_it():
    assert chosen(replace(PROBLEM, m=1), "sm_90a")[0].form == "stream"
    (large,) = chosen(replace(PROBLEM, m=4096), "sm_90a")
    assert large.mma is not None and large.mma[0] == 64


@pytest.mark.parametrize("target", ["sm_89", "sm_90a-f32"])
def test_no_short_sums_where_f32_is_asked_for(target: str):
    for tier in chosen(PROBLEM, target):
        assert tier.mma is None
    assert target_named(target).verify(PROBLEM, WGMMA, DeviceFacts()) is not None


def test_the_remark_names_short_sums():
    assert "fewer bits" in target_named("sm_90a").select(PROBLEM, DeviceFacts()).reason
    assert "fewer bits" not in target_named("sm_90a-f32").select(PROBLEM, DeviceFacts()).reason


def test_tuned_tiers_replace_defaults_and_leave_the_others():
    defaults = select.default_tiers(PROBLEM, SM_90A, exact=False)
    tuned = (replace(STREAM, max_m=4), replace(STREAM, max_m=16), WGMMA)
    merged = select.merge_tiers(defaults, tuned)
    limits = [tier.max_m for tier in merged]
    assert limits[:4] == [4, 8, 16, 32]
    assert merged[0] == tuned[0] and merged[2] == tuned[1] and merged[-1] == WGMMA
    assert merged[1] == defaults[0] and merged[3] == defaults[2]


def test_the_table_is_made_of_kernels_that_fit():
    for (chip, n, k), tiers in select.tuned_tiers().items():
        assert chip == SM_90A.name
        for tier in tiers:
            assert select.verify(ScaledMatmul(None, n, k), tier, SM_90A, exact=False) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lhs": "f4E2M1FN"}, "scaled activation of f4E2M1FN"),
        ({"lhs_scaled": False}, "unscaled activation of f8E4M3FN"),
        ({"rhs": "bf16"}, "weight of bf16"),
    ],
)
def test_a_problem_without_a_kernel_says_why(changes: dict, words: str):
    problem = replace(PROBLEM, **changes)
    selection = target_named("sm_90a").select(problem, DeviceFacts())
    assert selection.config is None
    assert words in selection.reason
    assert words in (target_named("sm_90a").verify(problem, STREAM, DeviceFacts()) or "")


REFUSALS = {
    "packed": (replace(STREAM, form="packed"), "expected stream or tiled"),
    "gemv": (replace(STREAM, form="gemv"), "expected stream or tiled"),
    "no tile": (replace(STREAM, tile=None), "expected a tile"),
    "layout": (replace(STREAM, weight_layout="tiled"), "expected 'plain'"),
    "quantize": (replace(TILED, quantize="fused"), "for the stream form; expected 'separate'"),
    "waves": (replace(STREAM, waves_per_eu=2), "waves_per_eu 2 is not served"),
    "isa": (replace(STREAM, isa="generic"), "isa generic is not served"),
    "k_pack": (replace(STREAM, k_pack=2), "expected 1"),
    "stages": (replace(STREAM, stages=1), "at least 2 stages"),
    "warps": (replace(STREAM, warps=3), "1, 2, 4, 8 or 16 warps"),
    "rows": (replace(STREAM, tile=(12, 32, 128)), "8 to 64 rows"),
    "columns": (replace(STREAM, tile=(8, 48, 128)), "16, 32 or 64 columns"),
    "step": (replace(STREAM, tile=(8, 32, 64)), "128 or 256"),
    "too many warps": (replace(STREAM, tile=(8, 16, 128), warps=8), "do not divide"),
    "tiled step": (replace(TILED, tile=(64, 64, 96)), "32, 64 or 128"),
    "tiled rows": (replace(TILED, tile=(24, 64, 64)), "rows in 16s"),
    "tiled columns": (replace(TILED, tile=(64, 48, 64)), "16 or 32s of columns"),
    "warps across scale blocks": (replace(TILED, tile=(16, 96, 64), warps=2), "do not divide"),
    "tiled warps": (replace(TILED, tile=(16, 16, 64)), "do not divide"),
    "wgmma rows": (replace(WGMMA, tile=(128, 64, 128)), "expected 64 rows"),
    "wgmma columns": (replace(WGMMA, tile=(64, 40, 128)), "32, 64, 96 or 128 columns"),
    "wgmma mma": (replace(WGMMA, mma=(64, 32, 32)), "expected mma = [64, 64, 32]"),
    "memory": (replace(STREAM, tile=(64, 64, 256), warps=16), "bytes of shared memory"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_tier_that_cannot_be_is_refused_by_name(case: str):
    tier, words = REFUSALS[case]
    assert words in (select.verify(PROBLEM, tier, SM_90A, exact=False) or "")


def test_wgmma_is_refused_where_it_is_not():
    assert "sm_89 has no wgmma" in (select.verify(PROBLEM, WGMMA, SM_89, exact=False) or "")
    problem = replace(PROBLEM, rhs="f4E2M1FN")
    assert "fp8 operands" in (select.verify(problem, WGMMA, SM_90A, exact=False) or "")
    tier = replace(TILED, tile=(128, 64, 32), warps=8)
    assert "4-bit" in (select.verify(problem, tier, SM_90A, exact=False) or "")


@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("target", TARGETS)
def test_an_x_that_is_quantised_on_the_way_changes_no_sum(target: str, lhs: str):
    for n, k in SHAPES:
        problem = ScaledMatmul(None, n, k, lhs=lhs, lhs_scaled=False, lhs_quantize="rceil")
        tiers = chosen(problem, target)
        assert tiers[0].quantize == "fused" or lhs == "f32"
        assert tiers[-1].quantize == "separate"
        for tier, before in zip(tiers, chosen(problem.quantized(), target), strict=True):
            assert tier.stages <= before.stages
            assert replace(tier, stages=before.stages, quantize="none") == before
            assert target_named(target).verify(problem, tier, DeviceFacts()) is None


def test_an_f32_in_the_kernel_has_to_fit_a_row_of_chunks():
    quantized = replace(PROBLEM, lhs="f32", lhs_scaled=False, lhs_quantize="rceil")
    tier = replace(STREAM, tile=(8, 16, 256), quantize="fused")
    words = "K step of 128 for an f32 activation"
    assert words in (select.verify(quantized, tier, SM_90A, exact=False) or "")
    as_it_is = replace(quantized, lhs_quantize="")
    none = replace(tier, quantize="none")
    assert words in (select.verify(as_it_is, none, SM_90A, exact=False) or "")
    before = replace(tier, quantize="separate")
    assert select.verify(quantized, before, SM_90A, exact=False) is None


def test_an_epilogue_changes_no_choice():
    problem = replace(PROBLEM, epilogue=Epilogue(bias="f32", activation="gelu"))
    assert chosen(problem, "sm_90a") == chosen(PROBLEM, "sm_90a")
