# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be measured of gfx950 kernels without the card: the steady loop of each shape's kernel.

Compiles the kernel that selection takes for a shape with a dynamic M, and prints, for the loop that
holds most matrix instructions (the whole kernel where it has no loop): all instructions for each 32
clocks of the matrix unit, the share of time that it is busy in the in-order model, bytes of w that
a wave multiplies for each instruction and in each clock, registers and spills. ``--markdown``
writes the table of docs/gfx950.md; ``--bars`` holds the figures against what other projects'
kernels reach, and fails where one is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cache

from iree.compiler import ir
from iree.compiler.tools import compile_str
from rich.console import Console
from rich.table import Table

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import COMPUTE_UNITS, SIMDS
from block32.lowering.gfx950.select import tuned_tiers
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_estimate import Estimate, estimate
from block32.tools.gfx950_executor import (
    Instruction,
    hsaco_from_vmfb,
    mutate,
    parse_code_object,
)
from block32.tools.gfx950_launch_time import LaunchTime, Way, Work, launch_time, work_of
from block32.tools.gfx950_listing import KernelFacts, Mix, facts_of
from block32.tools.tables import print_table

#: Shapes that other projects' kernels were read for: (M, N, K).
SHAPES = (
    (4096, 4096, 4096),
    (256, 4096, 4096),
    (1, 4096, 4096),
    (8, 4096, 4096),
    (1, 16384, 16384),
    (8, 16384, 16384),
    (32, 7168, 2048),
)
TUNED_ROWS = (1, 8, 32, 128, 512, 2048)

COLUMNS = (
    "M, N, K",
    "kernel",
    "instructions per 32 MFMA clocks",
    "busy*",
    "weight bytes an instruction",
    "weight bytes a clock and wave*",
    "VGPR + AGPR",
    "spills",
    "workgroups",
    "at least, µs**",
)


@dataclass(frozen=True)
class CompiledTier:
    """One kernel of block32's, out of the module that IREE made.

    Attributes:
        geometry: What it computes, and how.
        code: Its instructions.
        facts: Registers, LDS and instruction mix.
        way: The way of a wave through it.
    """

    geometry: Geometry
    code: tuple[Instruction, ...]
    facts: KernelFacts
    way: Way

    @property
    def waves_on_a_simd(self) -> int:
        """With one workgroup on a compute unit."""
        return max(1, self.geometry.waves // SIMDS)

    def launch(self, m: int) -> LaunchTime:
        """The estimate of a launch with ``m`` rows."""
        work = work_of(self.geometry, m)
        return launch_time(self.way, self.facts, work)


@cache
def compile_tier(n: int, k: int, tier: KernelTier) -> CompiledTier:
    """The kernel of a configuration for a dynamic M and a bf16 result."""
    target = Gfx950Target()
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    with ir.Context(), ir.Location.unknown():
        text = str(build_standalone_module(KernelSpec(problem, target, (tier,))))
    vmfb = compile_str(text, extra_args=list(target.compile_flags()))
    assert vmfb is not None
    hsaco = hsaco_from_vmfb(vmfb)
    kernel = parse_code_object(hsaco).kernels["gemm_tier0"]
    code = tuple(mutate.instructions(hsaco, kernel.name))
    geometry = Geometry(problem, tier)
    way = Way.create(code, work_of(geometry, 1).matrix_clocks)
    return CompiledTier(geometry, code, facts_of(hsaco, kernel), way)


def selected_tier(m: int, n: int, k: int) -> KernelTier:
    """The configuration that serves ``m`` rows of a dynamic M."""
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    config = Gfx950Target().select(problem, DeviceFacts()).config
    assert config is not None
    return config.tier_for(m)


@dataclass(frozen=True)
class Row:
    """One shape's kernel.

    Attributes:
        shape: (M, N, K).
        tier: The configuration.
        facts: What was read from the machine code.
        work: What a launch has to do.
        estimate: The in-order model of the loop; None without a loop.
        launch: The in-order model of the whole kernel.
    """

    shape: tuple[int, int, int]
    tier: KernelTier
    facts: KernelFacts
    work: Work
    estimate: Estimate | None
    launch: LaunchTime

    @property
    def mix(self) -> Mix:
        """The loop, or the whole kernel where it has none."""
        return self.facts.loop or self.launch.path

    @property
    def instructions_per_unit(self) -> float:
        """All instructions for each 32 clocks of the matrix unit."""
        return self.mix.count / self.mix.mfma_units

    @property
    def busy(self) -> float:
        """Share of the time that the matrix unit works."""
        return self.estimate.busy if self.estimate else self.launch.busy

    @property
    def weight_bytes_per_instruction(self) -> float:
        """Bytes of w that a wave multiplies for each instruction."""
        return self.work.weight_bytes_of_clock * self.mix.mfma_clocks / self.mix.count

    @property
    def weight_bytes_per_clock(self) -> float:
        """Bytes of w that a wave multiplies in each clock of the model."""
        if self.estimate is None:
            return self.launch.weight_bytes_per_clock
        return self.work.weight_bytes_of_clock * self.mix.mfma_clocks / self.estimate.clocks

    @property
    def spills(self) -> int:
        """Registers that were spilled."""
        return self.facts.vgpr_spills + self.facts.sgpr_spills

    def cells(self) -> list[str]:
        """The row as text, in the order of ``COLUMNS``."""
        m, n, k = self.shape
        return [
            f"{m}, {n}, {k}",
            self.tier.describe() + ("" if self.facts.loop else " (no loop)"),
            f"{self.instructions_per_unit:.2f}",
            f"{self.busy:.2f}",
            f"{self.weight_bytes_per_instruction:.0f}",
            f"{self.weight_bytes_per_clock:.1f}",
            f"{self.facts.vgprs} + {self.facts.agprs}",
            str(self.spills),
            f"{self.work.workgroups} ({self.work.workgroups / COMPUTE_UNITS:.1f} a CU)",
            f"{1e6 * self.work.least_seconds:.1f}",
        ]


def measure(m: int, n: int, k: int) -> Row:
    """Compile the kernel that serves ``m`` rows of a dynamic M, and read its code."""
    tier = selected_tier(m, n, k)
    kernel = compile_tier(n, k, replace(tier, max_m=None))
    loop = estimate(kernel.code, kernel.waves_on_a_simd)
    work = work_of(kernel.geometry, m)
    return Row((m, n, k), tier, kernel.facts, work, loop, kernel.launch(m))


@dataclass(frozen=True)
class Bar:
    """What a shape's loop has to reach.

    Attributes:
        shapes: (M, N, K) of each shape.
        figure: The property of ``Row``.
        at_most: The largest value, or None.
        at_least: The smallest value, or None.
    """

    shapes: tuple[tuple[int, int, int], ...]
    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, row: Row) -> bool:
        """Whether the row reaches it."""
        value = self.value(row)
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def value(self, row: Row) -> float:
        """The row's figure."""
        return row.work.workgroups if self.figure == "workgroups" else getattr(row, self.figure)


