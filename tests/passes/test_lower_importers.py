# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operators of importers that cannot be lowered are located errors."""

from __future__ import annotations

import pytest

from block32.passes.base import Report
from block32.passes.lower_onnx import LowerOnnxPass
from block32.passes.lower_torch import LowerTorchPass
from block32.passes.pipeline import PassFailedError, PipelinePass, run_pipeline
from block32.passes.registry import input_pipeline
from block32.tools.compiler import parse_module


def error_of(current: PipelinePass, text: str) -> str:
    with pytest.raises(PassFailedError) as caught:
        run_pipeline(parse_module(text.encode(), "m.mlir"), [current], Report())
    diagnostic = caught.value.diagnostic
    assert diagnostic is not None, caught.value.__cause__
    return diagnostic.render()


def dequantize(scale: str, zero_point: str = "", attributes: str = "") -> str:
    codes = "!torch.vtensor<[2,64],f8E4M3FN>"
    operands, types = f"%w, %s{', %z' if zero_point else ''}", f"{codes}, {scale}"
    types += f", {codes}" if zero_point else ""
    return f"""
func.func @f(%w: {codes}, %s: {scale}, %x: {codes}) -> !torch.vtensor<[2,64],f32> {{
  {zero_point}
  %d = torch.operator "onnx.DequantizeLinear"({operands})
      {{{attributes} torch.onnx.block_size = 32 : si64}} : ({types}) -> !torch.vtensor<[2,64],f32>
  return %d : !torch.vtensor<[2,64],f32>
}}
"""


def test_scales_of_another_shape() -> None:
    error = error_of(LowerOnnxPass(), dequantize("!torch.vtensor<[2,3],f32>"))
    assert error.endswith(
        ":4:8: error: 'torch.operator' op has blocks of 32 along axis 1; expected scales of shape "
        "2x2 but got 2x3"
    )


@pytest.mark.parametrize("axis", [-3, 2])
def test_an_axis_that_the_input_has_not(axis: int) -> None:
    attributes = f"torch.onnx.axis = {axis} : si64,"
    error = error_of(LowerOnnxPass(), dequantize("!torch.vtensor<[2,2],f32>", "", attributes))
    assert error.endswith(f"op has axis {axis}; expected -2 to 1 for its input")


@pytest.mark.parametrize(
    "zero_point",
    [
        '%z = torch.operator "onnx.Constant"() {torch.onnx.value = dense<1.0> : '
        "tensor<2x64xf8E4M3FN>} : () -> !torch.vtensor<[2,64],f8E4M3FN>",
        '%z = torch.operator "onnx.Identity"(%x) : (!torch.vtensor<[2,64],f8E4M3FN>) -> '
        "!torch.vtensor<[2,64],f8E4M3FN>",
    ],
    ids=["one", "unknown"],
)
def test_zero_points(zero_point: str) -> None:
    error = error_of(LowerOnnxPass(), dequantize("!torch.vtensor<[2,2],f32>", zero_point))
    assert "has a zero point; expected none, or the constant 0, for float8" in error


@pytest.mark.parametrize(
    ("x", "rule", "message"),
    [
        ("[?,64],f32", '"nearest"', "expected rule to be one of"),
        ("[?,64],f64", '"rceil"', "f64"),
        ("[?,?],f32", '"rceil"', "expected a matrix with a static K"),
        ("[2,3,64],f32", '"rceil"', "expected a matrix with a static K"),
    ],
)
def test_other_operands_of_the_quantiser(x: str, rule: str, message: str) -> None:
    results = "!torch.vtensor<[?,64],f8E4M3FN>, !torch.vtensor<[?,2],f8E8M0FNU>"
    text = f"""
func.func @f(%x: !torch.vtensor<{x}>) {{
  %rule = torch.constant.str {rule}
  %q:2 = torch.operator "torch.block32.quantize_mxfp8"(%x, %rule)
      : (!torch.vtensor<{x}>, !torch.str) -> ({results})
  return
}}
"""
    error = error_of(LowerTorchPass(), text)
    assert ":4:10: error: 'torch.operator' op " in error
    assert message in error


def test_modules_without_such_operators_are_not_parsed() -> None:
    assert input_pipeline(b"func.func @f() { return }") == []
    assert [type(p) for p in input_pipeline(b'"onnx.DequantizeLinear"')] == [LowerOnnxPass]
    assert [type(p) for p in input_pipeline(b"torch.block32.quantize_mxfp8")] == [LowerTorchPass]
