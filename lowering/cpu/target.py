# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CPU target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, maximum, minimum, round_up
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.common.weight_layout import PLAIN, ROW_MULTIPLE
from block32.lowering.cpu import amx, grouped, matrix, ops, pack, quantize, split_k, stream, tiled
from block32.lowering.cpu.gemm import emit_gemm
from block32.lowering.cpu.isa import INSTRUCTION_SETS, InstructionSet, instruction_set
from block32.lowering.cpu.panel import COLUMNS
from block32.lowering.cpu.select import TARGET_NAME, fits_layout, select, select_for_layout
from block32.lowering.cpu.store import GROUP
from block32.lowering.cpu.tile_panel import SCALE_ROWS, TILE
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import (
    RESULT,
    Buffer,
    DeviceFacts,
    KernelPlan,
    Launch,
    LayoutTiers,
    Selection,
    Target,
)

PACK = "pack"
GEMM = "gemm"
REDUCE = "reduce"

#: Fields of a tier that no kernel here reads, with the one value that each may have.
_NOT_USED: Final = {
    "k_pack": 1,
    "warps": 1,
    "order": "n",
    "waves_per_eu": 0,
}


def compile_flags(cpu: str) -> tuple[str, ...]:
    """IREE's flags for a CPU, as LLVM names it, in the local task system."""
    return (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-cpu={cpu}",
    )


class CpuTarget(Target):
    """Vector kernels for x86-64 and aarch64, and for any other CPU that LLVM knows."""

    name = TARGET_NAME
    quantizes = True
    groups = True

    def compile_flags(self) -> tuple[str, ...]:
        """This machine's CPU, in the local task system."""
        return compile_flags("host")

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """Every block-scaled matmul has a kernel here."""
        return select(problem, facts)

    def choose_layout_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> LayoutTiers:
        """Processors without matrix tiles gain where the operands of panels need not be turned."""
        return select_for_layout(problem, facts)

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Check a tier that the user wrote."""
        names = [isa.name for isa in INSTRUCTION_SETS]
        if tier.form not in ("stream", "tiled"):
            return f"expected form 'stream' or 'tiled' on cpu but got '{tier.form}'"
        if tier.isa not in names:
            return f"expected isa to be one of {', '.join(names)} but got '{tier.isa}'"
        isa = instruction_set(tier.isa)
        if not isa.is_on(facts):
            missing = sorted(isa.features - facts.cpu_features)
            return f"'{isa.name}' kernels need cpu features that are off: {', '.join(missing)}"
        if not isa.takes(_packed(problem).lhs):
            return f"'{isa.name}' kernels take no {problem.lhs} activation"
        if problem.lhs_quantize and tier.quantize != "fused":
            return "expected quantize 'fused': the activation is quantised where it is packed"
        for name, only in _NOT_USED.items():
            if getattr(tier, name) != only:
                return f"expected {name} {only!r} but got {getattr(tier, name)!r}"
        if tier.tile is None or tier.mma is None:
            return "expected both tile and mma"
        refused_split = split_k.verify(problem, tier)
        if refused_split:
            return refused_split
        if tier.weight_layout != PLAIN:
            reason = _layout_mismatch(problem, tier, isa)
            if reason:
                return reason
        return _verify_tile(problem, tier, isa)

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """The activation is packed by a first launch, then multiplied; a last one adds splits."""
        lhs = ("lhs", "lhs_scale") if problem.lhs_scaled else ("lhs",)
        groups = ("offsets", "expert_ids") if problem.grouping else ()
        packed = (pack.VALUES, pack.EXPONENTS, pack.FOLDED)
        quantized = (CODES, SCALES) if problem.lhs_quantize else ()
        panels = [
            tier
            for tier in tiers
            if tier.form == "tiled"
            and not tiled.decodes_in_registers(tier)
            and not instruction_set(tier.isa).tiles
        ]
        resting = [] if tiled.sums_rest_in_result(problem) else panels
        split = [tier for tier in tiers if tier.splits > 1]
        scratch = {tiled.ACCUMULATORS: resting, split_k.SLOTS: split}
        scratch = {name: users for name, users in scratch.items() if users}
        elements = {CODES: "i8", SCALES: "i8", pack.EXPONENTS: "i8"}
        elements |= {tiled.ACCUMULATORS: "f32", split_k.SLOTS: "f32"}
        buffers = {
            name: _buffer(elements.get(name, "i32"), tiers, partial(_elements, problem, name))
            for name in (*packed, *quantized)
        }
        buffers |= {
            name: _buffer(elements.get(name, "i32"), users, partial(_elements, problem, name))
            for name, users in scratch.items()
        }
        reads = (*packed, "rhs", "rhs_scale", *groups, *problem.epilogue.operand_names())
        updates, result = ((RESULT,), ()) if problem.grouping else ((), (RESULT,))
        gemm = Launch(GEMM, reads=reads, updates=updates, writes=(*result, *scratch))
        pack_reads = (*lhs, "offsets") if problem.grouping else lhs
        first = Launch(PACK, reads=pack_reads, writes=(*packed, *quantized))
        if split_k.SLOTS not in scratch:
            return KernelPlan((first, gemm), buffers)
        reduce_reads = (split_k.SLOTS, *problem.epilogue.operand_names())
        last = Launch(REDUCE, reads=reduce_reads, updates=(RESULT,), writes=())
        return KernelPlan((first, gemm, last), buffers)

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """Packing: one a row or slab. Multiplying: columns in x, rows or ranges of K in y."""
        assert tier.mma is not None
        if problem.grouping:
            return grouped.workgroups(problem, tier, launch.name == PACK, m)
        any_row = minimum(m, 1)
        if launch.name == REDUCE:
            return split_k.workgroups(problem, tier, any_row), 1, 1
        if tier.form == "stream":
            if launch.name == PACK:
                return round_up(m, tier.mma[0]) if pack.packs_rows(tier) else any_row, 1, 1
            return any_row * tiled.column_workgroups(problem, tier), tier.splits, 1
        partition = tiled.Partition.of(tier, m)
        if launch.name == PACK:
            return partition.slabs, 1, 1
        return tiled.column_workgroups(problem, tier), partition.workgroups, 1

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """The body is left as it is written."""
        return "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>"

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Write the body of the packing or of the multiplying kernel."""
        if problem.grouping:
            emit = grouped.emit_pack if launch.name == PACK else grouped.emit_gemm
            emit(problem, tier, kernel)
        elif launch.name == PACK and problem.lhs_quantize:
            quantize.emit_quantizing_pack(problem, tier, kernel)
        elif launch.name == PACK:
            pack.emit_pack(problem, tier, kernel)
        elif launch.name == REDUCE:
            if tier.splits > 1:
                split_k.emit_reduce(tier, kernel)
        else:
            emit_gemm(problem, tier, kernel)


