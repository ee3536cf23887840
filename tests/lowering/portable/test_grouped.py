# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls in plain linalg against float64, and what the builder refuses."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir
from iree.compiler.dialects import func

import block32
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.composites import Composites
from block32.lowering.problem import Grouping, ScaledMatmul
from tests.grouped import CASES, Arrays, compare, grouped, operands, program, viewed
from tests.numbers import run_function

LOCAL = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


@cache
def compiled(problem: ScaledMatmul) -> bytes:
    return block32.compile(program(problem), target="portable", flags=LOCAL)


def run(problem: ScaledMatmul, arrays: Arrays) -> npt.NDArray:
    """The compiled function's result for raw bytes."""
    return run_function(compiled(problem), "main", *viewed(problem, arrays))


def check(problem: ScaledMatmul, arrays: Arrays) -> npt.NDArray:
    got = run(problem, arrays)
    comparison = compare(problem, got, arrays)
    assert comparison.ok, comparison
    return got


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    problem, tokens, ids = CASES[name]
    offsets = np.cumsum([0, *tokens])
    check(problem, operands(problem, offsets.tolist(), ids, int(offsets[-1])))


def test_rows_of_no_group_stay() -> None:
    """Before the first group, after the last, and all of them where every group is empty."""
    problem = CASES["out of order"][0]
    for offsets in ([2, 5, 5, 6, 8], [11] * 5, [0] * 5):
        arrays = operands(problem, offsets, [0, 1, 2, 3], 11)
        got = check(problem, arrays)
        outside = np.r_[0 : offsets[0], offsets[-1] : 11]
        np.testing.assert_array_equal(got[outside], arrays["init"][outside])


def test_ids_that_are_no_expert() -> None:
    """Below -1 and from ``experts`` on: zeros, whatever such a number means inside."""
    problem = CASES["out of order"][0]
    assert problem.grouping is not None
    ids = [-2, -7, problem.grouping.experts, -(2**31)]
    got = check(problem, operands(problem, [0, 3, 5, 6, 10], ids, 10))
    np.testing.assert_array_equal(got, np.zeros_like(got))


def test_no_tokens_and_no_groups() -> None:
    problem = CASES["out of order"][0]
    assert check(problem, operands(problem, [0] * 5, [0, 1, 2, 3], 0)).shape == (0, 128)
    without = dataclasses.replace(problem, grouping=Grouping(4, 0))
    arrays = operands(without, [0], [], 5)
    np.testing.assert_array_equal(run(without, arrays), arrays["init"])


def test_a_nan_stays_with_its_expert_and_row() -> None:
    """A NaN code of one expert, a NaN scale of another, and a NaN scale of one row of x."""
    problem, tokens, _ = CASES["out of order"]
    offsets = np.cumsum([0, *tokens]).tolist()
    arrays = operands(problem, offsets, [2, 0, -1, 1], 10)
    arrays["rhs"][2, 5, 7] = 0x7F
    arrays["rhs_scale"][0] = 255
    arrays["lhs_scale"][8, 1] = 255
    got = check(problem, arrays)
    wanted = np.zeros((10, 128), bool)
    wanted[0:3, 5] = True
    wanted[8] = True
    np.testing.assert_array_equal(np.isnan(got), wanted)


def test_extreme_scale_bytes() -> None:
    """2^-127 is a denormal: devices that flush it would give 0 instead of 32."""
    problem = grouped(1, 32, 3, 3, rhs_block=(1, 32))
    arrays = operands(problem, [0, 1, 2, 3], [0, 1, 2], 3)
    arrays["lhs"][:] = arrays["rhs"][:] = 0x38
    arrays["lhs_scale"][:, 0] = (0, 254, 127)
    arrays["rhs_scale"][:, 0, 0] = (254, 0, 127)
    np.testing.assert_array_equal(run(problem, arrays), np.full((3, 1), 32.0))


TYPES = {
    "lhs": "tensor<?x64xf8E4M3FN>",
    "lhs_scale": "tensor<?x2xf8E8M0FNU>",
    "rhs": "tensor<4x48x64xf8E4M3FN>",
    "rhs_scale": "tensor<4x2x2xf8E8M0FNU>",
    "offsets": "tensor<4xi32>",
    "expert_ids": "tensor<3xi32>",
    "init": "tensor<?x48xf32>",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": None}, "expected offsets of type tensor<4xi32> but got none"),
        ({"expert_ids": None}, "a grouped matmul needs the operand 'expert_ids'"),
        ({"offsets": "tensor<3xi32>"}, "expected offsets of type tensor<4xi32> but got"),
        ({"expert_ids": "tensor<?xi32>"}, "expected a static shape of expert_ids"),
        ({"expert_ids": "tensor<3xi64>"}, "expected expert_ids of type tensor<3xi32> but got"),
        ({"rhs": "tensor<48x64xf8E4M3FN>"}, "expected rhs to be a tensor of rank 3"),
        ({"rhs_scale": "tensor<4x48x2xf8E8M0FNU>"}, "expected rhs_scale of type tensor<4x2x2x"),
        ({"init": "tensor<?x32xf32>"}, r"expected init of type tensor<\?x48xf32> but got"),
        ({"lhs_scale": None, "lhs": "tensor<?x64xf64>"}, "expected lhs to be one of"),
        ({"rhs": "tensor<0x48x64xf8E4M3FN>"}, "expected at least one expert"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_builder_refuses(changes: dict[str, str | None], message: str) -> None:
    types = {name: t for name, t in {**TYPES, **changes}.items() if t is not None}
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        composites = Composites(module)
        with ir.InsertionPoint(module.body), pytest.raises(BadAttributeError, match=message):

            @func.FuncOp.from_py_func(*(ir.Type.parse(t) for t in types.values()), name="main")
            def main(*arguments: ir.Value) -> ir.Value:
                return composites.grouped_matmul(dict(zip(types, arguments, strict=True)))


def test_the_builder_packs_fp4() -> None:
    types = TYPES | {"rhs": "tensor<4x48x64xf4E2M1FN>"}
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        composites = Composites(module)
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(*(ir.Type.parse(t) for t in types.values()), name="main")
            def main(*arguments: ir.Value) -> ir.Value:
                return composites.grouped_matmul(dict(zip(types, arguments, strict=True)))

        assert "tensor<4x48x64xf4E2M1FN> -> tensor<4x48x32xi8>" in str(module)
