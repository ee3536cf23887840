# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be measured of Apple kernels without a Mac: how long they compile, and their hot loops.

For each kernel form and operand types, at layer sizes: CPU seconds from ops to checked bitcode (the
best of three, the imports not counted), and for the hot loop the matrix instructions, the loads,
and all other instructions for each 16 K of a 32x32 tile (phis, addresses and casts are not
counted). ``--markdown`` writes the table of docs/apple.md; a kernel that takes 2 s or more is a
failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from block32.lowering.apple import llvm14
from block32.lowering.apple.air_parser import parse
from block32.lowering.apple.air_statistics import Loop, hot_loop
from block32.lowering.apple.library import CompiledKernel, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.problem import Epilogue, Grouping
from block32.tools.tables import print_table

N, K = 4096, 4096
REPEATS = 3
SLOWEST = 2.0

#: Matrix instructions in a step of 16 K.
STEP_MATRIX = 4

SCALED: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True}
EVERY_STEP = Epilogue(
    row_scale=True, scale=True, bias="bf16", residual="bf16", activation="gelu_tanh"
)

KERNELS: dict[str, tuple[str, Matmul]] = {
    "tiled bf16 x e4m3": ("tiled", Matmul(N, K)),
    "tiled e4m3 x e4m3": ("tiled", Matmul(N, K, lhs="f8E4M3FN")),
    "tiled, w in 32x32 blocks": ("tiled", Matmul(N, K, rhs_block=(32, 32))),
    "tiled, w in 32x32 blocks, x scaled": ("tiled", Matmul(N, K, rhs_block=(32, 32), **SCALED)),
    "tiled, a scale a row of w": ("tiled", Matmul(N, K, rhs_block=(1, 32))),
    "tiled, a scale a row of w, x scaled": ("tiled", Matmul(N, K, rhs_block=(1, 32), **SCALED)),
    "tiled, ragged": ("tiled", Matmul(N + 1, K + 27, rhs_block=(1, 32), **SCALED)),
    "tiled, transposed operands": (
        "tiled",
        Matmul(N + 1, K + 7, lhs_transposed=True, rhs_transposed=True),
    ),
    "tiled, every step of an epilogue": (
        "tiled",
        Matmul(N, K, result="bf16", epilogue=EVERY_STEP, rhs_block=(32, 32), **SCALED),
    ),
    "grouped bf16 x e4m3": ("grouped", Matmul(N, K, grouping=Grouping(128, 128))),
    "grouped, w in 32x32 blocks, x scaled": (
        "grouped",
        Matmul(N, K, grouping=Grouping(128, 128), rhs_block=(32, 32), **SCALED),
    ),
    "gemv bf16 x e4m3": ("gemv", Matmul(N, K)),
    "gemv, w in 32x32 blocks, x scaled": ("gemv", Matmul(N, K, rhs_block=(32, 32), **SCALED)),
}


@dataclass(frozen=True)
class Row:
    """One kernel's figures: CPU seconds of its compilation, and its hot loop."""

    name: str
    seconds: float
    loop: Loop

    def cells(self) -> list[str]:
        """The figures as the table has them."""
        loop = self.loop
        loads = f"{loop.vector_loads} + {loop.scalar_loads}"
        others = f"{loop.others.total()}"
        if loop.matrix:
            steps = loop.matrix / STEP_MATRIX
            shuffles = loop.others["shufflevector"] / steps
            others = f"{loop.others.total() / steps:.1f}"
            return [self.name, f"{loop.matrix}", loads, others, f"{shuffles:.1f}"]
        return [self.name, "0", loads, others, f"{loop.others['shufflevector']}"]


HEADINGS = [
    "kernel",
    "matrix instructions",
    "loads, vector + scalar",
    "others in 16 K",
    "of them shuffles",
]


def measure(name: str, form: str, matmul: Matmul) -> Row:
    """Compiles one kernel three times."""
    kernels: list[CompiledKernel] = []
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.process_time()
        kernels.append(compile_matmul(matmul, form, "kernel"))
        times.append(time.process_time() - start)
    return Row(name, min(times), _hot_loop(kernels[0]))


def _hot_loop(kernel: CompiledKernel) -> Loop:
    loop = hot_loop(parse(llvm14.disassemble(kernel.bitcode)).functions["kernel"])
    assert loop is not None
    return loop


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="the table of docs/apple.md")
    arguments = parser.parse_args()
    rows = [measure(name, form, matmul) for name, (form, matmul) in KERNELS.items()]
    # How long it took to compile is no figure for a page.
    headings, seconds = list(HEADINGS), [[] for _ in rows]
    if not arguments.markdown:
        headings.append("CPU seconds")
        seconds = [[f"{row.seconds:.2f}"] for row in rows]
    cells = [[*row.cells(), *taken] for row, taken in zip(rows, seconds, strict=True)]
    print_table(headings, cells, arguments.markdown)
    slow = [row.name for row in rows if row.seconds >= SLOWEST]
    if slow:
        print(f"apple_static: error: {SLOWEST} s or more: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
