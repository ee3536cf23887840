# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Inputs that broke systems of this kind, through a whole compile and run on the CPU.

Quantisers are looked at through a matmul with the identity: y is the dequantised activation, so
that codes and scales of the matmul's own quantiser show.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.passes.pipeline import PassFailedError
from block32.runtime import reference
from tests.numbers import random_codes, run_function
from tests.tools.specs import layers

FP8 = ml_dtypes.float8_e4m3fn
HEAD = """
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
#mn = affine_map<(m, n) -> (m, n)>
"""


@cache
def quantiser(rows: int, rule: str) -> bytes:
    """x times the identity, x quantised at run time."""
    return block32.compile(
        f"""{HEAD}
util.global private @ones = dense<127> : tensor<1x1xi8>
func.func @main(%x: tensor<{rows}x32xf32>, %w: tensor<32x32xf8E4M3FN>) -> tensor<{rows}x32xf32> {{
  %zero = arith.constant dense<0.0> : tensor<{rows}x32xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {{block32.lhs = {{block = [1, 32], scale = "dynamic", rule = "{rule}"}},
       block32.rhs = {{block = [32, 32], scale = @ones}}}}
      ins(%x, %w : tensor<{rows}x32xf32>, tensor<32x32xf8E4M3FN>)
      outs(%zero : tensor<{rows}x32xf32>) -> tensor<{rows}x32xf32>
  return %y : tensor<{rows}x32xf32>
}}
""",
        target="cpu",
    )


def check_quantised(x: npt.NDArray[np.float32], rule: str = "rceil") -> None:
    """Each element of y is the value that its code and scale stand for."""
    identity = reference.encode(np.eye(32))
    got = run_function(quantiser(len(x), rule), "main", x, identity.view(FP8))
    codes, scales = reference.quantize(x, rule)  # type: ignore[arg-type]
    want = reference.scaled_matmul(codes, scales, identity, np.full((1, 1), 127, np.uint8))
    # Workers flush results below the smallest normal number to zero.
    tiny = np.finfo(np.float32).smallest_normal
    flushed_got, flushed_want = (np.where(abs(y) < tiny, 0, y) for y in (got, want))
    np.testing.assert_array_equal(flushed_got, flushed_want)


