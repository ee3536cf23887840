# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling gfx950 kernels, and running the machine code out of the module in the executor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir
from iree.compiler.tools import compile_str

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import split_k
from block32.lowering.gfx950.target import GEMM, Gfx950Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import EXECUTABLE_PREFIX, KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_executor import hsaco_from_vmfb
from block32.tools.gfx950_launch import launch_matmul
from tests.numbers import Operands

TARGET = Gfx950Target()

#: Marks tests that run machine code.
needs_executor = pytest.mark.skipif(
    find_spec("tinygrad") is None, reason="the gfx950 extra (tinygrad) is not installed"
)


def kernel_module_text(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> str:
    """The module of one matmul as MLIR text."""
    with ir.Context(), ir.Location.unknown():
        return str(build_standalone_module(KernelSpec(problem, TARGET, tiers)))


@lru_cache(maxsize=64)
def compile_kernels(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> bytes:
    """The HSACO, taken out of the vmfb that IREE makes."""
    return compile_uncached(problem, tiers)


def compile_uncached(problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> bytes:
    """The HSACO, for a test that has changed how kernels are made."""
    text = kernel_module_text(problem, tiers)
    vmfb = compile_str(text, extra_args=list(TARGET.compile_flags()))
    assert vmfb is not None
    return hsaco_from_vmfb(vmfb)


def run_matmul(
    problem: ScaledMatmul,
    tiers: Sequence[KernelTier],
    operands: Operands,
    seed: int = 0,
    workgroups: Sequence[tuple[int, int, int]] | None = None,
    hsaco: bytes | None = None,
    first_counter: int = 0,
) -> npt.NDArray[Any]:
    """Run all launches of a matmul in the executor; y.

    Args:
        problem: The matmul.
        tiers: Its tiers; the one that serves the operands' M runs.
        operands: Its operands.
        seed: Of the schedule.
        workgroups: Run only these of the first launch.
        hsaco: Other machine code than the compiled one.
        first_counter: What the arrival counters start as.
    """
    tiers = tuple(tiers)
    outcome = launch_matmul(
        hsaco or compile_kernels(problem, tiers),
        problem,
        tiers,
        named_operands(operands),
        EXECUTABLE_PREFIX,
        seed,
        None if workgroups is None else {GEMM: workgroups},
        first_counter,
    )
    if split_k.COUNTERS in outcome.buffers and workgroups is None:
        assert not outcome.buffers[split_k.COUNTERS].any(), "a counter was not set back to 0"
    return outcome.y


def named_operands(operands: Operands) -> dict[str, npt.NDArray[Any]]:
    """The operands by their ABI name."""
    return {
        "lhs": operands.lhs,
        "rhs": operands.rhs,
        "lhs_scale": operands.lhs_scale,
        "rhs_scale": operands.rhs_scale,
    }


#: Largest error of an element, relative to itself, by result type; and relative to the peak.
RTOL = {"f32": 3e-5, "f16": 2e-3, "bf16": 1.6e-2}
ATOL_OF_PEAK = 5e-5


def assert_matches_reference(
    problem: ScaledMatmul, y: npt.NDArray[Any], operands: Operands
) -> None:
    """Every element against float64."""
    expected = operands.expected()
    y64 = y.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(y64), np.isnan(expected))
    finite = expected[np.isfinite(expected)]
    peak = float(np.max(np.abs(finite))) if finite.size else 0.0
    np.testing.assert_allclose(y64, expected, rtol=RTOL[problem.result], atol=ATOL_OF_PEAK * peak)
