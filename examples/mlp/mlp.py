# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compile a small MXFP8 MLP for this machine's CPU, run it through IREE, check it.

python examples/mlp/mlp.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import block32
from block32.runtime import reference

sys.path.insert(0, str(Path(__file__).parent))

from make_model import MODEL, WIDTHS, Layer, layers

ROWS = (0, 1, 5, 64)


def expected(x: npt.NDArray[np.float32], weights: list[Layer]) -> npt.NDArray[np.float64]:
    """The MLP in the float64 reference: quantise, multiply, ReLU."""
    y = x.astype(np.float64)
    for index, layer in enumerate(weights):
        activation = np.maximum(y, 0) if index else y
        codes, scales = reference.quantize(activation.astype(np.float32))
        y = reference.scaled_matmul(codes, scales, layer.codes, layer.scales, rhs_block=(32, 32))
    return y


def main() -> int:
    """Compile, run, compare; the exit code says whether all results are right."""
    console = Console()
    console.print(f"compiling {MODEL.name} for this machine's CPU", highlight=False)
    start = time.perf_counter()
    vmfb = block32.compile(
        MODEL, target="cpu", on_remark=lambda r: console.print(r.render(), highlight=False)
    )
    seconds = time.perf_counter() - start
    console.print(f"{len(vmfb)} bytes in {seconds:.1f} s", highlight=False)
    module = block32.load(vmfb)
    table = Table("rows", "relative error (Frobenius)", "result")
    is_right = True
    rng = np.random.default_rng(7)
    for rows in ROWS:
        x = rng.normal(size=(rows, WIDTHS[0])).astype(np.float32)
        y = module["mlp"](x)
        error, is_close = compare(y, expected(x, layers()))
        is_right = is_right and is_close
        table.add_row(str(rows), f"{error:.1e}", "right" if is_close else "WRONG")
    console.print(table)
    console.print("checked against the float64 reference" if is_right else "does not agree")
    return 0 if is_right else 1


def compare(got: npt.NDArray[np.float32], want: npt.NDArray[np.float64]) -> tuple[float, bool]:
    """Relative Frobenius error, and whether it is within what f32 rounding may do.

    A sum that f32 rounds differently can move an activation to the neighbouring e4m3 code, which
    is 1/16 of it: a few of them among 128 leave the result within 1e-2.
    """
    if got.shape != want.shape:
        return float("inf"), False
    norm = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want)) / norm if norm else 0.0
    return error, error < 1e-2


if __name__ == "__main__":
    sys.exit(main())
