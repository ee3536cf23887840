# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Device memory and shared memory, with the checks that hardware leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


class PtxError(Exception):
    """What a kernel did that it must not do; the message names the instruction."""


class GlobalMemory:
    """The buffers of a launch, far apart from each other."""

    def __init__(self) -> None:
        """Without buffers; ``add`` gives each its address."""
        self._buffers: list[tuple[int, Bytes, bool]] = []
        self._next = 1 << 32

    def add(self, data: Bytes, is_writable: bool) -> int:
        """Place a buffer, which stores change in place; its address."""
        base = self._next
        self._buffers.append((base, data, is_writable))
        self._next += (data.size + (1 << 24)) & ~0xFFFF
        return base

    def gather(self, addresses: Addresses, size: int) -> Bytes:
        """``[len(addresses), size]`` bytes."""
        result = np.zeros((len(addresses), size), np.uint8)
        for places, inside, data, _ in self._places(addresses, size):
            result[inside] = data[places]
        return result

    def scatter(self, addresses: Addresses, values: Bytes) -> None:
        """Store ``[len(addresses), size]`` bytes."""
        for places, inside, data, is_writable in self._places(addresses, values.shape[1]):
            if not is_writable:
                raise PtxError("store to a buffer that the launch only reads")
            data[places] = values[inside]

    def _places(
        self, addresses: Addresses, size: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_], Bytes, bool]]:
        """For each buffer that is met: places in it, the addresses that they are of, its bytes."""
        if np.any(addresses % size):
            raise PtxError(f"address {int(addresses[0]):#x} is not aligned to {size} bytes")
        found = np.zeros(len(addresses), bool)
        for base, data, is_writable in self._buffers:
            inside = (addresses >= base) & (addresses + size <= base + data.size)
            found |= inside
            if inside.any():
                places = (addresses[inside] - base)[:, None] + np.arange(size)
                yield places, inside, data, is_writable
        if not found.all():
            bad = int(addresses[~found][0])
            base, data, _ = max(
                (buffer for buffer in self._buffers if buffer[0] <= bad),
                key=lambda buffer: buffer[0],
                default=self._buffers[0],
            )
            raise PtxError(f"touches byte {bad - base} of a buffer of {data.size} bytes")


class SharedMemory:
    """A workgroup's shared memory.

    Every byte remembers who wrote and who read it since which barrier. ``epoch`` is the number of
    barriers so far.
    """

    def __init__(self, size: int):
        """``size`` bytes, all of them unwritten."""
        self.data = np.zeros(size, np.uint8)
        self.epoch = 0
        self._writer = np.full(size, -1, np.int32)
        self._write_epoch = np.full(size, -1, np.int32)
        self._reader = np.full(size, -1, np.int32)
        self._read_epoch = np.full(size, -1, np.int32)
        self._fenced = np.zeros(size, bool)

    def fence_proxy(self, warp: int) -> None:
        """What the warp wrote so far may be read through the asynchronous proxy."""
        self._fenced |= self._writer == warp

    def gather_async(self, places: NDArray[np.int64], warp: int) -> Bytes:
        """Bytes that ``wgmma`` reads, by address."""
        data = self.gather(places.reshape(-1), 1, warp).reshape(places.shape)
        if not self._fenced[places - SHARED_BASE].all():
            raise PtxError("wgmma reads what no fence.proxy.async has made visible to it")
        return data

    def gather(self, addresses: Addresses, size: int, warp: int) -> Bytes:
        """``[len(addresses), size]`` bytes, read by a warp."""
        places = self._places(addresses, size)
        writer = self._writer[places]
        if (writer < 0).any():
            raise PtxError("reads shared memory that nothing has written")
        if ((writer != warp) & (self._write_epoch[places] == self.epoch)).any():
            raise PtxError("reads what another warp wrote, with no barrier between")
        seen = self._read_epoch[places] == self.epoch
        others = seen & (self._reader[places] != warp)
        self._reader[places] = np.where(others, _SEVERAL, warp)
        self._read_epoch[places] = self.epoch
        return self.data[places]

    def check_write(self, addresses: Addresses, size: int, warp: int) -> None:
        """Refuse a write that another warp's access of this epoch races with."""
        places = self._places(addresses, size)
        read = (self._read_epoch[places] == self.epoch) & (self._reader[places] != warp)
        if read.any():
            raise PtxError("overwrites what another warp reads, with no barrier between")
        written = (self._write_epoch[places] == self.epoch) & (self._writer[places] != warp)
        if written.any():
            raise PtxError("overwrites what another warp wrote, with no barrier between")

    def scatter(self, addresses: Addresses, values: Bytes, warp: int) -> None:
        """Store ``[len(addresses), size]`` bytes."""
        self.check_write(addresses, values.shape[1], warp)
        places = self._places(addresses, values.shape[1])
        self.data[places] = values
        self._writer[places] = warp
        self._write_epoch[places] = self.epoch
        self._fenced[places] = False

    def _places(self, addresses: Addresses, size: int) -> NDArray[np.int64]:
        if np.any(addresses % min(size, 16)):
            raise PtxError(f"shared address {int(addresses[0])} is not aligned to {size} bytes")
        places = addresses[:, None] - SHARED_BASE + np.arange(size)
        if places.min() < 0 or places.max() >= self.data.size:
            raise PtxError(f"byte {int(places.max())} of {self.data.size} of shared memory")
        return places


#: Where a workgroup's shared memory begins, as on Hopper.
SHARED_BASE = 1024

_SEVERAL = -2
