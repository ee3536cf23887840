# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Order between waves: who is known to come after whom, and through which caches.

Every access to memory is stamped with an epoch: (workgroup, wave, time). A workgroup's time
advances at barriers and at atomics. A barrier orders all waves of a workgroup; an atomic orders
the wave that does it (and what it already knew) before every later atomic on the same address.
Accesses still outstanding at such a point are stamped anew: the point does not cover them.

Being ordered is not enough to be seen. The vector L1 is per compute unit and the L2 per XCD,
neither coherent (LLVM, "Memory Model gfx942"): the store must have been written through (sc1)
or back (buffer_wbl2 sc1), and the load must pass the caches (sc1) or come after buffer_inv sc1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from block32.tools.gfx950_executor.errors import RaceError, StaleReadError

if TYPE_CHECKING:
    from block32.tools.gfx950_executor.memory import Region
    from block32.tools.gfx950_executor.waits import Index, Outstanding

ANY_WAVE = -1
HOST = 0  # the epoch of what was there before the launch
SHARED = -1  # a byte read by several waves

Known = dict[tuple[int, int], int]


@dataclass
class Epoch:
    """One wave's accesses between two points of order.

    ``written_through`` tells whether its stores are visible beyond their own L2.
    """

    workgroup: int
    wave: int
    time: int
    atomic: bool
    written_through: bool


@dataclass
class GroupOrder:
    """A workgroup's clock."""

    number: int
    time: int = 1
    last_barrier: int = 0


@dataclass
class WaveOrder:
    """What one wave is known to come after; ``seen`` is that at the last invalidation."""

    group: GroupOrder
    wave: int
    known: Known = field(default_factory=dict)
    seen: Known = field(default_factory=dict)
    epochs: dict[tuple[int, str, bool, bool], int] = field(default_factory=dict)


def _covers(known: Known, epoch: Epoch) -> bool:
    return (
        known.get((epoch.workgroup, epoch.wave), -1) >= epoch.time
        or known.get((epoch.workgroup, ANY_WAVE), -1) >= epoch.time
    )


def _merge(into: Known, other: Known) -> None:
    for key, time in other.items():
        if into.get(key, -1) < time:
            into[key] = time


