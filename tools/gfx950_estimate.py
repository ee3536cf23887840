# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An in-order estimate of code's time on one SIMD: it ranks schedules, it is not the hardware.

A SIMD issues an instruction a clock, and one in four clocks to a wave. A matrix instruction keeps
the matrix unit busy and waits for it; memory answers after 800 clocks, LDS after 128, both in
order; waits hold the wave. Nothing else takes time: no contention for memory, LDS or caches, no
barriers between waves, no clock changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from block32.lowering.gfx950.machine import MEMORY_CLOCKS
from block32.tools.gfx950_executor import Instruction
from block32.tools.gfx950_executor.counts import instruction_class
from block32.tools.gfx950_listing import loop_range, mfma_clocks, mix_of

ISSUE_CLOCKS: Final = 4
LDS_CLOCKS: Final = 128

#: Turns of the loop before the ones that are measured, and those.
_WARM_UP, _MEASURED = 4, 8


@dataclass(frozen=True)
class Estimate:
    """What the model says of the steady state of a loop.

    Attributes:
        clocks: Clocks of one turn of the loop, over all waves of the SIMD.
        busy: Share of the time that the matrix unit works.
        bytes_per_clock: Bytes that a wave loads from memory in a clock.
        bytes_in_flight: Bytes of a wave that are on their way from memory, on average.
    """

    clocks: float
    busy: float
    bytes_per_clock: float
    bytes_in_flight: float


@dataclass(frozen=True)
class _Timed:
    """An instruction as the model sees it.

    Attributes:
        kind: Its class.
        clocks: Of the matrix unit.
        counts: What ``s_waitcnt`` waits for: most loads from memory and from LDS on their way.
    """

    kind: str
    clocks: int = 0
    counts: tuple[int, int] = (0, 0)

    @classmethod
    def create(cls, instruction: Instruction) -> _Timed:
        """Vmcnt is bits 3:0 and 15:14, lgkmcnt bits 11:8 (AMD "CDNA4 ISA", S_WAITCNT)."""
        kind = instruction_class(instruction)
        if kind == "mfma":
            return cls(kind, mfma_clocks(instruction))
        if kind == "wait":
            counts = instruction["simm16"]
            return cls(kind, 0, ((counts & 0xF) | (counts >> 14 & 3) << 4, counts >> 8 & 0xF))
        return cls(kind)


@dataclass
class _Wave:
    """A wave's place in its code, and what it waits for: the times when results arrive."""

    position: int = 0
    ready: float = 0.0
    memory: deque[float] = field(default_factory=deque)
    lds: deque[float] = field(default_factory=deque)

    def wait(self, counts: tuple[int, int]) -> float:
        """When at most so many operations are on their way."""
        until = 0.0
        for outstanding, most in zip((self.memory, self.lds), counts, strict=True):
            while len(outstanding) > most:
                until = max(until, outstanding.popleft())
        return until


def estimate(code: Sequence[Instruction], waves: int) -> Estimate | None:
    """The estimate for the loop with most matrix instructions, with ``waves`` on a SIMD."""
    place = loop_range(code)
    if place is None:
        return None
    loop = code[place.start : place.stop]
    total = _WARM_UP + _MEASURED
    marks = [turn * len(loop) - 1 for turn in (_WARM_UP, total)]
    warm, end = _times(_timed(loop) * total, waves, marks)
    clocks = (end - warm) / _MEASURED
    mix = mix_of(loop)
    return Estimate(
        clocks=clocks,
        busy=waves * mix.mfma_clocks / clocks,
        bytes_per_clock=mix.loaded_bytes / clocks,
        bytes_in_flight=mix.loaded_bytes / clocks * MEMORY_CLOCKS,
    )


def path_clocks(path: Sequence[Instruction], waves: int) -> float:
    """Clocks in which ``waves`` waves of one SIMD take a path, from its first to its last."""
    return _times(_timed(path), waves, [len(path) - 1])[0]


def wave_path(code: Sequence[Instruction], matrix_clocks: float) -> list[Instruction]:
    """The instructions that a wave takes through a kernel, as far as that can be told.

    Everything before the loop once, the loop as often as ``matrix_clocks`` of the matrix unit are
    left, and what follows it once, but for matrix instructions beyond that number. Code behind
    other branches counts as taken.

    Args:
        code: The kernel.
        matrix_clocks: Clocks of the matrix unit that the wave's part of the product takes.
    """
    place = loop_range(code)
    if place is None:
        return list(code)
    before, after = code[: place.start], code[place.stop :]
    loop = code[place.start : place.stop]
    in_loop = sum(map(mfma_clocks, loop))
    left = matrix_clocks - sum(map(mfma_clocks, before))
    following = sum(map(mfma_clocks, after))
    turns = max(1, int(left // in_loop))
    if following >= in_loop:  # a loop that leaves its last turns to the code behind it
        turns = max(1, int((left - following) // in_loop))
    return [*before, *(list(loop) * turns), *_up_to(after, left - turns * in_loop)]


def _up_to(code: Sequence[Instruction], matrix_clocks: float) -> list[Instruction]:
    """The code without what lies between so many clocks of matrix instructions and the last."""
    clocks = [mfma_clocks(instruction) for instruction in code]
    last = max((number for number, size in enumerate(clocks) if size), default=-1)
    path: list[Instruction] = []
    for number, (instruction, size) in enumerate(zip(code, clocks, strict=True)):
        if matrix_clocks <= 0 and number <= last:
            continue
        path.append(instruction)
        matrix_clocks -= size
    return path


def _timed(path: Sequence[Instruction]) -> list[_Timed]:
    """The path as the model sees it."""
    distinct = {instruction.pc: _Timed.create(instruction) for instruction in path}
    return [distinct[instruction.pc] for instruction in path]


def _times(code: Sequence[_Timed], wave_count: int, marks: Sequence[int]) -> list[float]:
    """When the last wave has issued the instructions at the positions ``marks``, the last the end.

    Every wave takes the same code.
    """
    waves = [_Wave() for _ in range(wave_count)]
    issue_free = unit_free = 0.0
    times = dict.fromkeys(marks, 0.0)
    running = list(waves)
    while running:
        wave = running[0] if len(running) == 1 else min(running, key=lambda w: w.ready)
        now = max(issue_free, wave.ready)
        timed = code[wave.position]
        kind = timed.kind
        if kind == "mfma":
            now = max(now, unit_free)
            unit_free = now + timed.clocks
        elif kind == "wait":
            now = max(now, wave.wait(timed.counts))
        elif kind == "vmem":
            wave.memory.append(now + MEMORY_CLOCKS)
        elif kind in ("lds", "smem"):
            wave.lds.append(now + LDS_CLOCKS)
        issue_free = max(issue_free, now + 1) if kind != "wait" else issue_free
        wave.ready = now + ISSUE_CLOCKS
        if wave.position in times:
            times[wave.position] = max(times[wave.position], now)
        wave.position += 1
        if wave.position == len(code):
            running.remove(wave)
    return [times[mark] for mark in marks]
