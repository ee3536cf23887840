# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Epilogues: what is fused, what is left alone, and the numbers of what was fused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.passes.base import Report
from block32.passes.fuse import FusePass
from block32.passes.pipeline import run_pipeline
from block32.passes.raise_ import RaisePass
from block32.runtime import reference
from block32.tools.compiler import parse_module
from tests.numbers import random_codes, run_function

M, N, K = 6, 48, 64
DATA = np.random.default_rng(17)
X = random_codes(DATA, (M, K), "f8E4M3FN")
X_SCALE = DATA.integers(118, 124, (M, 2), dtype=np.uint8)
W = random_codes(DATA, (N, K), "f8E4M3FN")
W_SCALE = DATA.integers(118, 124, (2, 2), dtype=np.uint8)
#: Values of the epilogues' operands, by the name that the programs below give them.
EXTRA = {
    "bias": DATA.standard_normal(N).astype(np.float32) * 50,
    "half_bias": (DATA.standard_normal(N) * 50).astype(ml_dtypes.bfloat16),
    "residual": DATA.standard_normal((M, N)).astype(np.float32) * 50,
    "rows": DATA.standard_normal(M).astype(np.float32),
    "scale": np.array(0.037, np.float32),
}
TYPES = {
    "bias": (f"tensor<{N}xf32>", "#n"),
    "half_bias": (f"tensor<{N}xbf16>", "#n"),
    "residual": (f"tensor<?x{N}xf32>", "#mn"),
    "rows": ("tensor<?xf32>", "#m"),
    "scale": ("tensor<f32>", "#none"),
}
Y = f"tensor<?x{N}xf32>"


@dataclass(frozen=True)
class Consumer:
    """An elementwise op: its other operands, its body with %y for the sum, its result type."""

    body: str
    operands: tuple[str, ...] = ()
    element: str = "f32"


def consumer_text(index: int, value: str, source: str, consumer: Consumer) -> str:
    types = [f"tensor<?x{N}x{source}>", *(TYPES[name][0] for name in consumer.operands)]
    maps = ["#mn", *(TYPES[name][1] for name in consumer.operands), "#mn"]
    arguments = [f"%y: {source}", *(f"%{n}_e: {element(n)}" for n in consumer.operands)]
    operands = [value, *(f"%{name}" for name in consumer.operands)]
    out = f"tensor<?x{N}x{consumer.element}>"
    return f"""
  %empty{index} = tensor.empty(%size) : {out}
  %step{index} = linalg.generic {{indexing_maps = [{", ".join(maps)}],
      iterator_types = ["parallel", "parallel"]}}
      ins({", ".join(operands)} : {", ".join(types)}) outs(%empty{index} : {out}) {{
  ^bb0({", ".join(arguments)}, %o: {consumer.element}):
    {consumer.body}
    linalg.yield %r : {consumer.element}
  }} -> {out}"""


def element(name: str) -> str:
    return re.findall(r"(bf16|f32)", TYPES[name][0])[0]


def program(*consumers: Consumer, returned: str = "") -> str:
    lines, value, source = "", "%sum", "f32"
    for index, consumer in enumerate(consumers):
        lines += consumer_text(index, value, source, consumer)
        value, source = f"%step{index}", consumer.element
    extra = "".join(f", %{name}: {TYPES[name][0]}" for name in EXTRA)
    result = f"tensor<?x{N}x{source}>"
    results = f"{result}, {Y}" if returned else result
    return f"""
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#out = affine_map<(m, n, k) -> (m, n)>
#mn = affine_map<(m, n) -> (m, n)>
#m = affine_map<(m, n) -> (m)>
#n = affine_map<(m, n) -> (n)>
#none = affine_map<(m, n) -> ()>
func.func @main(%x: tensor<?x{K}xf8E4M3FN>, %xs: tensor<?x2xf8E8M0FNU>,
    %w: tensor<{N}x{K}xf8E4M3FN>, %ws: tensor<2x2xf8E8M0FNU>{extra}) -> ({results}) {{
  %axis = arith.constant 0 : index
  %rows_x = tensor.dim %x, %axis : tensor<?x{K}xf8E4M3FN>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%rows_x) : {Y}
  %filled = linalg.fill ins(%zero : f32) outs(%empty : {Y}) -> {Y}
  %sum = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #out]
      ins(%x, %xs, %w, %ws : tensor<?x{K}xf8E4M3FN>, tensor<?x2xf8E8M0FNU>,
          tensor<{N}x{K}xf8E4M3FN>, tensor<2x2xf8E8M0FNU>) outs(%filled : {Y}) -> {Y}
  %size = tensor.dim %sum, %axis : {Y}
{lines}
  return {f"{value}, {returned}" if returned else value} : {results}
}}
"""


