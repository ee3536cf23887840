# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An in-order estimate of a loop's time on one SIMD: it ranks schedules, it is not the hardware.

A SIMD issues one instruction in four clocks to a wave. A matrix instruction keeps the matrix unit
busy and waits for it; memory answers after 800 clocks, LDS after 128, both in order; waits hold the
wave. Nothing else takes time: no contention for memory, LDS or caches, no clock changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from block32.lowering.gfx950.machine import MEMORY_CLOCKS, WAVE_LANES
from block32.tools.gfx950_executor import Instruction
from block32.tools.gfx950_executor.counts import instruction_class
from block32.tools.gfx950_listing import loop_instructions, memory_operation, mfma_clocks

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


@dataclass
class _Wave:
    """A wave's place in the loop, and what it waits for: the times when results arrive."""

    position: int = 0
    turns: int = 0
    ready: float = 0.0
    memory: list[float] = field(default_factory=list)
    lds: list[float] = field(default_factory=list)


def estimate(code: Sequence[Instruction], waves: int) -> Estimate | None:
    """The estimate for the loop with most matrix instructions, with ``waves`` on a SIMD."""
    loop = loop_instructions(code)
    if loop is None:
        return None
    clocks = _turn_clocks(loop, waves)
    mfma = sum(mfma_clocks(i) for i in loop)
    loaded = sum(_loaded_bytes(i) for i in loop)
    return Estimate(
        clocks=clocks,
        busy=waves * mfma / clocks,
        bytes_per_clock=loaded / clocks,
        bytes_in_flight=loaded / clocks * MEMORY_CLOCKS,
    )


def _loaded_bytes(instruction: Instruction) -> int:
    if instruction_class(instruction) != "vmem":
        return 0
    what, size = memory_operation(instruction)
    return size * WAVE_LANES if "load" in what else 0


def _turn_clocks(loop: Sequence[Instruction], wave_count: int) -> float:
    """Clocks of one turn once the loop has settled."""
    waves = [_Wave() for _ in range(wave_count)]
    issue_free = unit_free = warm = 0.0
    total = _WARM_UP + _MEASURED
    while waves[-1].turns < total:
        wave = min(waves, key=lambda w: (w.ready, w.turns, w.position))
        now = max(issue_free, wave.ready)
        instruction = loop[wave.position]
        kind = instruction_class(instruction)
        if kind == "mfma":
            now = max(now, unit_free)
            unit_free = now + mfma_clocks(instruction)
        elif kind == "wait":
            now = max(now, _wait(wave, instruction["simm16"]))
        elif kind == "vmem":
            wave.memory.append(now + MEMORY_CLOCKS)
        elif kind in ("lds", "smem"):
            wave.lds.append(now + LDS_CLOCKS)
        issue_free = now + ISSUE_CLOCKS / wave_count if wave_count > 1 else now
        wave.ready = now + ISSUE_CLOCKS
        wave.position += 1
        if wave.position == len(loop):
            wave.position, wave.turns = 0, wave.turns + 1
            if wave is waves[-1] and wave.turns == _WARM_UP:
                warm = now
    return (waves[-1].ready - warm) / _MEASURED


def _wait(wave: _Wave, counts: int) -> float:
    """When at most as many operations are on their way as ``s_waitcnt`` says.

    vmcnt is bits 3:0 and 15:14, lgkmcnt bits 11:8 (AMD "CDNA4 ISA", S_WAITCNT).
    """
    vm_count = (counts & 0xF) | (counts >> 14 & 3) << 4
    lgkm_count = counts >> 8 & 0xF
    until = 0.0
    for outstanding, most in ((wave.memory, vm_count), (wave.lds, lgkm_count)):
        while len(outstanding) > most:
            until = max(until, outstanding.pop(0))
    return until
