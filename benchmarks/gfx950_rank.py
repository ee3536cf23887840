# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How well the estimate of a launch ranks kernels, against what was fastest on an MI355X.

``gfx950_triton.toml`` says for many shapes which Triton configuration was fastest on the card. For
each of them every configuration that won anywhere is compiled and estimated at that shape. A
perfect estimate puts the winner first, one that knows nothing puts it in the middle (0.50).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.gfx950_triton import triton_launch, tuned_tier, tuned_tiers
from block32.dialects.kernel import KernelTier
from block32.tools.gfx950_launch_time import LaunchTime

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
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    arguments = parser.parse_args()
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
    for p in placed:
        print(p.shape, f"{p.place:.2f} {p.naive_place:.2f} {p.behind:.2f}")
    for m in arguments.rows:
        sub = [p for p in placed if p.shape[0] == m]
        print(
            m,
            f"{median(p.place for p in sub):.2f} {median(p.naive_place for p in sub):.2f} {median(p.behind for p in sub):.2f}",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
