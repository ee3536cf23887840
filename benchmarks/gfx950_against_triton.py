# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""block32's kernel beside Triton's at every tuned shape, by what machine code tells.

For each (N, K) of the table and some M, the kernel that selection takes and Triton's kernel with
the configuration that was fastest on an MI355X, both compiled here: instructions and time (in the
in-order model) of a wave's whole way through the kernel, the prologue and the store included. Up to
32 rows, where the weight has to stream, by bytes of w for each instruction and each clock; above by
instructions for each 32 clocks of the matrix unit and the share of time that it is busy. Fails
where Triton's is better by either. ``--markdown`` writes docs/gfx950_against_triton.md's table.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import Progress

from benchmarks.gfx950_candidates import PACKED_ROWS
from benchmarks.gfx950_static import TUNED_ROWS, compile_tier, selected_tier
from benchmarks.gfx950_triton import triton_launch, tuned_tier
from benchmarks.gfx950_triton import tuned_tiers as triton_tiers
from block32.dialects.kernel import KernelTier
from block32.tools.gfx950_launch_time import LaunchTime
from block32.tools.tables import print_table

COLUMNS = (
    "M, N, K",
    "block32",
    "Triton",
    "weight bytes an instruction",
    "weight bytes a clock and wave",
    "instructions per 32 MFMA clocks",
    "busy",
    "workgroups",
    "estimate, µs",
    "",
)


@dataclass(frozen=True)
class Pair:
    """The two kernels of a shape.

    Attributes:
        shape: (M, N, K).
        tier: block32's configuration.
        ours: The estimate of its launch.
        triton_tier: Triton's configuration.
        triton: The estimate of its launch.
    """

    shape: tuple[int, int, int]
    tier: KernelTier
    ours: LaunchTime
    triton_tier: KernelTier
    triton: LaunchTime

    @property
    def is_as_good(self) -> bool:
        """Whether Triton's kernel is better by neither of the shape's two measures."""
        if self.shape[0] <= PACKED_ROWS:
            return (
                self.ours.weight_bytes_per_instruction >= self.triton.weight_bytes_per_instruction
                and self.ours.weight_bytes_per_clock >= self.triton.weight_bytes_per_clock
            )
        return (
            self.ours.instructions_per_unit <= self.triton.instructions_per_unit
            and self.ours.busy >= self.triton.busy
        )

    def cells(self) -> list[str]:
        """The pair as text, in the order of ``COLUMNS``, block32 first."""
        a, b = self.ours, self.triton
        figures = [
            (a.weight_bytes_per_instruction, b.weight_bytes_per_instruction, 0),
            (a.weight_bytes_per_clock, b.weight_bytes_per_clock, 1),
            (a.instructions_per_unit, b.instructions_per_unit, 1),
            (a.busy, b.busy, 2),
            (a.workgroups, b.workgroups, 0),
            (1e6 * a.seconds, 1e6 * b.seconds, 1),
        ]
        return [
            ", ".join(map(str, self.shape)),
            describe(self.tier),
            describe(self.triton_tier),
            *(f"{x:.{digits}f} / {y:.{digits}f}" for x, y, digits in figures),
            "" if self.is_as_good else "worse",
        ]


def describe(tier: KernelTier) -> str:
    """Such as ``packed 8x16x256 P2 split 3, 2 waves``."""
    assert tier.tile is not None
    pack = f" P{tier.k_pack}" if tier.k_pack > 1 else ""
    split = f" split {tier.splits}" if tier.splits > 1 else ""
    return f"{tier.form} {'x'.join(map(str, tier.tile))}{pack}{split}, {tier.warps} waves"


def main() -> int:
    """Compile all pairs, print them, and say where Triton's kernel is better."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    arguments = parser.parse_args()
    pairs = []
    cells = [(m, n, k) for n, k in triton_tiers() for m in TUNED_ROWS]
    with Progress(console=Console(stderr=True)) as progress:
        for m, n, k in progress.track(cells, description="compiling"):
            tier = selected_tier(m, n, k)
            kernel = compile_tier(n, k, replace(tier, max_m=None))
            theirs = tuned_tier(m, n, k)
            pair = Pair((m, n, k), tier, kernel.launch(m), theirs, triton_launch(theirs, m, n, k))
            pairs.append(pair)
    print_table(COLUMNS, [pair.cells() for pair in pairs], arguments.markdown)
    worse = sum(not pair.is_as_good for pair in pairs)
    print(f"\n{len(pairs) - worse} of {len(pairs)} at least as good by both measures")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
