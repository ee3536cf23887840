# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The numbers of every kernel form: bitcode taken out of a vmfb, executed, against float64.

All cases of a table are compiled into one vmfb, since most of the time would go into starting IREE.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.program import Entry
from block32.lowering.problem import Epilogue
from block32.tools.air_emulator.vmfb import LoadedKernel, load_kernels
from block32.tools.apple_cases import (
    Case,
    check,
    execute,
    grouped_case,
    random_operands,
)
from block32.tools.apple_program import compile_kernels

MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True, "rhs_block": (32, 32)}
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh")

#: (M, N, K) that people run on this device, and ragged ones.
DENSE_SHAPES = (
    *((1, 64, 64), (1, 544, 64), (1, 128, 72), (16, 128, 192), (40, 96, 128), (100, 256, 64)),
    *((32, 128, 320), (33, 130, 96), (1, 5, 512), (50, 128, 1040), (16, 32, 2560), (129, 65, 40)),
    *((8, 96, 128), (3, 1, 17), (65, 33, 15), (130, 200, 31)),
)

GEMV_SHAPES = (
    *((64, 256), (200, 128), (64, 80), (64, 48), (64, 24), (200, 40)),
    *((5, 512), (7, 512), (8, 512), (12, 512), (16, 512), (1, 33), (3, 7), (2, 2100)),
)

GROUPED = (
    grouped_case(4, 128, 64, [3, 0, 5, 2], [2, 0, 3, 1], expert_scale=True),
    grouped_case(4, 70, 40, [7, 0, 20], [1, 0, 3]),
    grouped_case(2, 64, 48, [16, 24], [0, -1], expert_scale=True),
    grouped_case(16, 96, 64, [1, 2, 3, 1, 2, 3, 1, 2], [15, 0, 7, 7, 3, 15, 1, 9]),
    grouped_case(3, 65, 33, [70, 1, 129], [2, 2, 0], result="bf16"),
    grouped_case(3, 70, 100, [5, 33], [2, 1], rhs_block=(32, 32), expert_scale=True),
    grouped_case(
        3, 33, 70, [5, 0, 40], [1, 0, 2], lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(1, 32)
    ),
)


def _cases() -> Iterator[Case]:
    for m, n, k in DENSE_SHAPES:
        yield Case(Matmul(n=n, k=k), "tiled", m)
    for n, k in GEMV_SHAPES:
        yield Case(Matmul(n=n, k=k), "gemv", 1)
    for lhs, rhs in (
        ("f16", "f8E4M3FN"),
        ("f32", "f8E5M2"),
        ("f8E5M2", "f8E4M3FN"),
        ("bf16", "bf16"),
    ):
        yield Case(Matmul(n=70, k=50, lhs=lhs, rhs=rhs), "tiled", 40)
        yield Case(Matmul(n=7, k=150, lhs=lhs, rhs=rhs), "gemv", 1)
    for result in ("bf16", "f16"):
        yield Case(Matmul(n=70, k=50, result=result), "tiled", 40)
        yield Case(Matmul(n=64, k=64, lhs="f16", rhs="f16", result=result), "gemv", 1)
    for lhs_t, rhs_t in ((True, False), (False, True), (True, True)):
        transposed: dict[str, Any] = {"lhs_transposed": lhs_t, "rhs_transposed": rhs_t}
        yield Case(Matmul(n=65, k=35, **transposed), "tiled", 70)
        yield Case(Matmul(n=128, k=64, **transposed), "tiled", 64)
    for m in (1, 3, 8, 33, 129):
        yield Case(Matmul(n=130, k=100, **MXFP8), "tiled", m)
        yield Case(Matmul(n=40, k=70, rhs_block=(1, 32)), "tiled", m)
    yield Case(
        Matmul(n=96, k=160, lhs="f8E5M2", rhs="f8E5M2", lhs_scaled=True, rhs_block=(1, 32)), m=40
    )
    yield Case(Matmul(n=96, k=48, rhs_block=(32, 32), rhs_transposed=True), "tiled", 33)
    yield Case(Matmul(n=70, k=1000, **MXFP8), "gemv", 1)
    yield Case(Matmul(n=70, k=90, rhs_block=(1, 32), lhs="f16"), "gemv", 1)
    for activation in ACTIVATIONS:
        epilogue = Epilogue(scale=True, bias="f32", activation=activation)
        yield Case(Matmul(n=37, k=64, epilogue=epilogue), "tiled", 35)
    every = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f16", activation="silu")
    yield Case(Matmul(n=67, k=64, epilogue=every, **MXFP8), "tiled", 34)
    yield Case(Matmul(n=67, k=64, epilogue=every), "gemv", 1)
    yield from GROUPED


CASES = list(_cases())


@pytest.fixture(scope="module")
def kernels() -> dict[str, LoadedKernel]:
    entries = {f"f{i}": Entry(case.matmul, case.form) for i, case in enumerate(CASES)}
    return load_kernels(compile_kernels(entries))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_numbers(kernels: dict[str, LoadedKernel], index: int) -> None:
    operands = random_operands(CASES[index], seed=index)
    check(execute(kernels[f"f{index}_kernel"], operands), operands)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_the_result_does_not_depend_on_the_schedule(
    kernels: dict[str, LoadedKernel], index: int
) -> None:
    """Bitwise: threadgroups, lanes and frames in another order, for every fourth case in four."""
    operands = random_operands(CASES[index], seed=index)
    seeds = range(1, 5 if index % 4 == 0 else 2)
    first, *others = (
        execute(kernels[f"f{index}_kernel"], operands, seed) for seed in (None, *seeds)
    )
    for other in others:
        np.testing.assert_array_equal(first.view(np.uint8), other.view(np.uint8))
