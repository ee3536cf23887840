# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiled modules on a real card, where there is one; ``benchmarks/cuda.py`` checks far more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from iree import runtime
from iree.compiler import ir

import block32
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.runtime import reference
from block32.tools.standalone import compile_standalone
from tests.grouped import DTYPES, compare, grouped, program, viewed
from tests.grouped import operands as grouped_operands
from tests.lowering.nvidia.kernels import STREAM
from tests.numbers import random_operands

PROBLEM = ScaledMatmul(None, 160, 1152)

#: Error over |x| |w|: f32 sums, and those of wgmma for codes of all magnitudes in one block.
TOLERANCES = {"sm_89": 2e-6, "sm_90a-f32": 2e-6, "sm_90a": 1e-3}


@cache
def why_no_card() -> str:
    """Why no test can run, or nothing."""
    try:
        devices = runtime.get_driver("cuda").query_available_devices()
    except Exception as error:  # no driver, no device, or a runtime without cuda
        return f"no NVIDIA card: {str(error).splitlines()[0]}"
    return "" if devices else "no NVIDIA card"


needs_card = pytest.mark.skipif(bool(why_no_card()), reason=why_no_card() or "no card")


def load(target: str, *tiers: Any, problem: ScaledMatmul = PROBLEM) -> tuple[Any, runtime.Config]:
    chosen = target_named(target)
    config = chosen.select(problem, DeviceFacts()).config
    assert config is not None
    spec = KernelSpec(problem, chosen, tiers or config.tiers)
    vmfb = compile_standalone(spec, chosen.compile_flags())
    card = runtime.Config("cuda")
    module = runtime.VmModule.copy_buffer(card.vm_instance, vmfb)
    return runtime.load_vm_module(module, card), card


@needs_card
@pytest.mark.parametrize("target", TOLERANCES)
def test_every_tier_on_the_card(target: str):
    module, _ = load(target)
    for m in (1, 8, 33, 65, 130):
        operands = random_operands(PROBLEM, m)
        y = module["main"](*operands.arrays()).to_host()
        magnitude = replace(operands, lhs=operands.lhs & 0x7F, rhs=operands.rhs & 0x7F).expected()
        assert np.max(np.abs(y - operands.expected()) / magnitude) < TOLERANCES[target]


@needs_card
def test_no_rows_on_the_card():
    module, _ = load("sm_90a")
    before = module["main"](*random_operands(PROBLEM, 3).arrays()).to_host()
    # The shape alone: the runtime cannot bring an empty array to the host.
    assert tuple(module["main"](*random_operands(PROBLEM, 0).arrays()).shape) == (0, 160)
    again = module["main"](*random_operands(PROBLEM, 3).arrays()).to_host()
    assert again.tobytes() == before.tobytes()


@needs_card
def test_split_k_is_the_same_every_time_on_the_card():
    module, card = load("sm_90a", replace(STREAM, splits=4))
    operands = random_operands(PROBLEM, 19)
    arguments = [runtime.asdevicearray(card.device, array) for array in operands.arrays()]
    first = module["main"](*arguments).to_host()
    for _ in range(200):
        assert module["main"](*arguments).to_host().tobytes() == first.tobytes()


@needs_card
@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_an_x_that_is_quantised_on_the_card(target: str):
    """Each tier gives the bits of quantising first, whether its kernel or a launch does it."""
    problem = replace(PROBLEM, lhs="f32", lhs_scaled=False, lhs_quantize="rceil")
    late, _ = load(target, problem=problem)
    before, _ = load(target)
    for m in (1, 8, 33, 130):
        x = np.random.default_rng(m).standard_normal((m, problem.k)).astype(np.float32)
        codes, scales = reference.quantize(x)
        operands = replace(random_operands(PROBLEM, m), lhs=codes, lhs_scale=scales)
        _, w, _, w_scale = operands.arrays()
        want = before["main"](*operands.arrays()).to_host()
        assert late["main"](x, w, w_scale).to_host().tobytes() == want.tobytes()


@needs_card
@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_an_x_without_scales_on_the_card(target: str, lhs: str):
    """Every tier multiplies x as it is: even f32 loses no more than f32 sums do."""
    problem = replace(PROBLEM, lhs=lhs, lhs_scaled=False)
    module, _ = load(target, problem=problem)
    for m in (1, 8, 17, 33, 65, 130):
        check_without_scales(module, problem, m)
    _, w, _, w_scale = random_operands(PROBLEM, 0).arrays()
    empty = np.zeros((0, problem.k), DTYPES[lhs])
    assert tuple(module["main"](empty, w, w_scale).shape) == (0, problem.n)
    check_without_scales(module, problem, 3)


def check_without_scales(module: Any, problem: ScaledMatmul, m: int) -> None:
    operands = random_operands(PROBLEM, m)
    _, w, _, w_scale = operands.arrays()
    x = np.random.default_rng(m).standard_normal((m, problem.k)).astype(DTYPES[problem.lhs])
    y = module["main"](x, w, w_scale).to_host()
    wide_x = x.astype(np.float64)
    wide_w = reference.dequantize(operands.rhs, operands.rhs_scale, problem.rhs_block)
    error = np.abs(y - wide_x @ wide_w.T) / (np.abs(wide_x) @ np.abs(wide_w).T)
    assert np.max(error) < TOLERANCES["sm_89"], f"M = {m}"


@needs_card
@pytest.mark.parametrize("lhs", ["f8E4M3FN", "f32"])
def test_a_matmul_left_to_iree_on_the_card(lhs: str):
    problem = replace(PROBLEM, lhs=lhs, lhs_scaled=lhs != "f32")
    flags = target_named("sm_89").compile_flags()
    vmfb = block32.compile(program(problem), target="portable", flags=flags)
    card = runtime.Config("cuda")
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(card.vm_instance, vmfb), card)
    if lhs == "f32":
        check_without_scales(module, problem, 5)
        return
    operands = random_operands(problem, 5)
    y = module["main"](*operands.arrays()).to_host()
    magnitude = replace(operands, lhs=operands.lhs & 0x7F, rhs=operands.rhs & 0x7F).expected()
    assert np.max(np.abs(y - operands.expected()) / magnitude) < TOLERANCES["sm_89"]


@needs_card
@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_groups_of_rows_on_the_card(target: str):
    """An empty group, one without an expert, and rows of no group, which keep their bits."""
    problem = grouped(70, 96, experts=4, groups=4)
    module, _ = load(target, problem=problem)
    arrays = grouped_operands(problem, [2, 9, 9, 12, 32], [2, 0, -1, 1], 35)
    y = module["main"](*viewed(problem, arrays)).to_host()
    for rows in (slice(0, 2), slice(32, 35)):
        assert y[rows].tobytes() == arrays["init"][rows].tobytes()
    comparison = compare(problem, y, arrays)
    assert comparison.ok, comparison


def test_no_rows_are_kept_on_the_host():
    # A zero-size buffer breaks the device for the rest of the process.
    assert target_named("sm_90a").guards_empty
    with ir.Context(), ir.Location.unknown():
        spec = KernelSpec(PROBLEM, target_named("sm_90a"), (STREAM,))
        text = str(build_standalone_module(spec))
    host = text[text.index("func.func @main") :]
    assert host.index("arith.cmpi eq") < host.index("scf.if") < host.index("flow.dispatch")
