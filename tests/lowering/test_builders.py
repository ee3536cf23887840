# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.builders``: what they build, compiled and run against float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir
from iree.compiler.dialects import func

import block32
from block32.builders import quantize_rows, scaled_linear, weight_constant
from block32.dialects.diagnostics import BadAttributeError
from block32.passes.base import Remark
from block32.runtime import reference

DYNAMIC = -1
N, K = 96, 72
RNG = np.random.default_rng(5)
CODES, SCALES = reference.quantize_weight(RNG.standard_normal((N, K)))
BIAS = RNG.standard_normal(N).astype(np.float32)

Body = Callable[..., Any]


def build(body: Body, *types: tuple[tuple[int, ...], str]) -> ir.Module:
    """A module whose function ``main`` has the body; sizes of -1 are dynamic."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        dynamic = ir.ShapedType.get_dynamic_size()
        arguments = [
            ir.RankedTensorType.get(
                [dynamic if size == DYNAMIC else size for size in shape], ir.Type.parse(element)
            )
            for shape, element in types
        ]
        with ir.InsertionPoint(module.body):
            func.FuncOp.from_py_func(*arguments, name="main")(body)
        assert module.operation.verify()
        return module


def run(module: ir.Module, *arguments: npt.NDArray[Any]) -> tuple[Any, list[Remark]]:
    remarks: list[Remark] = []
    vmfb = block32.compile(module, target="cpu", on_remark=remarks.append)
    assert [r.severity for r in remarks] == ["remark"], remarks
    return np.array(block32.load(vmfb)["main"](*arguments)), remarks


def check(got: npt.NDArray[Any], expected: npt.NDArray[np.float64], kind: str) -> None:
    comparison = reference.compare(got, expected, kind)  # type: ignore[arg-type]
    assert comparison.ok, comparison


def test_an_activation_of_three_dimensions_is_quantised_with_an_epilogue() -> None:
    def body(x: ir.Value, bias: ir.Value) -> ir.Value:
        weight, scales = weight_constant(CODES, SCALES)
        return scaled_linear(
            x, weight, scales, bias=bias, activation="relu", quantize="floor", result="bf16"
        )

    module = build(body, ((DYNAMIC, 3, K), "f32"), ((N,), "f32"))
    x = RNG.standard_normal((2, 3, K)).astype(np.float32)
    got, (remark,) = run(module, x, BIAS)
    assert "with bias, relu: cpu " in remark.message
    codes, scales = reference.quantize(x.reshape(-1, K), "floor")
    expected = reference.scaled_matmul(codes, scales, CODES, SCALES) + BIAS
    assert got.dtype == ml_dtypes.bfloat16
    check(got, np.maximum(expected, 0).reshape(2, 3, N), "bf16")


def test_a_wide_activation_with_all_of_an_epilogue() -> None:
    """1x32 scales, a weight of float8 that is an argument, scales as bytes."""
    codes, scale_bytes = reference.quantize_weight(RNG.standard_normal((N, K)), (1, 32))

    def body(x: ir.Value, weight: ir.Value, scales: ir.Value, *rest: ir.Value) -> ir.Value:
        row_scale, scale, residual = rest
        return scaled_linear(x, weight, scales, row_scale=row_scale, scale=scale, residual=residual)

    shapes = [((DYNAMIC, K), "bf16"), ((N, K), "f8E4M3FN"), (scale_bytes.shape, "i8")]
    shapes += [((DYNAMIC,), "f32"), ((1,), "f32"), ((DYNAMIC, N), "f16")]
    module = build(body, *shapes)
    x = RNG.standard_normal((5, K)).astype(ml_dtypes.bfloat16)
    row_scale = RNG.standard_normal(5).astype(np.float32)
    scale = np.array([-1.5], np.float32)
    residual = RNG.standard_normal((5, N)).astype(np.float16)
    arguments = [x, codes.view(ml_dtypes.float8_e4m3fn), scale_bytes, row_scale, scale, residual]
    got, _ = run(module, *arguments)
    product = reference.scaled_matmul(x, None, codes, scale_bytes, rhs_block=(1, 32))
    assert got.dtype == ml_dtypes.bfloat16
    check(got, product * row_scale[:, None] * -1.5 + residual, "bf16")


def test_mxfp4_and_codes_that_two_layers_share() -> None:
    """Rows are quantised once; the packed weight is half as wide."""
    packed, packed_scales = reference.quantize_weight(RNG.standard_normal((N, K)), element="e2m1")

    def body(x: ir.Value) -> ir.Value:
        codes, scales = quantize_rows(x)
        weight, weight_scales = weight_constant(packed, packed_scales)
        return scaled_linear(codes, weight, weight_scales, x_scales=scales, element="f4E2M1FN")

    x = RNG.standard_normal((3, K)).astype(np.float32)
    got, _ = run(build(body, ((3, K), "f32")), x)
    codes, scales = reference.quantize(x)
    check(
        got,
        reference.scaled_matmul(codes, scales, packed, packed_scales, rhs_element="e2m1"),
        "f32",
    )


X = ((4, K), "f32")
FP8 = ((4, K), "f8E4M3FN")
W = ((N, K), "f8E4M3FN")
S = ((3, 3), "f8E8M0FNU")
REFUSED = {
    "x of one dimension": ([((K,), "f32"), W, S], {}, "expected x to be [..., M, K]"),
    "a dynamic K": ([((4, DYNAMIC), "f32"), W, S], {}, "with a static K but got tensor<4x?xf32>"),
    "x of f64": ([((4, K), "f64"), W, S], {}, "expected the elements of x to be f32 or bf16 or"),
    "another K": ([((4, 64), "f32"), W, S], {}, "expected weight of [N, 64] for an x with K = 64"),
    "a dynamic weight": ([X, ((DYNAMIC, K), "f8E4M3FN"), S], {}, "to be a static [N, K]"),
    "a weight of f32": ([X, ((N, K), "f32"), S], {}, "the elements of weight to be f8E4M3FN or"),
    "FNUZ": ([X, ((N, K), "f8E4M3FNUZ"), S], {}, "but got f8E4M3FNUZ"),
    "bytes of what": ([X, ((N, K), "i8"), S], {"element": "i8"}, "expected element to be f8E4M3FN"),
    "scales of f32": ([X, W, ((3, 3), "f32")], {}, "the elements of scales to be f8E8M0FNU or i8"),
    "other scales": (
        [X, W, ((3, 2), "i8")],
        {},
        "expected scales of [3, 3] or [96, 3] for a weight of [96, 72] but got tensor<3x2xi8>",
    ),
    "codes alone": ([FP8, W, S], {}, "expected x_scales: x is a tensor of codes"),
    "codes again": (
        [FP8, W, S, ((4, 3), "f8E8M0FNU")],
        {"x_scales": 3, "quantize": "rceil"},
        "expected no quantize",
    ),
    "scales of a wide x": ([X, W, S, ((4, 3), "i8")], {"x_scales": 3}, "expected no x_scales"),
    "scales of other rows": (
        [FP8, W, S, ((5, 3), "i8")],
        {"x_scales": 3},
        "expected x_scales of tensor<4x3xf8E8M0FNU> but got tensor<5x3xf8E8M0FNU>",
    ),
    "a rule": ([X, W, S], {"quantize": "nearest"}, "expected the rule to be rceil or floor"),
    "an activation": ([X, W, S], {"activation": "elu"}, "expected activation to be relu or gelu"),
    "a result": ([X, W, S], {"result": "f64"}, "expected result to be f32 or bf16 or f16"),
    "a long bias": (
        [X, W, S, ((N + 1,), "f32")],
        {"bias": 3},
        "expected bias of tensor<96xf32> but got tensor<97xf32>",
    ),
    "an integer bias": ([X, W, S, ((N,), "i32")], {"bias": 3}, "the elements of bias to be f32"),
    "a residual": (
        [X, W, S, ((4, N + 1), "f32")],
        {"residual": 3},
        "expected residual of tensor<4x96xf32>",
    ),
    "scales of no dimension": (
        [FP8, W, S, ((), "i8")],
        {"x_scales": 3},
        "expected x_scales of tensor<4x3xf8E8M0FNU> but got tensor<f8E8M0FNU>",
    ),
    "scales of other leading sizes": (
        [((2, 4, K), "f8E4M3FN"), W, S, ((4, 2, 3), "f8E8M0FNU")],
        {"x_scales": 3},
        "expected x_scales of tensor<2x4x3xf8E8M0FNU> but got tensor<4x2x3xf8E8M0FNU>",
    ),
    "a residual of other leading sizes": (
        [((2, 4, K), "f32"), W, S, ((4, 2, N), "f32")],
        {"residual": 3},
        "expected residual of tensor<2x4x96xf32> but got tensor<4x2x96xf32>",
    ),
    "a residual of no dimension": (
        [X, W, S, ((), "f32")],
        {"residual": 3},
        "expected residual of tensor<4x96xf32> but got tensor<f32>",
    ),
    "a number": ([X, W, S], {"scale": 2.0}, "expected scale to be a ranked tensor but got float"),
    "an array": (
        [X, W, S],
        {"bias": BIAS},
        "expected bias to be a ranked tensor but got ndarray",
    ),
    "a scale": ([X, W, S, ((2,), "f32")], {"scale": 3}, "expected scale of tensor<1xf32>"),
}


@pytest.mark.parametrize(("types", "arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(types: Any, arguments: Any, message: str) -> None:
    """Integers among the arguments are numbers of function arguments."""

    def body(*values: ir.Value) -> ir.Value:
        named = {k: values[v] if isinstance(v, int) else v for k, v in arguments.items()}
        return scaled_linear(*values[:3], **named)

    with pytest.raises(BadAttributeError) as caught:
        build(body, *types)
    assert message in str(caught.value)


def test_constants_are_matrices_of_bytes() -> None:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            with pytest.raises(BadAttributeError, match="expected codes to be a matrix of bytes"):
                weight_constant(CODES.astype(np.int32), SCALES)
            with pytest.raises(BadAttributeError, match="a matrix of bytes but got list"):
                weight_constant(CODES.tolist(), SCALES)
            with pytest.raises(BadAttributeError, match="expected scales to be a matrix of bytes"):
                weight_constant(CODES, SCALES.ravel())
