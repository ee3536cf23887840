# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Work on the accumulator before the store: right in every form, ragged edges included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.kernel_module import EXECUTABLE_PREFIX
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.tools.gfx950_launch import launch_matmul
from tests.lowering.gfx950.kernels import compile_kernels, named_operands
from tests.numbers import random_operands

TILED = KernelTier("tiled", tile=(32, 64, 256), warps=4, stages=2)
PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=2)
FORMS = {
    "tiled": TILED,
    "packed": PACKED,
    "split": replace(TILED, splits=2),
    "second launch": replace(PACKED, splits=2, reduce="second_launch"),
}
EPILOGUES = [
    Epilogue(row_scale=True, scale=True, bias="bf16", activation="relu"),
    Epilogue(bias="f32", residual="f16"),
    Epilogue(residual="f32", activation="silu"),
]
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ACTIVATIONS: dict[str | None, Callable[[npt.NDArray], npt.NDArray]] = {
    None: lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(-np.maximum(y, -700))),
}


@pytest.mark.parametrize("n", [64, 37])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("form", FORMS)
def test_epilogue(form: str, epilogue: Epilogue, n: int):
    problem = ScaledMatmul(m=11, n=n, k=544, epilogue=epilogue)
    operands = random_operands(problem)
    operands.lhs_scale -= np.uint8(20)
    rng = np.random.default_rng(1)
    extra = {
        "row_scale": rng.normal(size=11).astype(np.float32),
        "scale": np.array([0.75], np.float32),
        "bias": (rng.normal(size=n) * 10).astype(TYPES[epilogue.bias or "f32"]),
        "residual": (rng.normal(size=(11, n)) * 10).astype(TYPES[epilogue.residual or "f32"]),
    }
    named = named_operands(operands)
    named |= {name: extra[name] for name in epilogue.operand_names()}
    tiers = (FORMS[form],)
    hsaco = compile_kernels(problem, tiers)
    y = launch_matmul(hsaco, problem, tiers, named, EXECUTABLE_PREFIX).y
    wanted = operands.expected()
    if epilogue.row_scale:
        wanted *= extra["row_scale"].astype(np.float64)[:, None] * 0.75
    if epilogue.bias:
        wanted += extra["bias"].astype(np.float64)
    if epilogue.residual:
        wanted += extra["residual"].astype(np.float64)
    wanted = ACTIVATIONS[epilogue.activation](wanted)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
