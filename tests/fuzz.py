# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Damaged files for the readers of binary formats, and what a reader may do with them.

A reader gives a value or its own error. It does not end in another exception, does not hang, and
does not allocate what a number in the file asks for.
"""

from __future__ import annotations

import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

#: A reader of small files that takes this long does not end.
_HANGS_AFTER_SECONDS = 60

#: Numbers that sizes and offsets are not made for.
_WORDS = (0, 1, 7, 0x7F, 0x80, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with one to four things wrong: words, bits, and ranges lost, doubled or put in."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        size = draw(st.sampled_from([1, 2, 4, 8]))
        match draw(st.sampled_from(["word", "byte", "bit", "cut", "lose", "double", "insert"])):
            case "word":
                word = draw(st.sampled_from(_WORDS)) & (256**size - 1)
                data[at : at + size] = word.to_bytes(size, "little")
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "bit" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "lose":
                del data[at : at + size]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


def check_reader(
    read: Callable[[bytes], object], data: bytes, error: type[Exception], most_bytes: int
) -> None:
    """Read damaged data: a value or ``error``, within a bound of time and of memory.

    Args:
        read: The reader.
        data: The file.
        error: The reader's own error; its message is one line.
        most_bytes: What it may allocate, at the peak.
    """
    with _ends(), _allocates_at_most(most_bytes):
        try:
            read(data)
        except error as caught:
            assert str(caught) and "\n" not in str(caught)


@contextmanager
def _ends() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError(f"the reader has not ended after {_HANGS_AFTER_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_HANGS_AFTER_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _allocates_at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= size, f"{peak - before} bytes were allocated; expected at most {size}"