def _packed(problem: ScaledMatmul) -> ScaledMatmul:
    """The matmul with the activation that is packed."""
    return problem.quantized() if problem.lhs_quantize else problem


def _elements(problem: ScaledMatmul, name: str, tier: KernelTier, m: Index) -> Index:
    """How many elements of a transient buffer a tier needs."""
    if problem.grouping:
        return grouped.buffer_elements(problem, tier, name, m)
    sizes: dict[str, Callable[[], Index]] = {
        pack.VALUES: lambda: pack.values_size(problem, tier, m),
        pack.EXPONENTS: lambda: pack.exponents_size(problem, tier, m),
        pack.FOLDED: lambda: pack.flags_size(tier, m),
        CODES: lambda: quantize.codes_size(problem, tier, m),
        SCALES: lambda: quantize.scales_size(problem, tier, m),
        tiled.ACCUMULATORS: lambda: tiled.accumulators_size(problem, tier, m),
        split_k.SLOTS: lambda: split_k.slots_size(problem, tier, m),
    }
    return sizes[name]()


def _buffer(
    element: str, tiers: Sequence[KernelTier], size: Callable[[KernelTier, Index], Index]
) -> Buffer:
    """A buffer that is large enough for each of ``tiers``."""

    def largest(m: Index) -> Index:
        result: Index = 1
        for tier in tiers:
            result = maximum(result, size(tier, m))
        return result

    return Buffer(element, largest)


def _layout_mismatch(problem: ScaledMatmul, tier: KernelTier, isa: InstructionSet) -> str | None:
    """Why a kernel cannot read a weight in the tier's layout, or None."""
    if isa.layout is None or tier.weight_layout != isa.layout.name:
        others = f" or '{isa.layout.name}'" if isa.layout else ""
        return (
            f"expected weight_layout 'plain'{others} with '{isa.name}' but got "
            f"'{tier.weight_layout}'"
        )
    if not fits_layout(problem, isa.layout):
        return (
            f"weight_layout '{isa.layout.name}' is for one 8-bit weight with N a multiple of "
            f"{isa.layout.rows} and K one of {ROW_MULTIPLE}"
        )
    return None


