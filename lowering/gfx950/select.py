# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernel for which M: the table of tuned shapes, defaults, and what the machine can hold."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.common.bf16_parts import PARTS
from block32.lowering.gfx950.atoms import ATOMS, MFMA_16X16X32_BF16
from block32.lowering.gfx950.geometry import Geometry, geometry_of
from block32.lowering.gfx950.machine import COMPUTE_UNITS
from block32.lowering.gfx950.packed_quantize import FUSED_RULES
from block32.lowering.problem import ScaledMatmul, ceil_div
from block32.lowering.target import DeviceFacts, Selection

NAME = "gfx950"

LHS_TYPES = ("f8E4M3FN", "f8E5M2")
RHS_TYPES = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
RHS_BLOCKS = ((1, 32), (32, 32))

#: Types of an x without scales.
UNSCALED_TYPES = tuple(PARTS)

#: Rows up to which one tier of a dynamic M serves all: the time is that of streaming the weight.
FEWEST_ROWS = 8

#: How far apart the tiers of a dynamic M are: each at so many times the rows of the one before.
#: A module holds them all, and compiling one takes about 0.4 s; tables have more.
ROWS_APART = 4

#: Most arrival counters of a launch; with more tiles, partial sums are added by a second launch.
MAX_COUNTERS = 65536

#: Kernels for a handful of tokens, which stream the weight.
SMALL_TIERS = (
    KernelTier("packed", max_m=8, tile=(8, 16, 256), k_pack=2, warps=2, stages=3),
    KernelTier("packed", max_m=32, tile=(32, 32, 256), warps=2, stages=3),
)

#: Kernels for more rows, from small tiles to large ones. Deeper pipelines where a step is short:
#: memory takes about 800 clocks, a step of 64x64x256 has 256 clocks of matrix instructions a wave.
LARGE_TIERS = (
    KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=4),
    KernelTier("tiled", tile=(64, 128, 256), warps=4, stages=3, mma=(32, 32, 64)),
    KernelTier("tiled", tile=(128, 256, 256), warps=4, stages=2, mma=(32, 32, 64)),
)

#: Kernels of an x without scales. Weights are converted once for all rows of a tile, and of the
#: 16 rows of a matrix instruction those that do not exist cost nothing but time that memory needs.
UNSCALED_TIERS = (
    KernelTier("packed", max_m=16, tile=(16, 32, 256), warps=4, stages=2),
    KernelTier("packed", max_m=32, tile=(32, 32, 256), warps=4, stages=2),
    KernelTier("packed", tile=(64, 64, 128), warps=4, stages=2),
)

#: A larger tile is taken once it still makes this many workgroups: a larger tile loads less for
#: each product, but a machine that is mostly idle gains nothing from it.
WANTED_WORKGROUPS = COMPUTE_UNITS // 2


#: Split-K of the default tiers: at least so many K steps in a range, and at most so many ranges.
STEPS_OF_A_RANGE = 4
MOST_SPLITS = 8


