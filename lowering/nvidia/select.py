# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which form and which configuration computes a matmul on an NVIDIA GPU."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.nvidia.forms import create_kernel, form_of
from block32.lowering.nvidia.machine import SM_90A, WARP_LANES, Chip
from block32.lowering.nvidia.stream import StreamKernel
from block32.lowering.nvidia.tiled import TiledKernel, fits_warps
from block32.lowering.nvidia.wgmma import GROUP_ROWS, WgmmaKernel
from block32.lowering.problem import ELEMENT_BITS, ScaledMatmul, ceil_div
from block32.lowering.target import Selection

#: Largest M of the stream form, by its rows.
_STREAM_ROWS = (8, 16, 32)

#: Largest M that is quantised in the kernel that multiplies it.
_FUSED_ROWS: Final = 8


def select(problem: ScaledMatmul, chip: Chip, target: str, exact: bool) -> Selection:
    """The tiers for a problem, or why there are none."""
    reason = unsupported(problem)
    if reason is not None:
        return Selection(None, reason)
    if problem.lhs_quantize:
        selection = select(problem.quantized(), chip, target, exact)
        assert selection.config is not None
        tiers = tuple(quantizing_tier(problem, tier, chip) for tier in selection.config.tiers)
        return Selection(KernelConfig(target, tiers), selection.reason)
    tiers, reason = default_tiers(problem, chip, exact), f"defaults of {chip.name}"
    tuned = [t for t in _tuned(problem, chip) if verify(problem, t, chip, exact) is None]
    if tuned:
        tiers, reason = merge_tiers(tiers, tuned), f"tuned for {chip.name}"
    if problem.m is not None:
        m = problem.m
        tier = next(t for t in tiers if t.max_m is None or m <= t.max_m)
        tiers = (dataclasses.replace(tier, max_m=None),)
    if any(form_of(tier) is WgmmaKernel for tier in tiers):
        reason += ", wgmma sums blocks of 32 K with fewer bits than f32"
    return Selection(KernelConfig(target, tiers), reason)


def merge_tiers(
    defaults: Sequence[KernelTier], tuned: Sequence[KernelTier]
) -> tuple[KernelTier, ...]:
    """Tuned tiers where there are any, and the defaults in between and beyond."""
    by_limit = {tier.max_m: tier for tier in (*defaults, *tuned)}
    bounded = sorted(limit for limit in by_limit if limit is not None)
    return tuple(by_limit[limit] for limit in (*bounded, None))


def _tuned(problem: ScaledMatmul, chip: Chip) -> tuple[KernelTier, ...]:
    """What the table says of this shape; it was measured with fp8 on both sides."""
    is_fp8 = ELEMENT_BITS[problem.lhs] == ELEMENT_BITS[problem.rhs] == 8
    if problem.grouping:
        return ()
    return tuned_tiers().get((chip.name, problem.n, problem.k), ()) if is_fp8 else ()


@cache
def tuned_tiers() -> dict[tuple[str, int, int], tuple[KernelTier, ...]]:
    """The table of ``tuned.toml``, by (chip, N, K)."""
    text = resources.files("block32.lowering.nvidia").joinpath("tuned.toml").read_text("utf-8")
    table: dict[tuple[str, int, int], tuple[KernelTier, ...]] = {}
    for shape in tomllib.loads(text)["shapes"]:
        tiers = tuple(_tier_from_table(fields) for fields in shape["tiers"])
        table[SM_90A.name, shape["n"], shape["k"]] = tiers
    return table


def _tier_from_table(fields: dict[str, Any]) -> KernelTier:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return KernelTier(**values)


def unsupported(problem: ScaledMatmul) -> str | None:
    """Why no form serves a problem, or None."""
    if problem.lhs_quantize:
        return unsupported(problem.quantized())
    lhs_bits = ELEMENT_BITS[problem.lhs]
    if problem.lhs_scaled and lhs_bits != 8:
        return f"no kernel for a scaled activation of {problem.lhs}, only of fp8"
    if not problem.lhs_scaled and lhs_bits < 16:
        return f"no kernel for an unscaled activation of {problem.lhs}, only of bf16, f16 and f32"
    if ELEMENT_BITS[problem.rhs] > 8:
        return f"no kernel for a weight of {problem.rhs}"
    return None


