# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CPU kernels against stock IREE, NumPy and PyTorch, in one run.

    python -m benchmarks.cpu                           # the default shapes, on this machine's CPU
    python -m benchmarks.cpu 8x7168x2048 --cpu=haswell # one shape, with AVX2 kernels
    python -m benchmarks.cpu --without="stock scaled"  # without the slowest
    python -m benchmarks.cpu --pages=small             # operands on pages of 4 KiB
    python -m benchmarks.cpu --threads=1               # everybody on one core, without waking any
    python -m benchmarks.cpu --plot=roofline.png       # and a roofline (needs the extra ``plot``)

Everything is compiled first. Then the contenders take turns, each round in another order
(``turns.py`` says how); medians and quartiles are compared. On a machine that is busy the processor
time of a turn, summed over threads, says more than the time on the clock; it counts spinning too.
How threads are laid out matters more for a fraction of a millisecond than most else: see
``turns.give_way``. Contenders:

- ``block32``: our kernels (W8A8, e4m3, 32x32 scales on w).
- ``block32 W8A16``, ``block32 MXFP4``: the same with x in bf16, and with 4-bit weights.
- ``stock scaled``: W8A8 as a four-operand ``linalg.generic`` with ``arith.scaling_extf``,
  compiled by IREE alone.
- ``stock f32``: IREE's own f32 matmul of the same shape.
- ``numpy f32``: ``x @ w.T`` in f32.
- ``torch bf16``: ``torch.nn.functional.linear`` with a weight that is bf16 already, if installed.
- ``read``: a f32 matrix-vector product in NumPy that reads as many bytes as w has at a byte a
  weight: the bandwidth.
- ``read module``: sums of as many bytes, compiled by IREE: the bandwidth with what a call costs.
- ``call``: our kernels for one row and 32 columns: what a call of a compiled module costs.

