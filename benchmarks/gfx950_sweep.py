# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sweep the gfx950 kernels over shapes and rows in the executor, against float64.

One module with a dynamic M is compiled for each weight shape and run with every number of rows.
Each tier of the table is run alone as well, with one row less than it serves (``--tiers``: these
only).
Of each result a few tiles are run: corners, edges and one at random, with all their K ranges. What
lies outside of those tiles has to keep what it held before, and each tier has to multiply with
matrix instructions. ``--log`` keeps the verdicts, and a second run with it does what is missing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from iree.compiler import ir
from iree.compiler.tools import compile_str

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.common.tile_order import die_contiguous, split_position, tile_position
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import XCDS
from block32.lowering.gfx950.select import tuned_tiers
from block32.lowering.gfx950.split_k import REDUCE_BLOCK
from block32.lowering.gfx950.target import GEMM, REDUCE, Gfx950Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import EXECUTABLE_PREFIX, KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_executor import hsaco_from_vmfb
from block32.tools.gfx950_launch import POISON, launch_matmul

#: Rows that every shape of the table is run with.
ROWS = (1, 3, 7, 8, 16, 31, 32, 33, 63, 129, 192, 255, 1023, 1024)

#: (M, N, K) with ragged edges, N of tensor-parallel models, and sizes that others got wrong.
RAGGED = (
    (3, 2053, 1280),
    (31, 4096, 1280),
    (63, 8193, 1280),
    (129, 4097, 576),
    (255, 16385, 1152),
    (33, 130, 96),
    (16, 73448, 2560),
    (4, 1024, 16384),
    (1, 1536, 7168),
    (64, 256, 5120),
    (32, 512, 8192),
    *((m, n, 128) for n in (1, 2, 16, 31, 32, 33) for m in (1, 33)),
    *((m, n, 640) for n in (12, 24, 48, 96) for m in (1, 8, 63)),
)

#: Largest error: of the value itself (rounding to bf16), and of the sum of magnitudes (f32 sums).
RELATIVE_TO_VALUE = 2.0**-8
RELATIVE_TO_MAGNITUDES = 2.0**-17

Tile = tuple[int, int]
Area = tuple[slice, slice]
Workgroup = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """One number of rows with one module.

    Attributes:
        m: Rows.
        problem: The matmul, M dynamic.
        tiers: Asked for; None for those that selection takes.
    """

    m: int
    problem: ScaledMatmul
    tiers: tuple[KernelTier, ...] | None = None

    @property
    def name(self) -> str:
        """One line that tells the case from the others."""
        name = f"M={self.m} N={self.problem.n} K={self.problem.k}"
        return name + "".join(f" {tier.describe()} {tier.reduce}" for tier in self.tiers or ())

    def all_tiers(self) -> tuple[KernelTier, ...]:
        """The tiers of the module."""
        if self.tiers is not None:
            return self.tiers
        config = Gfx950Target().select(self.problem, DeviceFacts()).config
        assert config is not None
        return config.tiers


def cases() -> Iterator[Case]:
    """All cases; those of one module follow each other."""
    for m, n, k in RAGGED:
        yield Case(m, ScaledMatmul(m=None, n=n, k=k, result="bf16"))
    split = KernelTier("tiled", tile=(32, 64, 128), warps=4, stages=2, splits=3)
    yield Case(19, ScaledMatmul(m=None, n=5120, k=576, result="bf16"), (split,))
    for n, k in tuned_tiers():
        for m in ROWS:
            yield Case(m, ScaledMatmul(m=None, n=n, k=k, result="bf16"))
    yield from tier_cases()


def tier_cases() -> Iterator[Case]:
    """Every tier of the table by itself: a dynamic M has some of them, a static M any one."""
    for (n, k), tiers in tuned_tiers().items():
        problem = ScaledMatmul(m=None, n=n, k=k, result="bf16")
        for tier in tiers:
            assert tier.max_m is not None
            yield Case(tier.max_m - 1, problem, (replace(tier, max_m=None),))


