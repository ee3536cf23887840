# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The yardstick: Triton's kernels compute the same product, and the machine code is held alike."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from benchmarks.gfx950_rank import place_winner
from benchmarks.gfx950_triton import compile_tier, tuned_tier, tuned_tiers
from block32.dialects.kernel import KernelTier
from block32.runtime import reference
from block32.tools.gfx950_executor import Buffer, Executor

TIERS = {
    "tiled": KernelTier("tiled", tile=(32, 32, 128), warps=2, stages=2),
    "split": KernelTier("tiled", tile=(32, 32, 128), warps=1, stages=2, splits=2),
    "packed": KernelTier("packed", tile=(8, 16, 128), k_pack=2, warps=2, stages=2),
    "M fastest": KernelTier("tiled", tile=(16, 64, 128), warps=2, stages=2, order="m"),
}


@pytest.mark.parametrize("name", TIERS)
def test_the_yardstick_multiplies_right(name: str):
    M, N, K = (5 if name == "packed" else 40), 48, 512
    tier = TIERS[name]
    kernel = compile_tier(tier, K)
    rng = np.random.default_rng(len(name))
    x, w = (rng.integers(0, 0x70, (rows, K), dtype=np.uint8) for rows in (M, N))
    x_scale = rng.integers(120, 134, (M, K // 32), dtype=np.uint8)
    w_scale = rng.integers(120, 134, (ceil(N / 32), K // 32), dtype=np.uint8)
    assert tier.tile is not None
    tiles = ceil(M / tier.tile[0]) * ceil(N / tier.tile[1])
    assert tiles <= 8
    programs = [8 * split + tile for split in range(tier.splits) for tile in range(tiles)]
    y = np.zeros((M, N), ml_dtypes.bfloat16)
    slots = np.zeros((8, tier.splits, *tier.tile[:2]), np.float32)
    counters = np.zeros(8, np.int32)
    operands: list[Any] = [Buffer(array, writable=False) for array in (x, w, x_scale, w_scale)]
    Executor(kernel.hsaco).launch(
        kernel.facts.name,
        (8 * tier.splits,),
        [*operands, Buffer(y, initialised=False), slots, counters],
        [M, N, K],
        dynamic_lds_bytes=kernel.facts.lds_bytes,
        workgroups=[(program, 0, 0) for program in programs],
    )
    wanted = reference.scaled_matmul(x, x_scale, w, w_scale, rhs_block=(32, 32))
    np.testing.assert_allclose(
        y.astype(np.float64), wanted, rtol=2**-8, atol=1e-5 * np.abs(wanted).max()
    )


def test_every_shape_has_a_configuration_for_any_rows():
    for n, k in tuned_tiers():
        tiers = tuned_tiers()[n, k]
        assert tuned_tier(1, n, k) == tiers[0]
        assert tuned_tier(10**6, n, k) == tiers[-1], "the last one serves all above"
    assert tuned_tier(9, 1152, 5120).tile == (16, 32, 512)


def test_the_estimate_puts_the_fastest_on_the_card_before_kernels_of_the_wrong_size():
    shape = (512, 4096, 1280)
    wrong = [
        KernelTier("packed", tile=(8, 16, 256), k_pack=4, warps=4, stages=2, mma=(16, 16, 128)),
        KernelTier("tiled", tile=(16, 32, 256), warps=2, stages=2, mma=(16, 16, 128)),
    ]
    won = replace(tuned_tier(*shape), max_m=None, waves_per_eu=0)
    placed = place_winner(*shape, [won, *wrong])
    assert placed.place == 0.0
    assert placed.behind == 1.0
