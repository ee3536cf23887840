# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A weight for each batch: every input form, compiled, against float64."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.passes.base import Remark
from block32.passes.pipeline import PassFailedError
from block32.runtime import reference
from tests.extras import APPLE, skip_without
from tests.numbers import random_codes, run_function
from tests.tools.specs import GENERIC, apply_spec, write_spec

B, N, K = 3, 70, 72
CODES, SCALES = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DATA = np.random.default_rng(5)
W = random_codes(DATA, (B, N, K), "f8E4M3FN")
W_SCALE = DATA.integers(118, 136, (B, 3, 3), dtype=np.uint8)
#: The weights as a matmul has them, ``[batches, K, N]``.
W_KN = np.ascontiguousarray(W.transpose(0, 2, 1)).view(CODES)

MAPS = """
#x  = affine_map<(b, m, n, k) -> (b, m, k)>
#xs = affine_map<(b, m, n, k) -> (b, m, k floordiv 32)>
#w  = affine_map<(b, m, n, k) -> (b, n, k)>
#ws = affine_map<(b, m, n, k) -> (b, n floordiv 32, k floordiv 32)>
#y  = affine_map<(b, m, n, k) -> (b, m, n)>
"""


def scaled_contract(m: str = "?", init: str = "", after: str = "") -> str:
    """The op on raw operands; it adds to zero unless ``init`` says to what."""
    x, y = f"tensor<{B}x{m}x{K}xf8E4M3FN>", f"tensor<{B}x{m}x{N}xf32>"
    operands = f"{x}, tensor<{B}x{m}x3xf8E8M0FNU>, tensor<{B}x{N}x{K}xf8E4M3FN>"
    operands += f", tensor<{B}x3x3xf8E8M0FNU>"
    names = [f"%{name}: {kind}" for name, kind in zip("abcd", operands.split(", "), strict=True)]
    return f"""{MAPS}
func.func @main({", ".join(names)}, %e: {y}) -> {y} {{
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : {y}) -> {y}
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
      ins(%a, %b, %c_, %d : {operands}) outs(%{init or "zero"} : {y}) -> {y}{after}
  return %{"z" if after else "y"} : {y}
}}
""".replace("%c:", "%c_:")


def compiled(text: str, target: str = "cpu") -> tuple[bytes, list[Remark]]:
    remarks: list[Remark] = []
    flags = GENERIC if target == "portable" else ()
    vmfb = block32.compile(text, target=target, flags=flags, on_remark=remarks.append)
    return vmfb, remarks


def operands(m: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], list[npt.NDArray]]:
    """Codes and scales of x, and the arguments of ``scaled_contract`` with a random init."""
    rng = np.random.default_rng(m)
    x = random_codes(rng, (B, m, K), "f8E4M3FN")
    xs = rng.integers(118, 136, (B, m, 3), dtype=np.uint8)
    init = rng.standard_normal((B, m, N)).astype(np.float32)
    return x, xs, [x.view(CODES), xs.view(SCALES), W.view(CODES), W_SCALE.view(SCALES), init]


def product(x: npt.NDArray, xs: npt.NDArray | None) -> npt.NDArray[np.float64]:
    """Each batch by itself."""
    return np.stack(
        [
            reference.scaled_matmul(x[b], None if xs is None else xs[b], W[b], W_SCALE[b])
            for b in range(B)
        ]
    )


def check(got: npt.NDArray, expected: npt.NDArray[np.float64]) -> None:
    assert got.shape == expected.shape
    comparison = reference.compare(got.reshape(-1, N), expected.reshape(-1, N), "f32")
    assert comparison.ok, comparison


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_scaled_contract_of_any_number_of_rows(target: str) -> None:
    """Also of no rows, and of one row a batch."""
    vmfb, (remark,) = compiled(scaled_contract(), target)
    assert f"Mx{N}x{K}_e4m3_e4m3_32x32_f32_{B}experts_{B}groups: {target}" in remark.message
    for m in (5, 1, 40):
        x, xs, arguments = operands(m)
        check(run_function(vmfb, "main", *arguments), product(x, xs))
    assert run_function(vmfb, "main", *operands(0)[2]).shape == (B, 0, N)