def quantizing_tier(problem: ScaledMatmul, tier: KernelTier, chip: Chip) -> KernelTier:
    """A tier of the matmul after x was quantised, with the place where that is done.

    In the kernel for a handful of rows, of which every workgroup quantises all. Only the stages may
    change for that, so that no sum is in another order: the result is that of the two launches.
    """
    rows = problem.m if problem.m is not None else tier.max_m
    groups = problem.grouping.groups if problem.grouping else 1
    if rows is not None and rows <= _FUSED_ROWS * groups:
        for stages in range(tier.stages, 1, -1):
            fused = dataclasses.replace(tier, stages=stages, quantize="fused")
            if verify(problem, fused, chip, exact=False) is None:
                return fused
    return dataclasses.replace(tier, quantize="separate")


def default_tiers(problem: ScaledMatmul, chip: Chip, exact: bool) -> tuple[KernelTier, ...]:
    """The tiers of a problem that no table knows.

    With groups, whose tiles have rows of one group, they follow from the rows that a group has on
    average.
    """
    tiers = _ungrouped_tiers(problem, chip, exact)
    if problem.grouping is None:
        return tiers
    groups = max(1, problem.grouping.groups)
    return tuple(
        dataclasses.replace(
            tier, splits=1, max_m=None if tier.max_m is None else tier.max_m * groups
        )
        for tier in tiers
    )


def _ungrouped_tiers(problem: ScaledMatmul, chip: Chip, exact: bool) -> tuple[KernelTier, ...]:
    tiers = [_stream_tier(problem, chip, rows) for rows in _STREAM_ROWS]
    uses_wgmma = chip.has_wgmma and not exact and problem.lhs_scaled
    uses_wgmma = uses_wgmma and ELEMENT_BITS[problem.rhs] == 8
    tiers.append(dataclasses.replace(_tiled_tier(problem, chip, 64, 64, 4), max_m=64))
    if problem.lhs == "f32":
        tiers.append(dataclasses.replace(_small_tile_tier(problem, chip), max_m=256))
    if uses_wgmma:
        split = _wgmma_tier(problem, chip, is_split=True)
        if split.splits > 1:
            tiers.append(dataclasses.replace(split, max_m=512))
        tiers.append(_wgmma_tier(problem, chip, is_split=False))
    else:
        tiers.append(_tiled_tier(problem, chip, 128, 128, 8))
    return tuple(tiers)


