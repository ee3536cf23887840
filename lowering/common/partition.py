# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K: which part of K each of several workgroups takes."""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.common.index import Index, minimum
from block32.lowering.problem import ceil_div


@dataclass(frozen=True)
class SplitPartition:
    """K cut into ``count`` ranges of ``size``, the last one shorter.

    Attributes:
        k: The whole reduction.
        size: K elements of a range, a multiple of the kernel's K step.
        count: Ranges that are not empty; may be fewer than were asked for.
    """

    k: int
    size: int
    count: int

    @classmethod
    def create(cls, k: int, splits: int, step: int) -> SplitPartition:
        """Cut ``k`` into at most ``splits`` ranges of whole steps."""
        size = ceil_div(ceil_div(k, splits), step) * step
        return cls(k, size, ceil_div(k, size))

    def start(self, split: Index) -> Index:
        """The first K of a range."""
        return split * self.size

    def end(self, split: Index) -> Index:
        """One past the last K of a range."""
        return minimum(split * self.size + self.size, self.k)
