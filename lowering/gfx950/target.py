# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gfx950 target (AMD MI350, MI355X): launches, grids and kernels."""

from __future__ import annotations

from collections.abc import Callable

from block32.dialects.kernel import KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.common.index import Index, ceil_div, maximum, minimum
from block32.lowering.common.tile_order import split_workgroups
from block32.lowering.gfx950 import quantize, select, split_k
from block32.lowering.gfx950.geometry import Geometry, geometry_of
from block32.lowering.gfx950.machine import LDS_BYTES, SIMDS, VECTOR_REGISTERS, XCDS
from block32.lowering.gfx950.packed import emit_packed
from block32.lowering.gfx950.tiled import emit_tiled
from block32.lowering.gfx950.w8a16 import emit_w8a16
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import (
    RESULT,
    Buffer,
    DeviceFacts,
    KernelPlan,
    Launch,
    Selection,
    Target,
)

GEMM = "gemm"
REDUCE = "reduce"

#: Registers that a kernel may need beyond their estimate before LLVM has to spill.
REGISTER_MARGIN = 24

#: More waves on a SIMD than these are not planned for: fewer hide memory's latency just as well.
MOST_PLANNED_WAVES = 4


class Gfx950Target(Target):
    """Scaled MFMA kernels, compiled by IREE's rocm back end.

    A zero-size buffer breaks IREE's cuda device for the rest of the process, and its hip device is
    built alike, so M = 0 stays on the host.
    """

    name = select.NAME
    guards_empty = True
    quantizes = True
    groups = True
    merges_equal_ops = True

    def compile_flags(self) -> tuple[str, ...]:
        """The iree-compile flags that choose this target's device."""
        return ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx950")

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """Choose the tiers for ``problem``."""
        return select.select(problem, facts)

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Why ``tier`` cannot compute ``problem`` here, or None."""
        return select.verify(problem, tier, facts)

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch; with split-K slots and counters, and where asked for a second launch."""
        split = [g for g in _geometries(problem, tiers) if g.splits > 1]
        in_launch = [g for g in split if g.tier.reduce == "in_launch"]
        second = [g for g in split if g.tier.reduce == "second_launch"]
        buffers: dict[str, Buffer] = {}
        if split:
            buffers[split_k.SLOTS] = Buffer("f32", lambda m: _most(split, m, _slot_elements))
        if in_launch:
            buffers[split_k.COUNTERS] = Buffer(
                "i32", lambda m: _most(in_launch, m, Geometry.tiles), zeroed=True
            )
        counters = (split_k.COUNTERS,) if in_launch else ()
        slots = (split_k.SLOTS,) if split else ()
        gemm = Launch(
            GEMM,
            reads=quantize_launch.multiplied_operands(problem, tiers),
            updates=(*counters, RESULT) if problem.grouping else counters,
            writes=slots if problem.grouping else (RESULT, *slots),
        )
        launches = [gemm]
        if any(tier.quantize == "separate" for tier in tiers):
            launches.insert(0, quantize_launch.LAUNCH)
            buffers |= quantize_launch.buffers(problem)
        if second:
            reads = (split_k.SLOTS, *problem.epilogue.operand_names())
            launches.append(Launch(REDUCE, reads=reads, updates=(RESULT,), writes=()))
        return KernelPlan(tuple(launches), buffers)

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """One-dimensional grids; none for a launch that the tier does not need."""
        if launch.name == quantize_launch.NAME:
            count = quantize.workgroups(problem, m) if tier.quantize == "separate" else 0
            return count, 1, 1
        geometry = geometry_of(problem, tier)
        if launch.name == REDUCE:
            if geometry.splits == 1 or tier.reduce != "second_launch":
                return 0, 1, 1
            rows, columns = split_k.REDUCE_BLOCK
            return ceil_div(m, rows) * ceil_div(problem.n, columns), 1, 1
        tiles = geometry.tiles(m)
        if geometry.splits > 1:
            return split_workgroups(tiles, geometry.splits, XCDS), 1, 1
        return tiles, 1, 1

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """Workgroup size, and for how many waves on a SIMD LLVM should allocate registers."""
        geometry = geometry_of(problem, tier)
        threads, attributes = split_k.REDUCE_THREADS, ""
        if launch.name == quantize_launch.NAME:
            threads = quantize.THREADS
        if launch.name == GEMM:
            threads = geometry.threads
            waves = _waves_per_simd(geometry)
            attributes = f', {{llvm_func_attrs = {{"amdgpu-waves-per-eu" = "{waves},{waves}"}}}}'
        return (
            "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline "
            f"workgroup_size = [{threads}, 1, 1] subgroup_size = 64{attributes}>"
        )

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Write the kernel's body at the current insertion point."""
        geometry = geometry_of(problem, tier)
        if launch.name == quantize_launch.NAME:
            if tier.quantize == "separate":
                quantize.emit_quantize(problem, kernel)
            return
        if tier.quantize == "separate":
            kernel = kernel.renamed(_QUANTIZED_OPERANDS)
        if launch.name == REDUCE:
            if geometry.splits > 1:
                split_k.emit_reduce(geometry, kernel)
        elif not geometry.problem.lhs_scaled:
            emit_w8a16(geometry, kernel)
        elif geometry.is_packed:
            emit_packed(geometry, kernel)
        else:
            emit_tiled(geometry, kernel)


#: What a kernel whose x was quantised by a launch takes for x and its scales.
_QUANTIZED_OPERANDS = {
    "lhs": "lhs_values",
    quantize_launch.CODES: "lhs",
    quantize_launch.SCALES: "lhs_scale",
}


def _geometries(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> list[Geometry]:
    return [geometry_of(problem, tier) for tier in tiers]


def _slot_elements(geometry: Geometry, m: Index) -> Index:
    return geometry.tiles(m) * (geometry.splits * geometry.slot_elements)


def _most(geometries: list[Geometry], m: Index, need: Callable[[Geometry, Index], Index]) -> Index:
    """The largest need of any tier, each at the largest M that it serves up to ``m``."""
    largest: Index = 0
    for geometry in geometries:
        limit = geometry.tier.max_m
        rows = m if limit is None else minimum(m, limit)
        largest = maximum(largest, need(geometry, rows))
    return largest


def _waves_per_simd(geometry: Geometry) -> int:
    """What LLVM should plan for: as many waves as have room, and at least a workgroup's.

    A tier that says how many gets them.
    """
    least = max(1, geometry.waves // SIMDS)
    if geometry.tier.waves_per_eu:
        return max(least, geometry.tier.waves_per_eu)
    in_registers = VECTOR_REGISTERS // (geometry.registers + REGISTER_MARGIN)
    in_lds = LDS_BYTES // max(1, geometry.lds_bytes) * geometry.waves // SIMDS
    return max(least, min(in_registers, in_lds, MOST_PLANNED_WAVES))
