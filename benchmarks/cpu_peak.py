# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of a processor's dot products: a module whose workgroups do nothing else.

    python benchmarks/cpu_peak.py

Each workgroup adds up products in registers and stores the sums at its end. Operands are zeros and
stay in registers, so that no GEMM can be faster: none has its operands there already.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from iree import runtime
from iree.compiler import ir
from rich.console import Console
from rich.table import Table

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index
from block32.lowering.cpu import amx, ops
from block32.lowering.cpu.isa import INSTRUCTION_SETS, InstructionSet, instruction_set
from block32.lowering.cpu.registers import multiply_add
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_context import KernelContext
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import RESULT, KernelPlan, Launch
from block32.tools.iree_compile import device_facts
from block32.tools.standalone import compile_standalone

#: Steps of a workgroup, each a product for every register of sums.
STEPS = 100_000
#: Registers of sums: of eight tiles two are operands; of 32 vector registers, most.
TILE_SUMS, VECTOR_SUMS = 6, 24
#: Bytes of a row of x: a register for each of the sums.
DEPTH = 64 * VECTOR_SUMS
#: Columns of y that a workgroup writes: all of its sums, without which none is computed.
COLUMNS = amx.ROWS * amx.ROWS * TILE_SUMS


class PeakTarget(CpuTarget):
    """One launch of products in registers; its "matmul" has a row a workgroup."""

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch. It reads x: one of constants alone is run by the compiler."""
        del problem, tiers
        return KernelPlan((Launch("peak", reads=("lhs",), writes=(RESULT,)),))

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """One a row."""
        del problem, tier, launch
        return m, 1, 1

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """The products of a workgroup, and its sums."""
        del launch
        isa = instruction_set(tier.isa)
        y = kernel.memref(RESULT, f"memref<{problem.m}x{problem.n}xf32>")
        if isa.tiles:
            _tile_products(y, kernel.workgroup_id())
        else:
            x = kernel.memref("lhs", f"memref<{problem.m}x{problem.k}xi8>")
            _vector_products(isa, x, y, kernel.workgroup_id())


def _tile_products(y: ir.Value, row: Index) -> None:
    amx.is_permitted()
    amx.configure()
    for register in range(amx.REGISTERS):
        amx.zero(register)

    def step(_: Index) -> None:
        for sums in range(TILE_SUMS):
            amx.multiply(sums, TILE_SUMS, TILE_SUMS + 1)

    ops.repeat(0, STEPS, 1, step)
    for sums in range(TILE_SUMS):
        amx.store(sums, y, (row * TILE_SUMS + sums) * amx.TILE_BYTES)
    amx.release()


def _vector_products(isa: InstructionSet, x: ir.Value, y: ir.Value, row: Index) -> None:
    element = ir.BF16Type.get() if isa.dot == "bf16" else ops.f32()
    size = 4 * isa.lanes
    # What the compiler does not know to be equal: it would add equal products up once.
    starts = [ops.load(x, [row, size * i], size) for i in range(VECTOR_SUMS)]
    operand = ops.bitcast(starts[0], element)
    sums = [ops.bitcast(start, ops.f32()) for start in starts]

    def step(_: Index, sums: list[ir.Value]) -> list[ir.Value]:
        return [multiply_add(isa, value, operand, operand) for value in sums]

    sums = ops.for_range(0, STEPS, 1, sums, step)
    for i, value in enumerate(sums):
        ops.store(value, y, [row, i * isa.lanes])


@dataclass(frozen=True)
class Peak:
    """The products of an instruction set on all processors.

    Attributes:
        run: Computes them once.
        flops: Of one run, a multiplication and an addition each one.
    """

    run: Callable[[], Any]
    flops: float


def peak(isa: InstructionSet, flags: tuple[str, ...], workers: int) -> Peak:
    """Compile the products of ``isa`` for ``workers`` threads."""
    problem = ScaledMatmul(workers, COLUMNS, DEPTH)
    spec = KernelSpec(problem, PeakTarget(), (KernelTier("tiled", isa=isa.name),))
    config = runtime.Config("local-task")
    vmfb = compile_standalone(spec, flags)
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    function = runtime.load_vm_module(module, config)["main"]
    x, w = np.zeros((workers, DEPTH), np.uint8), np.zeros((COLUMNS, DEPTH), np.uint8)
    x_scale, w_scale = (
        np.zeros((rows, DEPTH // 32), np.uint8) for rows in (workers, COLUMNS // 32)
    )
    f8, f8_scale = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    arrays = [x.view(f8), w.view(f8), x_scale.view(f8_scale), w_scale.view(f8_scale)]
    operands = [runtime.asdevicearray(config.device, array) for array in arrays]
    if isa.tiles:
        products = TILE_SUMS * amx.ROWS * amx.ROWS * amx.DEPTH
    else:
        products = VECTOR_SUMS * isa.lanes * isa.pair
    return Peak(lambda: function(*operands), 2.0 * products * STEPS * workers)


def main() -> int:
    """Print the rate of each instruction set of this machine, by the best of some runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="runs of each")
    options = parser.parse_args()
    flags, workers = CpuTarget().compile_flags(), os.cpu_count() or 1
    facts = device_facts(flags)
    table = Table()
    for column in ("instruction set", "GFLOP/s", "256,4096,4096 takes at least ms"):
        table.add_column(column, justify="right" if table.columns else "left")
    for isa in INSTRUCTION_SETS:
        if not (isa.is_on(facts) and isa.registers > VECTOR_SUMS):
            continue
        products, seconds = peak(isa, flags, workers), []
        for _ in range(options.rounds):
            start = time.perf_counter()
            products.run()
            seconds.append(time.perf_counter() - start)
        rate = products.flops / min(seconds)
        shape_flops = 2.0 * 256 * 4096 * 4096
        table.add_row(isa.name, f"{rate / 1e9:.0f}", f"{shape_flops / rate * 1e3:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