def fused(text: str, target: str = "cpu") -> tuple[str, int]:
    """The epilogue's text after the pass, and the number of consumers that are left."""
    module = parse_module(text.encode(), "model.mlir")
    run_pipeline(module, [RaisePass(), FusePass(target=target)], Report())
    after = str(module)
    main = after[after.index("func.func @main") :]
    epilogue = re.search(r"epilogue = \{(.*?)\}", after)
    return (epilogue[1] if epilogue else ""), main.count("linalg.generic")


BIAS = Consumer("%r = arith.addf %y, %bias_e : f32", ("bias",))
RELU = Consumer("%z = arith.constant 0.0 : f32\n    %r = arith.maximumf %y, %z : f32")
GELU = Consumer("""%s = arith.constant 0.707106769 : f32
    %h = arith.constant 0.5 : f32
    %one = arith.constant 1.0 : f32
    %a = arith.mulf %y, %s : f32
    %b = math.erf %a : f32
    %c = arith.addf %b, %one : f32
    %d = arith.mulf %c, %h : f32
    %r = arith.mulf %y, %d : f32""")
GELU_TANH = Consumer("""%s = arith.constant 0.797884583 : f32
    %k = arith.constant 0.044715 : f32
    %h = arith.constant 0.5 : f32
    %one = arith.constant 1.0 : f32
    %y2 = arith.mulf %y, %y : f32
    %y3 = arith.mulf %y2, %y : f32
    %a = arith.mulf %k, %y3 : f32
    %b = arith.addf %y, %a : f32
    %c = arith.mulf %b, %s : f32
    %d = math.tanh %c : f32
    %e = arith.addf %one, %d : f32
    %f = arith.mulf %h, %y : f32
    %r = arith.mulf %f, %e : f32""")
SILU = Consumer("""%one = arith.constant 1.0 : f32
    %a = arith.negf %y : f32
    %b = math.exp %a : f32
    %c = arith.addf %b, %one : f32
    %r = arith.divf %y, %c : f32""")
TANH = Consumer("%r = math.tanh %y : f32")
RESIDUAL = Consumer("%r = arith.addf %residual_e, %y : f32", ("residual",))
ROWS = Consumer("%r = arith.mulf %y, %rows_e : f32", ("rows",))
SCALE = Consumer("%r = arith.mulf %y, %scale_e : f32", ("scale",))
CONSTANT = Consumer("%k = arith.constant 0.125 : f32\n    %r = arith.mulf %y, %k : f32")
TO_BF16 = Consumer("%r = arith.truncf %y : f32 to bf16", element="bf16")
HALF_BIAS = Consumer(
    "%b = arith.extf %half_bias_e : bf16 to f32\n    %r = arith.addf %y, %b : f32", ("half_bias",)
)

_erf = np.vectorize(math.erf)


def _bf16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return reference.round_to(values, "bf16")


