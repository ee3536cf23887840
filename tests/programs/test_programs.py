# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whole programs on the CPU: weights used twice, layers of one shape, unused arguments, no rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.runtime import reference
from tests.numbers import random_codes, run_function

N = K = 64
HEAD = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#ws1 = affine_map<(m, n, k) -> (n, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
"""
TYPES = {
    "x": "tensor<?x64xf8E4M3FN>",
    "xs": "tensor<?x2xf8E8M0FNU>",
    "w": "tensor<64x64xf8E4M3FN>",
    "ws": "tensor<2x2xf8E8M0FNU>",
    "y": "tensor<?x64xf32>",
}


def matmul(result: str, x: str = "x", w: str = "w") -> str:
    """One block-scaled matmul of the program."""
    return f"""
  %{result} = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%{x}, %{x}s, %{w}, %{w}s : {TYPES["x"]}, {TYPES["xs"]}, {TYPES["w"]}, {TYPES["ws"]})
    outs(%zeros : {TYPES["y"]}) -> {TYPES["y"]}"""


def program(arguments: str, body: str, result: str) -> str:
    declared = ", ".join(
        f"%{name}: {TYPES['xs' if name.endswith('s') and name[0] == 'x' else 'ws' if name.endswith('s') else name[0]]}"  # noqa: E501
        for name in arguments.split()
    )
    return f"""{HEAD}
func.func @main({declared}) -> {TYPES["y"]} {{
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c0 : {TYPES["x"]}
  %empty = tensor.empty(%m) : {TYPES["y"]}
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : {TYPES["y"]}) -> {TYPES["y"]}
{body}
  return %{result} : {TYPES["y"]}
}}
"""


class Data:
    """Random operands: activations x, weights w and v."""

    def __init__(self, m: int, seed: int = 0):
        rng = np.random.default_rng(seed)

        def codes(rows: int) -> npt.NDArray[np.uint8]:
            return random_codes(rng, (rows, K), "f8E4M3FN")

        def scales(rows: int) -> npt.NDArray[np.uint8]:
            return rng.integers(120, 134, (rows, K // 32), dtype=np.uint8)

        self.x, self.xs = codes(m), scales(m)
        self.w, self.ws = codes(N), scales(N // 32)
        self.v, self.vs = codes(N), scales(N // 32)

    def arguments(self, names: str) -> list[npt.NDArray[Any]]:
        values, scales = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
        return [
            getattr(self, name).view(scales if name.endswith("s") else values)
            for name in names.split()
        ]

    def product(self, weight: str = "w") -> npt.NDArray[np.float64]:
        w, ws = getattr(self, weight), getattr(self, f"{weight}s")
        return reference.scaled_matmul(self.x, self.xs, w, ws, rhs_block=(32, 32))


def check(got: npt.NDArray[Any], want: npt.NDArray[np.float64]) -> None:
    report = reference.compare(got, want, "f32")
    assert report.ok, report


TYPES["v"] = TYPES["w"]


@pytest.fixture(scope="module")
def remarks() -> list[str]:
    return []


def run(text: str, data: Data, names: str) -> npt.NDArray[Any]:
    return run_function(block32.compile(text, target="cpu"), "main", *data.arguments(names))


def test_the_same_weight_twice() -> None:
    body = matmul("a") + matmul("b") + f"\n  %r = arith.addf %a, %b : {TYPES['y']}"
    data = Data(5)
    names = "x xs w ws"
    check(run(program(names, body, "r"), data, names), 2 * data.product())


def test_two_layers_of_one_shape_share_an_executable_and_not_their_weights() -> None:
    body = matmul("a") + matmul("b", w="v") + f"\n  %r = arith.subf %a, %b : {TYPES['y']}"
    data = Data(3)
    names = "x xs w ws v vs"
    text = program(names, body, "r")
    ir = block32.compile(text, target="cpu", flags=("--compile-to=preprocessing",)).decode()
    assert ir.count("hal.executable.source private") == 1
    check(run(text, data, names), data.product("w") - data.product("v"))


def test_an_unused_argument() -> None:
    data = Data(4)
    names = "x xs w ws v vs"
    check(run(program(names, matmul("r"), "r"), data, names), data.product())


def test_x_times_itself() -> None:
    """matmul(x, x): one buffer is both operands, with 1x32 scales on both sides."""
    text = f"""{HEAD}
