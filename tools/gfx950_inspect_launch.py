# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ``block32 inspect`` says of a whole launch: an estimate against the card's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import select
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import (
    COMPUTE_UNITS,
    HBM_BYTES_PER_SECOND,
    MXFP8_FLOPS,
)
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_executor import Instruction
from block32.tools.gfx950_launch_time import LaunchTime, Way, launch_time, work_of
from block32.tools.gfx950_listing import KernelFacts

#: Rows for the last tier of a dynamic M, which serves any number.
ROWS_WITHOUT_LIMIT = 4096


@dataclass(frozen=True)
class InspectedLaunch:
    """The estimate of a kernel's launch.

    Attributes:
        rows: Rows of x.
        time: The estimate.
        memory_seconds: What the bytes of the operands and of y take at the card's bandwidth.
        matrix_seconds: What the product takes at the card's rate of MXFP8.
    """

    rows: int
    time: LaunchTime
    memory_seconds: float
    matrix_seconds: float

    @classmethod
    def create(
        cls,
        code: Sequence[Instruction],
        facts: KernelFacts,
        tier: KernelTier,
        problem: ScaledMatmul,
        rows: int,
    ) -> InspectedLaunch:
        """Estimate a launch of the kernel of ``tier`` with ``rows`` rows."""
        work = work_of(Geometry(problem, tier), rows)
        time = launch_time(Way.create(code, work.matrix_clocks), facts, work)
        return cls(rows, time, work.moved_bytes / HBM_BYTES_PER_SECOND, work.flops / MXFP8_FLOPS)

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        values = vars(self.time) | {
            "instructions_per_32_mfma_clocks": self.time.instructions_per_unit
        }
        values["path"] = vars(self.time.path)
        rest = {name: value for name, value in vars(self).items() if name != "time"}
        return rest | values

    def cells(self) -> list[str]:
        """The launch as text, in the order of ``COLUMNS``."""
        time = self.time
        return [
            str(self.rows),
            f"{time.workgroups} ({time.workgroups / COMPUTE_UNITS:.1f})",
            f"{time.instructions_per_unit:.2f}",
            f"{time.busy:.2f}",
            f"{time.bytes_in_flight:.0f}",
            f"{time.weight_bytes_per_instruction:.0f}",
            f"{1e6 * time.in_order_seconds:.2f}",
            f"{1e6 * self.memory_seconds:.2f}",
            f"{1e6 * self.matrix_seconds:.2f}",
            f"{1e6 * time.seconds:.2f}",
        ]


COLUMNS = (
    "rows",
    "workgroups (a CU)",
    "per 32 clocks",
    "busy",
    "bytes in flight",
    "weight bytes an instruction",
    "in order, µs",
    f"at {HBM_BYTES_PER_SECOND / 1e12:g} TB/s",
    f"at {MXFP8_FLOPS / 1e15:g} PFLOP/s",
    "estimate, µs",
)

FOOTNOTE = (
    "launches: an estimate of a wave's whole way through the kernel, in an in-order model; it "
    "ranks kernels and predicts no hardware (docs/gfx950_estimate.md)"
)


def tier_of(problem: ScaledMatmul, number: int, threads: int) -> tuple[KernelTier, int] | None:
    """The tier that this version chooses for a kernel, and the most rows that it serves.

    None where the kernel is not of that choice: made by another version, or asked for by the user.
    """
    selection = select.select(problem, DeviceFacts())
    tiers = selection.config.tiers if selection.config else ()
    if number >= len(tiers) or Geometry(problem, tiers[number]).threads != threads:
        return None
    tier = tiers[number]
    return tier, problem.m or tier.max_m or ROWS_WITHOUT_LIMIT


def launch_table(launches: Iterable[tuple[str, InspectedLaunch]]) -> Table:
    """The launches of some kernels by name."""
    table = Table(title="launches*", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, launch in launches:
        table.add_row(name, *launch.cells())
    return table
