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

from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.tools.iree_compile import run_iree_compile
from tests.lowering.nvidia.kernels import STREAM
from tests.numbers import random_operands

PROBLEM = ScaledMatmul(None, 160, 1152)

#: Error over |x| |w|: f32 sums, and those of wgmma.
TOLERANCES = {"sm_89": 2e-6, "sm_90a-f32": 2e-6, "sm_90a": 3e-4}


@cache
def why_no_card() -> str:
    """Why no test can run, or nothing."""
    try:
        devices = runtime.get_driver("cuda").query_available_devices()
    except Exception as error:  # no driver, no device, or a runtime without cuda
        return f"no NVIDIA card: {str(error).splitlines()[0]}"
    return "" if devices else "no NVIDIA card"


needs_card = pytest.mark.skipif(bool(why_no_card()), reason=why_no_card() or "no card")


def load(target: str, *tiers: Any) -> tuple[Any, runtime.Config]:
    chosen = target_named(target)
    config = chosen.select(PROBLEM, DeviceFacts()).config
    assert config is not None
    with ir.Context(), ir.Location.unknown():
        text = str(build_standalone_module(KernelSpec(PROBLEM, chosen, tiers or config.tiers)))
    vmfb = run_iree_compile(["-", *chosen.compile_flags()], stdin=text.encode())
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


def test_no_rows_are_kept_on_the_host():
    # A zero-size buffer breaks the device for the rest of the process.
    assert target_named("sm_90a").guards_empty
    with ir.Context(), ir.Location.unknown():
        spec = KernelSpec(PROBLEM, target_named("sm_90a"), (STREAM,))
        text = str(build_standalone_module(spec))
    host = text[text.index("func.func @main") :]
    assert host.index("arith.cmpi eq") < host.index("scf.if") < host.index("flow.dispatch")
