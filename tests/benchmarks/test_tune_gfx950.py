# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tuner of the gfx950 table: what it searches, what it takes, and that it can be stopped."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tune_gfx950
from benchmarks.gfx950_candidates import best_candidates, better_order, formula_seconds
from benchmarks.tune_gfx950 import Measured, Tuner
from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.select import tier_from_table, tuned_tiers
from block32.lowering.problem import ScaledMatmul

TIER = KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2, mma=(16, 16, 128))


@pytest.mark.parametrize(("m", "n", "k"), [(8, 4096, 1280), (32, 5120, 576), (512, 1152, 5120)])
def test_candidates_fit_the_machine_and_waste_no_stage(m: int, n: int, k: int):
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    candidates = best_candidates(m, n, k, 6)
    assert len(set(candidates)) == 6
    for tier in candidates:
        geometry = Geometry(problem, tier)
        assert geometry.problem_with_tile() is None
        assert geometry.splits == tier.splits, "no split is empty"
        assert tier.stages <= max(2, geometry.steps_of_a_wave)


def test_the_formula_wants_the_machine_full_and_the_pipeline_deep():
    problem = ScaledMatmul(m=None, n=1024, k=8192, result="bf16")

    def seconds(tier: KernelTier) -> float:
        return formula_seconds(Geometry(problem, tier), 64)

    assert seconds(replace(TIER, splits=8)) < seconds(TIER), "16 tiles on 256 compute units"
    assert seconds(replace(TIER, stages=4)) < seconds(TIER), "memory is far away"


def test_neighbours_share_the_longer_side():
    problem = ScaledMatmul(m=None, n=512, k=4096)
    assert better_order(problem, TIER, m=64) == "n", "one row of tiles"
    narrow = ScaledMatmul(m=None, n=64, k=4096)
    assert better_order(narrow, TIER, m=8192) == "n", "one column: both orders are the same"
    wide = ScaledMatmul(m=None, n=65536, k=4096)
    assert better_order(wide, TIER, m=256) == "m", "few rows: a die keeps all of x and a part of w"


def test_the_table_reads_back_as_it_was_written():
    table = {(64, 128): (replace(TIER, max_m=8, splits=3, order="m"), replace(TIER, max_m=64))}
    (shape,) = tomllib.loads(tune_gfx950.table_text(table))["shapes"]
    assert (shape["n"], shape["k"]) == (64, 128)
    assert tuple(map(tier_from_table, shape["tiers"])) == table[64, 128]


def measurements(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    """Candidates by their stages, with these times instead of those of compiled kernels."""
    tiers = [replace(TIER, stages=stages) for stages in seconds]

    def measure(_self: Tuner, _m: int, _n: int, _k: int, tier: KernelTier) -> Measured | None:
        return Measured(tier, seconds[tier.stages], float(tier.stages))

    monkeypatch.setattr(tune_gfx950, "best_candidates", lambda *_: tiers)
    monkeypatch.setattr(tune_gfx950, "selected_tier", lambda *_: tiers[0])
    monkeypatch.setattr(Tuner, "_measure", measure)


def test_the_fewest_instructions_decide_between_equal_estimates(monkeypatch: pytest.MonkeyPatch):
    measurements(monkeypatch, {4: 1.00, 3: 1.01, 2: 1.50})
    tuner = Tuner(None, time.monotonic() + 60, tries=3)
    assert tuner.best(64, 256, 1024) == replace(TIER, stages=3, max_m=64)


def test_a_second_run_goes_on_where_the_first_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    state = tmp_path / "state.json"
    measurements(monkeypatch, {2: 1.0})
    assert Tuner(state, time.monotonic() + 60, tries=1).best(64, 256, 1024) is not None
    assert list(json.loads(state.read_text())) == ["256 1024 64"]
    late = Tuner(state, time.monotonic() - 1, tries=1)
    late.load()
    assert late.best(64, 256, 1024) == replace(TIER, max_m=64), "known already"
    assert late.best(128, 256, 1024) is None, "no time left to look"


@pytest.mark.parametrize(("n", "k"), tuned_tiers())
def test_the_table_has_only_what_fits_as_it_stands(n: int, k: int):
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    tiers = tuned_tiers()[n, k]
    assert tuple(tier.max_m for tier in tiers) == tune_gfx950.ROWS, "selection merges them"
    assert tiers[0].form == "packed", "a handful of rows, whose x may be quantised in the kernel"
    for tier in tiers:
        geometry = Geometry(problem, tier)
        assert geometry.problem_with_tile() is None
        assert geometry.splits == tier.splits
