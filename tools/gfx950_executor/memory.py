# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Memory as a launch sees it: buffers (regions), LDS of a workgroup, scratch of a wave.

Everything is bounds-checked and carries poison: a mask of bits that nobody has written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from block32.tools.gfx950_executor.errors import MissingWaitError, OutOfBoundsError, RaceError
from block32.tools.gfx950_executor.state import LANES, U32, Wave
from block32.tools.gfx950_executor.waits import Index

Bytes = npt.NDArray[np.uint8]

# Each region lives in a slot of its own, 1 TiB apart, and straddles a 4 GiB border after its
# first page, so that an address computed with a lost carry falls outside of it.
_SLOT_BITS = 40
_OFFSET_IN_SLOT = 0xFFFFF000
_ARANGE = np.arange(64)


@dataclass(eq=False)
class Region:
    """One buffer.

    Attributes:
        name: For messages.
        data: Its bytes, uint8; the caller's own storage.
        address: Where a kernel finds it.
        writable: Whether a store to it is allowed.
        poison: uint8 mask of uninitialised bits, or None where all is initialised.
        writer, reader: the epoch that last touched each byte (see races).
        track_reads: Whether loads are stamped; useless where nothing may store.
    """

    name: str
    data: Bytes
    address: int
    writable: bool = True
    poison: Bytes | None = None
    writer: npt.NDArray[np.int32] | None = None
    reader: npt.NDArray[np.int32] | None = None

    @property
    def track_reads(self) -> bool:
        """Loads need stamps only where a store may follow."""
        return self.writable

    def writers(self) -> npt.NDArray[np.int32]:
        """The writer stamps, made at the first store."""
        if self.writer is None:
            self.writer = np.zeros(len(self.data), np.int32)
        return self.writer

    def readers(self) -> npt.NDArray[np.int32]:
        """The reader stamps, made at the first load."""
        if self.reader is None:
            self.reader = np.zeros(len(self.data), np.int32)
        return self.reader


class Memory:
    """All regions of one launch."""

    def __init__(self) -> None:
        self._slots: dict[int, Region] = {}

    def add(self, name: str, data: Bytes, writable: bool, initialised: bool) -> Region:
        """Map a buffer; its poison mask is full unless it is initialised."""
        slot = len(self._slots) + 1
        poison = None if initialised else np.full(len(data), 0xFF, np.uint8)
        address = (slot << _SLOT_BITS) + _OFFSET_IN_SLOT
        region = Region(name, data, address, writable, poison)
        self._slots[slot] = region
        return region

    def resolve(
        self, addresses: npt.NDArray[np.uint64], size: int
    ) -> Iterator[tuple[Region, Index, Index]]:
        """Find the regions of some accesses.

        Args:
            addresses: uint64[n].
            size: Bytes of each access.

        Yields:
            (region, positions in ``addresses``, byte offsets in the region).

        Raises:
            OutOfBoundsError: An access is not wholly inside a region.
        """
        slots = addresses >> np.uint64(_SLOT_BITS)
        if not len(slots):
            return
        # All lanes in one buffer is the common case.
        alone = (slots == slots[0]).all()
        for slot in slots[:1] if alone else np.unique(slots):
            where = _ARANGE[: len(slots)] if alone else np.flatnonzero(slots == slot)
            region = self._slots.get(int(slot))
            if region is None:
                raise OutOfBoundsError(
                    f"address {int(addresses[where[0]]):#x} belongs to no buffer"
                )
            offsets = (addresses[where] - np.uint64(region.address)).astype(np.int64)
            bad = (offsets < 0) | (offsets + size > len(region.data))
            if bad.any():
                at = int(offsets[np.flatnonzero(bad)[0]])
                raise OutOfBoundsError(
                    f"{size} bytes at offset {at} of {region.name}, which has {len(region.data)}"
                )
            yield region, where, offsets


def byte_index(offsets: Index, size: int) -> Index:
    """Byte indices int64[n, size] of n accesses."""
    return offsets[:, None] + _ARANGE[:size]


def words_of(data: Bytes) -> U32:
    """uint8[n, bytes] to uint32[n, words], little-endian, short elements zero-extended."""
    if data.shape[1] < 4:
        padded = np.zeros((len(data), 4), np.uint8)
        padded[:, : data.shape[1]] = data
        data = padded
    return np.ascontiguousarray(data).view("<u4")


def bytes_of(words: U32, size: int) -> Bytes:
    """uint32[n, words] to its first ``size`` bytes, uint8[n, size]."""
    return np.ascontiguousarray(words).view(np.uint8)[:, :size]


_ATOMIC = 0xFE
_SEVERAL = 0xFF


