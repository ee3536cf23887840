# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops that have the maps and the zero of the canonical op, but other types than kernels take."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from iree.compiler import ir

import block32
from block32.passes import canonical
from block32.passes.base import Report
from block32.passes.pipeline import run_pipeline
from block32.passes.raise_ import RaisePass
from block32.runtime import reference
from block32.tools.compiler import parse_module
from tests.numbers import random_codes, run_function

MAPS = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
"""
NAMES = ("x", "xs", "w", "ws", "y")
CANONICAL = {
    "x": "4x64xf8E4M3FN",
    "xs": "4x2xf8E8M0FNU",
    "w": "32x64xf8E4M3FN",
    "ws": "1x2xf8E8M0FNU",
    "y": "4x32xf32",
}


def function(name: str = "f", **other: str) -> str:
    """A matmul over a zero fill, whose operands have the canonical types but for ``other``."""
    types = {key: f"tensor<{text}>" for key, text in (CANONICAL | other).items()}
    element = (CANONICAL | other)["y"].rpartition("x")[2]
    arguments = ", ".join(f"%{key}: {types[key]}" for key in NAMES)
    ins = ", ".join(types[key] for key in NAMES[:4])
    return f"""
func.func @{name}({arguments}) -> {types["y"]} {{
  %zero = arith.constant {0 if element.startswith("i") else 0.0} : {element}
  %fill = linalg.fill ins(%zero : {element}) outs(%y : {types["y"]}) -> {types["y"]}
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : {ins}) outs(%fill : {types["y"]}) -> {types["y"]}
  return %r : {types["y"]}
}}
"""


def of_element(element: str) -> str:
    return function(x=f"4x64x{element}", w=f"32x64x{element}")


MEMREFS = """
func.func @f(%x: memref<4x64xf8E4M3FN>, %xs: memref<4x2xf8E8M0FNU>, %w: memref<32x64xf8E4M3FN>,
    %ws: memref<1x2xf8E8M0FNU>, %y: memref<4x32xf32>) {
  linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : memref<4x64xf8E4M3FN>, memref<4x2xf8E8M0FNU>, memref<32x64xf8E4M3FN>,
        memref<1x2xf8E8M0FNU>) outs(%y : memref<4x32xf32>)
  return
}
"""
DOT = """
#k = affine_map<(k) -> (k)>
#ks = affine_map<(k) -> (k floordiv 32)>
#none = affine_map<(k) -> ()>
func.func @f(%x: tensor<64xf8E4M3FN>, %xs: tensor<2xf8E8M0FNU>, %y: tensor<f32>) -> tensor<f32> {
  %r = linalg.scaled_contract indexing_maps = [#k, #ks, #k, #ks, #none]
    ins(%x, %xs, %x, %xs : tensor<64xf8E4M3FN>, tensor<2xf8E8M0FNU>, tensor<64xf8E4M3FN>,
        tensor<2xf8E8M0FNU>) outs(%y : tensor<f32>) -> tensor<f32>
  return %r : tensor<f32>
}
"""
LEFT_ALONE = {
    "f8E4M3": (of_element("f8E4M3"), "f8E4M3 has infinities; MXFP8 values are f8E4M3FN"),
    "FNUZ": (of_element("f8E5M2FNUZ"), "expected operands of f8E4M3FN, f8E5M2, f4E2M1FN"),
    "bf16": (of_element("bf16"), "expected operands of f8E4M3FN, f8E5M2, f4E2M1FN but got bf16"),
    "f64 result": (function(y="4x32xf64"), "expected a result of f32, bf16, f16 but got f64"),
    "f16 scales": (function(xs="4x2xf16"), "expected scales of type f8E8M0FNU but got f16"),
    "dynamic N": (
        function(w="?x64xf8E4M3FN", ws="?x2xf8E8M0FNU", y="4x?xf32"),
        "expected static N and K",
    ),
    "dynamic N of the result": (function(y="4x?xf32"), "expected static N and K"),
    "a dot product": (DOT, "expected loops (m, n, k)"),
}


@pytest.mark.parametrize(("text", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_other_types_are_left_alone_with_a_warning(text: str, reason: str) -> None:
    module = parse_module((MAPS + text).encode(), "model.mlir")
    report = Report()
    run_pipeline(module, [RaisePass()], report)
    (warning,) = report.remarks
    assert warning.severity == "warning"
    assert reason in warning.message
    with module.context, ir.Location.unknown():
        assert canonical.matmuls_of(module) == []


def test_memrefs_are_left_alone() -> None:
    module = parse_module((MAPS + MEMREFS).encode(), "model.mlir")
    before, report = str(module), Report()
    run_pipeline(module, [RaisePass()], report)
    assert (str(module), report.remarks) == (before, [])


SIZES = {
    "dynamic_weight_scales": {"ws": "?x?xf8E8M0FNU"},
    "dynamic_rows_of_scales": {"xs": "?x2xf8E8M0FNU"},
    "static_rows_of_scales": {"x": "?x64xf8E4M3FN", "y": "?x32xf32"},
    "static_rows_of_the_result": {"x": "?x64xf8E4M3FN", "xs": "?x2xf8E8M0FNU"},
    "dynamic_rows_of_the_result": {"y": "?x32xf32"},
}


def test_sizes_that_only_some_operands_know_are_no_obstacle() -> None:
    text = MAPS + "".join(function(name, **sizes) for name, sizes in SIZES.items())
    remarks = []
    vmfb = block32.compile(text, target="cpu", cpu="generic", on_remark=remarks.append)
    assert [remark.severity for remark in remarks] == ["remark"] * len(SIZES)
    rng = np.random.default_rng(3)
    x, w = random_codes(rng, (4, 64), "f8E4M3FN"), random_codes(rng, (32, 64), "f8E4M3FN")
    xs, ws = (rng.integers(118, 136, shape, dtype=np.uint8) for shape in ((4, 2), (1, 2)))
    expected = reference.scaled_matmul(x, xs, w, ws, rhs_block=(32, 32))
    fp8, e8m0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    operands = (x.view(fp8), xs.view(e8m0), w.view(fp8), ws.view(e8m0), np.ones((4, 32), "f4"))
    for name in SIZES:
        y = run_function(vmfb, name, *operands)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max())
