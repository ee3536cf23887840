# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arrival counter: one last arrival, and 0 again afterwards, launch after launch."""

from block32.lowering.common import counters


def test_one_arrival_is_the_last_and_the_counter_wraps():
    value, lasts = 0, []
    for _ in range(3 * 4):
        lasts.append(counters.is_last_arrival(value, arrivals=4))
        value = counters.count_arrival(value, arrivals=4)
    assert lasts == [False, False, False, True] * 3
    assert value == 0
