# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the time to compile, and to write and apply a spec, grows with the number of matmuls.

    python benchmarks/spec_scaling.py --counts 250,500,1000

Two kinds of model: ``own scales``, marked matmuls of one shape that each name scales of their own
(a matcher each), and ``few shapes``, ``linalg.scaled_contract`` of four shapes (a matcher for each
shape). Columns, in seconds of CPU time: ``compile`` is ``block32 compile`` from text to vmfb;
``spec`` is ``block32 spec`` without its check; ``plain`` is iree-compile up to the phase where
specs are applied, without one; ``applied`` is the same with the spec.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from iree.compiler.tools.binaries import find_tool
from rich.console import Console
from rich.table import Table

from block32.tools.transform_spec import SPEC_FLAG

_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=generic",
)
_MAPS = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @x_scale = dense<127> : tensor<4x2xi8>
"""
_X = "tensor<4x64xf8E4M3FN>"


def own_scales(count: int) -> str:
    """Marked matmuls of one shape, each with its own global of scales."""
    lines = [_MAPS]
    for i in range(count):
        lines.append(f"util.global private @scale_{i} = dense<{i % 250}> : tensor<1x2xi8>")
        lines.append(f"util.global private @w_{i} = dense<{i % 8}.0> : tensor<32x64xf8E4M3FN>")
    lines.append(f"func.func @main(%x: {_X}) -> tensor<4x32xf32> {{")
    lines.append("%zero = arith.constant dense<0.0> : tensor<4x32xf32>")
    lines.append("%sum_0 = arith.constant dense<1.0> : tensor<4x32xf32>")
    for i in range(count):
        lines.append(
            f"%w_{i} = util.global.load @w_{i} : tensor<32x64xf8E4M3FN>\n"
            f"%y_{i} = linalg.matmul indexing_maps = [#x, #w, #y] "
            "{block32.lhs = {block = [1, 32], scale = @x_scale}, "
            f"block32.rhs = {{block = [32, 32], scale = @scale_{i}}}}} "
            f"ins(%x, %w_{i} : {_X}, tensor<32x64xf8E4M3FN>) "
            "outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>\n"
            f"%sum_{i + 1} = arith.addf %sum_{i}, %y_{i} : tensor<4x32xf32>"
        )
    lines.append(f"return %sum_{count} : tensor<4x32xf32>\n}}")
    return "\n".join(lines)


def few_shapes(count: int) -> str:
    """``linalg.scaled_contract`` of four shapes, each on its own weight."""
    lines = [_MAPS]
    for i in range(count):
        n = 32 * (i % 4 + 1)
        lines.append(f"util.global private @w_{i} = dense<{i % 8}.0> : tensor<{n}x64xf8E4M3FN>")
    scales = ", ".join(f"%ws_{n}: tensor<{n // 32}x2xf8E8M0FNU>" for n in (32, 64, 96, 128))
    results = ", ".join(f"tensor<4x{n}xf32>" for n in (32, 64, 96, 128))
    lines.append(f"func.func @main(%x: {_X}, %xs: tensor<4x2xf8E8M0FNU>, {scales})")
    lines.append(f"    -> ({results}) {{")
    last = {}
    for n in (32, 64, 96, 128):
        lines.append(f"%zero_{n} = arith.constant dense<0.0> : tensor<4x{n}xf32>")
        last[n] = f"%zero_{n}"
    for i in range(count):
        n = 32 * (i % 4 + 1)
        lines.append(
            f"%w_{i} = util.global.load @w_{i} : tensor<{n}x64xf8E4M3FN>\n"
            f"%y_{i} = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y] "
            f"ins(%x, %xs, %w_{i}, %ws_{n} : {_X}, tensor<4x2xf8E8M0FNU>, "
            f"tensor<{n}x64xf8E4M3FN>, tensor<{n // 32}x2xf8E8M0FNU>) "
            f"outs(%zero_{n} : tensor<4x{n}xf32>) -> tensor<4x{n}xf32>\n"
            f"%sum_{i} = arith.addf {last[n]}, %y_{i} : tensor<4x{n}xf32>"
        )
        last[n] = f"%sum_{i}"
    lines.append(f"return {', '.join(last.values())} : {results}\n}}")
    return "\n".join(lines)


def cpu_seconds(command: Sequence[str]) -> float:
    """User and system time of a process, which other work on the machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(model: str, folder: Path) -> tuple[float, float, float, float]:
    """Seconds for a compile, the making of a spec, and iree-compile without and with it."""
    path, spec = folder / "model.mlir", folder / "spec.mlir"
    path.write_text(model)
    block32 = [sys.executable, "-m", "block32"]
    options = [str(path), "--target=cpu", "--quiet"]
    compiled = cpu_seconds([*block32, "compile", *options, "-o", str(folder / "model.vmfb")])
    written = cpu_seconds([*block32, "spec", *options, "--no-check", "-o", str(spec)])
    compile_ = [find_tool("iree-compile"), str(path), *_FLAGS, "--compile-to=preprocessing"]
    compile_ += ["-o", str(folder / "out.mlir")]
    return compiled, written, cpu_seconds(compile_), cpu_seconds([*compile_, f"{SPEC_FLAG}={spec}"])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", default="250,500,1000", help="numbers of matmuls, with commas")
    counts = [int(count) for count in parser.parse_args().counts.split(",")]
    table = Table("model", "matmuls", "compile", "spec", "plain", "applied")
    with tempfile.TemporaryDirectory(prefix="block32-") as folder:
        for name, model in (("own scales", own_scales), ("few shapes", few_shapes)):
            for count in counts:
                seconds = measure(model(count), Path(folder))
                table.add_row(name, str(count), *(f"{s:.2f}" for s in seconds))
    Console().print(table)


if __name__ == "__main__":
    main()
