# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sizes that follow from a matmul and a tier: waves, fragments, K steps, split ranges."""

from __future__ import annotations

from dataclasses import dataclass

from block32.dialects.kernel import KernelTier
from block32.lowering.common.group_tiles import group_tiles
from block32.lowering.common.index import Index
from block32.lowering.common.index import ceil_div as index_ceil_div
from block32.lowering.common.packing import Packing
from block32.lowering.common.partition import SplitPartition
from block32.lowering.gfx950.atoms import (
    ATOMS,
    MFMA_16X16X32_BF16,
    MFMA_16X16X128,
    KWindow,
    ScaledAtom,
)
from block32.lowering.gfx950.fragments import scale_spread
from block32.lowering.gfx950.machine import (
    CHUNK_BYTES,
    LDS_BYTES,
    LDS_READ_CLOCKS,
    SIMDS,
    VECTOR_REGISTERS,
    WAVE_LANES,
)
from block32.lowering.problem import ELEMENT_BITS, ScaledMatmul, ceil_div


@dataclass(frozen=True)
class Geometry:
    """Everything that is known of a kernel before it is written.

    Attributes:
        problem: The matmul.
        tier: The configuration, with ``tile`` set.
    """

    problem: ScaledMatmul
    tier: KernelTier

    @property
    def atom(self) -> ScaledAtom:
        """The matrix instruction."""
        if not self.problem.lhs_scaled:
            return MFMA_16X16X32_BF16
        return ATOMS[self.tier.mma] if self.tier.mma else MFMA_16X16X128

    @property
    def block_m(self) -> int:
        """Rows of a workgroup's tile."""
        return self._tile[0]

    @property
    def block_n(self) -> int:
        """Columns of a workgroup's tile."""
        return self._tile[1]

    @property
    def block_k(self) -> int:
        """K elements of one panel in one step."""
        return self._tile[2]

    @property
    def _tile(self) -> tuple[int, int, int]:
        assert self.tier.tile is not None
        return self.tier.tile

    @property
    def is_packed(self) -> bool:
        """Whether this is the packed form."""
        return self.tier.form == "packed"

    @property
    def packing(self) -> Packing:
        """The K panels; one in the tiled form."""
        return Packing(self.tier.k_pack, self.block_k)

    @property
    def waves(self) -> int:
        """Waves in a workgroup."""
        return self.tier.warps

    @property
    def threads(self) -> int:
        """Threads in a workgroup."""
        return self.waves * WAVE_LANES

    @property
    def waves_n(self) -> int:
        """Tiled: waves side by side along N, as many as have a fragment.

        Weights go to the registers of the wave that multiplies them, so waves along N load none
        twice; x comes from LDS, where sharing it costs nothing.
        """
        waves = self.waves
        while waves > 1 and self.block_n % (waves * self.atom.m):
            waves //= 2
        return waves

    @property
    def waves_m(self) -> int:
        """Tiled: waves along M."""
        return self.waves // self.waves_n

    @property
    def fragments_m(self) -> int:
        """Fragments of x in a wave."""
        if self.is_packed:
            return self.block_m * self.packing.k_pack // self.atom.m
        return self.block_m // (self.waves_m * self.atom.m)

    @property
    def fragments_n(self) -> int:
        """Fragments of w in a wave."""
        if self.is_packed:
            return self.block_n * self.packing.k_pack // self.atom.m
        return self.block_n // (self.waves_n * self.atom.m)

    @property
    def instructions(self) -> int:
        """Matrix instructions along K in one step of one panel."""
        return self.block_k // self.atom.k

    @property
    def step(self) -> int:
        """K elements that one step consumes."""
        return self.packing.step

    @property
    def partition(self) -> SplitPartition:
        """The ranges of K."""
        return SplitPartition.create(self.problem.k, self.tier.splits, self.step)

    @property
    def splits(self) -> int:
        """Workgroups that share a tile."""
        return self.partition.count

    @property
    def window(self) -> KWindow:
        """The instructions that share a scale load, in whole steps."""
        return KWindow(self.atom, scale_spread(self.problem.k_blocks, self.instructions))

    @property
    def tail(self) -> int:
        """K elements after the last whole step."""
        return self.problem.k % self.step

    @property
    def last_whole_step(self) -> int:
        """The K at which the last whole step starts; below 0 where there is none."""
        return self.problem.k // self.step * self.step - self.step

    @property
    def is_narrow(self) -> bool:
        """Whether rows start off 4-byte boundaries, so that every load has to be a narrow one."""
        return self.problem.lhs_row_bytes % 4 != 0 or self.problem.rhs_row_bytes % 4 != 0

    @property
    def tiles_n(self) -> int:
        """Tiles along N."""
        return ceil_div(self.problem.n, self.block_n)

    def tiles_m(self, m: Index) -> Index:
        """Tiles along M; with groups as many as any division of M rows can need."""
        if self.problem.grouping:
            return group_tiles(m, self.block_m, self.problem.grouping.groups)
        return index_ceil_div(m, self.block_m)

    def tiles(self, m: Index) -> Index:
        """All tiles of the result."""
        return self.tiles_m(m) * self.tiles_n

    @property
    def slot_elements(self) -> int:
        """f32 elements of one partial tile."""
        return self.block_m * self.block_n

    @property
    def lhs_bits(self) -> int:
        """Bits of an element of x."""
        return ELEMENT_BITS[self.problem.lhs]

    @property
    def loaded_lhs_bits(self) -> int:
        """Bits of an element of x as it comes from memory."""
        return self.lhs_bits

    @property
    def rhs_bits(self) -> int:
        """Bits of an element of w."""
        return ELEMENT_BITS[self.problem.rhs]

    @property
    def groups_ahead(self) -> int:
        """Tiled: how many fragments of x are read from LDS before they are used.

        As many as the matrix unit needs for what is multiplied while a read takes its time.
        """
        group_clocks = self.fragments_n * self.atom.clocks
        most = self.instructions * self.fragments_m
        return min(most, ceil_div(LDS_READ_CLOCKS, group_clocks))

    @property
    def step_clocks(self) -> int:
        """Clocks of the matrix unit that a wave needs for one step."""
        return self.fragments_m * self.fragments_n * self.instructions * self.atom.clocks

    @property
    def steps_of_a_wave(self) -> int:
        """Steps that a wave takes of the first range of K."""
        steps = ceil_div(min(self.partition.size, self.problem.k), self.step)
        return ceil_div(steps, self.waves) if self.is_packed else steps

    @property
    def lds_bytes(self) -> int:
        """LDS that the kernel allocates."""
        if self.is_packed:
            return self.waves * self.slot_elements * 4 if self.waves > 1 else 0
        x_tiles = 0 if self.is_narrow else self.tier.stages * self.block_m * self.block_k
        return x_tiles + (CHUNK_BYTES if self.splits > 1 else 0)

    @property
    def registers(self) -> int:
        """An estimate of the vector registers (VGPR and AGPR) of a lane, in words.

        Accumulators; operands on their way, of which on average half a step is used already
        (tiled); x fragments read ahead; addresses. Within a few of what LLVM takes.
        """
        accumulators = self.fragments_m * self.fragments_n * self.atom.result_registers
        x_words = self.atom.lane_words(self.loaded_lhs_bits)
        w_words = self.atom.lane_words(self.rhs_bits)
        fragments = self.fragments_m + self.fragments_n
        scales = fragments * self.instructions // self.window.spread
        step = self.fragments_n * self.instructions * w_words + scales
        addresses = 2 * fragments + 8
        if self.is_packed:
            step += self.fragments_m * self.instructions * x_words
            return accumulators + self.tier.stages * step + addresses
        ahead = (self.groups_ahead + 1) * x_words
        return accumulators + (2 * self.tier.stages - 1) * step // 2 + ahead + addresses

    @property
    def register_limit(self) -> int:
        """Vector registers that a lane can have with this many waves in a workgroup."""
        waves_per_simd = max(1, ceil_div(self.waves, SIMDS))
        return VECTOR_REGISTERS // waves_per_simd

    def problem_with_tile(self) -> str | None:
        """Which rule of the form the tile breaks, or None."""
        for rule in (self._check_shape, self._check_waves, self._check_resources):
            reason = rule()
            if reason:
                return reason
        return None

    def _check_shape(self) -> str | None:
        if self.problem.grouping and self.tier.splits > 1:
            return f"splits is {self.tier.splits}; expected 1 for groups of rows"
        block = self.problem.rhs_block[0]
        for name, size in (("M", self.block_m), ("N", self.block_n), ("K", self.block_k)):
            if size & (size - 1):
                return f"tile {name} is {size}; expected a power of two"
        if self.block_k % self.atom.k or self.block_k < 128:
            return f"tile K is {self.block_k}; expected a multiple of 128"
        if self.block_n % block and block % self.block_n:
            return f"tile N is {self.block_n}; expected a multiple or a divisor of {block}"
        if self.is_packed:
            return self._check_packed_shape()
        if self.tier.k_pack != 1:
            return f"k_pack is {self.tier.k_pack}; expected 1 in the tiled form"
        for name, size in (("M", self.block_m), ("N", self.block_n)):
            if size < self.atom.m:
                return f"tile {name} is {size}; expected at least {self.atom.m}"
        if self.tier.stages < 2:
            return "stages is 1; expected at least 2 in the tiled form"
        return None

    def _check_packed_shape(self) -> str | None:
        if not self.problem.lhs_scaled:
            return self._check_unscaled_shape()
        if self.atom is not MFMA_16X16X128:
            return "mma is 32x32x64; expected 16x16x128 in the packed form"
        if self.tier.k_pack not in (1, 2, 4):
            return f"k_pack is {self.tier.k_pack}; expected 1, 2 or 4"
        if self.block_m * self.tier.k_pack < 16 or self.block_n < 16:
            return "expected tile M times k_pack, and tile N, of at least 16 in the packed form"
        return None

    def _check_unscaled_shape(self) -> str | None:
        if self.tier.k_pack != 1:
            return f"k_pack is {self.tier.k_pack}; expected 1 where x has no scales"
        if self.block_m < 16 or self.block_n < 16:
            return "expected tile M and tile N of at least 16 in the packed form"
        return None

    def _check_waves(self) -> str | None:
        if self.waves & (self.waves - 1) or self.waves > 8:
            return f"warps is {self.waves}; expected 1, 2, 4 or 8"
        if self.is_packed:
            return None
        if self.block_m % (self.waves_m * self.atom.m):
            return f"{self.waves} warps; expected a fragment of {self.atom.m} rows for each"
        if self.block_m * self.block_k % (self.waves * WAVE_LANES * CHUNK_BYTES):
            return f"{self.waves} warps; expected 1024 bytes of x for each to load in a step"
        return None

    def _check_resources(self) -> str | None:
        if self.lds_bytes > LDS_BYTES:
            return f"{self.lds_bytes} bytes of LDS; expected at most {LDS_BYTES}"
        if self.registers > self.register_limit:
            return (
                f"about {self.registers} registers a lane; expected at most {self.register_limit}"
            )
        return None


@dataclass(frozen=True)
class QuantizingGeometry(Geometry):
    """The sizes of a kernel that quantises x on the way; ``problem`` is the matmul after that.

    Attributes:
        source: The matmul with x as it is in memory.
    """

    source: ScaledMatmul

    @property
    def loaded_lhs_bits(self) -> int:
        """Bits of an element of x before it is quantised."""
        return ELEMENT_BITS[self.source.lhs]


def geometry_of(problem: ScaledMatmul, tier: KernelTier) -> Geometry:
    """The sizes of the kernel that multiplies; a separate launch quantises x before it."""
    if not problem.lhs_quantize:
        return Geometry(problem, tier)
    if tier.quantize == "fused":
        return QuantizingGeometry(problem.quantized(), tier, problem)
    return Geometry(problem.quantized(), tier)