@cache
def compile_module(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> bytes:
    """The machine code of all tiers."""
    target = Gfx950Target()
    with ir.Context(), ir.Location.unknown():
        text = str(build_standalone_module(KernelSpec(problem, target, tiers)))
    vmfb = compile_str(text, extra_args=list(target.compile_flags()))
    assert vmfb is not None
    return hsaco_from_vmfb(vmfb)


def random_operands(problem: ScaledMatmul, m: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Operands of like magnitude (2^-3 to 2^1), so that no product is too small to be missed."""
    rng = np.random.default_rng([m, problem.n, problem.k])

    def codes(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        bits = rng.integers(0, 64, shape, dtype=np.uint8)
        return ((bits & 31) + 0x20 | (bits & 32) << 2).astype(np.uint8)

    def scales(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        return rng.integers(125, 130, shape, dtype=np.uint8)

    return {
        "lhs": codes((m, problem.k)),
        "rhs": codes((problem.n, problem.k)),
        "lhs_scale": scales((m, problem.k_blocks)),
        "rhs_scale": scales(problem.rhs_scale_shape),
    }


def decode_e4m3(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Finite f8E4M3FN codes as float64, from the format's definition."""
    exponent, mantissa = codes.astype(np.int64) >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(codes & 0x80, -1.0, 1.0) * np.where(exponent, normal, mantissa * 2.0**-9)


def expected(
    operands: dict[str, npt.NDArray[np.uint8]], rows: slice, columns: slice
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A tile of the product, and the sums of the products' magnitudes."""
    x, w = decode_e4m3(operands["lhs"][rows]), decode_e4m3(operands["rhs"][columns])
    k = x.shape[1]
    x_scale = operands["lhs_scale"][rows].astype(np.float64)
    blocks = np.arange(columns.start, columns.stop) // 32
    w_scale = operands["rhs_scale"][blocks].astype(np.float64)
    x *= np.repeat(2.0 ** (x_scale - 127), 32, axis=1)[:, :k]
    w *= np.repeat(2.0 ** (w_scale - 127), 32, axis=1)[:, :k]
    return x @ w.T, np.abs(x) @ np.abs(w).T


def sample_tiles(tiles_m: int, tiles_n: int, count: int, seed: int) -> list[Tile]:
    """Up to ``count`` tiles: the far corner, one at random, the two far edges, the near corner."""
    rng = random.Random(seed)
    last_m, last_n = tiles_m - 1, tiles_n - 1
    wanted = [
        (last_m, last_n),
        (rng.randrange(tiles_m), rng.randrange(tiles_n)),
        (last_m, rng.randrange(tiles_n)),
        (rng.randrange(tiles_m), last_n),
        (0, 0),
    ]
    return list(dict.fromkeys(wanted))[:count]


def areas_of(geometry: Geometry, m: int, wanted: list[Tile]) -> list[Area]:
    """What is stored of y where the wanted tiles are run: the tiles, or blocks of a second launch.

    Of each tile it is the block with its last element, whose other tiles have to be run as well.
    """
    areas = []
    for tile_m, tile_n in wanted:
        rows = slice(tile_m * geometry.block_m, min(m, (tile_m + 1) * geometry.block_m))
        columns = slice(
            tile_n * geometry.block_n, min(geometry.problem.n, (tile_n + 1) * geometry.block_n)
        )
        if has_second_launch(geometry):
            block_rows, block_columns = REDUCE_BLOCK
            first_row = (rows.stop - 1) // block_rows * block_rows
            first_column = (columns.stop - 1) // block_columns * block_columns
            rows = slice(first_row, min(m, first_row + block_rows))
            columns = slice(first_column, min(geometry.problem.n, first_column + block_columns))
        areas.append((rows, columns))
    return areas


def has_second_launch(geometry: Geometry) -> bool:
    """Whether a second launch adds the partial sums."""
    return geometry.splits > 1 and geometry.tier.reduce == "second_launch"


def workgroups_of(geometry: Geometry, m: int, areas: list[Area]) -> dict[str, list[Workgroup]]:
    """The workgroups that the areas need, by launch, all ranges of K."""
    chosen = {GEMM: [(w, 0, 0) for w in gemm_workgroups(geometry, m, areas)]}
    if has_second_launch(geometry):
        block_rows, block_columns = REDUCE_BLOCK
        across = -(-geometry.problem.n // block_columns)
        blocks = {r.start // block_rows * across + c.start // block_columns for r, c in areas}
        chosen[REDUCE] = [(block, 0, 0) for block in sorted(blocks)]
    return chosen


def gemm_workgroups(geometry: Geometry, m: int, areas: list[Area]) -> Iterator[int]:
    """The workgroups of the first launch whose tile overlaps an area."""
    tiles_m, total = as_integer(geometry.tiles_m(m)), as_integer(geometry.tiles(m))
    tiles = {
        (tile_m, tile_n)
        for rows, columns in areas
        for tile_m in range(rows.start // geometry.block_m, -(-rows.stop // geometry.block_m))
        for tile_n in range(columns.start // geometry.block_n, -(-columns.stop // geometry.block_n))
    }
    splits = geometry.splits
    for workgroup in range(total if splits == 1 else -(-total // XCDS) * XCDS * splits):
        tile = as_integer(
            die_contiguous(workgroup, total, XCDS)
            if splits == 1
            else split_position(workgroup, splits, XCDS)[0]
        )
        place = tile_position(tile, tiles_m, geometry.tiles_n, geometry.tier.order)
        if tile < total and (as_integer(place[0]), as_integer(place[1])) in tiles:
            yield workgroup


def check(case: Case, samples: int) -> str:
    """``right`` and what ran, or what is wrong."""
    tiers = case.all_tiers()
    index = next(i for i, t in enumerate(tiers) if t.max_m is None or case.m <= t.max_m)
    geometry = Geometry(case.problem, tiers[index])
    operands = random_operands(case.problem, case.m)
    tiles_m = as_integer(geometry.tiles_m(case.m))
    wanted = sample_tiles(tiles_m, geometry.tiles_n, samples, seed=case.m)
    areas = areas_of(geometry, case.m, wanted)
    outcome = launch_matmul(
        compile_module(case.problem, tiers),
        case.problem,
        tiers,
        operands,
        EXECUTABLE_PREFIX,
        workgroups=workgroups_of(geometry, case.m, areas),
    )
    report = outcome.reports[GEMM]
    if not report.instructions["mfma"]:
        return "wrong: no matrix instruction"
    verdict = compare(outcome.y, operands, areas)
    ran = f"tier {index} {tiers[index].describe()}, {report.workgroups} workgroups"
    return f"{verdict} ({ran})"


def compare(
    y: npt.NDArray[Any], operands: dict[str, npt.NDArray[np.uint8]], areas: list[Area]
) -> str:
    """``right`` where the areas are close to float64 and nothing else was written."""
    untouched = (y.view(np.uint8) == POISON).reshape(y.shape[0], y.shape[1], -1).all(axis=2)
    for rows, columns in areas:
        untouched[rows, columns] = True
        value, magnitudes = expected(operands, rows, columns)
        error = np.abs(y[rows, columns].astype(np.float64) - value)
        allowed = RELATIVE_TO_VALUE * np.abs(value) + RELATIVE_TO_MAGNITUDES * magnitudes
        bad = np.argwhere(~(error <= allowed))
        if len(bad):
            first = f"y[{rows.start + bad[0][0]}, {columns.start + bad[0][1]}]"
            return f"wrong: {len(bad)} elements, first {first}"
    return "right" if untouched.all() else "wrong: stored outside of what ran"


def already_right(log: Path | None) -> set[str]:
    """The names of the cases that the log calls right."""
    if log is None or not log.exists():
        return set()
    lines = [line.split(": ", 1) for line in log.read_text(encoding="utf-8").splitlines()]
    return {line[0] for line in lines if len(line) == 2 and line[1].startswith("right")}


def main() -> int:
    """Run the cases; 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--tiers", action="store_true", help="only the tiers of the table")
    parser.add_argument("--samples", type=int, default=3, help="tiles of each result, 1 to 5")
    parser.add_argument("--log", type=Path, help="add verdicts here, skip those right in it")
    arguments = parser.parse_args()
    done = already_right(arguments.log)
    every = list(tier_cases() if arguments.tiers else cases())
    wanted = [case for case in every if arguments.only in case.name]
    if not wanted:
        parser.error(f"no case's name holds '{arguments.only}'; names are like '{every[0].name}'")
    todo = [case for case in wanted if case.name not in done]
    failed = 0
    for number, case in enumerate(todo, start=1):
        start = time.monotonic()
        try:
            verdict = check(case, arguments.samples)
        except Exception as error:  # a case that cannot run must not hide the others
            verdict = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        line = f"{case.name}: {verdict}"
        print(f"[{number}/{len(todo)}, {time.monotonic() - start:.0f} s] {line}", flush=True)
        if arguments.log is not None:
            with arguments.log.open("a", encoding="utf-8") as log:
                log.write(line + "\n")
        failed += not verdict.startswith("right")
    print(f"{len(wanted) - failed} of {len(wanted)} right")
    return 1 if failed or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
