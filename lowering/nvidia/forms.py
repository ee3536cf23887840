# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a tier to the form that it names."""

from __future__ import annotations

from block32.dialects.kernel import KernelTier
from block32.lowering.nvidia.machine import Chip
from block32.lowering.nvidia.stream import StreamKernel
from block32.lowering.nvidia.tile_kernel import TileKernel
from block32.lowering.nvidia.tiled import TiledKernel
from block32.lowering.nvidia.wgmma import GROUP_ROWS, WgmmaKernel
from block32.lowering.problem import ScaledMatmul


def form_of(tier: KernelTier) -> type[TileKernel]:
    """The class of a tier's kernel; ``mma = [64, n, 32]`` means ``wgmma``."""
    if tier.form == "stream":
        return StreamKernel
    if tier.mma is not None and tier.mma[0] == GROUP_ROWS:
        return WgmmaKernel
    return TiledKernel


def create_kernel(problem: ScaledMatmul, tier: KernelTier, chip: Chip) -> TileKernel:
    """The kernel of a tier that ``select.verify`` accepts."""
    return form_of(tier)(problem, tier, chip)