class GlobalOrder:
    """Order over all memory of one launch.

    Args:
        xcds: Workgroups go to so many XCDs round-robin, and workgroups of one XCD share an L2;
            0 where that must not be relied upon.
    """

    def __init__(self, xcds: int = 0):
        self.xcds = xcds
        self.epochs: list[Epoch | None] = [None]
        self.released: dict[int, Known] = {}
        self.stored_pcs: dict[int, str] = {}
        self.group_epochs: dict[tuple[int, int], int] = {}
        self._of_group: dict[int, list[Epoch]] = {}

    # ---- stamps

    def epoch(self, order: WaveOrder, atomic: bool, through: bool, text: str) -> int:
        """The index of the wave's present epoch."""
        key = (order.group.time, text, atomic, through)
        index = order.epochs.get(key)
        if index is None:
            index = len(self.epochs)
            made = Epoch(order.group.number, order.wave, order.group.time, atomic, through)
            self.epochs.append(made)
            self._of_group.setdefault(made.workgroup, []).append(made)
            order.epochs[key] = index
            self.stored_pcs[index] = text
        return index

    def ordered(self, order: WaveOrder, epoch: Epoch) -> bool:
        """Whether an epoch is known to come before the wave's present."""
        if epoch.workgroup == order.group.number:
            return epoch.wave == order.wave or epoch.time <= order.group.last_barrier
        return _covers(order.known, epoch)

    # ---- accesses

    def load(self, order: WaveOrder, region: Region, index: Index, text: str, scope: int) -> None:
        """Check and stamp a plain load. scope: bit 0 is sc0, bit 1 is sc1, bit 2 a scalar load."""
        if region.writer is not None:
            for number in _distinct(region.writer[index]):
                epoch = self.epochs[number]
                if epoch is None:
                    continue
                where = self._describe(number)
                if not self.ordered(order, epoch):
                    raise RaceError(f"reads {region.name} bytes that {where} writes, unordered")
                self._check_fresh(order, epoch, region, scope, where)
        if region.track_reads:
            self._stamp_read(order, region, index, self.epoch(order, False, False, text))

    def _stamp_read(self, order: WaveOrder, region: Region, index: Index, mine: int) -> None:
        readers = region.readers()
        before = readers[index]
        stamp = np.full_like(before, mine)
        for number in _distinct(before):
            if number in (HOST, mine):
                continue
            epoch = self.epochs[number] if number > 0 else None
            if epoch is not None and self.ordered(order, epoch):
                continue  # whoever comes after this wave comes after that reader too
            together = SHARED
            if epoch is not None and epoch.workgroup == order.group.number:
                together = self._group_epoch(order, mine)
            stamp[before == number] = together
        readers[index] = stamp

    def _group_epoch(self, order: WaveOrder, mine: int) -> int:
        """An epoch that stands for several waves of one workgroup at the same time."""
        key = (order.group.number, order.group.time)
        if key not in self.group_epochs:
            self.group_epochs[key] = len(self.epochs)
            self.stored_pcs[len(self.epochs)] = self.stored_pcs[mine]
            self.epochs.append(Epoch(key[0], ANY_WAVE, key[1], False, False))
        return self.group_epochs[key]

    def _check_fresh(
        self, order: WaveOrder, epoch: Epoch, region: Region, scope: int, where: str
    ) -> None:
        same_group = epoch.workgroup == order.group.number
        if scope & 4:
            raise StaleReadError(f"a scalar load of {region.name} bytes that {where} wrote")
        if same_group:
            return
        same_l2 = self.xcds > 0 and (epoch.workgroup - order.group.number) % self.xcds == 0
        invalidated = _covers(order.seen, epoch)
        if not invalidated and not scope & (3 if same_l2 else 2):
            need = "sc0 or sc1" if same_l2 else "sc1"
            raise StaleReadError(
                f"a load without {need} or an earlier buffer_inv may hit stale cached bytes of "
                f"{region.name} that {where} wrote"
            )
        if not same_l2 and not (epoch.written_through or epoch.atomic):
            raise StaleReadError(
                f"{region.name} bytes that {where} stored without sc1 or a later buffer_wbl2 "
                "may still be in another XCD's L2"
            )

    def store(
        self, order: WaveOrder, region: Region, index: Index, text: str, atomic: bool, through: bool
    ) -> None:
        """Check and stamp a store or an atomic."""
        writers = region.writers()
        for number in _distinct(writers[index]):
            epoch = self.epochs[number]
            if epoch is None or (atomic and epoch.atomic):
                continue
            if not self.ordered(order, epoch):
                where = self._describe(number)
                raise RaceError(f"writes {region.name} bytes that {where} writes, unordered")
        if region.reader is not None:
            self._check_readers(order, region, index)
        writers[index] = self.epoch(order, atomic, through, text)

    def _check_readers(self, order: WaveOrder, region: Region, index: Index) -> None:
        for number in _distinct(region.readers()[index]):
            epoch = self.epochs[number] if number > 0 else None
            if number == SHARED or (epoch is not None and not self.ordered(order, epoch)):
                who = (
                    "several workgroups read"
                    if epoch is None
                    else f"{self._describe(number)} reads"
                )
                raise RaceError(f"writes {region.name} bytes that {who}, unordered")

    def _describe(self, number: int) -> str:
        epoch = self.epochs[number]
        assert epoch is not None
        return f"'{self.stored_pcs[number]}' of workgroup {epoch.workgroup} wave {epoch.wave}"

    # ---- points of order

    def barrier(self, group: GroupOrder, waves: list[WaveOrder]) -> None:
        """All waves of a workgroup have met."""
        for kind in ("known", "seen"):
            merged: Known = {}
            for order in waves:
                _merge(merged, getattr(order, kind))
            for order in waves:
                setattr(order, kind, dict(merged))
        group.last_barrier = group.time
        group.time += 1

    def atomic(self, order: WaveOrder, address: int) -> None:
        """An atomic on an address: come after those before it, come before those after it."""
        shared = self.released.setdefault(address, {})
        _merge(order.known, shared)
        group = order.group
        mine = {(group.number, order.wave): group.time}
        mine[(group.number, ANY_WAVE)] = group.last_barrier
        _merge(shared, order.known)
        _merge(shared, mine)

    def advance(self, order: WaveOrder) -> None:
        """End the wave's epoch after an atomic, which does not cover what comes later."""
        order.group.time += 1

    def restamp(self, order: WaveOrder, outstanding: list[Outstanding]) -> None:
        """Stamp outstanding accesses with the present: no wait has covered them."""
        for operation in outstanding:
            for region, index, stores, old in operation.accesses:
                previous = self.epochs[old]
                assert previous is not None
                new = self.epoch(
                    order, previous.atomic, previous.written_through, self.stored_pcs[old]
                )
                table = region.writers() if stores else region.readers()
                # Left alone where somebody else has touched the byte since.
                table[index] = np.where(table[index] == old, new, table[index])
            operation.accesses = [
                (r, i, s, self._moved(order, old)) for r, i, s, old in operation.accesses
            ]

    def _moved(self, order: WaveOrder, old: int) -> int:
        previous = self.epochs[old]
        assert previous is not None
        return self.epoch(order, previous.atomic, previous.written_through, self.stored_pcs[old])

    def write_back(self, order: WaveOrder) -> None:
        """buffer_wbl2 sc1: all that the wave comes after in its workgroup leaves the L2."""
        for epoch in self._of_group.get(order.group.number, []):
            epoch.written_through |= self.ordered(order, epoch)

    def invalidate(self, order: WaveOrder) -> None:
        """buffer_inv sc1: later plain loads see all that the wave comes after."""
        order.seen = dict(order.known)


def _distinct(values: np.ndarray) -> list[int]:
    """Distinct epochs of an access, without sorting in the common case of one."""
    flat = values.ravel()
    if not flat.size:
        return []
    first = flat[0]
    if (flat == first).all():
        return [int(first)]
    return [int(v) for v in np.unique(flat)]
