# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernels compute a matmul: the table of tiles, and the choice from it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from importlib import resources

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.cpu.isa import choose_instruction_set
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts, Selection

TARGET_NAME = "cpu"


@cache
def _table() -> dict[str, tuple[KernelTier, ...]]:
    """Tiers by instruction set, in order of M."""
    text = resources.files("block32.lowering.cpu").joinpath("tiles.json").read_text()
    return {isa: tuple(_tier(isa, row) for row in rows) for isa, rows in json.loads(text).items()}


def _tier(isa: str, row: dict[str, object]) -> KernelTier:
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
    return KernelTier(isa=isa, **fields)  # type: ignore[arg-type]


def select(problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
    """Choose the tiers: all of the table's for a dynamic M, the one that fits for a static M."""
    isa = choose_instruction_set(facts, problem.lhs)
    config = KernelConfig(TARGET_NAME, _table()[isa.name])
    if problem.m is not None:
        config = KernelConfig(TARGET_NAME, (_exactly(config.tier_for(problem.m), problem.m),))
    return Selection(config, f"{isa.name} instructions, {isa.dot} products")


def _exactly(tier: KernelTier, m: int) -> KernelTier:
    """The tier for one M: a stream kernel holds that many rows and no more."""
    assert tier.tile is not None and tier.mma is not None
    tier = dataclasses.replace(tier, max_m=None)
    if tier.form != "stream":
        return tier
    rows = max(m, 1)
    return dataclasses.replace(tier, tile=(rows, *tier.tile[1:]), mma=(rows, *tier.mma[1:]))
