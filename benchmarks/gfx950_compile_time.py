# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What compiling for gfx950 costs, in seconds of CPU time, and how many kernels come of it.

Each shape of the table alone, then a model of 32 layers over ten of them, all with a dynamic M. A
layer adds its product to what the layers of its shape gave before. Fails where a kernel takes 3
seconds or more, the model 60 or more, or where a shape is not built exactly once.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from block32.lowering.gfx950.select import tuned_tiers
from block32.tools.gfx950_executor import hsacos_from_vmfb, parse_code_object

LAYERS = 32

#: Most CPU seconds of one kernel and of the model.
KERNEL_BAR, MODEL_BAR = 3.0, 60.0

_MAPS = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
#at = affine_map<(m, n) -> (m, n)>
"""


@dataclass(frozen=True)
class Shape:
    """A weight's shape, and the types of what it is multiplied with."""

    n: int
    k: int

    @property
    def x(self) -> str:
        """The activation."""
        return f"tensor<?x{self.k}xf8E4M3FN>"

    @property
    def x_scale(self) -> str:
        """Its scales."""
        return f"tensor<?x{self.k // 32}xf8E8M0FNU>"

    @property
    def w(self) -> str:
        """The weight."""
        return f"tensor<{self.n}x{self.k}xf8E4M3FN>"

    @property
    def w_scale(self) -> str:
        """Its scales."""
        return f"tensor<{self.n // 32}x{self.k // 32}xf8E8M0FNU>"

    @property
    def y(self) -> str:
        """The product."""
        return f"tensor<?x{self.n}xbf16>"


def model(shapes: Sequence[Shape], layers: int) -> str:
    """A function of one activation a shape and one weight a layer; a result a shape."""
    used = [shapes[layer % len(shapes)] for layer in range(layers)]
    arguments, body = [], []
    for i, shape in enumerate(shapes):
        arguments += [f"%x{i}: {shape.x}", f"%xs{i}: {shape.x_scale}"]
        body.append(
            f"%m{i} = tensor.dim %x{i}, %c0 : {shape.x}\n"
            f"%empty{i} = tensor.empty(%m{i}) : {shape.y}\n"
            f"%zero{i} = linalg.fill ins(%zero : bf16) outs(%empty{i} : {shape.y}) -> {shape.y}"
        )
    last = [f"%zero{i}" for i in range(len(shapes))]
    for layer, shape in enumerate(used):
        i = layer % len(shapes)
        arguments += [f"%w{layer}: {shape.w}", f"%ws{layer}: {shape.w_scale}"]
        body.append(_layer(layer, i, shape, last[i]))
        last[i] = f"%sum{layer}"
    results = ", ".join(shape.y for shape in shapes)
    return (
        f"{_MAPS}func.func @main({', '.join(arguments)}) -> ({results}) {{\n"
        "%c0 = arith.constant 0 : index\n%zero = arith.constant 0.0 : bf16\n"
        + "\n".join(body)
        + f"\nreturn {', '.join(last)} : {results}\n}}\n"
    )


def _layer(layer: int, i: int, shape: Shape, before: str) -> str:
    """One product, and its sum with what came before."""
    return (
        f"%y{layer} = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]\n"
        f"  ins(%x{i}, %xs{i}, %w{layer}, %ws{layer} : {shape.x}, {shape.x_scale}, {shape.w}, "
        f"{shape.w_scale}) outs(%zero{i} : {shape.y}) -> {shape.y}\n"
        f"%sum{layer} = linalg.generic {{indexing_maps = [#at, #at, #at], "
        'iterator_types = ["parallel", "parallel"]}\n'
        f"  ins(%y{layer}, {before} : {shape.y}, {shape.y}) outs(%empty{i} : {shape.y}) {{\n"
        "^bb0(%a: bf16, %b: bf16, %out: bf16):\n  %c = arith.addf %a, %b : bf16\n"
        f"  linalg.yield %c : bf16\n}} -> {shape.y}"
    )


@dataclass(frozen=True)
class Cost:
    """What a compile took, and what came of it.

    Attributes:
        seconds: CPU time.
        kernels: The names of the matmul kernels.
    """

    seconds: float
    kernels: tuple[str, ...]


def compile_model(text: str, folder: Path) -> Cost:
    """Run ``block32 compile`` on a model."""
    source, output = folder / "model.mlir", folder / "model.vmfb"
    source.write_text(text)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "block32", "compile", str(source), "--target=gfx950"]
    subprocess.run([*command, "--quiet", "-o", str(output)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    names = [
        name for hsaco in hsacos_from_vmfb(output) for name in parse_code_object(hsaco).kernels
    ]
    return Cost(seconds, tuple(name for name in names if "gemm_tier" in name))


def main() -> int:
    """Measure, print, and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model-only", action="store_true", help="leave out the single shapes")
    arguments = parser.parse_args()
    shapes = [Shape(n, k) for n, k in tuned_tiers()][:10]
    table = Table("model", "kernels", "CPU seconds", "a kernel")
    is_within = True
    kernels = 0
    with tempfile.TemporaryDirectory(prefix="block32-") as name:
        for shape in () if arguments.model_only else shapes:
            cost = compile_model(model([shape], 1), Path(name))
            kernels += len(cost.kernels)
            is_within &= cost.seconds / len(cost.kernels) < KERNEL_BAR
            table.add_row(f"N {shape.n}, K {shape.k}", *_cells(cost))
        cost = compile_model(model(shapes, LAYERS), Path(name))
    table.add_row(f"{LAYERS} layers, {len(shapes)} shapes", *_cells(cost))
    Console().print(table)
    is_within &= cost.seconds < MODEL_BAR
    is_built_once = arguments.model_only or len(cost.kernels) == kernels
    print(f"each shape built once: {'yes' if is_built_once else 'NO'}")
    print(f"within the bars: {'yes' if is_within else 'NO'}")
    return 0 if is_within and is_built_once else 1


def _cells(cost: Cost) -> list[str]:
    count = len(cost.kernels)
    return [str(count), f"{cost.seconds:.1f}", f"{cost.seconds / count:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