At the end, what was aimed at stands beside what was reached (``GOALS``, ``NARROW_GOALS``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from iree import runtime
from rich.console import Console
from rich.table import Table

from benchmarks.turns import (
    PAGE_SETTINGS,
    Contender,
    give_way,
    measure,
    start_with,
    thread_count,
)
from block32.lowering.cpu.target import CpuTarget, compile_flags
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.tools.iree_compile import device_facts, run_iree_compile
from block32.tools.standalone import compile_standalone

DEFAULT_SHAPES = ((1, 4096, 4096), (8, 7168, 2048), (32, 7168, 2048), (256, 4096, 4096))
OURS = "block32"
W8A16 = "block32 W8A16"
MXFP4 = "block32 MXFP4"
#: What each of our kernels multiplies, where that is not W8A8.
OPERANDS: dict[str, dict[str, Any]] = {
    OURS: {},
    W8A16: {"lhs": "bf16", "lhs_scaled": False},
    MXFP4: {"rhs": "f4E2M1FN"},
}
#: Bytes that a weight takes; 4 for those that are not named.
BYTES_PER_WEIGHT = {OURS: 1, W8A16: 1, MXFP4: 0.5, "stock scaled": 1, "torch bf16": 2}
READ = "read"
READ_MODULE = "read module"
READERS = (READ, READ_MODULE)
BYTES_PER_WEIGHT |= dict.fromkeys(READERS, 1)
CALL, CALL_COLUMNS = "call", 32
#: Those who multiply nothing, or not the whole matrix.
NO_MATMUL = (*READERS, CALL)
TABLE_WIDTH = 100
#: What stock IREE compiles: an input program, with the matmul's sizes left open.
STOCK_SCALED = """
#x = affine_map<(m, n, b, k) -> (m, b, k)>
#x_scale = affine_map<(m, n, b, k) -> (m, b)>
#w = affine_map<(m, n, b, k) -> (n, b, k)>
#w_scale = affine_map<(m, n, b, k) -> (n floordiv 32, b)>
#y = affine_map<(m, n, b, k) -> (m, n)>
func.func @main(%x: tensor<{m}x{b}x32xf8E4M3FN>, %w: tensor<{n}x{b}x32xf8E4M3FN>,
                %xs: tensor<{m}x{b}xf8E8M0FNU>, %ws: tensor<{n32}x{b}xf8E8M0FNU>)
    -> tensor<{m}x{n}xf32> {{
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<{m}x{n}xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %y = linalg.generic {{indexing_maps = [#x, #w, #x_scale, #w_scale, #y],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}}
      ins(%x, %w, %xs, %ws : tensor<{m}x{b}x32xf8E4M3FN>, tensor<{n}x{b}x32xf8E4M3FN>,
          tensor<{m}x{b}xf8E8M0FNU>, tensor<{n32}x{b}xf8E8M0FNU>)
      outs(%init : tensor<{m}x{n}xf32>) {{
  ^bb0(%a: f8E4M3FN, %c: f8E4M3FN, %sa: f8E8M0FNU, %sc: f8E8M0FNU, %sum: f32):
    %fa = arith.scaling_extf %a, %sa : f8E4M3FN, f8E8M0FNU to f32
    %fc = arith.scaling_extf %c, %sc : f8E4M3FN, f8E8M0FNU to f32
    %p = arith.mulf %fa, %fc : f32
    %r = arith.addf %sum, %p : f32
    linalg.yield %r : f32
  }} -> tensor<{m}x{n}xf32>
  return %y : tensor<{m}x{n}xf32>
}}
"""
STOCK_F32 = """
func.func @main(%x: tensor<{m}x{k}xf32>, %w: tensor<{k}x{n}xf32>) -> tensor<{m}x{n}xf32> {{
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<{m}x{n}xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %y = linalg.matmul ins(%x, %w : tensor<{m}x{k}xf32>, tensor<{k}x{n}xf32>)
                     outs(%init : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  return %y : tensor<{m}x{n}xf32>
}}
"""
STOCK_READ = """
func.func @main(%w: tensor<{n}x{words}xi32>) -> tensor<{n}xi32> {{
  %zero = arith.constant 0 : i32
  %empty = tensor.empty() : tensor<{n}xi32>
  %init = linalg.fill ins(%zero : i32) outs(%empty : tensor<{n}xi32>) -> tensor<{n}xi32>
  %y = linalg.reduce {{arith.addi}} ins(%w : tensor<{n}x{words}xi32>) outs(%init : tensor<{n}xi32>)
                     dimensions = [1]
  return %y : tensor<{n}xi32>
}}
"""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Goal:
    """How many times as long as ours another one should take.

    Attributes:
        shape: Of which matmul.
        other: Who is compared with.
        factor: The least ratio of its time to ours.
        ours: Which of our kernels.
    """

    shape: Shape
    other: str
    factor: float
    ours: str = OURS


#: On processors with 512-bit vectors.
GOALS = (
    Goal((1, 4096, 4096), READ, 0.82),
    Goal((1, 4096, 4096), READ_MODULE, 0.82),
    Goal((1, 4096, 4096), "torch bf16", 3.0),
    Goal((1, 4096, 4096), OURS, 1.6, MXFP4),
    Goal((8, 7168, 2048), "torch bf16", 2.0),
    Goal((32, 7168, 2048), "torch bf16", 1.1),
    Goal((256, 4096, 4096), "torch bf16", 1.0),
    Goal((256, 4096, 4096), "stock scaled", 110.0),
    Goal((256, 4096, 4096), "torch bf16", 0.95, W8A16),
)
#: On processors without.
NARROW_GOALS = (
    Goal((1, 4096, 4096), "stock scaled", 12.0),
    Goal((8, 7168, 2048), "stock scaled", 40.0),
    Goal((32, 7168, 2048), "stock scaled", 40.0),
    Goal((256, 4096, 4096), "stock scaled", 40.0),
)


def our_module(problem: ScaledMatmul, flags: tuple[str, ...]) -> bytes:
    """The vmfb of our kernels for ``problem``."""
    target = CpuTarget()
    config = target.select(problem, device_facts(flags)).config
    assert config is not None
    return compile_standalone(KernelSpec(problem, target, config.tiers), flags)


def iree_contender(name: str, vmfb: bytes, *calls: list[np.ndarray]) -> Contender:
    """A compiled module whose operands are on the device already; a run makes all of ``calls``.

    It is called below IREE's Python wrapper of functions, which takes 0.04 ms a call.
    """
    config = runtime.Config("local-sync" if thread_count() == 1 else "local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    context = runtime.VmContext(config.vm_instance, modules=[*config.default_vm_modules, module])
    function = module.lookup_function("main")
    assert function is not None
    operands = [_on_device(config.device, arrays) for arrays in calls]

    def run() -> None:
        for of_call in operands:
            context.invoke(function, of_call, runtime.VmVariantList(1))

    return Contender(name, run)


def _on_device(device: runtime.HalDevice, arrays: list[np.ndarray]) -> runtime.VmVariantList:
    operands = runtime.VmVariantList(len(arrays))
    for array in arrays:
        view: Any = runtime.asdevicearray(device, array)._buffer_view
        operands.push_ref(view)
    return operands


def contenders(shape: Shape, flags: tuple[str, ...], without: list[str]) -> list[Contender]:
    """Compile everything for one shape, but for those who are left out."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    w = rng.standard_normal((n, k), np.float32)
    found = our_contenders(shape, flags, x, w)
    if "stock scaled" not in without and k % 32 == 0 and n % 32 == 0:
        sizes = {"m": m, "n": n, "b": k // 32, "n32": n // 32}
        stock = run_iree_compile(["-", *flags], stdin=STOCK_SCALED.format(**sizes).encode())
        x8, w8, x_scale, w_scale = our_operands(ScaledMatmul(m, n, k), x, w)
        blocks = [x8.reshape(m, -1, 32), w8.reshape(n, -1, 32), x_scale, w_scale]
        found.append(iree_contender("stock scaled", stock, blocks))
    if "stock f32" not in without:
        stock = run_iree_compile(["-", *flags], stdin=STOCK_F32.format(m=m, n=n, k=k).encode())
        found.append(iree_contender("stock f32", stock, [x, np.ascontiguousarray(w.T)]))
    found.append(Contender("numpy f32", lambda: x @ w.T))
    found += torch_contender(x, w)
    found += readers(n, max(k // 4, 1), flags)
    call = ScaledMatmul(1, min(n, CALL_COLUMNS), k)
    operands = our_operands(call, x[:1], w[:CALL_COLUMNS])
    found.append(iree_contender(CALL, our_module(call, flags), operands))
    return [contender for contender in found if contender.name not in without]


def readers(n: int, words: int, flags: tuple[str, ...]) -> list[Contender]:
    """Those who read ``n`` rows of 32-bit words and do little else."""
    matrix = np.random.default_rng(0).standard_normal((n, words), np.float32)
    vector = np.ones(words, np.float32)
    module = run_iree_compile(["-", *flags], stdin=STOCK_READ.format(n=n, words=words).encode())
    return [
        Contender(READ, lambda: matrix @ vector),
        iree_contender(READ_MODULE, module, [matrix.view(np.int32)]),
    ]


def our_contenders(
    shape: Shape, flags: tuple[str, ...], x: np.ndarray, w: np.ndarray
) -> list[Contender]:
    """Our kernels for each kind of operands."""
    problems = {name: ScaledMatmul(*shape, **fields) for name, fields in OPERANDS.items()}
    return [
        iree_contender(name, our_module(problem, flags), our_operands(problem, x, w))
        for name, problem in problems.items()
    ]


def our_operands(problem: ScaledMatmul, x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    """The operands of ``problem``, with scales near 1."""
    rng = np.random.default_rng(1)
    as_scale = ml_dtypes.float8_e8m0fnu
    x_scale = rng.integers(120, 130, (len(x), problem.k_blocks), np.uint8).view(as_scale)
    w_scale = rng.integers(120, 130, problem.rhs_scale_shape, np.uint8).view(as_scale)
    weights = w.astype(ml_dtypes.float8_e4m3fn)
    if problem.rhs == "f4E2M1FN":
        weights = rng.integers(0, 256, (problem.n, problem.rhs_row_bytes), np.uint8)
    if not problem.lhs_scaled:
        return [x.astype(ml_dtypes.bfloat16), weights, w_scale]
    return [x.astype(ml_dtypes.float8_e4m3fn), weights, x_scale, w_scale]


def torch_contender(x: np.ndarray, w: np.ndarray) -> list[Contender]:
    """PyTorch, where it is installed."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return []
    torch.set_num_threads(thread_count())
    x16, w16 = (torch.from_numpy(array).to(torch.bfloat16) for array in (x, w))
    return [Contender("torch bf16", lambda: torch.nn.functional.linear(x16, w16))]


def table(shape: Shape, group: list[Contender]) -> Table:
    """Medians, and how much longer than ours each takes."""
    m, n, k = shape
    ours, our_cpu = group[0].median, statistics.median(group[0].cpu_seconds)
    result = Table(title=f"M={m} N={n} K={k}", title_justify="left")
    columns = ("", "median ms", "quartiles", "ratio", "cpu ms", "cpu ratio", "GFLOP/s", "w GB/s")
    for column in columns:
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    for contender in group:
        median, cpu = contender.median, statistics.median(contender.cpu_seconds)
        moved = n * k * BYTES_PER_WEIGHT.get(contender.name, 4)
        flops = "" if contender.name in NO_MATMUL else f"{2 * m * n * k / median / 1e9:.1f}"
        result.add_row(
            contender.name,
            f"{median * 1e3:.3f}",
            "-".join(f"{quartile * 1e3:.3f}" for quartile in contender.quartiles),
            f"{median / ours:.2f}",
            f"{cpu * 1e3:.3f}",
            f"{cpu / our_cpu:.2f}",
            flops,
            "" if contender.name == CALL else f"{moved / median / 1e9:.1f}",
        )
    return result


def goals_table(goals: tuple[Goal, ...], results: dict[Shape, list[Contender]]) -> Table:
    """What was aimed at and what was reached, by time and by processor time."""
    result = Table(title="Goals: times as long as ours", title_justify="left")
    for column in ("M,N,K", "ours", "other", "aim", "median", "cpu median"):
        result.add_column(column)
    for goal in goals:
        named = {contender.name: contender for contender in results.get(goal.shape, [])}
        if goal.ours not in named or goal.other not in named:
            continue
        ours, other = named[goal.ours], named[goal.other]
        cpu = statistics.median(other.cpu_seconds) / statistics.median(ours.cpu_seconds)
        shape = ",".join(map(str, goal.shape))
        reached = f"{other.median / ours.median:.2f}"
        result.add_row(shape, goal.ours, goal.other, f"{goal.factor:g}", reached, f"{cpu:.2f}")
    return result


def draw_roofline(results: dict[Shape, list[Contender]], path: Path) -> None:
    """GFLOP/s over FLOPs a byte of w, under the measured bandwidth and NumPy's best f32 rate."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("error: --plot needs matplotlib: pip install 'block32[plot]'") from None
    figure, axes = pyplot.subplots()
    bandwidth = compute = 0.0
    points: dict[str, list[tuple[float, float]]] = {}
    for (m, n, k), group in results.items():
        for contender in group:
            rate = 2 * m * n * k / contender.median / 1e9
            if contender.name in READERS:
                bandwidth = max(bandwidth, n * k / contender.median / 1e9)
                continue
            if contender.name == CALL:
                continue
            if contender.name == "numpy f32":
                compute = max(compute, rate)
            width = BYTES_PER_WEIGHT.get(contender.name, 4)
            points.setdefault(contender.name, []).append((2 * m / width, rate))
    intensities = np.geomspace(0.25, 1024, 64)
    roof = np.minimum(intensities * bandwidth, compute)
    axes.loglog(intensities, roof, "k--", label=f"read {bandwidth:.0f} GB/s, f32 {compute:.0f}")
    for name, values in points.items():
        axes.loglog(*zip(*sorted(values), strict=True), "o-", label=name)
    axes.set_xlabel("FLOP a byte of w")
    axes.set_ylabel("GFLOP/s")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse_shape(text: str) -> Shape:
    """``MxNxK`` as three positive integers."""
    m, n, k = parse_sizes(text, "MxNxK")
    return m, n, k


def parse_sizes(text: str, form: str) -> list[int]:
    """As many positive integers as ``form`` has letters between ``x``."""
    try:
        sizes = [int(part) for part in text.split("x")]
    except ValueError:
        sizes = []
    if len(sizes) != len(form.split("x")):
        raise argparse.ArgumentTypeError(f"expected {form} but got '{text}'")
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected positive sizes but got '{text}'")
    return sizes


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="MxNxK")
    parser.add_argument("--rounds", type=int, default=21, help="turns that everybody takes")
    parser.add_argument("--cpu", default="host", help="the CPU to compile for, as LLVM names it")
    names = "a contender to leave out"
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help=names)
    pages = "the pages that all operands are on (default: huge)"
    parser.add_argument("--pages", choices=sorted(PAGE_SETTINGS), default="huge", help=pages)
    threads = "1, or as many as there are cores (default)"
    all_cores = os.cpu_count() or 1
    parser.add_argument(
        "--threads", type=int, choices=(1, all_cores), default=all_cores, help=threads
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline")
    options = parser.parse_args()
    start_with(options.pages, options.threads)
    give_way()
    flags = compile_flags(options.cpu)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    results: dict[Shape, list[Contender]] = {}
    for shape in options.shapes or DEFAULT_SHAPES:
        group = contenders(shape, flags, options.without)
        measure(group, options.rounds)
        results[shape] = group
        console.print(table(shape, group))
    has_wide_vectors = "avx512f" in device_facts(flags).cpu_features
    console.print(goals_table(GOALS if has_wide_vectors else NARROW_GOALS, results))
    if options.plot:
        draw_roofline(results, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