func.func @main(%x: tensor<64x64xf8E4M3FN>, %xs: tensor<64x2xf8E8M0FNU>) -> tensor<64x64xf32> {{
  %zeros = arith.constant dense<0.0> : tensor<64x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws1, #y]
    ins(%x, %xs, %x, %xs : tensor<64x64xf8E4M3FN>, tensor<64x2xf8E8M0FNU>,
        tensor<64x64xf8E4M3FN>, tensor<64x2xf8E8M0FNU>)
    outs(%zeros : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %r : tensor<64x64xf32>
}}
"""
    data = Data(64)
    want = reference.scaled_matmul(data.x, data.xs, data.x, data.xs, rhs_block=(1, 32))
    check(run(text, data, "x xs"), want)


@pytest.mark.parametrize("m", [0, 1, 2, 4, 5, 8, 9, 33])
def test_one_module_serves_every_m(m: int) -> None:
    names = "x xs w ws"
    text = program(names, matmul("r"), "r")
    vmfb = _COMPILED.setdefault(text, block32.compile(text, target="cpu"))
    data = Data(m, seed=m)
    got = run_function(vmfb, "main", *data.arguments(names))
    assert got.shape == (m, N)
    if m:
        check(got, data.product())


_COMPILED: dict[str, bytes] = {}


def test_a_static_tensor_cast_to_a_dynamic_one() -> None:
    text = f"""{HEAD}
func.func @main(%s: tensor<2x64xf8E4M3FN>, %ss: tensor<2x2xf8E8M0FNU>, %w: {TYPES["w"]},
    %ws: {TYPES["ws"]}) -> {TYPES["y"]} {{
  %x = tensor.cast %s : tensor<2x64xf8E4M3FN> to {TYPES["x"]}
  %xs = tensor.cast %ss : tensor<2x2xf8E8M0FNU> to {TYPES["xs"]}
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c0 : {TYPES["x"]}
  %empty = tensor.empty(%m) : {TYPES["y"]}
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : {TYPES["y"]}) -> {TYPES["y"]}
{matmul("r")}
  return %r : {TYPES["y"]}
}}
"""
    data = Data(2)
    check(run(text, data, "x xs w ws"), data.product())


def test_constant_weights_of_raw_bytes_and_of_fp8() -> None:
    data = Data(4)
    weight = f'dense<"0x{data.w.tobytes().hex()}">'
    scale = f'dense<"0x{data.ws.tobytes().hex()}">'
    as_bytes = f"""
  %wb = arith.constant {weight} : tensor<64x64xi8>
  %wsb = arith.constant {scale} : tensor<2x2xi8>
  %w = flow.tensor.bitcast %wb : tensor<64x64xi8> -> {TYPES["w"]}
  %ws = flow.tensor.bitcast %wsb : tensor<2x2xi8> -> {TYPES["ws"]}"""
    as_floats = f"""
  %w = arith.constant {weight} : {TYPES["w"]}
  %ws = arith.constant {scale} : {TYPES["ws"]}"""
    for constants in (as_bytes, as_floats):
        text = program("x xs", constants + matmul("r"), "r")
        check(run(text, data, "x xs"), data.product())


def test_functions_of_the_program_may_have_the_names_that_kernels_would_get() -> None:
    data = Data(5)
    names = [f"block32_{kind}_0_Mx64x64_e4m3_e4m3_32x32_f32" for kind in ("kernels", "matmul")]
    others = "".join(
        f"func.func @{name}(%t: tensor<4xf32>) -> tensor<4xf32> {{ return %t : tensor<4xf32> }}\n"
        for name in names
    )
    text = program("x xs w ws", matmul("r"), "r") + others
    check(run(text, data, "x xs w ws"), data.product())
