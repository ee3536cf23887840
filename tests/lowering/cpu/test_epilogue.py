# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The epilogue of CPU kernels: each field, in its order, before the one rounding."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import HOST, all_steps, run
from tests.numbers import Operands, random_operands

Reals = npt.NDArray[np.float64]

_erf = np.vectorize(math.erf)
ACTIVATIONS: dict[str, Any] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def small_operands(problem: ScaledMatmul) -> Operands:
    """Operands whose products are of the order of 1, where activations bend."""
    operands = random_operands(problem)
    rng = np.random.default_rng(1)
    operands.lhs = reference.encode(rng.standard_normal(operands.lhs.shape))
    operands.rhs = reference.encode(rng.standard_normal(operands.rhs.shape) / 8)
    operands.lhs_scale[:] = operands.rhs_scale[:] = 127
    return operands


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str, m: int) -> None:
    problem = ScaledMatmul(m, 45, 64, epilogue=Epilogue(activation=activation))
    operands = small_operands(problem)
    got = run(problem, HOST, *operands.arrays())
    expected = ACTIVATIONS[activation](operands.expected())
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("m", [3, 20])
def test_all_fields_in_their_order(m: int) -> None:
    epilogue = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f32", activation="relu")
    problem = ScaledMatmul(m, 45, 64, result="bf16", epilogue=epilogue)
    operands = small_operands(problem)
    steps, before_activation = all_steps(np.random.default_rng(2), operands.expected())
    got = run(problem, HOST, *operands.arrays(), *steps)
    expected = np.maximum(before_activation, 0)
    assert reference.compare(got, expected, "bf16").ok


def test_relu_keeps_a_nan() -> None:
    problem = ScaledMatmul(3, 16, 32, epilogue=Epilogue(activation="relu"))
    operands = small_operands(problem)
    operands.lhs_scale[1] = 255
    got = run(problem, HOST, *operands.arrays())
    assert np.isnan(got).any(axis=1).tolist() == [False, True, False]


def test_dynamic_rows_with_a_bias() -> None:
    problem = ScaledMatmul(None, 33, 64, epilogue=Epilogue(bias="f32", residual="bf16"))
    for m in (0, 1, 18):
        operands = random_operands(problem, m)
        bias = np.arange(33, dtype=np.float32)
        residual = np.ones((m, 33), ml_dtypes.bfloat16)
        got = run(problem, HOST, *operands.arrays(), bias, residual)
        assert reference.compare(got, operands.expected() + bias + 1, "f32").ok
