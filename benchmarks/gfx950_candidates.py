# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Configurations that are worth compiling for a shape, by a formula that needs no machine code.

The formula is the model of ``tools/gfx950_launch_time.py`` with counted instructions in place of
those of a compiled kernel. It only has to keep the good ones in the first few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import (
    CHUNK_BYTES,
    CLOCKS_PER_SECOND,
    COMPUTE_UNITS,
    L1_BYTES_PER_CLOCK,
    LDS_BYTES,
    LDS_BYTES_PER_CLOCK,
    MEMORY_CLOCKS,
    SIMDS,
    VECTOR_REGISTERS,
    WAVE_LANES,
    XCDS,
)
from block32.lowering.gfx950.select import FEWEST_ROWS
from block32.lowering.gfx950.target import REGISTER_MARGIN
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_estimate import ISSUE_CLOCKS
from block32.tools.gfx950_launch_time import work_of

SPLITS = (1, 2, 3, 4, 5, 6, 8)
STEP_KS = (128, 256, 512)
PACKED_ROWS = 32

#: Instructions of a kernel outside its K steps, and of split-K's sum, about: counted in kernels.
_AROUND_STEPS, _SPLIT_SUM = 250, 200

#: Instructions of a K step beside those that are counted one by one.
_AROUND_INSTRUCTIONS = 10


def all_tiers(m: int) -> Iterator[KernelTier]:
    """Every configuration of the search for up to ``m`` rows, whether it is possible or not."""
    if m <= PACKED_ROWS:
        yield from _packed_tiers(m)
    if m > FEWEST_ROWS:
        yield from _tiled_tiers(m)


def _packed_tiers(m: int) -> Iterator[KernelTier]:
    for k_pack, rows, columns in product((1, 2, 4), (8, 16, 32), (16, 32, 64)):
        wasted = rows >= 2 * m and rows > 8
        if wasted or rows * k_pack < 16 or rows < m or rows * k_pack > 32:
            continue
        for k, warps, stages, splits in product(STEP_KS, (1, 2, 4, 8), (1, 2, 3, 4), SPLITS):
            yield KernelTier(
                "packed",
                tile=(rows, columns, k),
                k_pack=k_pack,
                warps=warps,
                stages=stages,
                splits=splits,
            )


def _tiled_tiers(m: int) -> Iterator[KernelTier]:
    for rows, columns, k in product((16, 32, 64, 128, 256), (32, 64, 128, 256), STEP_KS):
        if rows >= 2 * m and rows > 16:
            continue
        for mma in ((16, 16, 128), (32, 32, 64)):
            for warps, stages, splits in product((2, 4, 8), (2, 3, 4), SPLITS):
                yield KernelTier(
                    "tiled",
                    tile=(rows, columns, k),
                    mma=mma,
                    warps=warps,
                    stages=stages,
                    splits=splits,
                )


@dataclass(frozen=True)
class Candidate:
    """A configuration and what the formula says of it."""

    tier: KernelTier
    seconds: float


def best_candidates(m: int, n: int, k: int, count: int) -> list[KernelTier]:
    """The ``count`` most promising configurations, no two of one tile and one split alike."""
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    candidates = [
        Candidate(tier, formula_seconds(geometry, m))
        for tier, geometry in ((tier, Geometry(problem, tier)) for tier in all_tiers(m))
        if is_sensible(geometry)
    ]
    candidates.sort(key=lambda candidate: (candidate.seconds, str(candidate.tier)))
    chosen: dict[tuple[object, ...], KernelTier] = {}
    for candidate in candidates:
        tier = candidate.tier
        chosen.setdefault((tier.form, tier.tile, tier.k_pack, tier.splits), tier)
        if len(chosen) == count:
            break
    return [replace(tier, order=better_order(problem, tier, m)) for tier in chosen.values()]


def is_sensible(geometry: Geometry) -> bool:
    """Whether the machine can hold it, no wave is without a step and no stage without one."""
    if geometry.problem_with_tile() or geometry.splits != geometry.tier.splits:
        return False
    range_k = min(geometry.partition.size, geometry.problem.k)
    if geometry.is_packed and geometry.waves > 1 and range_k < geometry.step * geometry.waves:
        return False
    least = 2 if geometry.tier.form == "tiled" else 1
    return geometry.tier.stages <= max(least, geometry.steps_of_a_wave)


