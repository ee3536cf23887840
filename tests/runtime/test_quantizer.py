# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The quantiser for weights of any size, against the reference: equal bytes, and the loss."""

from __future__ import annotations

import numpy as np
import pytest

from block32.runtime import reference
from block32.runtime.quantizer import FORMATS, quantize_rows

RNG = np.random.default_rng(2)
WIDE = (RNG.standard_normal((70, 100)) * 10.0 ** RNG.integers(-35, 30, (70, 1))).astype(np.float32)
EDGES = np.zeros((33, 40), np.float32)
EDGES[:9, 0] = (256, 448, 449, 480, 496, 512, 633, 634, 897)
EDGES[10], EDGES[11], EDGES[12, 1] = 1e-38, 1e-45, -400


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize(("name", "element"), [("mxfp8", "e4m3"), ("mxfp4", "e2m1")])
def test_bytes_are_those_of_the_reference(
    name: str, element: reference.Element, block_rows: int, rule: reference.Rule
) -> None:
    for values in (WIDE, EDGES):
        codes, scales, loss = quantize_rows(values, block_rows, rule, FORMATS[name])
        want = reference.quantize_weight(values, (block_rows, 32), rule, element)
        np.testing.assert_array_equal(codes, want[0])
        np.testing.assert_array_equal(scales, want[1])
        restored = reference.dequantize(codes, scales, (block_rows, 32), element)
        restored = restored[:, : values.shape[1]]
        error = np.linalg.norm(restored - values.astype(float)) / np.linalg.norm(
            values.astype(float)
        )
        assert loss.relative() == pytest.approx(error, rel=1e-5)


def test_clipped_values_are_counted() -> None:
    """Under the floor rule 449 to 511 pass the largest value."""
    values = np.full((32, 32), 500.0, np.float32)
    values[0, 0] = 448.0
    _, _, loss = quantize_rows(values, 32, "floor", FORMATS["mxfp8"])
    assert loss.clipped == 32 * 32 - 1
    assert quantize_rows(values, 32, "rceil", FORMATS["mxfp8"])[2].clipped == 0
