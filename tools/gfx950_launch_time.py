# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An estimate of a whole launch: the in-order model on every compute unit, against four limits.

A launch takes as long as its slowest limit: the in-order time of the workgroups that a compute unit
gets, the bytes that have to come from HBM at its peak rate, what they pull through the L1, what
they read from LDS, and the matrix units at their peak. It ranks kernels of one shape; it predicts
no hardware. Caches, dies and the start of a launch take no time in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from block32.lowering.common.index import as_integer
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import (
    CLOCKS_PER_SECOND,
    COMPUTE_UNITS,
    HBM_BYTES_PER_SECOND,
    L1_BYTES_PER_CLOCK,
    LDS_BYTES_PER_CLOCK,
    MEMORY_CLOCKS,
    MXFP8_FLOPS,
    SECOND_LAUNCH_SECONDS,
    SIMDS,
    UNITS_FOR_FULL_BANDWIDTH,
)
from block32.tools.gfx950_estimate import path_clocks, wave_path
from block32.tools.gfx950_executor import Instruction
from block32.tools.gfx950_listing import KernelFacts, Mix, mix_of


@dataclass(frozen=True)
class Work:
    """What a launch has to do, whoever wrote its kernel.

    Attributes:
        waves: Waves of a workgroup.
        workgroups: Workgroups that have a tile.
        matrix_clocks: Clocks of the matrix unit that a wave's part of a tile takes.
        weight_bytes: Bytes of w that a workgroup multiplies, divided by its waves.
        weight_bytes_of_clock: Bytes of w that a wave multiplies in a clock of the matrix unit.
        moved_bytes: Bytes of x, w, scales and y, each counted once.
        flops: Multiplications and additions of the whole product.
        slot_bytes: Bytes of partial sums that are stored and loaded again.
        has_second_launch: Whether a second launch adds partial sums.
    """

    waves: int
    workgroups: int
    matrix_clocks: float
    weight_bytes: float
    weight_bytes_of_clock: float
    moved_bytes: float
    flops: float
    slot_bytes: float = 0.0
    has_second_launch: bool = False

    @property
    def least_seconds(self) -> float:
        """What memory or the matrix units need at their peak rates."""
        return max(self.moved_bytes / HBM_BYTES_PER_SECOND, self.flops / MXFP8_FLOPS)

    @property
    def memory_seconds(self) -> float:
        """What memory needs: fewer than half of the compute units do not reach its peak rate."""
        reached = min(1.0, self.workgroups / (COMPUTE_UNITS * UNITS_FOR_FULL_BANDWIDTH))
        return self.moved_bytes / (HBM_BYTES_PER_SECOND * reached)

    @property
    def split_seconds(self) -> float:
        """What partial sums take beside the work itself: it is done before they are exchanged."""
        second = SECOND_LAUNCH_SECONDS if self.has_second_launch else 0.0
        return second + self.slot_bytes / HBM_BYTES_PER_SECOND


@dataclass(frozen=True)
class LaunchTime:
    """What the model says of a launch.

    Attributes:
        path: The instructions that a wave takes from the first to the last.
        busy: Share of that time that the matrix unit works.
        weight_bytes_per_instruction: Bytes of w that a wave multiplies for each instruction.
        weight_bytes_per_clock: Bytes of w that a wave multiplies in a clock.
        bytes_in_flight: Bytes of a wave on their way from memory, on average.
        workgroups: Workgroups that have a tile.
        resident: Workgroups that a compute unit runs at a time.
        in_order_seconds: The in-order time.
        seconds: The time of the slowest limit.
        least_seconds: What memory or the matrix units need at their peak rates.
    """

    path: Mix
    busy: float
    weight_bytes_per_instruction: float
    weight_bytes_per_clock: float
    bytes_in_flight: float
    workgroups: int
    resident: int
    in_order_seconds: float
    seconds: float
    least_seconds: float

    @property
    def instructions_per_unit(self) -> float:
        """Instructions of a wave for each 32 clocks of its matrix instructions."""
        return self.path.count / self.path.mfma_units