def _stream_tier(problem: ScaledMatmul, chip: Chip, rows: int) -> KernelTier:
    """The stream form for up to ``rows`` rows.

    Few workgroups get many warps, and only where they leave the chip half empty is K split over
    workgroups too: counting arrivals costs a fill and a round trip through device memory.
    """
    # An f32 x of many rows is larger than w: fewer warps have room for it, more columns share it.
    is_large = problem.lhs == "f32" and rows > 8
    columns = 64 if is_large and rows > 16 and problem.n > 32 * chip.multiprocessors else 32
    workgroups = ceil_div(problem.n, columns)
    warps = 8 if workgroups <= chip.multiprocessors and not is_large else 4
    steps = ceil_div(problem.k, 128)
    splits = max(1, min(chip.multiprocessors // workgroups, steps // (2 * warps), 8))
    tier = KernelTier(
        "stream", max_m=rows, tile=(rows, columns, 128), warps=warps, stages=4, splits=splits
    )
    if workgroups > chip.multiprocessors:
        tier = _fit_twice(problem, tier, chip)
    return _fit(problem, tier, chip)


def _fit_twice(problem: ScaledMatmul, tier: KernelTier, chip: Chip) -> KernelTier:
    """Take stages away until two workgroups share a multiprocessor, if that is possible.

    Where there are more workgroups than multiprocessors, two with fewer stages are faster than one
    after the other.
    """
    for stages in range(tier.stages, 1, -1):
        fewer = dataclasses.replace(tier, stages=stages)
        if create_kernel(problem, fewer, chip).resident_by_memory >= 2:
            return fewer
    return tier


def _tiled_tier(
    problem: ScaledMatmul, chip: Chip, block_m: int, block_n: int, warps: int
) -> KernelTier:
    """The form on ``mma.sync``; split where one tile of rows leaves the chip empty."""
    # A step of one block of K leaves room for two workgroups of the large tile.
    is_f32 = problem.lhs == "f32"
    is_narrow = block_m > 64 and ELEMENT_BITS[problem.rhs] == 8 and (problem.lhs_scaled or is_f32)
    block_k, stages = (32, 6) if is_narrow else (64, 4)
    tile = (block_m, block_n, block_k)
    tier = KernelTier("tiled", tile=tile, warps=warps, stages=stages, order="m")
    if block_m <= 64:
        # Two workgroups a multiprocessor share out the three products of f32, and a second launch
        # adds, for these rows alone: counters would cost fewer rows a fifth of their time.
        splits = _splits(problem, chip, block_n, 64, 1, resident=2 if is_f32 else 1)
        reduce = "second_launch" if is_f32 and splits > 1 else "in_launch"
        tier = dataclasses.replace(tier, splits=splits, reduce=reduce)
    return _fit(problem, tier, chip)


def _small_tile_tier(problem: ScaledMatmul, chip: Chip) -> KernelTier:
    """For a few hundred rows of f32: the three products want more workgroups than large tiles."""
    block_k = 64 if ELEMENT_BITS[problem.rhs] == 4 else 32
    tier = KernelTier("tiled", tile=(64, 64, block_k), warps=4, stages=6, order="m")
    return _fit(problem, tier, chip)


def _wgmma_tier(problem: ScaledMatmul, chip: Chip, is_split: bool) -> KernelTier:
    """Two warpgroups; for few rows K is split until the chip is full."""
    tier = KernelTier(
        "tiled", tile=(128, 128, 128), warps=8, stages=6, mma=(GROUP_ROWS, 128, 32), order="m"
    )
    if is_split:
        tier = dataclasses.replace(tier, splits=_splits(problem, chip, 128, 128, 2))
    return _fit(problem, tier, chip)


def _splits(
    problem: ScaledMatmul, chip: Chip, block_n: int, block_k: int, tiles_m: int, resident: int = 1
) -> int:
    """Ranges of K that fill the chip, each of at least 8 steps; 1 where few would do.

    The chip is full with ``resident`` workgroups on each multiprocessor.

    A tier that splits makes the calls of all tiers clear its counters, which takes about 3 us on an
    H200: more than two or three ranges win (`benchmarks/cuda.py`).
    """
    tiles = ceil_div(problem.n, block_n) * tiles_m
    steps = ceil_div(problem.k, block_k)
    splits = min(chip.multiprocessors * resident // tiles, steps // 8, 8)
    return splits if splits > 3 else 1


def _fit(problem: ScaledMatmul, tier: KernelTier, chip: Chip) -> KernelTier:
    """Take stages away, then warps of the stream form, until shared memory holds them."""
    while create_kernel(problem, tier, chip).shared_bytes > chip.shared_memory:
        if tier.stages > 2:
            tier = dataclasses.replace(tier, stages=tier.stages - 1)
        else:
            tier = dataclasses.replace(tier, warps=tier.warps // 2)
    return tier


#: Fields of a tier that mean nothing here, and the one value that they may have.
_UNUSED_FIELDS: Final = {
    "weight_layout": "plain",
    "k_pack": 1,
    "waves_per_eu": 0,
    "isa": "",
}


def verify(problem: ScaledMatmul, tier: KernelTier, chip: Chip, exact: bool) -> str | None:
    """Why a tier cannot compute a problem, in one phrase, or None."""
    return next(_faults(problem, tier, chip, exact), None)


def _faults(problem: ScaledMatmul, tier: KernelTier, chip: Chip, exact: bool) -> Iterator[str]:
    reason = unsupported(problem)
    if reason is not None:
        yield reason
    if tier.form == "packed":
        yield "packed is for matrix units of 16 and more columns; expected stream or tiled"
    if tier.form not in ("stream", "tiled"):
        yield f"form {tier.form} is not served here; expected stream or tiled"
    if tier.tile is None:
        yield "expected a tile"
        return
    for name, only in _UNUSED_FIELDS.items():
        value = getattr(tier, name)
        if value != only:
            yield f"{name} {value} is not served here; expected {only!r}"
    if tier.stages < 2:
        yield "expected at least 2 stages"
    if tier.warps & (tier.warps - 1) or tier.warps > 16:
        yield f"expected 1, 2, 4, 8 or 16 warps but got {tier.warps}"
    form = form_of(tier)
    if tier.quantize == "fused" and form is not StreamKernel:
        yield "quantize 'fused' is for the stream form; expected 'separate'"
    if problem.grouping and tier.splits > 1:
        yield f"expected splits 1 for groups of rows but got {tier.splits}"
    checks = {StreamKernel: _stream_faults, TiledKernel: _tiled_faults, WgmmaKernel: _wgmma_faults}
    yield from checks[form](problem, tier)
    if form is WgmmaKernel and not chip.has_wgmma:
        yield f"{chip.name} has no wgmma; expected mma = [16, 8, 16]"
    if form is WgmmaKernel and exact:
        yield "wgmma on fp8 sums with fewer bits than f32, which this target refuses"
    size = create_kernel(problem, tier, chip).shared_bytes
    if size > chip.shared_memory:
        yield f"needs {size} bytes of shared memory but {chip.name} has {chip.shared_memory}"


def _stream_faults(problem: ScaledMatmul, tier: KernelTier) -> Iterator[str]:
    assert tier.tile is not None
    block_m, block_n, block_k = tier.tile
    if tier.quantize != "separate" and problem.lhs == "f32" and block_k > 128:
        yield f"expected a K step of 128 for an f32 activation but got {block_k}"
    if block_m % 8 or block_m > 64:
        yield f"expected a tile of 8 to 64 rows, a multiple of 8, but got {block_m}"
    if block_n not in (16, 32, 64):
        yield f"expected a tile of 16, 32 or 64 columns but got {block_n}"
    if block_k not in (128, 256):
        yield f"expected a K step of 128 or 256 but got {block_k}"
    if block_m * block_n % (tier.warps * WARP_LANES):
        yield f"{tier.warps} warps do not divide a tile of {block_m * block_n} elements"


def _tiled_faults(problem: ScaledMatmul, tier: KernelTier) -> Iterator[str]:
    assert tier.tile is not None
    block_m, block_n, block_k = tier.tile
    if block_k not in (32, 64, 128):
        yield f"expected a K step of 32, 64 or 128 but got {block_k}"
    if block_m % 16 or (block_n % 32 and block_n != 16):
        yield f"expected rows in 16s, and 16 or 32s of columns, but got {block_m}x{block_n}"
        return
    grids = [(rows, tier.warps // rows) for rows in (1, 2, 4, 8, 16) if tier.warps % rows == 0]
    if not any(fits_warps(block_m, block_n, grid) for grid in grids):
        yield f"{tier.warps} warps do not divide a tile of {block_m}x{block_n}"
    if block_k == 32 and ELEMENT_BITS[problem.rhs] == 4:
        yield "expected a K step of 64 or more for 4-bit weights"
    lhs_bits = ELEMENT_BITS[problem.quantized().lhs if problem.lhs_quantize else problem.lhs]
    chunks = block_k * max(lhs_bits, 8) // 128
    if tier.warps * WARP_LANES % chunks:
        yield f"{tier.warps} warps do not divide the chunks of a row"


def _wgmma_faults(problem: ScaledMatmul, tier: KernelTier) -> Iterator[str]:
    assert tier.tile is not None and tier.mma is not None
    block_m, block_n, block_k = tier.tile
    has_fp8_lhs = problem.lhs_scaled or problem.lhs_quantize
    if not has_fp8_lhs or ELEMENT_BITS[problem.rhs] != 8:
        yield "wgmma is for fp8 operands on both sides; expected mma = [16, 8, 16]"
    if tier.warps % 4 or block_m != tier.warps // 4 * GROUP_ROWS:
        yield f"expected {tier.warps // 4 * GROUP_ROWS} rows for {tier.warps} warps"
    if block_n not in (32, 64, 96, 128) or block_k != 128:
        yield f"expected a tile of 32, 64, 96 or 128 columns, K step 128, got {block_n}, {block_k}"
    if tier.mma != (GROUP_ROWS, block_n, 32):
        yield f"expected mma = [{GROUP_ROWS}, {block_n}, 32]"
