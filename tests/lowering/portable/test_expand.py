# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The portable form against float64: every element type, block, tail and scale byte."""

from __future__ import annotations

import numpy as np
import pytest
from iree.compiler import ir

import block32
from block32.lowering.problem import ScaledMatmul
from block32.passes.canonical import MatmulOperands, build
from block32.runtime import reference
from tests.grouped import program as composite_program
from tests.numbers import Operands, random_operands, run_function

LOCAL = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


def program(problem: ScaledMatmul) -> str:
    """A function of one canonical op; packed operands are bitcast to their 4-bit type."""
    m = "?" if problem.m is None else str(problem.m)
    shapes = {
        "lhs": (m, problem.k, problem.lhs),
        "rhs": (problem.n, problem.k, problem.rhs),
        "lhs_scale": (m, problem.k_blocks, "f8E8M0FNU"),
        "rhs_scale": (*problem.rhs_scale_shape, "f8E8M0FNU"),
    }
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        types = [ir.Type.parse(f"tensor<{r}x{c}x{e}>") for r, c, e in shapes.values()]
        stored = [
            ir.Type.parse(f"tensor<{r}x{(c + 1) // 2}xi8>") if e == "f4E2M1FN" else t
            for t, (r, c, e) in zip(types, shapes.values(), strict=True)
        ]
        with ir.InsertionPoint(module.body):
            from iree.compiler.dialects import func

            from block32.lowering.common.tensors import bitcast

            @func.FuncOp.from_py_func(*stored, name="main")
            def main(*arguments: ir.Value) -> ir.Value:
                lhs, rhs, lhs_scale, rhs_scale = (
                    bitcast(a, t) for a, t in zip(arguments, types, strict=True)
                )
                operands = MatmulOperands(lhs, lhs_scale, rhs, rhs_scale, problem.rhs_block[0])
                return build(operands, ir.Type.parse(problem.result))

        return str(module)


def run(problem: ScaledMatmul, operands: Operands) -> np.ndarray:
    vmfb = block32.compile(program(problem), target="portable", flags=LOCAL)
    return run_function(vmfb, "main", *operands.arrays())


@pytest.mark.parametrize(
    "problem",
    [
        ScaledMatmul(4, 64, 128),
        ScaledMatmul(3, 33, 72, rhs_block=(1, 32)),
        ScaledMatmul(5, 40, 40, lhs="f8E5M2", rhs="f8E4M3FN", result="bf16"),
        ScaledMatmul(2, 48, 96, rhs="f4E2M1FN", result="f16"),
        ScaledMatmul(None, 12, 64, rhs="f8E5M2"),
    ],
    ids=lambda p: p.describe(),
)
def test_numbers(problem: ScaledMatmul) -> None:
    operands = random_operands(problem, m=problem.m or 7)
    got = run(problem, operands)
    kind = {"f32": "f32", "bf16": "bf16", "f16": "f16"}[problem.result]
    expected = reference.round_to(operands.expected(), kind)  # type: ignore[arg-type]
    report = reference.compare(got, expected, kind)  # type: ignore[arg-type]
    assert report.ok, report


def test_no_rows_give_no_rows() -> None:
    problem = ScaledMatmul(None, 16, 32)
    assert run(problem, random_operands(problem, m=0)).shape == (0, 16)


def test_every_pair_of_extreme_scale_bytes() -> None:
    """A scale of 2^-127 is a denormal: devices that flush it would give 0 instead of 32."""
    problem = ScaledMatmul(6, 1, 32, rhs_block=(1, 32))
    ones = np.full((6, 32), 0x38, np.uint8)
    lhs_scale = np.array([[0], [254], [1], [127], [255], [0]], np.uint8)
    for rhs_byte in (0, 1, 127, 253, 254, 255):
        rhs_scale = np.array([[rhs_byte]], np.uint8)
        operands = Operands(problem, 6, ones, ones[:1], lhs_scale, rhs_scale)
        with np.errstate(over="ignore"):
            expected = operands.expected().astype(np.float32)
        got = run_cached(problem, operands)
        # Sums below the smallest normal number may be flushed to zero.
        is_tiny = np.abs(expected) < np.finfo(np.float32).smallest_normal
        np.testing.assert_array_equal(np.where(is_tiny, 0, got), np.where(is_tiny, 0, expected))


_COMPILED: dict[ScaledMatmul, bytes] = {}


def run_cached(problem: ScaledMatmul, operands: Operands) -> np.ndarray:
    if problem not in _COMPILED:
        _COMPILED[problem] = block32.compile(program(problem), target="portable", flags=LOCAL)
    return run_function(_COMPILED[problem], "main", *operands.arrays())


HEADS = """
func.func @main(%x: tensor<?x64xf32>, %w: tensor<64x64xf8E4M3FN>, %s: tensor<2x2xf8E8M0FNU>)
    -> tensor<2x?x32xf32> {
  %y = call @matmul(%x, %w, %s)
      : (tensor<?x64xf32>, tensor<64x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>) -> tensor<?x64xf32>
  %c0 = arith.constant 0 : index
  %m = tensor.dim %y, %c0 : tensor<?x64xf32>
  %heads = tensor.expand_shape %y [[0], [1, 2]] output_shape [%m, 2, 32]
      : tensor<?x64xf32> into tensor<?x2x32xf32>
  %empty = tensor.empty(%m) : tensor<2x?x32xf32>
  %r = linalg.transpose ins(%heads : tensor<?x2x32xf32>) outs(%empty : tensor<2x?x32xf32>)
      permutation = [1, 0, 2]
  return %r : tensor<2x?x32xf32>
}
"""


@pytest.mark.parametrize(
    "device",
    [
        ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_89"),
        ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx942"),
    ],
    ids=["cuda", "rocm"],
)
def test_gpu_back_ends_take_a_result_that_attention_reads(device: tuple[str, str]):
    """A dispatch of its own finishes y then, so that both sums leave the one that makes them.

    IREE could not bufferize the copy of zeros that the two sums began with.
    """
    matmul = composite_program(ScaledMatmul(None, 64, 64, lhs="f32", lhs_scaled=False))
    body = matmul.replace("func.func @main", "func.func private @matmul")
    assert block32.compile(body[: body.rindex("}")] + HEADS + "}", target="portable", flags=device)
