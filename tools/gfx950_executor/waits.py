# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Outstanding memory operations: vmcnt and lgkmcnt, and what waiting for them releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from block32.tools.gfx950_executor.memory import Region

VMCNT_MAX = 63
LGKMCNT_MAX = 15

Index = npt.NDArray[np.int64]


@dataclass
class Outstanding:
    """One issued memory operation that no wait has covered yet.

    Attributes:
        text: The instruction, for messages.
        vector: Vector register rows it will write.
        scalar: Scalar registers it will write.
        in_order: Whether it retires in issue order (scalar loads and flat operations do not).
        lds: LDS byte indices touched, if any; ``lds_write`` says how.
        lds_direct: Whether it is a load from memory into LDS.
        region, bytes: the memory bytes touched; ``stores`` says how.
    """

    text: str
    vector: tuple[int, ...] = ()
    scalar: tuple[int, ...] = ()
    in_order: bool = True
    lds: Index | None = None
    lds_write: bool = False
    lds_direct: bool = False
    accesses: list[tuple[Region, Index, bool, int]] = field(default_factory=list)


class Counters:
    """The two counters of a wave, as queues of what they count.

    Args:
        vector_locks, scalar_locks: the wave's marks of registers that a load may still write.
        arrived: Called with the LDS bytes of a direct load that has been waited for.
    """

    def __init__(
        self, vector_locks: bytearray, scalar_locks: bytearray, arrived: Callable[[Index], None]
    ):
        self._vector_locks = vector_locks
        self._scalar_locks = scalar_locks
        self._arrived = arrived
        self.vm: list[Outstanding] = []
        self.lgkm: list[Outstanding] = []

    def issue_vm(self, operation: Outstanding) -> None:
        """Count an operation in vmcnt and lock the registers it will write."""
        if len(self.vm) >= VMCNT_MAX:  # the hardware stalls here until one has come back
            self.wait(vm=VMCNT_MAX - 1)
        self._lock(operation)
        self.vm.append(operation)

    def issue_lgkm(self, operation: Outstanding) -> None:
        """Count an operation in lgkmcnt and lock the registers it will write."""
        self._lock(operation)
        self.lgkm.append(operation)

    def _lock(self, operation: Outstanding) -> None:
        for row in operation.vector:
            self._vector_locks[row] += 1
        for code in operation.scalar:
            self._scalar_locks[code] = 1

    def wait(self, vm: int = VMCNT_MAX, lgkm: int = LGKMCNT_MAX) -> None:
        """Wait until at most so many operations are outstanding; retire the others."""
        if vm < VMCNT_MAX:
            self._retire_all_but(vm, self.vm)
        if lgkm < LGKMCNT_MAX:
            self._retire_all_but(lgkm, self.lgkm)

    def _retire_all_but(self, count: int, queue: list[Outstanding]) -> None:
        # With a scalar load or a flat operation among them nobody can say which ones a count
        # above 0 leaves (LLVM waits for 0 then).
        if count and not all(operation.in_order for operation in queue):
            return
        while len(queue) > count:
            self._retire(queue.pop(0))

    def _retire(self, operation: Outstanding) -> None:
        for row in operation.vector:
            self._vector_locks[row] -= 1
        for code in operation.scalar:
            self._scalar_locks[code] = 0
        if operation.lds_direct and operation.lds is not None:
            self._arrived(operation.lds)

    def overtake(self, rows: tuple[int, ...]) -> list[tuple[int, int]]:
        """Unlock registers for a memory load, where only earlier memory loads still write them.

        Such loads return in issue order, so the last one wins; LLVM relies on it where an earlier
        load's value is dead.

        Returns:
            The registers and the locks they had, to be put back after the write.
        """
        overtaken = []
        for row in rows:
            locks = self._vector_locks[row]
            if locks and sum(row in operation.vector for operation in self.vm) == locks:
                overtaken.append((row, locks))
                self._vector_locks[row] = 0
        return overtaken

    def producer_of(self, register: str) -> str:
        """The outstanding instruction that will write a register, for a message."""
        from block32.tools.gfx950_executor.state import scalar_name, vector_name

        for operation in self.vm + self.lgkm:
            names = [vector_name(r) for r in operation.vector]
            names += [scalar_name(c) for c in operation.scalar]
            if register in names:
                return operation.text
        return "its load"
