# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling NVIDIA kernels to PTX, and running the PTX in the executor."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from block32.dialects.kernel import KernelTier
from block32.lowering.kernel_module import EXECUTABLE_PREFIX, KernelSpec, export_name
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.tools.ptx_executor import PtxKernel, launch, parse_ptx
from block32.tools.standalone import compile_standalone

STREAM = KernelTier("stream", tile=(8, 32, 128), warps=2, stages=3)
TILED = KernelTier("tiled", tile=(64, 64, 64), warps=4, stages=3, order="m")
WGMMA = KernelTier("tiled", tile=(64, 64, 128), warps=4, stages=3, mma=(64, 64, 32))

RESULTS: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@lru_cache(maxsize=64)
def ptx_text(problem: ScaledMatmul, target: str, *tiers: KernelTier) -> str:
    """The PTX of all kernels of a matmul."""
    chosen = target_named(target)
    for tier in tiers:
        reason = chosen.verify(problem, tier, DeviceFacts())
        assert reason is None, reason
    with tempfile.TemporaryDirectory() as folder:
        flags = [*chosen.compile_flags(), f"--iree-hal-dump-executable-files-to={folder}"]
        compile_standalone(KernelSpec(problem, chosen, tiers), flags)
        return next(Path(folder).glob("*.ptx")).read_text()


def run_kernels(
    problem: ScaledMatmul,
    target: str,
    tier: KernelTier,
    operands: dict[str, npt.NDArray[Any]],
    m: int,
    seed: int = 0,
    kernels: dict[str, PtxKernel] | None = None,
) -> npt.NDArray[Any]:
    """Run all launches of a matmul with one tier; y.

    Results start as NaN, or as ``operands["init"]``; slots as NaN. Counters must be 0 again at the
    end.
    """
    chosen = target_named(target)
    kernels = kernels or parse_ptx(ptx_text(problem, target, tier))
    plan = chosen.plan(problem, (tier,))
    buffers: dict[str, npt.NDArray[Any]] = dict(operands)
    for name, buffer in plan.buffers.items():
        size = buffer.size(m)
        assert isinstance(size, int)
        dtype = np.uint8 if buffer.element == "i8" else np.uint32
        poison = 0xFF if buffer.element == "i8" else 0x7FC0_0000
        buffers[name] = np.full(size, 0 if buffer.zeroed else poison, dtype)
    y = operands.get("init", np.full((m, problem.n), np.nan)).astype(RESULTS[problem.result])
    buffers["result"] = y
    for step in plan.launches:
        grid = chosen.workgroups(problem, tier, step, m)[0]
        assert isinstance(grid, int)
        launch(
            kernels[export_name(EXECUTABLE_PREFIX, step, 0)],
            grid,
            [buffers[name] for name in step.bindings],
            [name not in step.reads for name in step.bindings],
            [m] if problem.m is None else [],
            chosen.workgroup_memory(problem, tier, step),
            seed,
        )
    if "counters" in buffers:
        assert not buffers["counters"].any(), "a counter was not set back to 0"
    return y
