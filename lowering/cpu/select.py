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
from block32.lowering.problem import ScaledMatmul
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
        return self.features <= facts.cpu_features and all(
            isa.is_on(facts) and isa.takes(problem.lhs)
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
    config = KernelConfig(TARGET_NAME, profile.tiers)
    if problem.m is not None:
        config = KernelConfig(TARGET_NAME, (_exactly(config.tier_for(problem.m), problem.m),))
    return Selection(config, f"tuned for {profile.name} processors")


def _exactly(tier: KernelTier, m: int) -> KernelTier:
    """The tier for one M: a stream kernel holds that many rows and no more."""
    tier = dataclasses.replace(tier, max_m=None)
    assert tier.tile is not None and tier.mma is not None
    if tier.form != "stream":
        return tier
    rows = max(m, 1)
    return dataclasses.replace(tier, tile=(rows, *tier.tile[1:]), mma=(rows, *tier.mma[1:]))