@pytest.mark.parametrize("m", [0, 6])
def test_static_rows(m: int) -> None:
    vmfb, _ = compiled(scaled_contract(str(m)))
    x, xs, arguments = operands(m)
    got = run_function(vmfb, "main", *arguments)
    if m:
        check(got, product(x, xs))
    assert got.shape == (B, m, N)


def test_what_is_added_to() -> None:
    vmfb, _ = compiled(scaled_contract(init="e"))
    x, xs, arguments = operands(7)
    check(run_function(vmfb, "main", *arguments), product(x, xs) + arguments[-1])


def test_a_consumer_stays_an_operation_of_its_own() -> None:
    """No kernel of a grouped matmul has an epilogue; the result is right all the same."""
    y = f"tensor<{B}x?x{N}xf32>"
    relu = f"""
  %z = linalg.generic {{indexing_maps = [#id, #id],
      iterator_types = ["parallel", "parallel", "parallel"]}} ins(%y : {y}) outs(%e : {y}) {{
  ^bb0(%v: f32, %o: f32):
    %r = arith.maximumf %v, %c : f32
    linalg.yield %r : f32
  }} -> {y}"""
    identity = "#id = affine_map<(b, m, n) -> (b, m, n)>"
    vmfb, (remark,) = compiled(identity + scaled_contract(after=relu))
    assert "relu" not in remark.message
    x, xs, arguments = operands(4)
    check(run_function(vmfb, "main", *arguments), np.maximum(product(x, xs), 0))


def dense(array: npt.NDArray[np.uint8]) -> str:
    kind = "x".join(map(str, array.shape))
    return f'dense<"0x{array.tobytes().hex()}"> : tensor<{kind}xi8>'


def marked(lhs: str, scales: npt.NDArray[np.uint8] = W_SCALE, b: str = str(B)) -> str:
    x, y = f"tensor<{b}x?x{K}xf32>", f"tensor<{b}x?x{N}xf32>"
    w = f"tensor<{b}x{K}x{N}xf8E4M3FN>"
    return f"""
util.global private @ws = {dense(scales)}
func.func @main(%x: {x}, %w: {w}, %e: {y}) -> {y} {{
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : {y}) -> {y}
  %y = linalg.batch_matmul {{{lhs} block32.rhs = {{block = [32, 32], scale = @ws}}}}
      ins(%x, %w : {x}, {w}) outs(%zero : {y}) -> {y}
  return %y : {y}
}}
"""


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_marked_batch_matmul(is_quantized: bool) -> None:
    """With the activation as it is, or quantised by the kernels themselves."""
    lhs = 'block32.lhs = {block = [1, 32], scale = "dynamic"},' if is_quantized else ""
    vmfb, (remark,) = compiled(marked(lhs))
    assert ("x is quantised (rceil)" in remark.message) == is_quantized
    x = DATA.standard_normal((B, 6, K)).astype(np.float32)
    got = run_function(vmfb, "main", x, W_KN, np.zeros((B, 6, N), np.float32))
    codes, scales = reference.quantize(x.reshape(-1, K))
    both = (codes.reshape(x.shape), scales.reshape(B, 6, 3)) if is_quantized else (x, None)
    check(got, product(*both))


def test_scales_of_a_marked_one_whose_weight_is_stored_by_rows() -> None:
    """``[N, batches, K]``, transposed: the order of the scales is that of the matmul's operand."""
    w = f"tensor<{B}x{K}x{N}xf8E4M3FN>"
    stored = f"tensor<{N}x{B}x{K}xf8E4M3FN>"
    turn = f"""  %empty = tensor.empty() : {w}
  %w = linalg.transpose ins(%s : {stored}) outs(%empty : {w}) permutation = [1, 2, 0]
  %y ="""
    text = marked("").replace(f"%w: {w}", f"%s: {stored}").replace("  %y =", turn)
    x = DATA.standard_normal((B, 6, K)).astype(np.float32)
    by_rows = np.ascontiguousarray(W.transpose(1, 0, 2)).view(CODES)
    vmfb, _ = compiled(text)
    got = run_function(vmfb, "main", x, by_rows, np.zeros((B, 6, N), np.float32))
    check(got, product(x, None))


