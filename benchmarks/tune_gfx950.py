# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write the gfx950 table of tuned shapes: for each (N, K) and each range of M the best kernel.

Best is the shortest estimate of a launch (docs/gfx950_estimate.md): nothing is timed, no card is
needed, and what comes out is as good as that estimate. A formula chooses which configurations are
compiled; the estimate reads their machine code. What needs more LDS or registers than there are, or
spills, is left out. With ``--state`` a run goes on where one before it stopped, also after
``--minutes`` are over, when shapes that were not reached keep their entry in the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.gfx950_candidates import best_candidates
from benchmarks.gfx950_static import CompiledTier, compile_tier, selected_tier
from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.select import FEWEST_ROWS, tier_from_table, tuned_tiers
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_launch_time import LaunchTime, launch_time, work_of
from block32.tools.output import write_atomically

TABLE = Path(__file__).parent.parent / "lowering" / "gfx950" / "tuned.toml"

#: Largest M of each tier; the last one serves everything above.
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)

HEADER = """\
# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# Kernel configurations by weight shape, with tiers by largest M.
#
# Written by benchmarks/tune_gfx950.py: the shortest by an estimate that reads machine code
# (docs/gfx950_estimate.md). Nothing was timed on a card.
"""

#: Estimates that differ by less than this are taken to be equal: the one with the fewest
#: instructions for its matrix instructions is taken.
SLACK = 0.03


@dataclass(frozen=True)
class Measured:
    """What the table needs to know of a configuration at one M."""

    tier: KernelTier
    seconds: float
    instructions_per_unit: float


@dataclass
class Tuner:
    """Compiles and estimates, each kernel once, and remembers results in a file.

    Attributes:
        state_path: Where results are kept, or None.
        deadline: When to stop, by ``time.monotonic``.
        tries: Configurations that are compiled for each shape and M.
        results: (N, K, M) as text to the best tier's fields and its time.
        kernels: Compiled kernels by K and configuration.
    """

    state_path: Path | None
    deadline: float
    tries: int
    results: dict[str, dict[str, object]] = field(default_factory=dict)
    kernels: dict[tuple[int, KernelTier], CompiledTier | None] = field(default_factory=dict)

    def load(self) -> None:
        """Take over the results of an earlier run."""
        if self.state_path and self.state_path.exists():
            self.results = json.loads(self.state_path.read_text(encoding="utf-8"))

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    def best(self, m: int, n: int, k: int) -> KernelTier | None:
        """The best configuration for up to ``m`` rows; None where the time is up."""
        key = f"{n} {k} {m}"
        if key not in self.results:
            if self.is_over():
                return None
            chosen = self._search(m, n, k)
            self.results[key] = {"tier": asdict(chosen.tier), "seconds": chosen.seconds}
            if self.state_path:
                write_atomically(self.state_path, json.dumps(self.results, indent=1).encode())
        return replace(tier_from_table(self.results[key]["tier"]), max_m=m)  # type: ignore[arg-type]

    def _search(self, m: int, n: int, k: int) -> Measured:
        candidates = best_candidates(m, n, k, self.tries)
        before = replace(selected_tier(m, n, k), max_m=None)
        if before.form == "packed" or m > FEWEST_ROWS:
            candidates.append(before)  # a handful of rows stays packed, where x can be quantised
        measured = [self._measure(m, n, k, tier) for tier in dict.fromkeys(candidates)]
        usable = [result for result in measured if result is not None]
        least = min(result.seconds for result in usable)
        close = [result for result in usable if result.seconds <= (1 + SLACK) * least]
        return min(close, key=lambda result: (result.instructions_per_unit, result.seconds))

    def _measure(self, m: int, n: int, k: int, tier: KernelTier) -> Measured | None:
        """None for a kernel that spills.

        Kernels of one K differ in constants only where N differs, so they are compiled once.
        """
        plain = replace(tier, order="n")
        if (k, plain) not in self.kernels:
            kernel = compile_tier(n, k, plain)
            spills = kernel.facts.vgpr_spills + kernel.facts.sgpr_spills
            self.kernels[k, plain] = None if spills else kernel
        kernel = self.kernels[k, plain]
        if kernel is None:
            return None
        launch = launch_at(kernel, m, n, k)
        return Measured(tier, launch.seconds, launch.instructions_per_unit)


def launch_at(kernel: CompiledTier, m: int, n: int, k: int) -> LaunchTime:
    """The estimate of a kernel at a shape with the K that it was compiled for."""
    problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
    work = work_of(Geometry(problem, kernel.geometry.tier), m)
    return launch_time(kernel.way, kernel.facts, work)


def table_text(table: Mapping[tuple[int, int], Sequence[KernelTier]]) -> str:
    """The table as TOML."""
    shapes = [HEADER]
    for (n, k), tiers in table.items():
        rows = "\n".join(f"  {{ {tier_fields(tier)} }}," for tier in tiers)
        shapes.append(f"[[shapes]]\nn = {n}\nk = {k}\ntiers = [\n{rows}\n]\n")
    return "\n".join(shapes)


def tier_fields(tier: KernelTier) -> str:
    """The fields of a tier that are not at their default, as TOML."""
    default = KernelTier(tier.form)
    values = {"max_m": tier.max_m, "form": tier.form}
    values |= {
        name: value
        for name, value in asdict(tier).items()
        if name not in values and value != getattr(default, name)
    }
    return ", ".join(f"{name} = {_toml(value)}" for name, value in values.items())


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def main() -> int:
    """Search, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long")
    parser.add_argument("--tries", type=int, default=8, help="kernels to compile a shape and M")
    parser.add_argument("--state", type=Path, metavar="FILE", help="results, to go on from")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to write")
    parser.add_argument(
        "--shape", nargs=2, type=int, action="append", metavar=("N", "K"), help="only these"
    )
    arguments = parser.parse_args()
    known = tuned_tiers()
    shapes = [(n, k) for n, k in arguments.shape] if arguments.shape else list(known)
    tuner = Tuner(arguments.state, time.monotonic() + 60 * arguments.minutes, arguments.tries)
    tuner.load()
    table: dict[tuple[int, int], Sequence[KernelTier]] = dict(known)
    not_reached = []
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("tuning", total=len(shapes) * len(ROWS))
        for n, k in shapes:
            tiers = []
            for m in ROWS:
                progress.update(task, description=f"N {n}, K {k}, M up to {m}")
                tiers.append(tuner.best(m, n, k))
                progress.advance(task)
            found = [tier for tier in tiers if tier is not None]
            if len(found) == len(ROWS):
                table[n, k] = found
            else:
                not_reached.append((n, k))
    write_atomically(arguments.table, table_text(table).encode())
    for n, k in not_reached:
        console.print(f"not reached in time, kept as it was: N {n}, K {k}")
    return 1 if not_reached else 0


if __name__ == "__main__":
    sys.exit(main())
