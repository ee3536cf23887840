# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernels compute a matmul: the table of tiles, and the choice from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.common.weight_layout import LAYOUTS, WeightLayout
from block32.lowering.cpu import pack, split_k
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.panel import COLUMNS
from block32.lowering.cpu.store import GROUP
from block32.lowering.problem import ELEMENT_BITS, Grouping, ScaledMatmul, ceil_div
from block32.lowering.target import DeviceFacts, LayoutTiers, Selection

TARGET_NAME = "cpu"
#: Workgroups that a matmul is cut into where its size allows: the machine's threads are not known.
WORKGROUPS = 32
#: Products that make a workgroup worth while: some 20 us, where starting one takes less than 1.
_LEAST_PRODUCTS = 1 << 18
#: A dynamic M counts as so many rows where it is asked whether another order of w pays.
_FEW_ROWS = 2
#: Rows that a tiled workgroup keeps: decoding a panel costs about as much as multiplying 15.
_LEAST_TILED_ROWS = 96


@dataclass(frozen=True)
class Profile:
    """A kind of processor, and the tiers that suit it.

    Attributes:
        name: For remarks.
        features: LLVM feature names that tell it, besides those of its instruction sets.
        tiers: In order of M.
        layout_tiers: The same over a weight in another order of bytes; none where that gains
            nothing.
        layout_pays_from: The fewest rows for which that gains something.
    """

    name: str
    features: frozenset[str]
    tiers: tuple[KernelTier, ...]
    layout_tiers: tuple[KernelTier, ...]
    layout_pays_from: int

    def serves(self, problem: ScaledMatmul, facts: DeviceFacts) -> bool:
        """Whether a machine is of this kind and its kernels take the activation."""
        lhs = problem.quantized().lhs if problem.lhs_quantize else problem.lhs
        return self.features <= facts.cpu_features and all(
            isa.is_on(facts) and isa.takes(lhs)
            for isa in (instruction_set(tier.isa) for tier in self.tiers)
        )


@cache
def profiles() -> tuple[Profile, ...]:
    """The table ``tiles.json``: best first, the last serves every machine."""
    text = resources.files("block32.lowering.cpu").joinpath("tiles.json").read_text()
    return tuple(
        Profile(
            row["name"],
            frozenset(row["features"]),
            tuple(_tier(fields) for fields in row["tiers"]),
            tuple(_tier(fields) for fields in row.get("layout_tiers", ())),
            row.get("layout_pays_from", 1),
        )
        for row in json.loads(text)["profiles"]
    )


def _tier(fields: dict[str, Any]) -> KernelTier:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    return KernelTier(**values)


def select(problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
    """Choose the tiers: all of the table's for a dynamic M, the one that fits for a static M."""
    profile = _profile(problem, facts)
    tiers = _tiers_for(problem, profile.tiers)
    return Selection(KernelConfig(TARGET_NAME, tiers), f"tuned for {profile.name} processors")


def select_for_layout(problem: ScaledMatmul, facts: DeviceFacts) -> LayoutTiers:
    """The tiers over a weight whose bytes may be put in another order."""
    profile = _profile(problem, facts)
    tiers = profile.layout_tiers
    if not all(fits_layout(problem, LAYOUTS[tier.weight_layout]) for tier in tiers) or not tiers:
        return LayoutTiers()
    rows = _FEW_ROWS if problem.m is None else problem.m
    return LayoutTiers(_tiers_for(problem, tiers), pays=rows >= profile.layout_pays_from)


def fits_layout(problem: ScaledMatmul, layout: WeightLayout) -> bool:
    """Whether kernels read the problem's weight in ``layout``: one of 8 bits, of whole pieces."""
    is_one = problem.grouping is None and ELEMENT_BITS[problem.rhs] == 8
    return is_one and layout.fits((problem.n, problem.rhs_row_bytes))


def _profile(problem: ScaledMatmul, facts: DeviceFacts) -> Profile:
    return next(p for p in profiles() if p.serves(problem, facts))


def _tiers_for(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> tuple[KernelTier, ...]:
    """A profile's tiers as ``problem`` needs them."""
    if problem.lhs_quantize:
        tiers = tuple(dataclasses.replace(tier, quantize="fused") for tier in tiers)
    if problem.grouping:
        tiers = tuple(_for_groups(tier, problem.grouping) for tier in tiers)
    if problem.m is not None:
        tier = KernelConfig(TARGET_NAME, tiers).tier_for(problem.m)
        tiers = (_exactly(tier, problem.m, problem.grouping),)
    return tuple(_with_workgroups(tier, problem) for tier in tiers)


def _for_groups(tier: KernelTier, grouping: Grouping) -> KernelTier:
    """The tier for M rows that are shared out over groups."""
    if tier.max_m is None:
        return tier
    return dataclasses.replace(tier, max_m=tier.max_m * max(grouping.groups, 1))


def _exactly(tier: KernelTier, m: int, grouping: Grouping | None) -> KernelTier:
    """The tier for one M: a stream kernel has slabs of equal size for that many rows."""
    tier = dataclasses.replace(tier, max_m=None)
    assert tier.tile is not None and tier.mma is not None
    if tier.form != "stream" or grouping:
        return tier
    m = max(m, 1)
    rows = ceil_div(m, ceil_div(m, tier.mma[0]))
    return dataclasses.replace(tier, tile=(m, *tier.tile[1:]), mma=(rows, *tier.mma[1:]))


def _with_workgroups(tier: KernelTier, problem: ScaledMatmul) -> KernelTier:
    """The tier for an N that gives few workgroups: fewer columns or rows each, then ranges of K.

    Matrix kernels keep theirs: what they decode of w has to serve many rows.
    """
    assert tier.tile is not None
    if instruction_set(tier.isa).tiles:
        return tier
    rows, columns, depth = tier.tile
    least = _least_columns(tier)
    products = rows * columns * problem.k
    while ceil_div(problem.n, columns) < WORKGROUPS and columns > least:
        if products < 2 * _LEAST_PRODUCTS:
            break
        columns, products = columns // 2, products // 2
    workgroups = ceil_div(problem.n, columns)
    if tier.form == "tiled":
        while workgroups < WORKGROUPS and rows >= 2 * _LEAST_TILED_ROWS:
            rows, workgroups = rows // 2, workgroups * 2
    tier = dataclasses.replace(tier, tile=(rows, columns, depth))
    if not pack.packs_rows(tier) or problem.grouping:
        return tier
    splits = min(WORKGROUPS // workgroups, products // _LEAST_PRODUCTS)
    if splits < 2:
        return tier
    splits = split_k.partition(problem, dataclasses.replace(tier, splits=splits)).count
    return dataclasses.replace(tier, splits=splits, reduce="second_launch") if splits > 1 else tier


def _least_columns(tier: KernelTier) -> int:
    """The fewest columns of a workgroup that its kernel is written for."""
    assert tier.mma is not None
    if tier.form == "tiled":
        return COLUMNS
    return GROUP if pack.packs_rows(tier) else tier.mma[1]
