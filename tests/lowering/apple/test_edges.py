# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Edges and padding: nothing beyond the operands reaches a result, nothing beyond y is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.tools.air_emulator.dispatch import Binding, Kernel
from block32.tools.apple_cases import (
    Case,
    Operands,
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


MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True, "rhs_block": (32, 32)}
W8A16: dict[str, Any] = {"rhs_block": (32, 32)}


@pytest.mark.parametrize("fields", [{}, W8A16, MXFP8], ids=["plain", "w8a16", "mxfp8"])
@pytest.mark.parametrize("n", [5, 7, 8, 12, 16])
def test_one_row_and_few_columns(n: int, fields: dict[str, Any]) -> None:
    """Both forms, on the same operands: neither reads nor writes beyond a narrow weight."""
    results = [run(Case(Matmul(n=n, k=512, **fields), form, 1)) for form in ("gemv", "tiled")]
    for operands, y in results:
        check(y, operands)
    (operands, vector), (_, tiled) = results
    assert np.abs(vector - tiled).max() <= 1e-5 * operands.peak


@pytest.mark.parametrize("fields", [W8A16, MXFP8], ids=["w8a16", "mxfp8"])
def test_many_rows_agree_with_the_first_of_them_alone(fields: dict[str, Any]) -> None:
    """M = 50 by tiles, M = 1 by the GEMV, on one weight with K that is no multiple of 32."""
    matmul = Matmul(n=128, k=1040, **fields)
    many = random_operands(Case(matmul, "tiled", 50))
    y = execute(compiled(many.case), many)
    check(y, many)
    rows = {"lhs": 1, "lhs_scale": 1}
    arrays = {name: array[: rows.get(name, len(array))] for name, array in many.arrays.items()}
    one = Operands(Case(matmul, "gemv", 1), arrays, many.x[:1], many.w)
    alone = execute(compiled(one.case), one)
    check(alone, one)
    assert np.abs(alone - y[:1]).max() <= 1e-5 * one.peak


@pytest.mark.parametrize("fields", [{}, MXFP8], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("n", [32, 96])
@pytest.mark.parametrize("m", [1, 16, 50])
def test_a_weight_narrower_than_the_tiles_fills_y(m: int, n: int, fields: dict[str, Any]) -> None:
    """y is poisoned first: every element is written, and once (twice is a race)."""
    operands, y = run(Case(Matmul(n=n, k=160, **fields), "tiled", m), seed=n)
    assert not np.isnan(y).any()
    check(y, operands)


@pytest.mark.parametrize("m", [1, 3, 8, 33, 129])
@pytest.mark.parametrize(("n", "k"), [(97, 161), (33, 97), (31, 33), (1, 31), (130, 130)])
@pytest.mark.parametrize("rows", [1, 32])
def test_block_scales_of_ragged_shapes(m: int, n: int, k: int, rows: int) -> None:
    matmul = Matmul(n=n, k=k, lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(rows, 32))
    operands, y = run(Case(matmul, "tiled", m))
    check(y, operands)
