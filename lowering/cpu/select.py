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
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.problem import Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts, Selection

TARGET_NAME = "cpu"


@dataclass(frozen=True)
class Profile:
    """A kind of processor, and the tiers that suit it.

    Attributes:
        name: For remarks.
        features: LLVM feature names that tell it, besides those of its instruction sets.
        tiers: In order of M.
    """

    name: str
    features: frozenset[str]
    tiers: tuple[KernelTier, ...]

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
        )
        for row in json.loads(text)["profiles"]
    )


def _tier(fields: dict[str, Any]) -> KernelTier:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    return KernelTier(**values)


def select(problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
    """Choose the tiers: all of the table's for a dynamic M, the one that fits for a static M."""
    profile = next(p for p in profiles() if p.serves(problem, facts))
    tiers = profile.tiers
    if problem.lhs_quantize:
        tiers = tuple(dataclasses.replace(tier, quantize="fused") for tier in tiers)
    if problem.grouping:
        tiers = tuple(_for_groups(tier, problem.grouping) for tier in tiers)
    config = KernelConfig(TARGET_NAME, tiers)
    if problem.m is not None:
        config = KernelConfig(
            TARGET_NAME, (_exactly(config.tier_for(problem.m), problem.m, problem.grouping),)
        )
    return Selection(config, f"tuned for {profile.name} processors")


def _for_groups(tier: KernelTier, grouping: Grouping) -> KernelTier:
    """The tier for M rows that are shared out over groups."""
    if tier.max_m is None:
        return tier
    return dataclasses.replace(tier, max_m=tier.max_m * max(grouping.groups, 1))


def _exactly(tier: KernelTier, m: int, grouping: Grouping | None) -> KernelTier:
    """The tier for one M: a stream kernel holds that many rows and no more."""
    tier = dataclasses.replace(tier, max_m=None)
    assert tier.tile is not None and tier.mma is not None
    if tier.form != "stream" or grouping:
        return tier
    rows = max(m, 1)
    return dataclasses.replace(tier, tile=(rows, *tier.tile[1:]), mma=(rows, *tier.mma[1:]))
