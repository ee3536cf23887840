# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls on the CPU: every form, every kind of processor, and hostile offsets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import block32
from block32.lowering.cpu import grouped as kernels
from block32.lowering.cpu.select import profiles
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.problem import Grouping, ScaledMatmul
from tests.grouped import CASES, W8A16, Arrays, compare, grouped, operands, program, viewed
from tests.lowering.cpu.support import HOST, Processor, every_processor, run
from tests.numbers import run_function


def check(problem: ScaledMatmul, arrays: Arrays, processor: Processor = HOST) -> np.ndarray:
    got = run(problem, processor, *viewed(problem, arrays))
    comparison = compare(problem, got, arrays)
    assert comparison.ok, comparison
    return got


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    problem, tokens, ids = CASES[name]
    offsets = np.cumsum([0, *tokens]).tolist()
    check(dataclasses.replace(problem, m=offsets[-1]), operands(problem, offsets, ids, offsets[-1]))


RAGGED = grouped(70, 72, 3, 3)


@every_processor
@pytest.mark.parametrize(("offsets", "m"), [([1, 2, 4, 8], 9), ([0, 3, 33, 33], 36)])
def test_every_kind_of_processor(processor: Processor, offsets: list[int], m: int) -> None:
    """A few rows a group are streamed, more are tiled."""
    problem = dataclasses.replace(RAGGED, m=m)
    check(problem, operands(problem, offsets, [2, 0, 2], m), processor)


def test_every_tier() -> None:
    """From less than a row a group to a group whose rows end in the middle of a slab."""
    for offsets, m in (([0, 0, 1, 1], 2), ([1, 2, 4, 8], 9), ([1, 19, 19, 24], 24)):
        check(RAGGED, operands(RAGGED, offsets, [2, 0, 2], m))


def test_groups_of_several_parts() -> None:
    """1000 rows of one expert are three parts of 384 rows; the next group begins in a slab's
    middle."""
    problem = dataclasses.replace(grouped(40, 64, 2, 3), m=1013)
    got = check(problem, operands(problem, [3, 1003, 1010, 1010], [1, 0, 1], 1013))
    assert np.isfinite(got).all()


def test_a_model_of_eight_experts() -> None:
    problem = dataclasses.replace(grouped(1856, 2688, 8, 6, **W8A16), m=6)
    check(problem, operands(problem, [0, 1, 2, 4, 4, 5, 6], [0, 3, 1, 4, 5, 2], 6))


@pytest.mark.parametrize("m", [0, 5])
def test_static_rows(m: int) -> None:
    problem = dataclasses.replace(CASES["ragged"][0], m=m)
    offsets = [0, 0, 0, 0] if m == 0 else [0, 2, 2, 4]
    assert check(problem, operands(problem, offsets, [1, 0, 3], m)).shape == (m, 70)


@pytest.mark.parametrize(
    "offsets",
    [[0, 900, 2, 7], [-5, 3, 8, 8], [9, 1, 9, 0], [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]],
    ids=["past the end", "negative", "falling", "huge"],
)
def test_offsets_that_make_no_sense_stay_inside_y(offsets: list[int]) -> None:
    """What y holds is undefined; that nothing else is written shows in what is computed after."""
    problem = dataclasses.replace(CASES["ragged"][0], m=9)
    bad = operands(problem, [0, 2, 4, 9], [1, 0, 3], 9)
    bad["offsets"][:] = offsets
    assert run(problem, HOST, *viewed(problem, bad)).shape == (9, 70)
    check(problem, operands(problem, [0, 2, 4, 9], [1, 0, 3], 9))


def test_nan_weights_of_other_experts_are_not_read() -> None:
    problem = dataclasses.replace(CASES["out of order"][0], m=10)
    arrays = operands(problem, [0, 3, 3, 8, 10], [2, 0, -1, 2], 10)
    for expert in (0, 1, 3):
        arrays["rhs"][expert] = 0x7F
        arrays["rhs_scale"][expert] = 255
    assert np.isfinite(check(problem, arrays)).all()


@pytest.mark.parametrize("tokens", [[3, 0, 5], [0, 0, 1], [7, 7, 7], [384, 1, 0], [385, 12, 6]])
def test_parts_and_slabs_fit_their_buffers(tokens: list[int]) -> None:
    """The bound that grids and buffers are made from, for each tier of each processor."""
    problem, m = grouped(64, 64, 3, 3), sum(tokens)
    for tier in (tier for profile in profiles() for tier in profile.tiers):
        rows, slab = kernels.rows_of_part(tier), kernels.rows_of_slab(tier)
        assert rows % slab == 0, "a part has whole slabs"
        most_parts = kernels.most_parts(problem, tier, m)
        most_slabs = kernels.most_slabs(problem, tier, m)
        assert isinstance(most_parts, int)
        assert isinstance(most_slabs, int)
        assert sum(-(-count // rows) for count in tokens) <= most_parts
        assert sum(-(-count // slab) for count in tokens) <= most_slabs


def test_a_part_of_no_whole_slabs_is_refused() -> None:
    problem, facts = grouped(64, 64, 3, 3), HOST.facts
    config = CpuTarget().select(problem, facts).config
    assert config is not None
    assert all(CpuTarget().verify(problem, tier, facts) is None for tier in config.tiers)
    tier = config.tiers[-1]
    assert tier.tile is not None
    odd = dataclasses.replace(tier, tile=(tier.tile[0] + 1, *tier.tile[1:]))
    assert "expected tile[0] to be a multiple of mma[0]" in (
        CpuTarget().verify(problem, odd, facts) or ""
    )


def test_a_program_that_reads_init_again() -> None:
    """The dispatch writes where init was: another reader gets a copy."""
    problem, tokens, ids = CASES["out of order"]
    problem = dataclasses.replace(problem, m=10)
    text = program(problem).replace(
        "    return %0 : tensor<10x128xf32>",
        "    %twice = arith.addf %0, %arg6 : tensor<10x128xf32>\n"
        "    return %twice : tensor<10x128xf32>",
    )
    assert "%twice" in text
    arrays = operands(problem, np.cumsum([0, *tokens]).tolist(), ids, 10)
    got = run_function(block32.compile(text, target="cpu"), "main", *viewed(problem, arrays))
    comparison = compare(problem, got - arrays["init"], arrays)
    assert comparison.relative_frobenius < 1e-5


def test_no_groups() -> None:
    problem = dataclasses.replace(CASES["out of order"][0], grouping=Grouping(4, 0))
    arrays = operands(problem, [0], [], 5)
    np.testing.assert_array_equal(run(problem, HOST, *viewed(problem, arrays)), arrays["init"])