def work_of(geometry: Geometry, m: int) -> Work:
    """The work of one of block32's kernels with ``m`` rows of x."""
    problem = geometry.problem
    k_range = min(geometry.partition.size, problem.k)
    steps, tail = divmod(k_range, geometry.step)
    instructions = ceil(min(tail, geometry.block_k) / geometry.atom.k)
    if geometry.is_packed:
        steps = ceil(steps / geometry.waves)
    in_step = geometry.step_clocks / geometry.instructions
    waves_of_step = 1 if geometry.is_packed else geometry.waves
    step_bytes = geometry.block_n * geometry.step * geometry.rhs_bits / 8 / waves_of_step
    return Work(
        waves=geometry.waves,
        workgroups=as_integer(geometry.tiles(m)) * geometry.splits,
        matrix_clocks=in_step * (steps * geometry.instructions + instructions),
        weight_bytes=geometry.block_n * k_range * geometry.rhs_bits / 8 / geometry.waves,
        weight_bytes_of_clock=step_bytes / geometry.step_clocks,
        moved_bytes=moved_bytes(m, problem.n, problem.k, geometry.lhs_bits, geometry.rhs_bits),
        flops=2.0 * m * problem.n * problem.k,
        slot_bytes=slot_bytes(m, problem.n, geometry.splits),
        has_second_launch=geometry.splits > 1 and geometry.tier.reduce == "second_launch",
    )


def moved_bytes(m: int, n: int, k: int, lhs_bits: int = 8, rhs_bits: int = 8) -> float:
    """Bytes of x, w, their scales (32x32 blocks on w) and a 16-bit y."""
    k_blocks = ceil(k / 32)
    return (m * lhs_bits + n * rhs_bits) * k / 8 + (m + ceil(n / 32)) * k_blocks + 2 * m * n


@dataclass(frozen=True)
class Way:
    """The way of a wave through a kernel, with what was worked out about it.

    Attributes:
        path: Its instructions.
        mix: Their count by class.
        clocks: The in-order time by the number of waves on a SIMD, as far as it was asked for.
    """

    path: Sequence[Instruction]
    mix: Mix
    clocks: dict[int, float]

    @classmethod
    def create(cls, code: Sequence[Instruction], matrix_clocks: float) -> Way:
        """The way of a wave whose matrix instructions take so many clocks."""
        path = wave_path(code, matrix_clocks)
        return cls(path, mix_of(path), {})

    def clocks_with(self, waves: int) -> float:
        """The in-order time of ``waves`` waves on one SIMD."""
        if waves not in self.clocks:
            self.clocks[waves] = path_clocks(self.path, waves)
        return self.clocks[waves]


def slot_bytes(m: int, n: int, splits: int) -> float:
    """Bytes of f32 partial sums on their way to memory and back."""
    return 2 * 4.0 * splits * m * n if splits > 1 else 0.0


def launch_time(way: Way, facts: KernelFacts, work: Work) -> LaunchTime:
    """The estimate of one launch.

    Args:
        way: The way of a wave through the kernel.
        facts: Its registers and LDS, for how many workgroups a compute unit holds.
        work: What the launch has to do.
    """
    mix = way.mix
    in_a_unit = ceil(work.workgroups / COMPUTE_UNITS)
    fitting = max(1, facts.occupancy * SIMDS // work.waves)
    resident = min(fitting, in_a_unit)
    rounds, rest = divmod(in_a_unit, resident)
    clocks = rounds * way.clocks_with(_on_a_simd(resident, work.waves))
    if rest:
        clocks += way.clocks_with(_on_a_simd(rest, work.waves))
    loaded = in_a_unit * work.waves * mix.loaded_bytes / L1_BYTES_PER_CLOCK
    read = in_a_unit * work.waves * mix.lds_read_bytes / LDS_BYTES_PER_CLOCK
    in_order = clocks / CLOCKS_PER_SECOND
    seconds = max(
        in_order,
        max(loaded, read) / CLOCKS_PER_SECOND,
        work.memory_seconds,
        work.least_seconds,
    )
    alone = way.clocks_with(_on_a_simd(1, work.waves))
    return LaunchTime(
        path=mix,
        busy=_on_a_simd(1, work.waves) * mix.mfma_clocks / alone,
        weight_bytes_per_instruction=work.weight_bytes / mix.count,
        weight_bytes_per_clock=work.weight_bytes / alone,
        bytes_in_flight=mix.loaded_bytes / alone * MEMORY_CLOCKS,
        workgroups=work.workgroups,
        resident=resident,
        in_order_seconds=in_order,
        seconds=seconds + work.split_seconds,
        least_seconds=work.least_seconds,
    )


def _on_a_simd(workgroups: int, waves: int) -> int:
    return ceil(workgroups * waves / SIMDS)
