# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arrival counters: how the workgroups of one tile agree on who adds their partial sums.

Each workgroup publishes its partial sum, waits until the stores have arrived, and counts itself.
The counter wraps to 0 at the last arrival, so it is ready for the next launch, and nobody waits
for anybody. The last to arrive reads every partial, its own as well, and adds them in split order.
"""

from __future__ import annotations


def wrapping_limit(arrivals: int) -> int:
    """The operand of an atomic ``uinc_wrap`` that goes back to 0 after ``arrivals`` calls.

    It is also what the last of them finds in the counter.
    """
    return arrivals - 1
