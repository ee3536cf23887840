# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Input forms with a wider activation or explicit dequantisation, compiled, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.passes.base import Remark
from block32.runtime import reference
from tests.numbers import random_codes, run_function

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
LOCAL = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
M, N, K = 5, 96, 72
DATA = np.random.default_rng(11)
X = DATA.standard_normal((M, K)).astype(np.float32)
W = random_codes(DATA, (N, K), "f8E4M3FN")
W_SCALE = DATA.integers(118, 136, (3, 3), dtype=np.uint8)


def dense(array: npt.NDArray[np.uint8]) -> str:
    return f'dense<"0x{array.tobytes().hex()}"> : tensor<{"x".join(map(str, array.shape))}xi8>'


def compile_and_run(text: str, *arguments: npt.NDArray, target: str = "cpu") -> npt.NDArray:
    remarks: list[Remark] = []
    flags = LOCAL if target == "portable" else ()
    vmfb = block32.compile(text, target=target, flags=flags, on_remark=remarks.append)
    assert len(remarks) == 1, f"expected one matmul to be raised but got {remarks}"
    return run_function(vmfb, "main", *arguments)


def marked(source: str, lhs: str, name: str = "matmul", batch: str = "") -> str:
    x = f"tensor<{batch}?x{K}x{source}>"
    y = f"tensor<{batch}?x{N}xf32>"
    return f"""
util.global private @ws = {dense(W_SCALE)}
func.func @main(%x: {x}, %w: tensor<{batch}{K}x{N}xf8E4M3FN>, %zero: {y}) -> {y} {{
  %c = arith.constant 0.0 : f32
  %fill = linalg.fill ins(%c : f32) outs(%zero : {y}) -> {y}
  %y = linalg.{name} {{{lhs} block32.rhs = {{block = [32, 32], scale = @ws}}}}
      ins(%x, %w : {x}, tensor<{batch}{K}x{N}xf8E4M3FN>) outs(%fill : {y}) -> {y}
  return %y : {y}
}}
"""


def weight_argument() -> npt.NDArray:
    return np.ascontiguousarray(W.T).view(ml_dtypes.float8_e4m3fn)


def check(got: npt.NDArray, expected: npt.NDArray[np.float64]) -> None:
    comparison = reference.compare(got.reshape(expected.shape), expected, "f32")
    assert comparison.ok, comparison


