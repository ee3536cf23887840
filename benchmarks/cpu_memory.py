# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak memory of a matmul on the CPU, beside what its operands and its result take.

    python -m benchmarks.cpu_memory                    # the default shapes
    python -m benchmarks.cpu_memory 256x4096x4096 --cpu=haswell

Each shape has a process of its own. Once the operands are on the device, the kernel's count of the
largest resident set starts anew (``/proc/self/clear_refs``, so Linux alone). What it has risen to
after a few runs, without the result, is what packed x, sums between parts of K and the code itself
take. It is set against the bytes of the weight as stored with its scales, of x with its scales, and
of y.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from iree import runtime
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import DEFAULT_SHAPES, Shape, our_module, our_operands, parse_shape
from block32.lowering.cpu.target import compile_flags
from block32.lowering.problem import ScaledMatmul

RUNS = 3


def resident(field: str) -> int:
    """Bytes of a line of ``/proc/self/status``: VmRSS, or VmHWM for its peak."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def measure(shape: Shape, cpu: str) -> tuple[int, int]:
    """The bytes of operands and result, and those that runs take beside them."""
    flags = compile_flags(cpu)
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((rows, k), np.float32) for rows in (m, n))
    problem = ScaledMatmul(m, n, k)
    arrays = our_operands(problem, x, w)
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, our_module(problem, flags))
    function = runtime.load_vm_module(module, config)["main"]
    operands = [runtime.asdevicearray(config.device, array) for array in arrays]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result_bytes = 0
    for _ in range(RUNS):
        result = function(*operands)
        result_bytes = result.to_host().nbytes
        del result
    beside = resident("VmHWM") - before - result_bytes
    return sum(array.nbytes for array in arrays) + result_bytes, max(beside, 0)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="MxNxK")
    parser.add_argument("--cpu", default="host", help="the CPU to compile for, as LLVM names it")
    options = parser.parse_args()
    table = Table()
    for column in ("M,N,K", "operands and result MB", "beside MB", "more"):
        table.add_column(column, justify="right")
    # glibc keeps what is freed below this size to use it again, and raises it when left alone.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    for shape in options.shapes or DEFAULT_SHAPES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            needed, beside = pool.submit(measure, shape, options.cpu).result()
        more = f"{100 * beside / needed:.1f}%"
        table.add_row(",".join(map(str, shape)), f"{needed / 1e6:.2f}", f"{beside / 1e6:.2f}", more)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
