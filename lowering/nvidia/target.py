# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The targets ``sm_89``, ``sm_90a`` and ``sm_90a-f32``: plans, grids and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iree.compiler import ir

from block32.dialects.kernel import KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.common.index import Index, maximum, minimum
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import quantize, select
from block32.lowering.nvidia.forms import create_kernel
from block32.lowering.nvidia.instructions import ANCHOR_BYTES
from block32.lowering.nvidia.machine import SM_89, SM_90A, WARP_LANES, Chip
from block32.lowering.nvidia.tile_kernel import TileKernel
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

#: Registers of a multiprocessor, and the most that one thread can have.
_REGISTERS: Final = 65_536
_REGISTERS_PER_THREAD: Final = 255


class NvidiaTarget(Target):
    """One kind of NVIDIA GPU through IREE's cuda back end.

    A zero-size buffer breaks IREE's cuda device for the rest of the process, and so does a launch
    of no workgroups: M = 0 stays on the host, and launches without work are not recorded.

    Attributes:
        chip: The machine.
        exact: Only forms that accumulate in f32; leaves out ``wgmma`` on fp8.
    """

    guards_empty = True
    takes_empty_grids = False
    quantizes = True
    groups = True

    def __init__(self, name: str, chip: Chip, exact: bool = False):
        """See the class's attributes."""
        self.name = name
        self.chip = chip
        self.exact = exact

    def compile_flags(self) -> tuple[str, ...]:
        """The flags that choose the cuda device and the chip."""
        return self.chip.compile_flags()

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """The tuned tiers of this shape, or the defaults."""
        del facts  # the chip says it all
        return select.select(problem, self.chip, self.name, self.exact)

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Why this tier cannot compute ``problem`` on this chip, or None."""
        del facts
        return select.verify(problem, tier, self.chip, self.exact)

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch that multiplies, with one before and behind it where a tier asks for them.

        The one before quantises x, the one behind adds partial sums.
        """
        kernels = [create_kernel(problem, tier, self.chip) for tier in tiers]
        in_launch = any(kernel.reduces_in_launch for kernel in kernels)
        second_launch = any(kernel.reduces_in_second_launch for kernel in kernels)
        buffers: dict[str, Buffer] = {}
        if in_launch:
            buffers["counters"] = Buffer("i32", _largest(kernels, _counters), zeroed=True)
        if in_launch or second_launch:
            buffers["slots"] = Buffer("f32", _largest(kernels, TileKernel.slot_elements))
        slots = ("slots",) if buffers else ()
        counters = ("counters",) if in_launch else ()
        gemm = Launch(
            "gemm",
            reads=quantize_launch.multiplied_operands(problem, tiers),
            updates=(*counters, RESULT) if problem.grouping else counters,
            writes=slots if problem.grouping else (*slots, RESULT),
        )
        launches = [gemm]
        if any(tier.quantize == "separate" for tier in tiers):
            launches.insert(0, quantize_launch.LAUNCH)
            buffers |= quantize_launch.buffers(problem)
        if second_launch:
            reads = ("slots", *problem.epilogue.operand_names())
            launches.append(Launch("reduce", reads=reads, updates=(RESULT,), writes=()))
        return KernelPlan(tuple(launches), buffers)

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """A one-dimensional grid over tiles, and over ranges of K where one tile has several."""
        if launch.name == quantize_launch.NAME:
            return quantize.workgroups(problem, m) if tier.quantize == "separate" else 0, 1, 1
        kernel = create_kernel(problem, tier, self.chip)
        if launch.name == "gemm":
            return kernel.workgroups(m), 1, 1
        return kernel.tiles(m) if kernel.reduces_in_second_launch else 0, 1, 1

    def workgroup_memory(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> int:
        """What the launch that multiplies must bring beside the kernel's own anchor."""
        if launch.name != "gemm":
            return 0
        return create_kernel(problem, tier, self.chip).shared_bytes - ANCHOR_BYTES

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """IREE is to leave the body as it is, and to launch it with the tier's threads."""
        threads = quantize.THREADS
        if launch.name != quantize_launch.NAME:
            threads = create_kernel(problem, tier, self.chip).threads
        return (
            "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline "
            f"workgroup_size = [{threads}, 1, 1] subgroup_size = {WARP_LANES}>"
        )

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Write the body of one launch of one tier."""
        form = create_kernel(problem, tier, self.chip)
        if launch.name == quantize_launch.NAME:
            if tier.quantize == "separate":
                quantize.emit_quantize(problem, kernel)
        elif launch.name == "gemm":
            self._limit_registers(form)
            form.emit_gemm(kernel)
        elif form.reduces_in_second_launch:
            form.emit_reduce(kernel)

    def _limit_registers(self, form: TileKernel) -> None:
        """Ask for as many workgroups a multiprocessor as shared memory allows, within reason.

        Without the bound the assembler takes the registers that a lone workgroup could have.
        """
        wanted = form.accumulator_registers + form.working_registers
        by_registers = _REGISTERS // (form.threads * min(wanted, _REGISTERS_PER_THREAD))
        count = max(1, min(form.resident_by_memory, by_registers, _MOST_RESIDENT))
        function = ir.InsertionPoint.current.block.owner
        i32 = ir.IntegerType.get_signless(32)
        function.attributes["nvvm.minctasm"] = ir.IntegerAttr.get(i32, count)


#: More workgroups a multiprocessor hide no more latency.
_MOST_RESIDENT: Final = 4


def _counters(kernel: TileKernel, m: Index) -> Index:
    """Arrival counters for ``m`` rows: one a tile."""
    return kernel.tiles(m) if kernel.reduces_in_launch else 0


def _largest(
    kernels: list[TileKernel], need: Callable[[TileKernel, Index], Index]
) -> Callable[[Index], Index]:
    """The largest need over the tiers; a tier is never launched with more rows than it serves."""

    def size(m: Index) -> Index:
        needs = [
            need(kernel, m if kernel.tier.max_m is None else minimum(m, kernel.tier.max_m))
            for kernel in kernels
        ]
        result: Index = 1
        for value in needs:
            if not isinstance(value, int) or value > 0:
                result = maximum(result, value)
        return result

    return size


def sm_89() -> NvidiaTarget:
    """Ada, and through its PTX every newer card: ``mma.sync`` alone."""
    return NvidiaTarget("sm_89", SM_89)


def sm_90a() -> NvidiaTarget:
    """Hopper: ``wgmma`` for many rows, whose sums of 32 products are short."""
    return NvidiaTarget("sm_90a", SM_90A)


def sm_90a_f32() -> NvidiaTarget:
    """Hopper, with f32 accumulation throughout."""
    return NvidiaTarget("sm_90a-f32", SM_90A, exact=True)
