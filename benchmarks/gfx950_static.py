# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be measured of gfx950 kernels without the card: the steady loop of each shape's kernel.

Compiles the kernel that selection takes for a shape with a dynamic M, and prints, for the loop that
holds most matrix instructions (the whole kernel where it has no loop): all instructions for each 32
clocks of the matrix unit, the share of time that it is busy in the in-order model, bytes loaded for
each instruction, registers and spills. ``--markdown`` writes the table of docs/gfx950.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.tools import compile_str
from rich.console import Console
from rich.table import Table

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import (
    COMPUTE_UNITS,
    HBM_BYTES_PER_SECOND,
    MXFP8_FLOPS,
    SIMDS,
)
from block32.lowering.gfx950.select import tuned_tiers
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_estimate import Estimate, estimate
from block32.tools.gfx950_executor import hsaco_from_vmfb, mutate, parse_code_object
from block32.tools.gfx950_listing import KernelFacts, facts_of

#: Shapes that other projects' kernels were read for: (M, N, K).
SHAPES = (
    (4096, 4096, 4096),
    (256, 4096, 4096),
    (8, 4096, 4096),
    (8, 16384, 16384),
    (32, 7168, 2048),
)
TUNED_ROWS = (1, 8, 32, 128, 512, 2048)

COLUMNS = (
    "M, N, K",
    "kernel",
    "instructions per 32 MFMA clocks",
    "busy*",
    "bytes an instruction",
    "VGPR + AGPR",
    "spills",
    "workgroups a CU",
    "at least, µs**",
)


@dataclass(frozen=True)
class Row:
    """One shape's kernel."""

    shape: tuple[int, int, int]
    tier: KernelTier
    facts: KernelFacts
    estimate: Estimate | None

    def cells(self) -> list[str]:
        """The row as text, in the order of ``COLUMNS``."""
        m, n, k = self.shape
        mix = self.facts.loop or self.facts.whole
        geometry = Geometry(ScaledMatmul(m=m, n=n, k=k), self.tier)
        workgroups = -(-m // geometry.block_m) * geometry.tiles_n * geometry.splits
        return [
            f"{m}, {n}, {k}",
            self.tier.describe() + ("" if self.facts.loop else " (no loop)"),
            f"{mix.count / mix.mfma_units:.2f}",
            f"{self.estimate.busy:.2f}" if self.estimate else "-",
            f"{mix.loaded_bytes / mix.count:.0f}",
            f"{self.facts.vgprs} + {self.facts.agprs}",
            str(self.facts.vgpr_spills + self.facts.sgpr_spills),
            f"{workgroups / COMPUTE_UNITS:.1f}",
            f"{least_microseconds(m, n, k):.1f}",
        ]


def least_microseconds(m: int, n: int, k: int) -> float:
    """The time that the memory or the matrix units need at their peak rates, bf16 result."""
    moved = (m + n) * k + m * -(-k // 32) + -(-n // 32) * -(-k // 32) + 2 * m * n
    return 1e6 * max(moved / HBM_BYTES_PER_SECOND, 2.0 * m * n * k / MXFP8_FLOPS)


def measure(m: int, n: int, k: int) -> Row:
    """Compile the kernel that serves ``m`` rows of a dynamic M, and read its code."""
    target = Gfx950Target()
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    config = target.select(problem, DeviceFacts()).config
    assert config is not None
    tier = config.tier_for(m)
    with ir.Context(), ir.Location.unknown():
        text = str(build_standalone_module(KernelSpec(problem, target, (tier,))))
    vmfb = compile_str(text, extra_args=list(target.compile_flags()))
    assert vmfb is not None
    hsaco = hsaco_from_vmfb(vmfb)
    kernel = parse_code_object(hsaco).kernels["gemm_tier0"]
    code = mutate.instructions(hsaco, kernel.name)
    waves = max(1, tier.warps // SIMDS)
    return Row((m, n, k), tier, facts_of(hsaco, kernel), estimate(code, waves))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tuned", action="store_true", help="every shape of tuned.toml as well")
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("M", "N", "K"), help="only this")
    arguments = parser.parse_args()
    shapes = [tuple(arguments.shape)] if arguments.shape else list(SHAPES)
    if arguments.tuned:
        shapes += [(m, n, k) for n, k in tuned_tiers() for m in TUNED_ROWS]
    rows = [measure(*shape).cells() for shape in shapes]
    if arguments.markdown:
        print("| " + " | ".join(COLUMNS) + " |")
        print("|" + "---|" * len(COLUMNS))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return 0
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