def default_tiers(n: int, k: int) -> tuple[KernelTier, ...]:
    """The tiers of an [``n``, ``k``] weight that is not in the table."""
    tiers = [*SMALL_TIERS, replace(LARGE_TIERS[0], max_m=64)]
    usable = [LARGE_TIERS[0]]
    usable += [tier for tier in LARGE_TIERS[1:] if tier.tile and n > tier.tile[1] // 2]
    for tier, larger in pairwise(usable):
        most = rows_below(larger, n)
        if most > (tiers[-1].max_m or 0):
            tiers.append(replace(tier, max_m=most))
    return (*(fill_machine(tier, n, k) for tier in tiers), usable[-1])


def unscaled_tiers(n: int, k: int) -> tuple[KernelTier, ...]:
    """The tiers of an [``n``, ``k``] weight for an x without scales."""
    *bounded, last = UNSCALED_TIERS
    return (*(fill_machine(tier, n, k) for tier in bounded), last)


def fill_machine(tier: KernelTier, n: int, k: int) -> KernelTier:
    """The tier with as many splits as give every compute unit a workgroup, for its largest M."""
    assert tier.tile is not None
    assert tier.max_m is not None
    block_m, block_n, block_k = tier.tile
    tiles = ceil_div(tier.max_m, block_m) * ceil_div(n, block_n)
    most = k // (STEPS_OF_A_RANGE * block_k * tier.k_pack)
    splits = min(COMPUTE_UNITS // tiles, most, MOST_SPLITS)
    return replace(tier, splits=max(1, splits))


def rows_below(tier: KernelTier, n: int) -> int:
    """The most rows with which ``tier`` does not make ``WANTED_WORKGROUPS``."""
    assert tier.tile is not None
    block_m, block_n, _ = tier.tile
    return (ceil_div(WANTED_WORKGROUPS, ceil_div(n, block_n)) - 1) * block_m


def select(problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
    """The tiers for ``problem``: those of the table, else the defaults, made to fit."""
    reason = why_unsupported(problem, facts)
    if reason:
        return Selection(None, reason)
    if problem.lhs_quantize:
        return _quantizing(problem, select(problem.quantized(), facts))
    tuned = None if problem.grouping else _tuned(problem)
    tiers = tuned or _default(problem)
    if problem.m is None and tuned:
        tiers = thin(tiers)
    tiers = unbounded_last(tiers)
    if problem.m is not None:
        m = problem.m
        chosen = next(tier for tier in tiers if tier.max_m is None or m <= tier.max_m)
        tiers = (replace(chosen, max_m=None),)
    fitted = [fit(problem, tier) for tier in tiers]
    return Selection(
        KernelConfig(NAME, merge_equal(fitted)), "tuned shape" if tuned else "default tiles"
    )


def _tuned(problem: ScaledMatmul) -> tuple[KernelTier, ...] | None:
    return tuned_tiers().get((problem.n, problem.k)) if problem.lhs_scaled else None


def _default(problem: ScaledMatmul) -> tuple[KernelTier, ...]:
    default = default_tiers if problem.lhs_scaled else unscaled_tiers
    tiers = default(problem.n, problem.k)
    if not problem.grouping:
        return tiers
    # A tile has rows of one group, so its size follows from the rows that a group has on average.
    groups = max(1, problem.grouping.groups)
    return tuple(
        replace(tier, splits=1, max_m=None if tier.max_m is None else tier.max_m * groups)
        for tier in tiers
    )


def _quantizing(problem: ScaledMatmul, selection: Selection) -> Selection:
    """The tiers of the matmul after x was quantised, each with the place where that is done."""
    if selection.config is None:
        return selection
    tiers = tuple(_with_quantize(problem, tier) for tier in selection.config.tiers)
    return replace(selection, config=KernelConfig(NAME, tiers))


def _with_quantize(problem: ScaledMatmul, tier: KernelTier) -> KernelTier:
    """The tier with ``quantize``: fused for a handful of rows, if it has the registers.

    Only the depth of the pipeline may change for that, so that no sum is in another order.
    """
    rows = problem.m if problem.m is not None else tier.max_m
    groups = problem.grouping.groups if problem.grouping else 1
    is_small = tier.form == "packed" and rows is not None and rows <= FEWEST_ROWS * groups
    if is_small and problem.lhs_quantize in FUSED_RULES:
        for stages in range(tier.stages, 0, -1):
            fused = replace(tier, stages=stages, quantize="fused")
            if geometry_of(problem, fused).problem_with_tile() is None:
                return fused
    return replace(tier, quantize="separate")


def why_unsupported(problem: ScaledMatmul, facts: DeviceFacts) -> str | None:
    """Why there is no kernel for this matmul at all, or None."""
    if facts.architecture not in ("", NAME):
        return f"needs gfx950 but the module is compiled for {facts.architecture}"
    if problem.lhs_quantize:
        return why_unsupported(problem.quantized(), facts)
    if problem.lhs not in (LHS_TYPES if problem.lhs_scaled else UNSCALED_TYPES):
        return (
            f"x is {problem.lhs}; gfx950 multiplies scaled {' or '.join(LHS_TYPES)}, or "
            f"{', '.join(UNSCALED_TYPES)} without scales{_cure(problem.lhs)}"
        )
    if problem.rhs not in RHS_TYPES:
        wanted = ", ".join(RHS_TYPES)
        return f"w is {problem.rhs}; gfx950 multiplies scaled {wanted}{_cure(problem.rhs)}"
    if problem.rhs_block not in RHS_BLOCKS:
        return f"w has scale blocks {problem.rhs_block}; expected (1, 32) or (32, 32)"
    return None


def _cure(element: str) -> str:
    """What to do about a type of the generation before."""
    return " (FNUZ types are those of gfx942: convert the model)" if "FNUZ" in element else ""


def verify(problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
    """Why ``tier`` cannot compute ``problem``, or None: for a user's explicit choice."""
    reason = why_unsupported(problem, facts)
    if reason:
        return reason
    if tier.form not in ("tiled", "packed"):
        return f"form is '{tier.form}'; expected 'tiled' or 'packed'"
    if tier.tile is None:
        return f"form '{tier.form}' needs a tile"
    if tier.quantize == "fused" and tier.form != "packed":
        return f"form is '{tier.form}'; expected 'packed' for quantize 'fused'"
    if tier.quantize == "fused" and problem.lhs_quantize not in FUSED_RULES:
        rules = ", ".join(FUSED_RULES)
        return f"quantize is 'fused' for rule '{problem.lhs_quantize}'; expected {rules}"
    takes_scales = problem.lhs_scaled or bool(problem.lhs_quantize)
    if not takes_scales and tier.form != "packed":
        return f"form is '{tier.form}'; expected 'packed' for an x without scales"
    known = list(ATOMS) if takes_scales else [MFMA_16X16X32_BF16.shape]
    if tier.mma not in (None, *known):
        wanted = " or ".join(str(list(shape)) for shape in known)
        return f"mma is {list(tier.mma)}; expected {wanted}"
    if tier.weight_layout != "plain":
        return f"weight_layout is '{tier.weight_layout}'; expected 'plain'"
    if tier.isa:
        return f"isa is '{tier.isa}'; expected none (it is for CPUs)"
    geometry = geometry_of(problem, tier)
    return geometry.problem_with_tile() or _too_many_counters(geometry)


@cache
def tuned_tiers() -> dict[tuple[int, int], tuple[KernelTier, ...]]:
    """The table of ``tuned.toml``, by (N, K)."""
    text = (
        resources.files("block32.lowering.gfx950")
        .joinpath("tuned.toml")
        .read_text(encoding="utf-8")
    )
    table: dict[tuple[int, int], tuple[KernelTier, ...]] = {}
    for shape in tomllib.loads(text)["shapes"]:
        tiers = tuple(tier_from_table(fields) for fields in shape["tiers"])
        table[shape["n"], shape["k"]] = tiers
    return table


def tier_from_table(fields: dict[str, Any]) -> KernelTier:
    """A tier of a table, from its TOML fields."""
    lists_as_tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return KernelTier(**lists_as_tuples)


def thin(tiers: tuple[KernelTier, ...]) -> tuple[KernelTier, ...]:
    """Fewer tiers for a module that has to hold them all, ``ROWS_APART`` times apart.

    A tier that is left out is served by the next larger one.
    """
    kept = [tiers[-1]]
    for tier in reversed(tiers[:-1]):
        limit = kept[-1].max_m
        is_far = limit is None or (limit > FEWEST_ROWS and ROWS_APART * (tier.max_m or 0) <= limit)
        if is_far:
            kept.append(tier)
    return tuple(reversed(kept))


def unbounded_last(tiers: tuple[KernelTier, ...]) -> tuple[KernelTier, ...]:
    """The tiers with the last one serving every larger M."""
    return (*tiers[:-1], replace(tiers[-1], max_m=None))


def merge_equal(tiers: list[KernelTier]) -> tuple[KernelTier, ...]:
    """Neighbouring tiers that differ in ``max_m`` alone become one."""
    merged: list[KernelTier] = []
    for tier in tiers:
        if merged and replace(merged[-1], max_m=tier.max_m) == tier:
            merged.pop()
        merged.append(tier)
    return tuple(merged)


def fit(problem: ScaledMatmul, tier: KernelTier) -> KernelTier:
    """The tier, stepped down until it breaks no limit. There is always one that does not."""
    for candidate in _steps_down(tier):
        if Geometry(problem, candidate).problem_with_tile() is None:
            return _fit_reduction(problem, candidate)
    raise AssertionError(f"no kernel of the form {tier.form} fits {problem.describe()}")


def _fit_reduction(problem: ScaledMatmul, tier: KernelTier) -> KernelTier:
    """Drop empty splits; add in a second launch where there may be too many tiles to count."""
    geometry = Geometry(problem, tier)
    if geometry.splits == 1:
        return replace(tier, splits=1, reduce="in_launch")
    tiles = _most_tiles(geometry)
    if tiles is None or tiles > MAX_COUNTERS:
        return replace(tier, reduce="second_launch")
    return tier


def _most_tiles(geometry: Geometry) -> int | None:
    """The most tiles that a launch of the tier can have; None where M has no limit."""
    problem, limit = geometry.problem, geometry.tier.max_m
    rows = problem.m if problem.m is not None else limit
    return None if rows is None else ceil_div(rows, geometry.block_m) * geometry.tiles_n


def _too_many_counters(geometry: Geometry) -> str | None:
    """Why a tier that was asked for cannot count its tiles in the launch, or None.

    Where M has no limit it is let through: the counters grow with the M that comes.
    """
    tiles = _most_tiles(geometry)
    counts = geometry.splits > 1 and geometry.tier.reduce == "in_launch"
    if not counts or tiles is None or tiles <= MAX_COUNTERS:
        return None
    return (
        f"{tiles} tiles to count in the launch; expected at most {MAX_COUNTERS}, "
        'or reduce = "second_launch"'
    )


def _steps_down(tier: KernelTier) -> Iterator[KernelTier]:
    """``tier`` and smaller ones: first a shorter K step, then fewer stages, waves, a smaller tile.

    The K step goes first: tables were tuned for kernels that keep a whole step in LDS.
    """
    assert tier.tile is not None
    block_m, block_n, block_k = tier.tile
    least_stages = 2 if tier.form == "tiled" else 1
    for m, n in _smaller_tiles(tier.form, block_m, block_n, tier.k_pack):
        for warps in _halves(tier.warps, 1):
            for stages in range(tier.stages, least_stages - 1, -1):
                for k in _halves(block_k, 128):
                    yield replace(tier, tile=(m, n, k), warps=warps, stages=stages)


def _halves(size: int, least: int) -> Iterator[int]:
    while size >= least:
        yield size
        size //= 2


def _smaller_tiles(form: str, m: int, n: int, k_pack: int) -> Iterator[tuple[int, int]]:
    least_m = 16 // k_pack if form == "packed" else 32
    while True:
        yield m, n
        if n > 32 and n >= m:
            n //= 2
        elif m > least_m:
            m //= 2
        else:
            return