REFUSED = {
    "one weight's scales": (W_SCALE[0], str(B), "expected 'block32.rhs' scales of shape 3x3x3"),
    "any number of weights": (W_SCALE, "?", "expected 'block32.rhs' scales of shape ?x3x3"),
}


@pytest.mark.parametrize(("scales", "b", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_scales_that_do_not_fit_a_marked_one(
    scales: npt.NDArray[np.uint8], b: str, reason: str
) -> None:
    with pytest.raises(PassFailedError, match=re.escape(reason)):
        compiled(marked("", scales, b))


def test_weights_that_the_program_dequantises() -> None:
    """``[batches, N, K]`` codes times the scales of blocks, transposed, as importers write it."""
    x, y = f"tensor<{B}x?x{K}xf32>", f"tensor<{B}x?x{N}xf32>"
    w, wide = f"tensor<{B}x{N}x{K}xf8E4M3FN>", f"tensor<{B}x{N}x{K}xf32>"
    turned = f"tensor<{B}x{K}x{N}xf32>"
    text = f"""
#id = affine_map<(b, n, k) -> (b, n, k)>
#block = affine_map<(b, n, k) -> (b, n floordiv 32, k floordiv 32)>
func.func @main(%x: {x}, %w: {w}, %ws: tensor<{B}x3x3xf8E8M0FNU>, %e: {y}) -> {y} {{
  %ew = tensor.empty() : {wide}
  %d = linalg.generic {{indexing_maps = [#id, #block, #id],
      iterator_types = ["parallel", "parallel", "parallel"]}}
      ins(%w, %ws : {w}, tensor<{B}x3x3xf8E8M0FNU>) outs(%ew : {wide}) {{
  ^bb0(%v: f8E4M3FN, %s: f8E8M0FNU, %o: f32):
    %p = arith.scaling_extf %v, %s : f8E4M3FN, f8E8M0FNU to f32
    linalg.yield %p : f32
  }} -> {wide}
  %et = tensor.empty() : {turned}
  %t = linalg.transpose ins(%d : {wide}) outs(%et : {turned}) permutation = [0, 2, 1]
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : {y}) -> {y}
  %y = linalg.batch_matmul ins(%x, %t : {x}, {turned}) outs(%zero : {y}) -> {y}
  return %y : {y}
}}
"""
    vmfb, (remark,) = compiled(text)
    assert f"{B}experts" in remark.message
    x_values = DATA.standard_normal((B, 5, K)).astype(np.float32)
    arguments = [x_values, W.view(CODES), W_SCALE.view(SCALES), np.zeros((B, 5, N), np.float32)]
    check(run_function(vmfb, "main", *arguments), product(x_values, None))


def test_a_spec_puts_the_kernels_in(tmp_path: Path) -> None:
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(scaled_contract())
    text = write_spec(model, spec, "--target=cpu")
    assert text.count("hal.executable.source private") == 1
    x, xs, arguments = operands(5)
    check(run_function(apply_spec(model, spec, *GENERIC), "main", *arguments), product(x, xs))


@pytest.mark.parametrize("target", ["gfx950", "apple-m5", "sm_90a"])
def test_every_target_has_a_kernel(target: str) -> None:
    """The composite is that of any grouped matmul, whose kernels are checked by themselves."""
    if target.startswith("apple"):
        skip_without("apple", APPLE)
    vmfb, (remark,) = compiled(scaled_contract(), target)
    assert f"{B}groups: {target}" in remark.message
    assert len(vmfb) > 0