def _verify_tile(problem: ScaledMatmul, tier: KernelTier, isa: InstructionSet) -> str | None:
    """Check the sizes of a tier's tiles against the kernel's structure."""
    assert tier.tile is not None and tier.mma is not None
    rows, columns, depth = tier.tile
    if problem.grouping and rows % tier.mma[0]:
        return f"expected tile[0] to be a multiple of mma[0] ({tier.mma[0]}) but got {rows}"
    if tier.form == "stream":
        return _verify_stream(problem, tier, isa)
    if isa.tiles:
        return _verify_matrix(tier, isa)
    if columns % COLUMNS:
        return f"expected tile[1] to be a multiple of {COLUMNS} but got {columns}"
    if depth % isa.chunk:
        return f"expected tile[2] to be a multiple of {isa.chunk} but got {depth}"
    if tiled.decodes_in_registers(tier):
        if tier.mma[1] % 2 or GROUP % tier.mma[1]:
            return f"expected mma[1] to be an even divisor of {GROUP} but got {tier.mma[1]}"
    elif tier.mma[1] % isa.lanes or COLUMNS % tier.mma[1]:
        return f"expected mma[1] to be a multiple of {isa.lanes} that divides {COLUMNS}"
    elif tiled.stack_bytes(tier) > ops.STACK:
        needed = tiled.stack_bytes(tier)
        return f"expected a panel of at most {ops.STACK} bytes but tile[2] makes it {needed}"
    if isa.mmla and tier.mma[0] % 2:
        return f"'{isa.name}' multiplies pairs of rows: expected mma[0] to be even"
    return None


def _verify_stream(problem: ScaledMatmul, tier: KernelTier, isa: InstructionSet) -> str | None:
    """Check the sizes of a stream kernel's tiles."""
    assert tier.tile is not None and tier.mma is not None
    rows, columns, depth = tier.tile
    most = tier.max_m if tier.max_m is not None else problem.m
    if not problem.grouping and (most is None or rows < most):
        return f"a stream kernel holds all rows: expected tile[0] of at least {most or 'max_m'}"
    if columns % GROUP:
        return f"expected tile[1] to be a multiple of {GROUP} but got {columns}"
    if tier.weight_layout != PLAIN:
        return _verify_columns(tier)
    if depth % isa.chunk:
        return f"expected tile[2] to be a multiple of {isa.chunk} but got {depth}"
    if GROUP % tier.mma[1]:
        return f"expected mma[1] to divide {GROUP} but got {tier.mma[1]}"
    if tier.mma[0] > stream.most_slab_rows(isa):
        return f"expected mma[0] of at most {stream.most_slab_rows(isa)} but got {tier.mma[0]}"
    return None


def _verify_columns(tier: KernelTier) -> str | None:
    """Check the sizes of a stream kernel whose lanes run along N."""
    assert tier.tile is not None and tier.mma is not None
    if tier.mma[0] != tier.tile[0]:
        return f"expected mma[0] to be tile[0] ({tier.tile[0]}) but got {tier.mma[0]}"
    if tier.mma[1] % GROUP or tier.tile[1] % tier.mma[1]:
        return f"expected mma[1] to be a multiple of {GROUP} that divides tile[1]"
    return None


def _verify_matrix(tier: KernelTier, isa: InstructionSet) -> str | None:
    """Check the sizes of a matrix kernel's tiles."""
    assert tier.tile is not None and tier.mma is not None
    _, columns, depth = tier.tile
    slab_rows, panel_rows, _ = tier.mma
    if slab_rows % TILE and slab_rows != matrix.FEW_ROWS:
        few = matrix.FEW_ROWS
        return f"expected mma[0] to be {few} or a multiple of {TILE} but got {slab_rows}"
    if panel_rows != TILE and panel_rows % SCALE_ROWS:
        return f"expected mma[1] to be {TILE} or a multiple of {SCALE_ROWS} but got {panel_rows}"
    sums, left = matrix.tiles_along_n(tier) * pack.tiles_of_slab(tier), pack.tiles_of_slab(tier)
    if sums + left >= amx.REGISTERS:
        return f"expected mma to leave a tile register for w: {sums} + {left} of 8 are taken"
    if columns % panel_rows:
        return f"expected tile[1] to be a multiple of {panel_rows} but got {columns}"
    if depth % isa.chunk:
        return f"expected tile[2] to be a multiple of {isa.chunk} but got {depth}"
    needed = matrix.stack_bytes(tier)
    if needed > ops.STACK:
        return f"expected panel and sums of at most {ops.STACK} bytes but tile takes {needed}"
    return None
