# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What kernels keep beside operands and result, and sums that rest in the result itself."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.cpu import tiled
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import Processor, every_processor, run
from tests.numbers import random_operands

BYTES = {"i8": 1, "i32": 4, "f32": 4}


def beside(problem: ScaledMatmul, processor: Processor) -> int:
    """Bytes of all buffers between the launches of ``problem``."""
    assert problem.m is not None
    tiers: tuple[KernelTier, ...] = CpuTarget().select(problem, processor.facts).config.tiers  # type: ignore[union-attr]
    buffers = CpuTarget().plan(problem, tiers).buffers.values()
    return sum(BYTES[b.element] * as_integer(b.size(problem.m)) for b in buffers)


@every_processor
@pytest.mark.parametrize(("m", "n", "k"), [(8, 7168, 2048), (32, 7168, 2048), (256, 4096, 4096)])
def test_a_tenth_of_operands_and_result_is_enough(
    processor: Processor, m: int, n: int, k: int
) -> None:
    """Packed x, its scales and flags; sums and panels need no buffer."""
    operands_and_result = (m + n) * k + (m + n // 32) * (k // 32) + 4 * m * n
    assert beside(ScaledMatmul(m, n, k), processor) <= operands_and_result / 10


@every_processor
@pytest.mark.parametrize("result", ["f32", "bf16"])
def test_rows_that_share_a_place_are_added_once(
    processor: Processor, result: Literal["f32", "bf16"]
) -> None:
    """A last slab that is not full, over several parts of K, folded and with a scale apart."""
    problem = ScaledMatmul(None, 128, 424, result=result, epilogue=Epilogue(bias="f32"))
    assert tiled.sums_rest_in_result(problem) == (result == "f32")
    bias = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    for m in (20, 43):
        for scale in (127, 20):
            operands = random_operands(dataclasses.replace(problem, epilogue=Epilogue()), m, seed=m)
            operands.lhs_scale[m - 1] = scale
            got = run(problem, processor, *operands.arrays(), bias)
            expected = operands.expected() + bias
            comparison = reference.compare(got, expected, result)
            assert comparison.ok, (m, scale, comparison)
