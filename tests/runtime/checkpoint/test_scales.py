# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scales as bytes, and their exact changes of block."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime import reference
from block32.runtime.checkpoint.files import open_checkpoint
from block32.runtime.checkpoint.layers import ScaledWeight, find_weights
from block32.runtime.checkpoint.scales import compact, expand, read_bytes, to_bytes
from tests.checkpoints import E4M3, random_layer, save


def weight_with(folder: Path, scales: np.ndarray) -> ScaledWeight:
    codes = np.zeros((32 * scales.shape[0], 32 * scales.shape[1]), np.uint8).view(E4M3)
    path = save(folder / "m.safetensors", {"l.weight": codes, "l.weight_scale": scales})
    return find_weights(open_checkpoint(path))[0][0]


def test_all_bytes_as_f32_powers_of_two() -> None:
    values = reference.decode_scales(np.arange(255, dtype=np.uint8)).astype(np.float32)
    found, is_exact = to_bytes(values)
    assert is_exact.all()
    np.testing.assert_array_equal(found, np.arange(255))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, -1.0, 3.0, 0.0123, 2.0**-128, 2.0**-126 * 1.5, 2.0**-149, np.inf, np.nan]
)
def test_what_e8m0_has_not(value: float) -> None:
    assert not to_bytes(np.array([value], np.float32))[1].any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_powers_of_two_are_converted(tmp_path: Path, dtype: type) -> None:
    scales = np.array([[2.0**-127, 2.0**-5, 1.0], [2.0, 2.0**7, 2.0**127]]).astype(dtype)
    expected = [[0, 122, 127], [128, 134, 254]]
    np.testing.assert_array_equal(read_bytes(weight_with(tmp_path, scales)), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0123, r"'l.weight_scale' holds 0.0123\d* at \[1, 2\]; expected powers of two"),
        (-1.0, r"holds -1.0 at \[1, 2\]; expected powers of two from 2\^-127 to 2\^127"),
        (0.0, r"holds 0.0 at \[1, 2\]; expected powers of two"),
        (np.nan, r"'l.weight_scale' holds nan at \[1, 2\]"),
        (np.inf, r"'l.weight_scale' holds inf at \[1, 2\]"),
    ],
)
def test_other_numbers_are_refused(tmp_path: Path, value: float, message: str) -> None:
    scales = np.ones((2, 3), np.float32)
    scales[1, 2] = value
    with pytest.raises(DiagnosticError, match=message):
        read_bytes(weight_with(tmp_path, scales))


@settings(max_examples=60)
@given(
    n=st.integers(1, 200),
    blocks=st.integers(1, 9),
    block=st.sampled_from([(1, 32), (32, 32), (128, 128), (64, 32), (96, 64), (1, 128)]),
    draw=st.data(),
)
def test_expansion_of_any_part_is_repetition(
    n: int, blocks: int, block: tuple[int, int], draw: st.DataObject
) -> None:
    k = 32 * blocks - draw.draw(st.integers(0, 31))
    layer = random_layer(n, k, block)
    start = draw.draw(st.integers(0, n - 1))
    rows = range(start, draw.draw(st.integers(start + 1, n)))
    first = draw.draw(st.integers(0, blocks - 1))
    columns = range(32 * first, draw.draw(st.integers(32 * first + 1, max(k, 32 * first + 1))))
    found = expand(layer.scales, block, rows, columns)
    expected = layer.row_scales()[rows.start : rows.stop, first : -(-columns.stop // 32)]
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=60)
@given(n=st.integers(1, 100), k=st.integers(1, 100), draw=st.data())
def test_compaction_is_exact_or_refused(n: int, k: int, draw: st.DataObject) -> None:
    layer = random_layer(n, k, (32, 32))
    rows = layer.row_scales().copy()
    compacted = compact(rows)
    assert compacted is not None
    np.testing.assert_array_equal(compacted, layer.scales)
    at = draw.draw(st.integers(0, n - 1)), draw.draw(st.integers(0, rows.shape[1] - 1))
    rows[at] ^= 1
    # A block of a single row agrees with itself, whatever its scale.
    is_alone = n % 32 == 1 and at[0] == n - 1
    assert (compact(rows) is not None) == is_alone
