# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernel is chosen: tables, defaults, limits, and refusals that say what would work."""

from dataclasses import replace
from itertools import pairwise

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import select
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts

FACTS = DeviceFacts(architecture="gfx950")
ROWS = (1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 64, 129, 255, 1024, 8192)
SHAPES = [*select.tuned_tiers(), (4096, 4096), (1, 33), (96, 640), (73448, 2560), (130, 96)]


def chosen(problem: ScaledMatmul) -> tuple[KernelTier, ...]:
    config = select.select(problem, FACTS).config
    assert config is not None
    return config.tiers


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rhs", ["f8E4M3FN", "f4E2M1FN"])
@pytest.mark.parametrize("rhs_block", [(1, 32), (32, 32)])
def test_every_m_has_a_kernel_that_breaks_no_limit(n, k, rhs, rhs_block):
    problem = ScaledMatmul(m=None, n=n, k=k, rhs=rhs, rhs_block=rhs_block)
    tiers = chosen(problem)
    assert tiers[-1].max_m is None
    for tier in tiers:
        assert select.verify(problem, tier, FACTS) is None
        assert tier.form in ("tiled", "packed"), "every form uses the matrix unit"


def test_a_known_m_gets_the_one_tier_that_serves_it():
    for m in ROWS:
        assert len(chosen(ScaledMatmul(m=m, n=5120, k=2048))) == 1
    assert chosen(ScaledMatmul(m=1, n=4096, k=4096))[0].form == "packed"
    assert chosen(ScaledMatmul(m=4096, n=4096, k=4096))[0].tile == (128, 256, 256)


def test_default_tiles_grow_with_the_number_of_workgroups():
    tiers = chosen(ScaledMatmul(m=None, n=4096, k=4096))
    assert [(tier.max_m, tier.tile, tier.splits) for tier in tiers] == [
        (8, (8, 16, 256), 1),
        (32, (32, 32, 256), 2),
        (64, (64, 64, 256), 4),
        (192, (64, 64, 256), 1),
        (896, (64, 128, 256), 1),
        (None, (128, 256, 256), 1),
    ]
    narrow = chosen(ScaledMatmul(m=None, n=60, k=4096))
    assert narrow[-1].tile == (64, 64, 256), "no tile that is mostly past N"


def test_few_columns_are_split_along_k_until_the_machine_is_full():
    assert chosen(ScaledMatmul(m=4, n=1024, k=16384))[0].splits == 4
    assert chosen(ScaledMatmul(m=4, n=1024, k=1024))[0].splits == 1, "too few steps to share"
    assert chosen(ScaledMatmul(m=1, n=16, k=65536))[0].splits == select.MOST_SPLITS


@pytest.mark.parametrize(("n", "k"), select.tuned_tiers())
def test_a_dynamic_m_gets_tiers_that_are_far_apart(n: int, k: int):
    limits = [tier.max_m for tier in chosen(ScaledMatmul(m=None, n=n, k=k))]
    assert limits[-1] is None
    assert limits[0] is not None
    bounded = [limit for limit in limits if limit is not None]
    assert all(select.ROWS_APART * a <= b for a, b in pairwise(bounded))
    assert bounded[0] >= 4
    assert len(limits) <= 7, "compiling takes so long"


def test_a_table_entry_is_taken_for_the_rows_that_it_serves():
    tiers = select.tuned_tiers()[1152, 5120]
    for before, tier in pairwise(tiers):
        assert before.max_m is not None
        got = chosen(ScaledMatmul(m=before.max_m + 1, n=1152, k=5120, result="bf16"))
        assert got == (replace(tier, max_m=None),)


def test_what_does_not_fit_is_stepped_down():
    problem = ScaledMatmul(m=1, n=1152, k=5120)
    large = KernelTier("packed", tile=(8, 16, 1024), k_pack=2, warps=2, stages=4)
    tier = select.fit(problem, large)
    assert Geometry(problem, large).problem_with_tile() is not None
    assert Geometry(problem, tier).problem_with_tile() is None
    assert tier.tile == (8, 16, 512), "a shorter K step comes first"


def test_too_many_tiles_to_count_are_added_in_a_second_launch():
    tier = KernelTier("tiled", tile=(16, 16, 128), warps=1, stages=2, splits=2)
    few = select.fit(ScaledMatmul(m=64, n=64, k=512), tier)
    many = select.fit(ScaledMatmul(m=65536, n=64 * 32, k=512), tier)
    assert (few.reduce, many.reduce) == ("in_launch", "second_launch")


