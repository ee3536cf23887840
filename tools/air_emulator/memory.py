# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Device memory: buffers with exact bounds, bytes that know whether and by whom they were written.

An address is ``(buffer + 1) << 40 | offset``: arithmetic that leaves a buffer arrives in no other
one, because offsets stay far below 2^39.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from block32.tools.air_emulator.faults import (
    AirError,
    AlignmentError,
    OutOfBoundsError,
    PoisonError,
    RaceError,
    ReadOnlyError,
)

_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_NOBODY = -1
_MANY = -2


@dataclass
class Buffer:
    """One buffer of a dispatch.

    Attributes:
        name: For messages.
        data: Its bytes; stores go into this array.
        writable: Whether the kernel may store to it.
        initialized: Which bytes hold something; None means all.
    """

    name: str
    data: np.ndarray
    writable: bool = False
    initialized: np.ndarray | None = None
    writer: np.ndarray = field(init=False)
    reader: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise TypeError("a buffer's data is a one-dimensional uint8 array")
        size = self.data.size if self.writable else 0
        self.writer = np.full(size, _NOBODY, np.int64)
        self.reader = np.full(size, _NOBODY, np.int64)


class Memory:
    """The buffers of one dispatch. Threads are named by their number in it."""

    def __init__(self, buffers: list[Buffer], describe: Callable[[int], str]):
        self.buffers = buffers
        self._describe = describe

    def address(self, index: int) -> int:
        """Address of the first byte of a buffer."""
        return (index + 1) << _OFFSET_BITS

    def load(
        self, pointers: np.ndarray, size: int, alignment: int, threads: np.ndarray
    ) -> np.ndarray:
        """Bytes at each address, as uint8 of shape [threads, size]."""
        out = np.empty((pointers.size, size), np.uint8)
        for buffer, where, offsets in self._by_buffer(pointers, size, alignment, threads):
            who = threads if where is None else threads[where]
            data = _gather(buffer.data, offsets, size)
            self._check_load(buffer, offsets, size, who)
            if where is None:
                return data
            out[where] = data
        return out

    def store(
        self, pointers: np.ndarray, values: np.ndarray, alignment: int, threads: np.ndarray
    ) -> None:
        """Writes ``values``, uint8 of shape [threads, size], each at its address."""
        size = values.shape[1]
        for buffer, where, offsets in self._by_buffer(pointers, size, alignment, threads):
            who, what = (threads, values) if where is None else (threads[where], values[where])
            if not buffer.writable:
                self._fault(ReadOnlyError, who[0], f"store to the read-only buffer {buffer.name}")
            index = offsets[:, None] + np.arange(size)
            owner = np.broadcast_to(who[:, None], index.shape)
            for others, did in ((buffer.writer, "wrote"), (buffer.reader, "read")):
                seen = others[index]
                clash = (seen != _NOBODY) & (seen != owner)
                if clash.any():
                    self._race(buffer, "stores to", index, clash, owner, seen, did)
            buffer.writer[index] = owner
            clash = buffer.writer[index] != owner  # two threads in this very instruction
            if clash.any():
                seen = buffer.writer[index]
                self._race(buffer, "stores to", index, clash, owner, seen, "wrote")
            buffer.data[index] = what
            if buffer.initialized is not None:
                buffer.initialized[index] = True

    def _by_buffer(self, pointers: np.ndarray, size: int, alignment: int, threads: np.ndarray):
        """Yields (buffer, positions or None for all, offsets), bounds and alignment checked."""
        identities = pointers >> _OFFSET_BITS
        first = identities[0]
        if (identities == first).all():
            groups = [(int(first), None)]
        else:
            groups = [(int(i), np.flatnonzero(identities == i)) for i in np.unique(identities)]
        for identity, where in groups:
            offsets = (pointers if where is None else pointers[where]) & _OFFSET_MASK
            who = threads if where is None else threads[where]
            if not 1 <= identity <= len(self.buffers):
                self._fault(OutOfBoundsError, who[0], "access through an address of no buffer")
            buffer = self.buffers[identity - 1]
            bad = offsets + size > buffer.data.size
            if bad.any():
                at = int(np.argmax(bad))
                message = (
                    f"{size} bytes at offset {int(offsets[at])} of buffer {buffer.name}, "
                    f"which has {buffer.data.size}"
                )
                self._fault(OutOfBoundsError, who[at], message)
            if alignment > 1 and (offsets & (alignment - 1)).any():
                at = int(np.argmax((offsets & (alignment - 1)) != 0))
                message = f"offset {int(offsets[at])} of {buffer.name} is not {alignment}-aligned"
                self._fault(AlignmentError, who[at], message)
            yield buffer, where, offsets

    def _check_load(self, buffer: Buffer, offsets: np.ndarray, size: int, who: np.ndarray) -> None:
        if buffer.initialized is None and not buffer.writable:
            return
        index = offsets[:, None] + np.arange(size)
        if buffer.initialized is not None and not buffer.initialized[index].all():
            at = int(np.argmin(buffer.initialized[index].all(axis=1)))
            message = f"load of unwritten bytes at offset {int(offsets[at])} of {buffer.name}"
            self._fault(PoisonError, who[at], message)
        if buffer.writable:
            owner = np.broadcast_to(who[:, None], index.shape)
            seen = buffer.writer[index]
            clash = (seen != _NOBODY) & (seen != owner)
            if clash.any():
                self._race(buffer, "loads from", index, clash, owner, seen, "wrote")
            known = buffer.reader[index]
            alone = (known == _NOBODY) | (known == owner)
            buffer.reader[index] = np.where(alone, owner, _MANY)

    def _race(
        self,
        buffer: Buffer,
        does: str,
        index: np.ndarray,
        clash: np.ndarray,
        owner: np.ndarray,
        seen: np.ndarray,
        did: str,
    ) -> None:
        at = np.unravel_index(int(np.argmax(clash)), clash.shape)
        other = int(seen[at])
        whom = "several threads" if other == _MANY else self._describe(other)
        message = f"{does} byte {int(index[at])} of {buffer.name}, which {whom} {did}"
        self._fault(RaceError, int(owner[at]), message)

    def _fault(self, kind: type[AirError], thread: int, message: str) -> None:
        raise kind(f"{self._describe(int(thread))}: {message}")


def _gather(data: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """Rows of ``size`` bytes; through wider elements where every offset allows it."""
    if size in (2, 4, 8) and not (offsets & (size - 1)).any():
        wide = data[: data.size - data.size % size].view(f"u{size}")
        return wide[offsets // size].view(np.uint8).reshape(-1, size)
    return data[offsets[:, None] + np.arange(size)]
