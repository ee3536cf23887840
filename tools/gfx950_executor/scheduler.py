# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Waves and workgroups in a seeded order.

Some workgroups are resident at once. A turn picks one wave of them that can run and lets it run
for a while: until a barrier, its end, or a random number of instructions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from block32.tools.gfx950_executor.errors import ExecutionError, StuckError
from block32.tools.gfx950_executor.memory import Lds, Memory, Scratch
from block32.tools.gfx950_executor.races import GlobalOrder, GroupOrder, WaveOrder
from block32.tools.gfx950_executor.state import Wave

if TYPE_CHECKING:
    from block32.tools.gfx950_executor.code_object import Kernel
    from block32.tools.gfx950_executor.program import Program


class Workgroup:
    """One workgroup: its waves, LDS and place in the order of things."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        position: tuple[int, int, int],
        wave_count: int,
        lds_bytes: int,
        memory: Memory,
        order: GlobalOrder,
        byte_counts: Counter[str],
    ):
        self.kernel = kernel
        self.position = position
        self.memory = memory
        self.order = order
        self.lds = Lds(lds_bytes)
        self.group_order = GroupOrder(number)
        self.code_address = 0
        self._byte_counts = byte_counts
        self._scratch: dict[int, Scratch] = {}
        self.waves = [Wave(i, self, WaveOrder(self.group_order, i)) for i in range(wave_count)]

    def count(self, level: str, size: int) -> None:
        """Add bytes to the report."""
        self._byte_counts[level] += size

    def scratch_of(self, wave: Wave) -> Scratch:
        """A wave's scratch memory, made when first touched."""
        if wave.index not in self._scratch:
            self._scratch[wave.index] = Scratch(self.kernel.scratch_bytes)
        return self._scratch[wave.index]

    def runnable(self) -> list[Wave]:
        """Waves that can execute an instruction; opens a barrier that all have reached."""
        living = [w for w in self.waves if not w.ended]
        waiting = [w for w in living if w.at_barrier]
        if living and len(waiting) == len(living):
            self._open_barrier(living)
        return [w for w in living if not w.at_barrier]

    def _open_barrier(self, living: list[Wave]) -> None:
        if len(living) < len(self.waves):
            ended = next(w.index for w in self.waves if w.ended)
            raise StuckError(f"a barrier that wave {ended} never reaches: it has ended").at(
                f"{self.kernel.name}: workgroup {self.position}"
            )
        self.order.barrier(self.group_order, [w.order for w in self.waves])
        for wave in living:
            wave.at_barrier = False
            self.order.restamp(wave.order, wave.counters.vm)
        self.lds.new_phase(living)

    @property
    def ended(self) -> bool:
        """Whether all waves have ended."""
        return all(w.ended for w in self.waves)


class Scheduler:
    """Runs workgroups to their end.

    Args:
        program: The kernel's code.
        seed: Of the order of workgroups, waves and the lengths of turns.
        resident: Workgroups that run at the same time.
        step_limit: Instructions a wave may execute before it counts as stuck.
    """

    def __init__(self, program: Program, seed: int, resident: int, step_limit: int):
        self._program = program
        self._random = random.Random(seed)
        self._resident = resident
        self._step_limit = step_limit
        self.executed: Counter[int] = Counter()

    def run(self, workgroups: Iterable[Workgroup]) -> int:
        """Run all; returns how many there were."""
        source: Iterator[Workgroup] = iter(workgroups)
        active: list[Workgroup] = []
        count = 0
        with np.errstate(all="ignore"):
            while True:
                while len(active) < self._resident and (group := next(source, None)) is not None:
                    active.append(group)
                    count += 1
                if not active:
                    return count
                group = self._random.choice(active)
                runnable = group.runnable()
                if runnable:
                    self._turn(self._random.choice(runnable), self._random.randint(1, 400))
                if group.ended:
                    active.remove(group)

    def _turn(self, wave: Wave, length: int) -> None:
        program, executed = self._program, self.executed
        pc = wave.pc
        try:
            for _ in range(length):
                pc = wave.pc
                step = program.step(pc)
                executed[pc] += 1
                wave.pc = step.next_pc
                step.run(wave)
                if wave.at_barrier or wave.ended:
                    break
            wave.executed += length
            if wave.executed > self._step_limit:
                raise StuckError(f"a wave still runs after {self._step_limit} instructions")
        except ExecutionError as error:
            raise error.at(self._location(wave, pc)) from None

    def _location(self, wave: Wave, pc: int) -> str:
        group = wave.workgroup
        step = self._program.steps().get(pc)
        what = step.instruction.name if step else "instruction"
        place = ",".join(str(p) for p in group.position)
        return f"{group.kernel.name}: workgroup {place} wave {wave.index}: {what} at {pc:#x}"