PROBLEM = ScaledMatmul(m=64, n=256, k=1024)
TILED = KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile": (128, 128, 1024), "stages": 3}, "bytes of LDS; expected at most 163840"),
        ({"tile": (256, 256, 128), "warps": 1}, "registers a lane; expected at most 512"),
        ({"tile": (96, 64, 256)}, "tile M is 96; expected a power of two"),
        ({"tile": (64, 64, 64)}, "tile K is 64; expected a multiple of 128"),
        ({"tile": (16, 16, 256), "warps": 4}, "expected a fragment of 16 rows for each"),
        ({"stages": 1}, "expected at least 2 in the tiled form"),
        ({"warps": 3}, "warps is 3; expected 1, 2, 4 or 8"),
        ({"k_pack": 2}, "k_pack is 2; expected 1 in the tiled form"),
        ({"form": "packed", "k_pack": 3}, "k_pack is 3; expected 1, 2 or 4"),
        ({"form": "packed", "tile": (4, 16, 256), "k_pack": 2}, "of at least 16"),
        ({"form": "packed", "mma": (32, 32, 64)}, "expected 16x16x128 in the packed form"),
        ({"form": "stream"}, "form is 'stream'; expected 'tiled' or 'packed'"),
        ({"tile": None}, "needs a tile"),
        ({"mma": (16, 16, 32)}, "expected [16, 16, 128] or [32, 32, 64]"),
        ({"weight_layout": "tiled"}, "expected 'plain'"),
        ({"isa": "avx2"}, "isa is 'avx2'; expected none"),
    ],
)
def test_an_explicit_kernel_that_breaks_a_rule_is_refused(change, reason: str):
    assert reason in (select.verify(PROBLEM, replace(TILED, **change), FACTS) or "")
    assert select.verify(PROBLEM, TILED, FACTS) is None


def test_more_tiles_than_counters_are_refused():
    tier = KernelTier("tiled", tile=(16, 16, 128), warps=1, stages=2, splits=2)
    problem = ScaledMatmul(m=8192, n=2048, k=512)
    assert select.verify(problem, tier, FACTS) is None, "65,536 tiles can be counted"
    reason = select.verify(replace(problem, m=8193), tier, FACTS)
    assert reason is not None
    assert "65664 tiles to count in the launch; expected at most 65536" in reason
    for other in (replace(tier, reduce="second_launch"), replace(tier, splits=1)):
        assert select.verify(replace(problem, m=8193), other, FACTS) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lhs": "bf16"}, "x is bf16; gfx950 multiplies scaled f8E4M3FN or f8E5M2, or bf16, f16"),
        ({"lhs_scaled": False}, "x is f8E4M3FN; gfx950 multiplies scaled f8E4M3FN or f8E5M2, or"),
        ({"rhs": "bf16"}, "w is bf16; gfx950 multiplies scaled"),
        ({"rhs_block": (128, 128)}, "expected (1, 32) or (32, 32)"),
        ({"lhs": "f8E4M3FNUZ"}, "FNUZ types are those of gfx942: convert the model"),
    ],
)
def test_what_has_no_kernel_is_left_alone_with_a_reason(change, reason: str):
    selection = select.select(replace(PROBLEM, **change), FACTS)
    assert selection.config is None
    assert reason in selection.reason


def test_another_chip_is_refused_by_name():
    selection = select.select(PROBLEM, DeviceFacts(architecture="gfx942"))
    assert selection.config is None
    assert selection.reason == "needs gfx950 but the module is compiled for gfx942"


UNSCALED = ScaledMatmul(m=64, n=256, k=1024, lhs="bf16", lhs_scaled=False)
STREAMED = KernelTier("packed", tile=(16, 32, 256), warps=4, stages=2)


@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1, 33), (96, 640), (5120, 2048)])
def test_an_x_without_scales_has_a_kernel_for_every_m(lhs: str, n: int, k: int):
    problem = ScaledMatmul(m=None, n=n, k=k, lhs=lhs, lhs_scaled=False)
    for tier in chosen(problem):
        assert select.verify(problem, tier, FACTS) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"form": "tiled"}, "form is 'tiled'; expected 'packed' for an x without scales"),
        ({"k_pack": 2}, "k_pack is 2; expected 1 where x has no scales"),
        ({"mma": (16, 16, 128)}, "mma is [16, 16, 128]; expected [16, 16, 32]"),
        ({"tile": (8, 32, 256)}, "expected tile M and tile N of at least 16"),
        ({"tile": (128, 128, 256)}, "bytes of LDS; expected at most 163840"),
    ],
)
def test_an_explicit_kernel_for_an_x_without_scales_is_verified(change, reason: str):
    assert reason in (select.verify(UNSCALED, replace(STREAMED, **change), FACTS) or "")
    assert select.verify(UNSCALED, STREAMED, FACTS) is None