@pytest.mark.parametrize("source", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_an_activation_without_scales_is_taken_as_it_is(source: str, target: str) -> None:
    x = X.astype(DTYPES[source])
    zeros = np.zeros((M, N), np.float32)
    got = compile_and_run(marked(source, ""), x, weight_argument(), zeros, target=target)
    check(got, reference.scaled_matmul(x, None, W, W_SCALE))


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("source", ["f32", "bf16"])
def test_a_dynamic_scale_quantises_the_activation(source: str, rule: str) -> None:
    x = X.astype(DTYPES[source])
    lhs = f'block32.lhs = {{block = [1, 32], scale = "dynamic", rule = "{rule}"}},'
    zeros = np.zeros((M, N), np.float32)
    got = compile_and_run(marked(source, lhs), x, weight_argument(), zeros)
    codes, scales = reference.quantize(x, rule)  # type: ignore[arg-type]
    check(got, reference.scaled_matmul(codes, scales, W, W_SCALE))


@pytest.mark.parametrize("lhs", ["", 'block32.lhs = {block = [1, 32], scale = "dynamic"},'])
def test_a_batch_of_one_is_collapsed(lhs: str) -> None:
    text = marked("f32", lhs, "batch_matmul", "1x")
    zeros = np.zeros((1, M, N), np.float32)
    got = compile_and_run(text, X[None], weight_argument()[None], zeros)
    assert got.shape == (1, M, N)
    codes, scales = reference.quantize(X)
    x, x_scale = (codes, scales) if lhs else (X, None)
    check(got[0], reference.scaled_matmul(x, x_scale, W, W_SCALE))


def linear_as_importers_emit(lhs: str, batch: str = "?") -> str:
    """Weight [N, K] -> transpose -> broadcast over the batch -> batch_matmul, with its bias."""
    x, y = f"tensor<{batch}x?x{K}xf32>", f"tensor<{batch}x?x{N}xf32>"
    wide = f"tensor<{batch}x{K}x{N}xf8E4M3FN>"
    dynamic = "%b, %m" if batch == "?" else "%m"
    wide_size = "%b" if batch == "?" else ""
    return f"""
#id = affine_map<(b, k, n) -> (b, k, n)>
#kn = affine_map<(b, k, n) -> (k, n)>
util.global private @ws = {dense(W_SCALE)}
func.func @main(%x: {x}, %w: tensor<{N}x{K}xf8E4M3FN>) -> {y} {{
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %x, %c0 : {x}
  %m = tensor.dim %x, %c1 : {x}
  %zero = arith.constant 0.0 : f32
  %et = tensor.empty() : tensor<{K}x{N}xf8E4M3FN>
  %wt = linalg.transpose ins(%w : tensor<{N}x{K}xf8E4M3FN>) outs(%et : tensor<{K}x{N}xf8E4M3FN>)
      permutation = [1, 0]
  %eb = tensor.empty({wide_size}) : {wide}
  %wb = linalg.generic {{indexing_maps = [#kn, #id],
      iterator_types = ["parallel", "parallel", "parallel"]}}
      ins(%wt : tensor<{K}x{N}xf8E4M3FN>) outs(%eb : {wide}) {{
  ^bb0(%in: f8E4M3FN, %out: f8E4M3FN):
    linalg.yield %in : f8E4M3FN
  }} -> {wide}
  %e = tensor.empty({dynamic}) : {y}
  %f = linalg.fill ins(%zero : f32) outs(%e : {y}) -> {y}
  %y = linalg.batch_matmul {{{lhs} block32.rhs = {{block = [32, 32], scale = @ws}}}}
      ins(%x, %wb : {x}, {wide}) outs(%f : {y}) -> {y}
  return %y : {y}
}}
"""


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("lhs", ["", 'block32.lhs = {block = [1, 32], scale = "dynamic"},'])
def test_a_linear_layer_as_importers_emit_it(batch: int, lhs: str) -> None:
    """The transposed, broadcast weight is read as it is stored; batches become rows."""
    x = DATA.standard_normal((batch, M, K)).astype(np.float32)
    text = linear_as_importers_emit(lhs, "1" if batch == 1 else "?")
    got = compile_and_run(text, x, W.view(ml_dtypes.float8_e4m3fn))
    assert got.shape == (batch, M, N)
    rows = x.reshape(-1, K)
    codes, scales = reference.quantize(rows) if lhs else (rows, None)
    check(got.reshape(-1, N), reference.scaled_matmul(codes, scales, W, W_SCALE))


def dequantised(mark: str, by_blocks: bool, both: bool = False) -> str:
    """W is extended and multiplied by its scales, ``scaling_extf`` or a 3x32x3x24 view."""
    n, k = N, 96
    x = f"tensor<{M}x{k}xf32>"
    w = f"tensor<{n}x{k}xf8E4M3FN>"
    f32 = f"tensor<{n}x{k}xf32>"
    expand = f"""
  %ws4 = tensor.expand_shape %ws [[0, 1], [2, 3]] output_shape [3, 1, 3, 1]
      : tensor<3x3xf8E8M0FNU> into tensor<3x1x3x1xf8E8M0FNU>
  %w4 = tensor.expand_shape %w [[0, 1], [2, 3]] output_shape [3, 32, 3, 32]
      : {w} into tensor<3x32x3x32xf8E4M3FN>
  %e4 = tensor.empty() : tensor<3x32x3x32xf32>
  %d4 = linalg.generic {{indexing_maps = [#d4, #s4, #d4],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}}
      ins(%w4, %ws4 : tensor<3x32x3x32xf8E4M3FN>, tensor<3x1x3x1xf8E8M0FNU>)
      outs(%e4 : tensor<3x32x3x32xf32>) {{
  ^bb0(%code: f8E4M3FN, %scale: f8E8M0FNU, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.extf %scale : f8E8M0FNU to f32
    %2 = arith.mulf %1, %0 : f32
    linalg.yield %2 : f32
  }} -> tensor<3x32x3x32xf32>
  %wf = tensor.collapse_shape %d4 [[0, 1], [2, 3]] : tensor<3x32x3x32xf32> into {f32}
"""
    scaling = f"""
  %ew = tensor.empty() : {f32}
  %wf = linalg.generic {{indexing_maps = [#id, #blocks, #id],
      iterator_types = ["parallel", "parallel"]}}
      ins(%w, %ws : {w}, tensor<3x3xf8E8M0FNU>) outs(%ew : {f32}) {{
  ^bb0(%code: f8E4M3FN, %scale: f8E8M0FNU, %out: f32):
    %0 = arith.scaling_extf %code, %scale : f8E4M3FN, f8E8M0FNU to f32
    linalg.yield %0 : f32
  }} -> {f32}
"""
    return f"""
#id = affine_map<(n, k) -> (n, k)>
#blocks = affine_map<(n, k) -> (n floordiv 32, k floordiv 32)>
#d4 = affine_map<(a, b, c, d) -> (a, b, c, d)>
#s4 = affine_map<(a, b, c, d) -> (a, 0, c, 0)>
#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
func.func @main(%x: {x}, %w: {w}, %ws: tensor<3x3xf8E8M0FNU>) -> tensor<{M}x{n}xf32> {{
  {expand if by_blocks else scaling}
  %zero = arith.constant dense<0.0> : tensor<{M}x{n}xf32>
  %y = linalg.matmul indexing_maps = [#mk, #nk, #mn] {mark}
      ins(%x, %wf : {x}, {f32}) outs(%zero : tensor<{M}x{n}xf32>) -> tensor<{M}x{n}xf32>
  return %y : tensor<{M}x{n}xf32>
}}
"""


@pytest.mark.parametrize("by_blocks", [False, True], ids=["scaling_extf", "blocks"])
@pytest.mark.parametrize("mark", ["", "{block32.rhs = {block = [32, 32]}}"], ids=["bare", "marked"])
def test_an_explicitly_dequantised_weight(by_blocks: bool, mark: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((M, 96)).astype(np.float32)
    w = random_codes(rng, (96, 96), "f8E4M3FN")
    scale = rng.integers(118, 136, (3, 3), dtype=np.uint8)
    got = compile_and_run(
        dequantised(mark, by_blocks),
        x,
        w.view(ml_dtypes.float8_e4m3fn),
        scale.view(ml_dtypes.float8_e8m0fnu),
    )
    check(got, reference.scaled_matmul(x, None, w, scale))