def formula_seconds(geometry: Geometry, m: int) -> float:
    """The time of a launch, with counted instructions."""
    work = work_of(geometry, m)
    in_a_unit = ceil(work.workgroups / COMPUTE_UNITS)
    resident = min(in_a_unit, _fitting(geometry))
    step = _StepCost.of(geometry)
    steps, stages = geometry.steps_of_a_wave, geometry.tier.stages
    clocks = 0.0
    left = in_a_unit
    while left > 0:
        waves = ceil(min(resident, left) * geometry.waves / SIMDS)
        ahead = stages if geometry.is_packed else stages - 1
        of_step = max(
            waves * geometry.step_clocks,
            ISSUE_CLOCKS * step.instructions,
            waves * step.instructions,
            MEMORY_CLOCKS / ahead,
        )
        around = ISSUE_CLOCKS * (_AROUND_STEPS + stages * step.loads)
        if geometry.splits > 1:
            around += ISSUE_CLOCKS * _SPLIT_SUM + 3 * MEMORY_CLOCKS
        clocks += 2 * MEMORY_CLOCKS + around + steps * of_step
        left -= resident
    waves = in_a_unit * geometry.waves
    loaded = waves * (steps + stages - 1) * step.loaded_bytes / L1_BYTES_PER_CLOCK
    read = waves * steps * step.read_bytes / LDS_BYTES_PER_CLOCK
    in_order = max(clocks, loaded, read) / CLOCKS_PER_SECOND
    return max(in_order, work.memory_seconds, work.least_seconds) + work.split_seconds


def _fitting(geometry: Geometry) -> int:
    """Workgroups that a compute unit holds, about."""
    waves = min(8, VECTOR_REGISTERS // (geometry.registers + REGISTER_MARGIN))
    by_registers = max(1, waves * SIMDS // geometry.waves)
    return min(by_registers, LDS_BYTES // max(1, geometry.lds_bytes))


@dataclass(frozen=True)
class _StepCost:
    """What one wave does in one K step.

    Attributes:
        instructions: All instructions.
        loads: Loads from memory.
        loaded_bytes: Their bytes.
        read_bytes: Bytes read from LDS.
    """

    instructions: int
    loads: int
    loaded_bytes: int
    read_bytes: int

    @classmethod
    def of(cls, geometry: Geometry) -> _StepCost:
        atom, instructions = geometry.atom, geometry.instructions
        wide = WAVE_LANES * CHUNK_BYTES
        w = geometry.fragments_n * instructions * atom.chunks(geometry.rhs_bits)
        x_chunks = geometry.fragments_m * instructions * atom.chunks(geometry.lhs_bits)
        x = x_chunks if geometry.is_packed else geometry.block_m * geometry.block_k // wide
        reads = 0
        if not geometry.is_packed:
            x, reads = ceil(x / geometry.waves), x_chunks
        fragments = geometry.fragments_m + geometry.fragments_n
        scales = ceil(fragments * instructions / geometry.window.spread)
        matrix = geometry.fragments_m * geometry.fragments_n * instructions
        return cls(
            matrix + w + x + scales + reads + _AROUND_INSTRUCTIONS,
            w + x + scales,
            (w + x) * wide,
            reads * wide,
        )


def better_order(problem: ScaledMatmul, tier: KernelTier, m: int) -> str:
    """Which tiles should be neighbours, so that a die loads the fewest rows of x and w.

    A die gets a run of neighbouring tiles (``die_contiguous``).
    """
    geometry = Geometry(problem, tier)
    if tier.form == "packed" or geometry.splits > 1:
        return "n"
    tiles_m, tiles_n = ceil(m / geometry.block_m), geometry.tiles_n
    run = ceil(tiles_m * tiles_n / XCDS)
    rows = ceil(run / tiles_n) * geometry.block_m + min(run, tiles_n) * geometry.block_n
    columns = ceil(run / tiles_m) * geometry.block_n + min(run, tiles_m) * geometry.block_m
    return "n" if rows <= columns else "m"