MEANINGS = {
    "bias": (BIAS, 'bias = "f32"', lambda y: y + EXTRA["bias"]),
    "bf16 bias": (HALF_BIAS, 'bias = "bf16"', lambda y: y + EXTRA["half_bias"].astype(float)),
    "relu": (RELU, 'activation = "relu"', lambda y: np.maximum(y, 0)),
    "gelu": (GELU, 'activation = "gelu"', lambda y: y / 2 * (1 + _erf(y / math.sqrt(2)))),
    "gelu_tanh": (
        GELU_TANH,
        'activation = "gelu_tanh"',
        lambda y: y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    ),
    "silu": (SILU, 'activation = "silu"', lambda y: y / (1 + np.exp(-y))),
    "tanh": (TANH, 'activation = "tanh"', np.tanh),
    "residual": (RESIDUAL, 'residual = "f32"', lambda y: y + EXTRA["residual"]),
    "row scale": (ROWS, "row_scale = true", lambda y: y * EXTRA["rows"].astype(float)[:, None]),
    "scale": (SCALE, "scale = true", lambda y: y * float(EXTRA["scale"])),
    "constant scale": (CONSTANT, "scale = true", lambda y: y * 0.125),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_consumer_is_fused(name: str) -> None:
    consumer, epilogue, _ = MEANINGS[name]
    assert fused(program(consumer)) == (epilogue, 0)


def test_a_cast_is_the_result_type() -> None:
    module = parse_module(program(TO_BF16).encode(), "model.mlir")
    run_pipeline(module, [RaisePass(), FusePass()], Report())
    assert 'result = "bf16"' in str(module)
    assert fused(program(TO_BF16)) == ("", 0)


def test_everything_in_order_is_one_epilogue() -> None:
    epilogue, left = fused(program(ROWS, SCALE, BIAS, RESIDUAL, GELU, TO_BF16))
    assert left == 0
    for field in ("row_scale", "scale", "bias", "residual", "activation"):
        assert field in epilogue


@pytest.mark.parametrize(
    ("consumers", "left"),
    [
        ((RELU, BIAS), 1),
        ((BIAS, SCALE), 1),
        ((BIAS, BIAS), 1),
        ((TO_BF16, Consumer("%r = math.tanh %y : bf16", element="bf16")), 1),
        ((RELU, GELU), 1),
    ],
    ids=["bias after relu", "scale after bias", "two biases", "after a cast", "two activations"],
)
def test_out_of_order_consumers_stay(consumers: tuple[Consumer, ...], left: int) -> None:
    assert fused(program(*consumers))[1] == left


@pytest.mark.parametrize(
    "body",
    [
        "%r = math.exp %y : f32",
        "%r = arith.mulf %y, %y : f32",
        "%z = arith.constant 1.0 : f32\n    %r = arith.maximumf %y, %z : f32",
        "%z = arith.constant 0.5 : f32\n    %r = arith.addf %y, %z : f32",
        "%r = arith.subf %y, %y : f32",
        GELU.body.replace("0.707106769", "0.8"),
        GELU_TANH.body.replace("0.044715", "0.05"),
        SILU.body.replace("constant 1.0", "constant 2.0"),
        "%i = linalg.index 0 : index\n    %j = arith.index_cast %i : index to i32\n"
        "    %k = arith.sitofp %j : i32 to f32\n    %r = arith.addf %y, %k : f32",
    ],
)
def test_other_functions_stay(body: str) -> None:
    assert fused(program(Consumer(body))) == ("", 1)


def test_a_result_with_another_user_stays() -> None:
    assert fused(program(BIAS, returned="%sum")) == ("", 1)


@pytest.mark.parametrize("target", ["portable", "gfx950"])
def test_a_target_without_epilogues_keeps_the_ops(target: str) -> None:
    epilogue, left = fused(program(BIAS), target)
    assert (epilogue, left) in (("", 1), ('bias = "f32"', 0))
    assert target != "portable" or left == 1


def test_a_row_that_is_a_column_stays() -> None:
    """A sum with one value a row is no bias, and a product with one value a column no scale."""
    added_rows = Consumer("%r = arith.addf %y, %rows_e : f32", ("rows",))
    times_bias = Consumer("%r = arith.mulf %y, %bias_e : f32", ("bias",))
    assert fused(program(added_rows))[1] == 1
    assert fused(program(times_bias))[1] == 1


def run(text: str) -> npt.NDArray:
    arguments = [
        X.view(ml_dtypes.float8_e4m3fn),
        X_SCALE.view(ml_dtypes.float8_e8m0fnu),
        W.view(ml_dtypes.float8_e4m3fn),
        W_SCALE.view(ml_dtypes.float8_e8m0fnu),
        *EXTRA.values(),
    ]
    return run_function(block32.compile(text, target="cpu"), "main", *arguments)


def expected_sums() -> npt.NDArray[np.float64]:
    return reference.scaled_matmul(X, X_SCALE, W, W_SCALE)


@pytest.mark.parametrize("name", MEANINGS)
def test_numbers(name: str) -> None:
    consumer, _, meaning = MEANINGS[name]
    comparison = reference.compare(run(program(consumer)), meaning(expected_sums()), "f32")
    assert comparison.ok, comparison


def test_numbers_of_everything_at_once() -> None:
    got = run(program(ROWS, SCALE, BIAS, RESIDUAL, SILU, TO_BF16))
    y = expected_sums() * EXTRA["rows"].astype(float)[:, None] * float(EXTRA["scale"])
    y = y + EXTRA["bias"] + EXTRA["residual"]
    comparison = reference.compare(got.astype(np.float32), y / (1 + np.exp(-y)), "bf16")
    assert comparison.ok, comparison