SQUARE, WIDE, FEW = SHAPES[:1], SHAPES[1:2], SHAPES[2:6]

#: Beside each bar, what the best kernel of another project had (read from its assembly for gfx950).
BARS = (
    Bar(SQUARE, "instructions_per_unit", at_most=2.5),  # 3.0
    Bar(SQUARE, "busy", at_least=0.82),  # 0.68
    Bar(WIDE, "instructions_per_unit", at_most=4.7),  # 5.6
    Bar(WIDE, "busy", at_least=0.55),  # 0.36
    Bar(FEW, "weight_bytes_per_instruction", at_least=250),  # 221
    Bar(FEW, "weight_bytes_per_clock", at_least=8),  # 3.7
    Bar(FEW, "workgroups", at_least=COMPUTE_UNITS),
    Bar(SHAPES[6:], "instructions_per_unit", at_most=6),  # 7.7
    Bar(SHAPES, "spills", at_most=0),
)


def check_bars() -> int:
    """Print every bar with its figure; 1 where one is missed."""
    rows = {shape: measure(*shape) for shape in SHAPES}
    table = Table("M, N, K", "kernel", "figure", "bar", "here", "")
    missed = 0
    for bar in BARS:
        for shape in bar.shapes:
            row = rows[shape]
            limit = f"at least {bar.at_least}" if bar.at_most is None else f"at most {bar.at_most}"
            holds = bar.holds(row)
            missed += not holds
            table.add_row(
                ", ".join(map(str, shape)),
                row.tier.describe(),
                bar.figure.replace("_", " "),
                limit,
                f"{bar.value(row):.2f}",
                "reached" if holds else "MISSED",
            )
    Console().print(table)
    print(f"{missed} missed" if missed else "all reached")
    return 1 if missed else 0


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tuned", action="store_true", help="every shape of tuned.toml as well")
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    parser.add_argument("--bars", action="store_true", help="check what has to be reached")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("M", "N", "K"), help="only this")
    arguments = parser.parse_args()
    if arguments.bars:
        return check_bars()
    shapes = [tuple(arguments.shape)] if arguments.shape else list(SHAPES)
    if arguments.tuned:
        shapes += [(m, n, k) for n, k in tuned_tiers() for m in TUNED_ROWS]
    rows = [measure(*shape).cells() for shape in shapes]
    print_table(COLUMNS, rows, arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
