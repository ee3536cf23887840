# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels with one thing taken out: the executor names what is wrong, or the numbers do."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.tools.ptx_executor import PtxError, parse_ptx
from tests.lowering.nvidia.kernels import STREAM, TILED, WGMMA, ptx_text, run_kernels
from tests.lowering.nvidia.test_numbers import scaled_operands

PROBLEM = ScaledMatmul(None, 40, 640)


def run_mutated(tier: KernelTier, pattern: str, replacement: str, count: int = 0) -> np.ndarray:
    """Replace ``pattern`` in the PTX, which must be there, and run it on 9 rows."""
    text = ptx_text(PROBLEM, "sm_90a", tier)
    mutated, found = re.subn(pattern, replacement, text, count=count)
    assert found, f"nothing to mutate: {pattern}"
    arrays, _, _ = scaled_operands(PROBLEM, 9)
    return run_kernels(PROBLEM, "sm_90a", tier, arrays, 9, kernels=parse_ptx(mutated))


CAUGHT = {
    "the wait for copies in a ring of a warp": (
        STREAM,
        r"cp\.async\.wait_group\s+1;",
        "cp.async.wait_group 2;",
        "nothing has written",
    ),
    "the wait for copies of a workgroup": (
        TILED,
        r"cp\.async\.wait_group\s+1;",
        "cp.async.wait_group 2;",
        "nothing has written",
    ),
    "all barriers": (TILED, r"bar\.sync\s+0;", "", "no barrier between|nothing has written"),
    "the fence before wgmma": (WGMMA, r"fence\.proxy\.async[^;]*;", "", "made visible"),
    "the wait for wgmma": (
        WGMMA,
        r"wgmma\.wait_group\.sync\.aligned 1;",
        "",
        "read before it is written",
    ),
    "the last wait for wgmma": (
        WGMMA,
        r"wgmma\.wait_group\.sync\.aligned 0;",
        "wgmma.wait_group.sync.aligned 1;",
        "read before it is written",
    ),
}


@pytest.mark.parametrize("what", CAUGHT)
def test_the_executor_names_what_is_missing(what: str):
    tier, pattern, replacement, words = CAUGHT[what]
    with pytest.raises(PtxError, match=words):
        run_mutated(tier, pattern, replacement)


def test_a_counter_that_does_not_wrap_is_noticed():
    with pytest.raises(AssertionError, match="not set back"):
        run_mutated(replace(STREAM, splits=2), r"(inc\.u32\s+[^;]*), 1;", r"\1, 2;")


def test_a_wrong_scale_byte_is_a_wrong_number():
    arrays, want, magnitude = scaled_operands(PROBLEM, 9)
    del arrays
    # The second byte of a word is shifted to the exponent field; the mutant takes the first.
    y = run_mutated(STREAM, r"(shl\.b32\s+%r\d+, %r\d+), 15;", r"\1, 23;")
    assert np.max(np.abs(y - want) / magnitude) > 1e-3


def test_an_edge_mask_that_is_off_by_one_leaves_a_buffer():
    # 40 columns: the guard of the last tile compares with 40.
    with pytest.raises(PtxError, match="touches byte"):
        run_mutated(STREAM, r"(setp\.[lg][te]\.u32\s+%p\d+, %r\d+), (39|40);", r"\1, 48;")