class Lds:
    """The LDS of one workgroup, and who touched which byte since the last barrier.

    Args:
        size: Bytes allocated to the workgroup.
    """

    def __init__(self, size: int):
        self.size = size
        self.data: Bytes = np.zeros(size, np.uint8)
        self.poison: Bytes = np.full(size, 0xFF, np.uint8)
        self._writer: Bytes = np.zeros(size, np.uint8)
        self._reader: Bytes = np.zeros(size, np.uint8)
        self._arriving: Bytes = np.zeros(size, np.uint8)

    def check_bounds(self, offsets: Index, size: int) -> None:
        """Refuse accesses that leave the allocation."""
        bad = (offsets < 0) | (offsets + size > self.size)
        if bad.any():
            at = int(offsets[np.flatnonzero(bad)[0]])
            raise OutOfBoundsError(
                f"{size} bytes at LDS offset {at}; the workgroup has {self.size}"
            )

    def read(self, wave: Wave, index: Index) -> tuple[Bytes, Bytes]:
        """Bytes and poison at some indices, checked against other waves' writes."""
        self._check_arrived(wave, index)
        self._check(self._writer[index], wave, "reads", "wrote")
        readers = self._reader[index]
        mine = wave.index + 1
        other = (readers != 0) & (readers != mine)
        self._reader[index] = np.where(other, _SEVERAL, mine)
        return self.data[index], self.poison[index]

    def write(self, wave: Wave, index: Index, data: Bytes, poison: Bytes) -> None:
        """Write bytes and poison, checked against other waves' reads and writes."""
        self._check_arrived(wave, index)
        others = self._writer[index]
        foreign = (others != 0) & (others != wave.index + 1)
        if foreign.any():
            # Compilers let waves that hold the same value store it redundantly.
            same = (self.data[index] == data) & ((self.poison[index] | poison) == 0)
            others = np.where(same, 0, others)
        self._check(others, wave, "writes", "wrote")
        self._check(self._reader[index], wave, "writes", "read")
        self._writer[index] = wave.index + 1
        self.data[index] = data
        self.poison[index] = poison

    def write_direct(self, wave: Wave, index: Index, data: Bytes, poison: Bytes) -> None:
        """Write by a load from memory: not there before the wave waits for it."""
        for operation in wave.counters.lgkm:
            if operation.lds is not None and np.isin(index, operation.lds).any():
                raise MissingWaitError(f"LDS is overwritten before a wait for {operation.text}")
        self._check_arrived(wave, index)
        self._check(self._writer[index], wave, "writes", "wrote")
        self._check(self._reader[index], wave, "writes", "read")
        self._writer[index] = wave.index + 1
        self.data[index] = data
        self.poison[index] = poison
        self._arriving[index] = wave.index + 1

    def arrive(self, index: Index) -> None:
        """A direct load has been waited for."""
        self._arriving[index] = 0

    def atomic(self, wave: Wave, index: Index) -> None:
        """Check and stamp an atomic, which does not race with other atomics."""
        self._check_arrived(wave, index)
        writers = self._writer[index]
        self._check(np.where(writers == _ATOMIC, 0, writers), wave, "updates", "wrote")
        self._check(self._reader[index], wave, "updates", "read")
        self._writer[index] = _ATOMIC

    def new_phase(self, waves: list[Wave]) -> None:
        """A barrier: earlier accesses are ordered, save those that no wait has covered."""
        self._writer.fill(0)
        self._reader.fill(0)
        for wave in waves:
            for operation in wave.counters.vm + wave.counters.lgkm:
                if operation.lds is not None:
                    table = self._writer if operation.lds_write else self._reader
                    mine = wave.index + 1
                    taken = (table[operation.lds] != 0) & (table[operation.lds] != mine)
                    table[operation.lds] = np.where(taken, _SEVERAL, mine)

    def _check_arrived(self, wave: Wave, index: Index) -> None:
        arriving = self._arriving[index]
        if not arriving.any():
            return
        at, owner = (
            int(index[arriving != 0].ravel()[0]),
            int(arriving[arriving != 0].ravel()[0]) - 1,
        )
        if owner != wave.index:
            raise RaceError(
                f"wave {wave.index} touches LDS byte {at} while a load of wave {owner} fills it"
            )
        raise MissingWaitError(f"LDS byte {at} is touched before a wait for the load into it")

    def _check(self, others: Bytes, wave: Wave, does: str, did: str) -> None:
        foreign = (others != 0) & (others != wave.index + 1)
        if foreign.any():
            who = int(others[foreign].ravel()[0])
            name = {_ATOMIC: "an atomic", _SEVERAL: "several waves"}.get(who, f"wave {who - 1}")
            raise RaceError(
                f"wave {wave.index} {does} LDS bytes that {name} {did}, "
                "with no wait and barrier between"
            )


class Scratch:
    """The private memory of one wave: ``size`` bytes a lane."""

    def __init__(self, size: int):
        self.size = size
        self.data: Bytes = np.zeros((LANES, size), np.uint8)
        self.poison: Bytes = np.full((LANES, size), 0xFF, np.uint8)

    def check_bounds(self, offsets: Index, size: int) -> None:
        """Refuse accesses that leave a lane's allocation."""
        bad = (offsets < 0) | (offsets + size > self.size)
        if bad.any():
            at = int(offsets[np.flatnonzero(bad)[0]])
            raise OutOfBoundsError(f"{size} bytes at scratch offset {at}; a lane has {self.size}")
