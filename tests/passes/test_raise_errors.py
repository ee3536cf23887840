# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a marked matmul that cannot be raised gets: one located error that names the cure."""

from __future__ import annotations

import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.passes.base import Report
from block32.passes.pipeline import PassFailedError, run_pipeline
from block32.passes.raise_ import RaisePass
from block32.tools.compiler import parse_module

LHS = "block32.lhs = {block = [1, 32], scale = @xs}"
RHS = "block32.rhs = {block = [32, 32], scale = @ws}"


def program(
    attributes: str = f"{LHS}, {RHS}",
    lhs: str = "f8E4M3FN",
    rhs: str = "f8E4M3FN",
    globals_: str = "",
    result: str = "f32",
) -> str:
    return f"""
util.global private @xs = dense<127> : tensor<4x2xi8>
util.global private @ws = dense<127> : tensor<1x2xi8>
{globals_}
func.func @f(%x: tensor<4x64x{lhs}>, %w: tensor<64x32x{rhs}>, %i: tensor<4x32x{result}>) -> tensor<4x32x{result}> {{
  %y = linalg.matmul {{{attributes}}} ins(%x, %w : tensor<4x64x{lhs}>, tensor<64x32x{rhs}>)
      outs(%i : tensor<4x32x{result}>) -> tensor<4x32x{result}>
  return %y : tensor<4x32x{result}>
}}
"""  # noqa: E501


def error_of(text: str) -> str:
    module = parse_module(text.encode(), "model.mlir")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [RaisePass()], Report())
    diagnostic = failure.value.diagnostic
    assert isinstance(diagnostic, DiagnosticError)
    return diagnostic.render()