def rows_of(*values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """A row for each list of values, filled up with an eighth of the first."""
    rows = np.zeros((len(values), 32), np.float32)
    for row, given in zip(rows, values, strict=True):
        given = np.atleast_1d(np.asarray(given, np.float32))
        row[:] = given[0] / 8
        row[: len(given)] = given
    return rows


@pytest.mark.parametrize("rule", ["rceil", "floor", "even", "ceil"])
def test_largest_magnitudes_at_which_rules_differ(rule: str) -> None:
    check_quantised(rows_of(256, 448, 449, 480, 496, 512, 633, 634, 897), rule)


def test_rows_of_zeros_of_tiny_and_of_alternating_values() -> None:
    alternating = np.zeros(32)
    alternating[::2] = 5.0
    even = [np.full(32, value) for value in (0.0, 1e-30, 400.0, 1e-38)]
    check_quantised(rows_of(*even, alternating))


def test_the_largest_number_below_a_power_of_two() -> None:
    """An exponent taken from a rounded logarithm would be that of the power."""
    below = [np.nextafter(np.float32(2.0**e), np.float32(0)) for e in (-20, -1, 0, 1, 9, 30)]
    check_quantised(rows_of(*below))


def test_a_block_with_an_infinity_and_one_with_a_nan() -> None:
    """Neither crashes. An infinity saturates, under the largest scale; a NaN is a NaN."""
    x = rows_of(3.0, 5.0, 7.0)
    x[0, 4], x[1, 9] = np.inf, np.nan
    identity = reference.encode(np.eye(32)).view(FP8)
    got = run_function(quantiser(3, "rceil"), "main", x, identity)
    assert got[0, 4] == np.inf, "448 * 2^127 is no f32"
    assert np.isfinite(np.delete(got[0], 4)).all()
    assert np.isnan(got[1]).all(), "every column sums over the row's NaN"
    np.testing.assert_array_equal(got[2], x[2])


def test_ties_and_every_value_from_256_to_448() -> None:
    """Scale 1 in each row: what is seen is the rounding to e4m3, ties to even."""
    steps = [np.append(448, np.arange(first, first + 31)) for first in range(256, 448, 31)]
    check_quantised(rows_of([448, 17, 19, -17, -19], *(np.minimum(s, 448) for s in steps)))


MLP = """{head}
util.global private @s0 = dense<{s0}> : tensor<2x2xi8>
util.global private @s1 = dense<{s1}> : tensor<2x2xi8>
util.global private @s2 = dense<{s2}> : tensor<2x2xi8>
func.func @main(%x0: tensor<?x64xf32>, %w0: tensor<64x64xf8E4M3FN>,
    %w1: tensor<64x64xf8E4M3FN>, %w2: tensor<64x64xf8E4M3FN>) -> tensor<?x64xf32> {{
  %axis = arith.constant 0 : index
  %cst = arith.constant 0.0 : f32
  %m = tensor.dim %x0, %axis : tensor<?x64xf32>
  %e = tensor.empty(%m) : tensor<?x64xf32>
  %zero = linalg.fill ins(%cst : f32) outs(%e : tensor<?x64xf32>) -> tensor<?x64xf32>
{body}
  return %x3 : tensor<?x64xf32>
}}
"""
LAYER = """
  %y{i} = linalg.matmul indexing_maps = [#x, #w, #y]
      {{block32.lhs = {{block = [1, 32], scale = "dynamic"}},
       block32.rhs = {{block = [32, 32], scale = @s{i}}}}}
      ins(%x{i}, %w{i} : tensor<?x64xf32>, tensor<64x64xf8E4M3FN>)
      outs(%zero : tensor<?x64xf32>) -> tensor<?x64xf32>
  %x{next} = linalg.generic
      {{indexing_maps = [#mn, #mn], iterator_types = ["parallel", "parallel"]}}
      ins(%y{i} : tensor<?x64xf32>) outs(%e : tensor<?x64xf32>) {{
  ^bb0(%a: f32, %o: f32):
    %r = arith.maximumf %a, %cst : f32
    linalg.yield %r : f32
  }} -> tensor<?x64xf32>
"""


def test_a_perceptron_of_three_layers() -> None:
    """Each layer quantises what the one before has made; one module for every M."""
    rng = np.random.default_rng(3)
    weights = [reference.encode(rng.standard_normal((64, 64))) for _ in range(3)]
    scales = [rng.integers(123, 127, (2, 2), dtype=np.uint8) for _ in range(3)]
    text = MLP.format(
        head=HEAD,
        body="".join(LAYER.format(i=i, next=i + 1) for i in range(3)),
        **{f"s{i}": s.tolist() for i, s in enumerate(scales)},
    )
    vmfb = block32.compile(text, target="cpu")
    for m in (1, 4, 13):
        x = rng.standard_normal((m, 64)).astype(np.float32)
        y = x.astype(np.float64)
        for w, scale in zip(weights, scales, strict=True):
            codes, x_scale = reference.quantize(y.astype(np.float32))
            y = np.maximum(reference.scaled_matmul(codes, x_scale, w, scale), 0)
        got = run_function(vmfb, "main", x, *(w.view(FP8) for w in weights))
        # A sum that differs in its last bit may be quantised to the neighbouring code.
        comparison = reference.compare(got, y, "f32")
        assert comparison.relative_frobenius < 5e-3, comparison


def test_a_program_grows_linearly_with_its_matmuls() -> None:
    """A thousand matmuls of one shape share an executable, and each adds the same few lines."""
    lines = {}
    for count in (10, 20, 1000):
        flags = ("--compile-to=preprocessing",)
        text = block32.compile(layers(count), target="cpu", flags=flags).decode()
        assert text.count("hal.executable.source private") == 1
        assert text.count("flow.dispatch @block32_kernels_") == 2 * count
        lines[count] = len(text.splitlines())
    assert lines[1000] - lines[20] == 98 * (lines[20] - lines[10])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_of_one_with_512_rows(dynamic: bool) -> None:
    """1x512xK is collapsed to 512 rows, its size known or not."""
    rows, k, n = "?" if dynamic else "512", 72, 40
    x_type, y_type = f"tensor<1x{rows}x{k}xf32>", f"tensor<1x{rows}x{n}xf32>"
    rng = np.random.default_rng(8)
    w, w_scale = random_codes(rng, (n, k), "f8E4M3FN"), rng.integers(120, 130, (2, 3), np.uint8)
    text = f"""
util.global private @ws = dense<{w_scale.tolist()}> : tensor<2x3xi8>
func.func @main(%x: {x_type}, %w: tensor<1x{k}x{n}xf8E4M3FN>, %e: {y_type}) -> {y_type} {{
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : {y_type}) -> {y_type}
  %y = linalg.batch_matmul {{block32.lhs = {{block = [1, 32], scale = "dynamic"}},
      block32.rhs = {{block = [32, 32], scale = @ws}}}}
      ins(%x, %w : {x_type}, tensor<1x{k}x{n}xf8E4M3FN>) outs(%zero : {y_type}) -> {y_type}
  return %y : {y_type}
}}
"""
    vmfb = block32.compile(text, target="cpu")
    for m in (512, 3) if dynamic else (512,):
        x = rng.standard_normal((1, m, k)).astype(np.float32)
        weight = np.ascontiguousarray(w.T)[None].view(FP8)
        got = run_function(vmfb, "main", x, weight, np.zeros((1, m, n), np.float32))
        codes, x_scale = reference.quantize(x[0])
        want = reference.scaled_matmul(codes, x_scale, w, w_scale)
        comparison = reference.compare(got[0], want, "f32")
        assert comparison.ok, comparison


def test_an_f32_scale_that_is_no_power_of_two_is_refused() -> None:
    text = layers(1).replace("dense<100> : tensor<1x2xi8>", "dense<0.0123> : tensor<1x2xf32>")
    wanted = "'block32.rhs' scales of f8E8M0FNU or i8 but got f32"
    with pytest.raises(PassFailedError, match=f":11:8: error: 'linalg.matmul' op .*{wanted}"):
        block32.compile(text, target="cpu")
