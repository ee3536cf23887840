# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``quantize`` composite, compiled, against the float64 reference: equal bytes everywhere."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir
from iree.compiler.dialects import func

import block32
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.composites import Composites, build_quantize_function
from block32.runtime import reference
from tests.numbers import run_function_results

RULES = ("rceil", "floor", "even", "ceil")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
LARGEST_BELOW_4 = np.nextafter(np.float32(4), np.float32(0))


def program(k: int, source: str, rule: str, element: str, m: str = "?") -> str:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        composites = Composites(module)
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(ir.Type.parse(f"tensor<{m}x{k}x{source}>"), name="main")
            def main(x: ir.Value) -> tuple[ir.Value, ir.Value]:
                return composites.quantize(x, rule, element)

        return str(module)


@cache
def compiled(k: int, source: str, rule: str, element: str, m: str = "?") -> bytes:
    return block32.compile(program(k, source, rule, element, m), target="cpu")


def check(
    x: npt.NDArray[np.float32], source: str = "f32", rule: str = "rceil", element: str = "f8E4M3FN"
) -> None:
    values = x.astype(DTYPES[source])
    codes, scales = run_function_results(
        compiled(x.shape[1], source, rule, element), "main", values
    )
    short = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}[element]
    want_codes, want_scales = reference.quantize(values, rule, short)  # type: ignore[arg-type]
    np.testing.assert_array_equal(reference.raw(scales), want_scales)
    np.testing.assert_array_equal(reference.raw(codes), want_codes)


def rows_of(*blocks: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Blocks of 32, filled up with zeros, one a row."""
    rows = np.zeros((len(blocks), 32), np.float32)
    for row, block in zip(rows, blocks, strict=True):
        values = np.atleast_1d(np.asarray(block, np.float32))
        row[: len(values)] = values
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_at_the_edges_of_powers_of_two(rule: str) -> None:
    """Each rule carries to the next scale at another magnitude."""
    largest = (256, 448, 449, 480, 496, 512, 633, 634, 897, LARGEST_BELOW_4, 4, 2**-126, 3e38)
    check(rows_of(*largest), rule=rule)


def test_zeros_and_tiny_values() -> None:
    """The scale of a tiny block is 2^-127, a denormal: dividing by it would give 0/0."""
    alternating = np.zeros(32)
    alternating[::2] = 3.0
    tiny = [np.full(32, v) for v in (0.0, -0.0, 1e-30, 400.0, 1e-38, 1e-45, 2**-126)]
    check(rows_of(*tiny, alternating))


def test_infinities_and_nans_stay_in_their_block() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 96)).astype(np.float32)
    x[0, 40] = np.inf
    x[1, 50] = -np.inf
    x[2, 10], x[2, 20] = np.nan, -np.nan
    x[3, 64:] = np.nan
    check(x)
    check(x, element="f8E5M2")


def test_ties_go_to_the_even_code() -> None:
    """With 448 in the block its scale is 1, and the codes are those of the values themselves."""
    ties = np.concatenate([[448, 17, 19, -17, -19], 2.0**-10 * np.arange(-13, 14)])
    steps = [
        np.append(np.arange(start, min(start + 31, 449)), 448) for start in range(256, 449, 31)
    ]
    check(rows_of(ties, *steps))


@pytest.mark.parametrize("source", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("element", ["f8E4M3FN", "f8E5M2"])
def test_random_values_of_every_magnitude(source: str, element: str) -> None:
    """K = 72: the last block is short."""
    rng = np.random.default_rng(7)
    spread = 5.0 if source == "f16" else 35.0
    exponents = rng.uniform(-spread, spread, (50, 72))
    x = rng.standard_normal((50, 72)) * 10.0 ** (exponents if source != "f16" else exponents / 2)
    check(np.clip(x, -3e38, 3e38).astype(np.float32), source, element=element)


@pytest.mark.parametrize("m", ["?", "0"])
def test_no_rows_give_no_rows(m: str) -> None:
    codes, scales = run_function_results(
        compiled(72, "f32", "rceil", "f8E4M3FN", m), "main", np.zeros((0, 72), np.float32)
    )
    assert codes.shape == (0, 72)
    assert scales.shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "rule", "element", "message"),
    [
        ("tensor<4x64xf64>", "rceil", "f8E4M3FN", "element type of x to be one of f32, bf16, f16"),
        ("tensor<4x?xf32>", "rceil", "f8E4M3FN", "expected a matrix with a static K"),
        ("tensor<4x64xf32>", "up", "f8E4M3FN", "expected rule to be one of rceil, floor"),
        ("tensor<4x64xf32>", "rceil", "f8E4M3", "expected element to be one of f8E4M3FN"),
    ],
)
def test_what_cannot_be_quantised_is_refused(x: str, rule: str, element: str, message: str) -> None:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        x_type = ir.RankedTensorType(ir.Type.parse(x))
        with ir.InsertionPoint(module.body), pytest.raises(BadAttributeError, match=message):
            build_quantize_function("q", x_type, rule, element)
