# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What another order of a weight's bytes gains on CPUs: plain kernels beside those that read it.

    python -m benchmarks.cpu_layout                                # AVX2 and AVX-512, some shapes
    python -m benchmarks.cpu_layout 8x4096x4096 --cpu=haswell      # one shape, with AVX2 kernels

Both sides take turns (``turns.py`` says how) over several copies of the weight, so that it comes
from memory and not from a cache. What is printed is how many times as fast the kernels over a
repacked weight are: by medians of the clock and of processor time, and the quarters of the ratios
of single runs. CPUs that this machine cannot run, and those whose kernels read plain weights
alone, are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics

import numpy as np

from benchmarks.cpu import Shape, iree_contender, our_operands, parse_shape
from benchmarks.turns import Contender, give_way, measure, start_with
from block32.dialects.kernel import KernelTier
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN
from block32.lowering.cpu.target import CpuTarget, compile_flags
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.tools.iree_compile import device_facts
from block32.tools.standalone import compile_standalone

CPUS = ("haswell", "skylake-avx512", "icelake-server")
SHAPES = ((1, 4096, 4096), (4, 4096, 4096), (8, 4096, 4096), (32, 7168, 2048), (256, 4096, 4096))
#: Bytes of all copies of a weight together: more than a core's share of the last cache.
COLD_BYTES = 96 << 20


def side(
    problem: ScaledMatmul,
    tiers: tuple[KernelTier, ...],
    flags: tuple[str, ...],
    operands: list[np.ndarray],
) -> Contender:
    """Kernels of ``tiers``; a run multiplies once with each copy of the weight."""
    x, w, *scales = operands
    layout = tiers[0].weight_layout
    if layout != PLAIN:
        w = LAYOUTS[layout].pack(w)
    copies = [[x, w, *scales]] * max(COLD_BYTES // w.nbytes, 1)
    vmfb = compile_standalone(KernelSpec(problem, CpuTarget(), tiers), flags)
    return iree_contender(layout, vmfb, *copies)


def compare(shape: Shape, flags: tuple[str, ...], rounds: int) -> str | None:
    """The line for a shape; None where nothing is repacked."""
    problem = ScaledMatmul(*shape)
    target, facts = CpuTarget(), device_facts(flags)
    config, others = (
        target.select(problem, facts).config,
        target.choose_layout_tiers(problem, facts),
    )
    if config is None or not others.tiers:
        return None
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(size, np.float32) for size in ((m, k), (n, k)))
    operands = our_operands(problem, x, w)
    plain, packed = (
        side(problem, tiers, flags, operands) for tiers in (config.tiers, others.tiers)
    )
    measure([plain, packed], rounds)
    clock, cpu = (
        statistics.median(getattr(plain, name)) / statistics.median(getattr(packed, name))
        for name in ("seconds", "cpu_seconds")
    )
    ratios = [a / b for a, b in zip(plain.seconds, packed.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    chosen = "by default" if others.pays else "on request"
    return f"{others.layout} {chosen}: clock {clock:.2f} ({low:.2f} to {high:.2f}), cpu {cpu:.2f}"


def features_lacking_here(flags: tuple[str, ...]) -> list[str]:
    """The vector features of the processor of ``flags`` that this machine's does not have.

    AMX does not count: kernels ask for it when they run.
    """
    here = device_facts(compile_flags("host")).cpu_features
    wanted = device_facts(flags).cpu_features
    return sorted(f for f in wanted - here if f.startswith(("avx", "fma", "f16c")))


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="MxNxK")
    parser.add_argument("--cpu", action="append", help="a CPU as LLVM names it; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="turns that both sides take")
    options = parser.parse_args()
    start_with("huge", os.cpu_count() or 1)
    give_way()
    for cpu in options.cpu or CPUS:
        flags = compile_flags(cpu)
        if lacking := features_lacking_here(flags):
            print(f"{cpu}: this machine lacks {', '.join(lacking)}")
            continue
        for shape in options.shapes or SHAPES:
            line = compare(shape, flags, options.rounds)
            print(f"{cpu} {','.join(map(str, shape))}: {line or 'plain weights'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
