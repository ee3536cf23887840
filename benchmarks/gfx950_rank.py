# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How well the estimate of a launch ranks kernels, against what was fastest on an MI355X.

``gfx950_triton.toml`` says for many shapes which Triton configuration was fastest on the card. For
each of them every configuration that won anywhere is compiled and estimated at that shape. A
perfect estimate puts the winner first, one that knows nothing puts it in the middle (0.50).
``--loops`` holds the steady loops of six forms against each other instead: the estimate should put
them in the order of their instructions for each matrix instruction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.gfx950_triton import compile_tier, triton_launch, tuned_tier, tuned_tiers
from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.machine import SIMDS
from block32.tools.gfx950_estimate import estimate
from block32.tools.gfx950_launch_time import LaunchTime
from block32.tools.tables import print_table

ROWS = (1, 8, 32, 128, 512, 2048)


@dataclass(frozen=True)
class Candidate:
    """A configuration at one shape, and its estimate."""

    tier: KernelTier
    time: LaunchTime


@dataclass(frozen=True)
class Placed:
    """Where the estimate puts the measured winner of a shape.

    Attributes:
        shape: (M, N, K).
        place: Share of the other configurations that the estimate takes to be faster.
        naive_place: The same for the count of instructions a matrix instruction alone.
        behind: The winner's estimated time over the best one's.
    """

    shape: tuple[int, int, int]
    place: float
    naive_place: float
    behind: float


def winners() -> list[KernelTier]:
    """Every configuration that won somewhere, without its M."""
    distinct = {
        replace(tier, max_m=None, waves_per_eu=0)
        for tiers in tuned_tiers().values()
        for tier in tiers
    }
    return sorted(distinct, key=str)


def place_of(
    winner: Candidate, others: Sequence[Candidate], key: Callable[[LaunchTime], float]
) -> float:
    """The share of ``others`` before ``winner``; ties count half."""
    mine = key(winner.time)
    before = sum(key(other.time) < mine for other in others)
    ties = sum(key(other.time) == mine for other in others)
    return (before + ties / 2) / len(others)


def place_winner(m: int, n: int, k: int, pool: Sequence[KernelTier]) -> Placed:
    """Estimate the whole pool at a shape."""
    won = replace(tuned_tier(m, n, k), max_m=None, waves_per_eu=0)
    candidates = [Candidate(tier, triton_launch(tier, m, n, k)) for tier in pool]
    winner = next(candidate for candidate in candidates if candidate.tier == won)
    others = [candidate for candidate in candidates if candidate is not winner]
    return Placed(
        (m, n, k),
        place_of(winner, others, lambda time: time.seconds),
        place_of(winner, others, lambda time: time.instructions_per_unit),
        winner.time.seconds / min(candidate.time.seconds for candidate in candidates),
    )


def main() -> int:
    """Print the ranking."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of x")
    parser.add_argument("--shapes", type=int, help="only the first so many (N, K)")
    parser.add_argument("--loops", action="store_true", help="the loops of six forms instead")
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    arguments = parser.parse_args()
    if arguments.loops:
        return print_loops(arguments.markdown)
    shapes = list(tuned_tiers())[: arguments.shapes]
    pool = winners()
    placed = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(
            f"{len(pool)} configurations", total=len(shapes) * len(arguments.rows)
        )
        for n, k in shapes:
            for m in arguments.rows:
                placed.append(place_winner(m, n, k, pool))
                progress.advance(task)
    groups = [(str(m), [p for p in placed if p.shape[0] == m]) for m in arguments.rows]
    print_groups([*groups, ("all", placed)], arguments.markdown)
    return 0


COLUMNS = (
    "M",
    "shapes",
    "place of the fastest on the card (0 is first)",
    "in the first tenth",
    "its place by instructions per 32 MFMA clocks",
    "its estimate over the best one",
)


def print_groups(groups: Sequence[tuple[str, list[Placed]]], is_markdown: bool) -> None:
    """A line a group: medians over its shapes."""
    lines = [
        [
            name,
            str(len(group)),
            f"{median(p.place for p in group):.2f}",
            f"{sum(p.place <= 0.1 for p in group)}",
            f"{median(p.naive_place for p in group):.2f}",
            f"{median(p.behind for p in group):.2f}",
        ]
        for name, group in groups
    ]
    print_table(COLUMNS, lines, is_markdown)


#: Forms from a handful of rows to large products, as Triton tiers.
LOOPS = (
    KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=3),
    KernelTier("tiled", tile=(16, 64, 256), warps=4, stages=2, splits=4),
    KernelTier("packed", tile=(32, 32, 256), warps=2, stages=3),
    KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2),
    KernelTier("tiled", tile=(128, 128, 128), warps=4, stages=2),
    KernelTier("tiled", tile=(256, 256, 128), warps=4, stages=2),
)


def print_loops(is_markdown: bool) -> int:
    """Each loop's instructions and estimate; 1 where the two put them in different orders."""
    figures = []
    for tier in LOOPS:
        kernel = compile_tier(tier, 4096)
        loop, mix = estimate(kernel.code, max(1, tier.warps // SIMDS)), kernel.facts.loop
        assert loop is not None
        assert mix is not None
        figures.append((tier, mix.count / mix.classes["mfma"], loop))
    columns = ("Triton's kernel", "instructions an MFMA", "busy", "bytes a clock and wave")
    lines = [
        [tier.describe(), f"{count:.1f}", f"{loop.busy:.2f}", f"{loop.bytes_per_clock:.1f}"]
        for tier, count, loop in figures
    ]
    print_table(columns, lines, is_markdown)
    by_count = sorted(figures, key=lambda figure: -figure[1])
    is_same = by_count == sorted(figures, key=lambda figure: figure[2].busy)
    print(f"\nthe same order by both: {'yes' if is_same else 'NO'}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
