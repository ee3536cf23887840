# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Edges and padding: nothing beyond the operands reaches a result, nothing beyond y is written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.tools.air_emulator.dispatch import Binding, Kernel
from block32.tools.apple_cases import (
    Case,
    check,
    compiled,
    execute,
    grid,
    grouped_case,
    poisoned,
    random_operands,
    run,
)


@pytest.mark.parametrize("fill", [0x7F, 0xFF])
@pytest.mark.parametrize("form", ["tiled", "gemv"])
def test_what_lies_behind_the_operands_never_reaches_a_result(form: str, fill: int) -> None:
    """NaN codes behind x, w and both scales: buffers are padded in a program's memory."""
    matmul = Matmul(n=33, k=70, lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(32, 32))
    case = Case(matmul, form, 1 if form == "gemv" else 35)
    operands = random_operands(case)
    kernel = compiled(case)
    clean = execute(kernel, operands)
    names = [buffer.name for buffer in matmul.buffers()][:-1]
    padding = np.full(4096, fill, np.uint8)
    bindings = [
        Binding(np.concatenate([operands.arrays[name].reshape(-1), padding])) for name in names
    ]
    y = poisoned(clean.shape, "f32")
    kernel.dispatch([*bindings, Binding(y, output=True)], grid(case), constants=[case.m])
    np.testing.assert_array_equal(y, clean)


@pytest.mark.parametrize("m", [1, 31, 64, 65])
def test_nothing_behind_y_is_written(m: int) -> None:
    case = Case(Matmul(n=45, k=20), "tiled", m)
    operands = random_operands(case)
    room = poisoned((m * 45 + 999,), "f32")
    bindings = [Binding(operands.arrays[name]) for name in ("lhs", "rhs")]
    compiled(case).dispatch([*bindings, Binding(room, output=True)], grid(case), constants=[m])
    check(room[: m * 45].reshape(m, 45), operands)
    assert np.isnan(room[m * 45 :]).all()


@settings(max_examples=25)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    scaled=st.booleans(),
    lhs_transposed=st.booleans(),
    rhs_transposed=st.booleans(),
)
def test_any_shape(
    m: int, n: int, k: int, scaled: bool, lhs_transposed: bool, rhs_transposed: bool
) -> None:
    matmul = Matmul(
        n=n,
        k=k,
        rhs_block=(32, 32) if scaled else None,
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
    )
    operands, y = run(Case(matmul, "tiled", m))
    check(y, operands)


@settings(max_examples=15)
@given(
    tokens=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    n=st.integers(1, 70),
    k=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_groups(tokens: list[int], n: int, k: int, seed: int) -> None:
    if not sum(tokens):
        return  # no rows, no launch
    rng = np.random.default_rng(seed)
    experts = [int(e) for e in rng.integers(-1, 3, len(tokens))]
    operands, y = run(grouped_case(3, n, k, tokens, experts, expert_scale=True), seed=seed)
    check(y, operands)


def test_rows_of_no_group_keep_what_they_held() -> None:
    case = grouped_case(2, 40, 32, [3, 5], [1, 0])
    operands = random_operands(case)
    operands.arrays["offsets"][:] = [0, 3, 3]  # the second group is empty now
    y = np.full((8, 40), 7.0, np.float32)
    bindings = [Binding(a) for a in operands.arrays.values()]
    kernel = compiled(case)
    kernel.dispatch([*bindings, Binding(y, output=True)], grid(case), constants=[8])
    assert (y[3:] == 7.0).all()
    assert not (y[:3] == 7.0).any()


def test_a_group_table_that_reaches_beyond_x_writes_nothing_there() -> None:
    case = grouped_case(2, 40, 32, [3, 5], [1, 0])
    operands = random_operands(case)
    operands.arrays["offsets"][2] = 1000
    check(execute(compiled(case), operands), operands)


def test_expert_minus_one_reads_no_weight() -> None:
    """The weight has no bytes at all."""
    case = grouped_case(1, 40, 32, [3], [-1])
    operands = random_operands(case)
    operands.arrays["rhs"] = np.zeros((0,), np.uint8)
    assert (execute(compiled(case), operands) == 0).all()


def test_static_rows_need_no_push_constant() -> None:
    matmul = Matmul(n=33, k=48, m=21)
    case = Case(matmul, "tiled", 21)
    operands = random_operands(case)
    compiled_kernel = compile_matmul(matmul, "tiled", "kernel")
    assert compiled_kernel.signature.constants == 0
    y = poisoned((21, 33), "f32")
    bindings = [Binding(operands.arrays[name]) for name in ("lhs", "rhs")]
    kernel = Kernel(compiled_kernel.bitcode, "kernel")
    kernel.dispatch([*bindings, Binding(y, output=True)], grid(case))
    check(y, operands)
