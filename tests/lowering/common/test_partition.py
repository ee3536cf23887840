# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K ranges cover K once, in whole steps."""

import pytest

from block32.lowering.common.index import as_integer
from block32.lowering.common.partition import SplitPartition


@pytest.mark.parametrize(
    ("k", "splits", "step"),
    [(12800, 8, 128), (12800, 8, 256), (5120, 5, 1024), (4096, 4, 512), (96, 3, 128), (33, 2, 128)],
)
def test_ranges_cover_k_once(k: int, splits: int, step: int):
    partition = SplitPartition.create(k, splits, step)
    covered = []
    for split in range(partition.count):
        start = as_integer(partition.start(split))
        end = as_integer(partition.end(split))
        assert start % step == 0
        assert start < end, "no range is empty"
        covered += range(start, end)
    assert covered == list(range(k))
    assert partition.count <= splits


def test_ranges_that_would_be_empty_are_dropped():
    assert SplitPartition.create(1280, splits=4, step=512).count == 3
    assert SplitPartition.create(100, splits=8, step=128).count == 1
