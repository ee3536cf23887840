# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arrival counter: one last arrival, and 0 again afterwards, launch after launch."""

from block32.lowering.common.counters import wrapping_limit


def uinc_wrap(value: int, limit: int) -> int:
    """The atomic of LLVM's language reference: ``(old u>= operand) ? 0 : (old + 1)``."""
    return 0 if value >= limit else value + 1


def test_one_arrival_is_the_last_and_the_counter_wraps():
    value, lasts, limit = 0, [], wrapping_limit(arrivals=4)
    for _ in range(3 * 4):
        lasts.append(value == limit)
        value = uinc_wrap(value, limit)
    assert lasts == [False, False, False, True] * 3
    assert value == 0
