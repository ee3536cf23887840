# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Work on the accumulator before the store: right in every form, ragged edges included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import select
from block32.lowering.kernel_module import EXECUTABLE_PREFIX
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.gfx950_launch import launch_matmul
from tests.lowering.gfx950.kernels import compile_kernels, named_operands, needs_executor
from tests.numbers import random_operands

pytestmark = needs_executor

TILED = KernelTier("tiled", tile=(32, 64, 256), warps=4, stages=2)
PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=2)
FORMS = {
    "tiled": TILED,
    "packed": PACKED,
    "split": replace(TILED, splits=2),
    "second launch": replace(PACKED, splits=2, reduce="second_launch"),
}
#: Each operand in each type, each activation, and the number of columns: whole fours or not.
EPILOGUES = [
    (Epilogue(row_scale=True, scale=True, bias="bf16", activation="relu"), 64),
    (Epilogue(row_scale=True, scale=True, bias="bf16", activation="relu"), 37),
    (Epilogue(bias="f32", residual="f16"), 37),
    (Epilogue(residual="f32", activation="silu"), 64),
    (Epilogue(bias="f16", residual="bf16", activation="gelu"), 37),
    (Epilogue(scale=True, activation="gelu_tanh"), 64),
    (Epilogue(row_scale=True, activation="tanh"), 37),
]
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_erf = np.vectorize(math.erf)
ACTIVATIONS: dict[str | None, Callable[[npt.NDArray], npt.NDArray]] = {
    None: lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "gelu": lambda y: y / 2 * (1 + _erf(y / math.sqrt(2))),
    "gelu_tanh": lambda y: y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "silu": lambda y: y / (1 + np.exp(-np.maximum(y, -700))),
    "tanh": np.tanh,
}


@pytest.mark.parametrize(("epilogue", "n"), EPILOGUES)
@pytest.mark.parametrize("form", FORMS)
def test_epilogue(form: str, epilogue: Epilogue, n: int):
    problem = ScaledMatmul(m=11, n=n, k=544, epilogue=epilogue)
    check(problem, (FORMS[form],), 11)


@pytest.mark.parametrize("result", ["bf16", "f16"])
def test_the_sum_is_rounded_once_after_the_epilogue(result: Literal["bf16", "f16"]):
    epilogue = Epilogue(bias="f32", residual="f32", activation="relu")
    problem = ScaledMatmul(m=11, n=40, k=256, result=result, epilogue=epilogue)
    y, wanted = run(problem, (FORMS["tiled"],), 11)
    rounded = reference.round_to(wanted, result)
    assert np.mean(y.astype(np.float64) == rounded) > 0.98, "more than ties of f32 sums differ"


def test_relu_keeps_a_nan():
    problem = ScaledMatmul(m=4, n=16, k=256, epilogue=Epilogue(activation="relu"))
    operands = random_operands(problem)
    operands.lhs_scale[1] = 255
    hsaco = compile_kernels(problem, (PACKED,))
    y = launch_matmul(hsaco, problem, (PACKED,), named_operands(operands), EXECUTABLE_PREFIX).y
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False, False]
    assert not np.isnan(y[[0, 2, 3]]).any()


def test_selected_kernels_of_a_dynamic_m():
    """Every tier that selection takes has the epilogue, and reads M rows of its operands."""
    problem = ScaledMatmul(
        m=None, n=70, k=512, epilogue=Epilogue(row_scale=True, bias="f32", residual="bf16")
    )
    config = select.select(problem, DeviceFacts()).config
    assert config is not None
    for m in (1, 9, 40):
        check(problem, config.tiers, m)


def check(problem: ScaledMatmul, tiers: tuple[KernelTier, ...], m: int) -> None:
    """Compare every element with float64."""
    y, wanted = run(problem, tiers, m)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def run(
    problem: ScaledMatmul, tiers: tuple[KernelTier, ...], m: int
) -> tuple[npt.NDArray, npt.NDArray[np.float64]]:
    """What the machine code gives on random operands, and what is right.

    Sums are of the order of 1, where activations bend.
    """
    epilogue, n = problem.epilogue, problem.n
    operands = random_operands(problem, m)
    rng = np.random.default_rng(1)
    operands.lhs = reference.encode(rng.normal(size=operands.lhs.shape))
    operands.rhs = reference.encode(rng.normal(size=operands.rhs.shape))
    operands.lhs_scale[:], operands.rhs_scale[:] = 124, 125
    extra = {
        "row_scale": rng.normal(size=m).astype(np.float32),
        "scale": np.array([0.75], np.float32),
        "bias": rng.normal(size=n).astype(TYPES[epilogue.bias or "f32"]),
        "residual": rng.normal(size=(m, n)).astype(TYPES[epilogue.residual or "f32"]),
    }
    named = named_operands(operands)
    named |= {name: extra[name] for name in epilogue.operand_names()}
    hsaco = compile_kernels(problem, tiers)
    y = launch_matmul(hsaco, problem, tiers, named, EXECUTABLE_PREFIX).y
    wanted = operands.expected()
    if epilogue.row_scale:
        wanted *= extra["row_scale"].astype(np.float64)[:, None]
    if epilogue.scale:
        wanted *= 0.75
    if epilogue.bias:
        wanted += extra["bias"].astype(np.float64)
    if epilogue.residual:
        wanted += extra["residual"].astype(np.float64)
    return y, ACTIVATIONS[epilogue.activation](wanted)