CASES = {
    "an unsupported block": (
        program(f"{LHS}, block32.rhs = {{block = [16, 16], scale = @ws}}"),
        "unsupported block [16, 16]; expected [1, 32] or [32, 32]",
    ),
    "32x32 scales on the activation": (
        program(
            f"block32.lhs = {{block = [32, 32], scale = @s}}, {RHS}",
            globals_="util.global private @s = dense<127> : tensor<1x2xi8>",
        ),
        "expected 1x32 scales on the left operand but got 32x32",
    ),
    "no block": (
        program(f"{LHS}, block32.rhs = {{scale = @ws}}"),
        "missing field 'block'; expected [1, 32] or [32, 32]",
    ),
    "a misspelled field": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scales = @ws}}"),
        "unknown field 'scales'; expected block, scale or rule",
    ),
    "scales of only one side": (
        program(RHS),
        "missing 'block32.lhs'; expected {block = [1, 32], scale = ...}",
    ),
    "no scale for a raw operand": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32]}}"),
        "needs a scale; expected a symbol or a constant",
    ),
    "an unknown symbol": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = @nothing}}"),
        "names an unknown symbol @nothing; expected a util.global",
    ),
    "a symbol that is no global": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = @f}}"),
        "expected @f to be a util.global but got func.func",
    ),
    "scales of the wrong shape": (
        program(
            f"{LHS}, block32.rhs = {{block = [32, 32], scale = @s}}",
            globals_="util.global private @s = dense<127> : tensor<2x2xi8>",
        ),
        "expected 'block32.rhs' scales of shape 1x2 for a 64x32 operand but got 2x2",
    ),
    "scales of another type": (
        program(
            f"{LHS}, block32.rhs = {{block = [32, 32], scale = @s}}",
            globals_="util.global private @s = dense<1.0> : tensor<1x2xf32>",
        ),
        "expected 'block32.rhs' scales of f8E8M0FNU or i8 but got f32",
    ),
    "f16 scales": (
        program(
            f"{LHS}, block32.rhs = {{block = [32, 32], scale = @s}}",
            globals_="util.global private @s = dense<1.0> : tensor<1x2xf16>",
        ),
        "but got f16",
    ),
    "unsigned scales": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = dense<1> : tensor<1x2xui8>}}"),
        "expected 'block32.rhs' scales of f8E8M0FNU or i8 but got ui8",
    ),
    "a vector of scales": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = dense<1> : vector<1x2xi8>}}"),
        "expected 'block32.rhs' scales in a tensor but got vector<1x2xi8>",
    ),
    "a global of another kind": (
        program(
            f"{LHS}, block32.rhs = {{block = [32, 32], scale = @s}}",
            globals_="util.global private @s = 127 : i8",
        ),
        "expected 'block32.rhs' scales in a tensor but got i8",
    ),
    "a misspelled attribute": (
        program("block32.left = {block = [1, 32], scale = @xs}"),
        "unknown attribute 'block32.left'; expected one of block32.lhs, block32.rhs",
    ),
    "f8E4M3 for f8E4M3FN": (
        program(rhs="f8E4M3"),
        "but got f8E4M3 (f8E4M3 has infinities; MXFP8 values are f8E4M3FN)",
    ),
    "FNUZ": (
        program(lhs="f8E4M3FNUZ"),
        "but got f8E4M3FNUZ (FNUZ types belong to older AMD chips (gfx94x); "
        "MXFP8 values are f8E4M3FN: take 1 off each scale byte and bitcast codes other than "
        "0x7F, 0x80 and 0xFF)",
    ),
    "an unknown rule": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = @ws, rule = \"up\"}}"),
        "unknown rule up; expected one of rceil, floor, even, ceil",
    ),
    "a scale that is a number": (
        program(f"{LHS}, block32.rhs = {{block = [32, 32], scale = 1.0 : f32}}"),
        "expected a symbol, a dense constant or \"dynamic\"",
    ),
    "no dictionary": (
        program(f"{LHS}, block32.rhs = 32"),
        "malformed 'block32.rhs': expected a dictionary but got 32",
    ),
    "scales of a wider activation": (
        program(lhs="f32"),
        "'block32.lhs' names scales of an f32 operand; expected scale = \"dynamic\" to quantise it",
    ),
    "32x32 blocks of a dynamic activation": (
        program(f'block32.lhs = {{block = [32, 32], scale = "dynamic"}}, {RHS}', lhs="bf16"),
        "expected 1x32 scales on the left operand but got 32x32",
    ),
    "scales of a wider weight": (
        program(RHS, lhs="f32", rhs="bf16"),
        "'block32.rhs' names scales of an bf16 operand; expected raw fp8 values",
    ),
    "a claim that is not true": (
        program("block32.rhs = {block = [32, 32]}", lhs="f32", rhs="f32"),
        "its operand is no product of fp8 values and f8E8M0FNU scales",
    ),
    "an f64 activation": (
        program(RHS, lhs="f64"),
        "missing 'block32.lhs'; expected {block = [1, 32], scale = ...}",
    ),
    "an f64 result": (
        program(result="f64"),
        "expected a result of f32, bf16, f16 but got f64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES.keys())
def test_error(text: str, message: str) -> None:
    rendered = error_of(text)
    assert message in rendered
    assert "'linalg.matmul' op cannot be raised: " in rendered
    assert len(rendered.splitlines()) == 1


def test_a_mark_on_another_op_is_an_error() -> None:
    text = """
func.func @f(%x: tensor<4x64xf32>) -> tensor<4x64xf32> {
  %y = arith.addf %x, %x {block32.rhs = {block = [32, 32]}} : tensor<4x64xf32>
  return %y : tensor<4x64xf32>
}
"""
    assert (
        "expected block32.lhs and block32.rhs on linalg.matmul or linalg.batch_matmul only"
        in error_of(text)
    )


def test_a_kernel_for_an_op_that_stays_is_an_error() -> None:
    text = """
#x = affine_map<(m, n, k) -> (m, k)>
#s = affine_map<(m, n, k) -> (m, k floordiv 16)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
#ws = affine_map<(m, n, k) -> (n, k floordiv 32)>
func.func @f(%x: tensor<4x64xf8E4M3FN>, %s: tensor<4x4xf8E8M0FNU>, %w: tensor<32x64xf8E4M3FN>,
    %t: tensor<32x2xf8E8M0FNU>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {
  %y = linalg.scaled_contract indexing_maps = [#x, #s, #w, #ws, #y]
      {block32.kernel = {target = "cpu", tiers = [{form = "stream"}]}}
      ins(%x, %s, %w, %t : tensor<4x64xf8E4M3FN>, tensor<4x4xf8E8M0FNU>, tensor<32x64xf8E4M3FN>,
          tensor<32x2xf8E8M0FNU>) outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
"""
    assert "cannot be raised: expected 32 elements of K to share a scale but got 16" in error_of(
        text
    )
