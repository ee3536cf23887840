# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a program passes to a kernel is what the kernel reads: nothing is copied on the way."""

from __future__ import annotations

import pytest

from block32.tools.compiler import CompileOptions, compile_source

ROWS = """
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x64xf8E4M3FN>
  %f0 = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?x32xf32>
  %zero = linalg.fill ins(%f0 : f32) outs(%empty : tensor<?x32xf32>) -> tensor<?x32xf32>"""

MODEL = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @weight = #util.byte_pattern<3> : tensor<32x64xf8E4M3FN>
func.func @main(%x: tensor<5x64xf8E4M3FN>, %xs: tensor<5x2xf8E8M0FNU>,
    %ws: tensor<1x2xf8E8M0FNU>) -> tensor<5x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<5x32xf32>
  %w = util.global.load @weight : tensor<32x64xf8E4M3FN>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<5x64xf8E4M3FN>, tensor<5x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<5x32xf32>) -> tensor<5x32xf32>
  return %y : tensor<5x32xf32>
}
"""


def _dynamic() -> str:
    model = MODEL.replace("tensor<5x", "tensor<?x")
    return model.replace("\n  %zero = arith.constant dense<0.0> : tensor<?x32xf32>", ROWS)


@pytest.mark.parametrize("target", ["cpu", "gfx950"])
@pytest.mark.parametrize("model", [MODEL, _dynamic()], ids=["static", "dynamic"])
def test_no_operand_is_copied_on_the_way_to_a_kernel(target: str, model: str) -> None:
    """A weight that lives in a global least of all."""
    options = CompileOptions(target=target, flags=("--compile-to=hal",))
    text = compile_source(model.encode(), "model.mlir", options).decode()
    assert "hal.command_buffer.dispatch" in text
    assert "hal.command_buffer.copy_buffer" not in text


def test_a_function_of_the_program_that_is_named_like_ours_stays() -> None:
    name = "block32_matmul_0_5x32x64_e4m3_e4m3_32x32_f32"
    theirs = f"""
util.func public @{name}(%a: tensor<4xf32>) -> tensor<4xf32> {{
  util.optimization_barrier %a : tensor<4xf32>
  util.return %a : tensor<4xf32>
}}
func.func @other(%a: tensor<4xf32>) -> tensor<4xf32> {{
  %b = util.call @{name}(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %b : tensor<4xf32>
}}
"""
    options = CompileOptions(target="cpu", flags=("--compile-to=preprocessing",))
    text = compile_source((MODEL + theirs).encode(), "model.mlir", options).decode()
    assert f"util.func public @{name}(" in text
    assert "@block32_matmul_0_5x32x64_e4m3_e4m3_32x32_f32_(" not in text, "ours is inlined"
    assert "flow.dispatch @block32_kernels" in text
