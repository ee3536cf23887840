# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising in the packing launch: the bits of a quantisation before the matmul."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import HOST, Processor, every_processor, run, scales
from tests.numbers import random_codes

PROBLEM = ScaledMatmul(None, 70, 104, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil")
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
FP8 = ml_dtypes.float8_e4m3fn


def weights(problem: ScaledMatmul) -> list[npt.NDArray]:
    rng = np.random.default_rng(1)
    w = random_codes(rng, (problem.n, problem.k), "f8E4M3FN").view(FP8)
    return [w, scales(rng.integers(118, 136, problem.rhs_scale_shape, dtype=np.uint8))]


def activation(problem: ScaledMatmul, m: int) -> npt.NDArray:
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, problem.k)) * 10.0 ** rng.uniform(-3, 3, (m, 1))
    return x.astype(DTYPES[problem.lhs])


def check(
    problem: ScaledMatmul, x: npt.NDArray, processor: Processor = HOST, *extra: npt.NDArray
) -> None:
    """Both ways on one machine, byte for byte; and the codes of the one are the reference's."""
    w, w_scale = weights(problem)
    codes, x_scale = reference.quantize(x, problem.lhs_quantize)  # type: ignore[arg-type]
    got = run(problem, processor, x, w, w_scale, *extra)
    two_steps = problem.quantized()
    want = run(two_steps, processor, codes.view(FP8), w, scales(x_scale), w_scale, *extra)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@every_processor
@pytest.mark.parametrize("m", [3, 13])
def test_every_kind_of_processor(processor: Processor, m: int) -> None:
    """Both forms; K = 104 has a short block, and N = 70 a short panel."""
    check(dataclasses.replace(PROBLEM, m=m), activation(PROBLEM, m), processor)


def test_every_tier_and_no_rows() -> None:
    for m in (1, 3, 8, 13, 0):
        check(PROBLEM, activation(PROBLEM, m))


@pytest.mark.parametrize("rule", ["rceil", "floor", "even", "ceil"])
def test_every_rule(rule: str) -> None:
    problem = dataclasses.replace(PROBLEM, m=2, lhs_quantize=rule)
    check(problem, activation(problem, 2))


@pytest.mark.parametrize(("lhs", "m"), [("f16", 2), ("f32", 13)])
def test_every_type(lhs: str, m: int) -> None:
    problem = dataclasses.replace(PROBLEM, m=m, lhs=lhs)
    check(problem, activation(problem, m))


def test_zeros_denormals_infinities_and_nans() -> None:
    """Each stays in its block; two NaNs of one row are not of one block."""
    problem = dataclasses.replace(PROBLEM, m=7, lhs="f32")
    x = activation(problem, 7)
    x[0] = 0.0
    x[1] = 1e-38
    x[2, ::2] = 0.0
    x[3, 40] = np.inf
    x[4, 10], x[4, 100] = np.nan, -np.nan
    x[5, 64:96] = np.nextafter(np.float32(4), np.float32(0))
    check(problem, x)


def test_with_an_epilogue_and_a_static_m() -> None:
    problem = dataclasses.replace(PROBLEM, m=5, epilogue=Epilogue(bias="f32", activation="gelu"))
    check(problem, activation(problem, 5), HOST, np.linspace(-2, 2, 70, dtype=np.float32))


def test_a_tier_that_does_not_quantise_where_it_packs_is_refused() -> None:
    facts = HOST.facts
    config = CpuTarget().select(PROBLEM, facts).config
    assert config is not None
    assert all(CpuTarget().verify(PROBLEM, tier, facts) is None for tier in config.tiers)
    separate: KernelTier = dataclasses.replace(config.tiers[-1], quantize="separate")
    refused = CpuTarget().verify(PROBLEM, separate, facts)
    assert refused == "expected quantize 'fused': the activation is quantised where it is packed"
