# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising an activation on the CPU: IREE's own code, beside the code of our packing launch.

A quantisation that several matmuls read is plain linalg, which IREE compiles. The other side is
what a launch of our own would do: rows quantised as the launch that packs x does it.

    python -m benchmarks.cpu_quantize
    python -m benchmarks.cpu_quantize 512x1536 --cpu=haswell
"""

from __future__ import annotations

import argparse
import statistics
import sys

import ml_dtypes
import numpy as np
from iree.compiler import ir
from iree.compiler.dialects import func
from rich.console import Console
from rich.table import Table

import block32
from benchmarks.cpu import iree_contender, parse_sizes
from benchmarks.turns import Contender, measure
from block32.dialects.kernel import KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.common.index import Index, ceil_div, minimum
from block32.lowering.composites import Composites
from block32.lowering.cpu import ops
from block32.lowering.cpu.quantize import RowQuantizer
from block32.lowering.cpu.target import CpuTarget, compile_flags
from block32.lowering.kernel_context import KernelContext
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import RESULT, KernelPlan, Launch
from block32.tools.standalone import compile_standalone

DEFAULT_SHAPES = ((1, 4096), (128, 384), (512, 384), (2000, 384), (128, 1536), (2000, 1536))
#: Rows of a workgroup of ours.
ROWS = 4


class QuantizeAlone(CpuTarget):
    """The launch that quantises, without a matmul: its result is never written."""

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch."""
        del tiers
        writes = (quantize_launch.CODES, quantize_launch.SCALES, RESULT)
        launch = Launch(quantize_launch.NAME, reads=("lhs",), writes=writes)
        return KernelPlan((launch,), quantize_launch.buffers(problem))

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """Some rows each."""
        del problem, tier, launch
        return ceil_div(m, ROWS), 1, 1

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Quantise the workgroup's rows."""
        del tier, launch
        quantizer = RowQuantizer(problem, kernel, kernel.m)
        first = kernel.workgroup_id() * ROWS
        ops.repeat(first, minimum(first + ROWS, kernel.m), 1, quantizer.quantize)


def our_vmfb(problem: ScaledMatmul, flags: tuple[str, ...]) -> bytes:
    """The module of ``QuantizeAlone``."""
    spec = KernelSpec(problem, QuantizeAlone(), (KernelTier("stream"),))
    return compile_standalone(spec, flags)


def iree_vmfb(k: int, cpu: str) -> bytes:
    """The composite by itself: no kernel takes it."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        composites = Composites(module)
        x_type = ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size(), k], ir.F32Type.get())
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(x_type, name="main")
            def main(x: ir.Value) -> tuple[ir.Value, ir.Value]:
                return composites.quantize(x)

        return block32.compile(module, target="cpu", cpu=cpu)


def contenders(m: int, k: int, cpu: str) -> list[Contender]:
    """Ours first."""
    flags = compile_flags(cpu)
    problem = ScaledMatmul(None, 32, k, lhs="f32", lhs_scaled=False, lhs_quantize="rceil")
    x = np.random.default_rng(0).standard_normal((m, k), np.float32)
    weight = np.zeros((problem.n, k), ml_dtypes.float8_e4m3fn)
    scales = np.zeros(problem.rhs_scale_shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    return [
        iree_contender("our launch", our_vmfb(problem, flags), [x, weight, scales]),
        iree_contender("IREE's code", iree_vmfb(k, cpu), [x]),
    ]


def parse_shape(text: str) -> tuple[int, int]:
    """``MxK`` as two positive integers."""
    m, k = parse_sizes(text, "MxK")
    return m, k


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="MxK")
    parser.add_argument("--rounds", type=int, default=41, help="turns that both take")
    parser.add_argument("--cpu", default="host", help="the CPU to compile for, as LLVM names it")
    options = parser.parse_args()
    table = Table(title=f"quantising f32, cpu {options.cpu}", title_justify="left")
    for column in ("M,K", "our launch us", "IREE's us", "times as long", "by cpu time"):
        table.add_column(column, justify="right")
    for m, k in options.shapes or DEFAULT_SHAPES:
        ours, irees = contenders(m, k, options.cpu)
        measure([ours, irees], options.rounds)
        cpu, iree_cpu = (statistics.median(c.cpu_seconds) for c in (ours, irees))
        table.add_row(
            f"{m},{k}",
            f"{ours.median * 1e6:.0f}",
            f"{irees.median * 1e6:.0f}",
            f"{irees.median / ours.median:.2f}",
            f"{iree_cpu / cpu:.2f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
