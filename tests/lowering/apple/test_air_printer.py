# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops to LLVM text: one small kernel at a time, and what AIR does not have."""

from __future__ import annotations

import math as pymath
import re
from collections.abc import Callable

import numpy as np
import pytest
from iree.compiler import ir
from iree.compiler.dialects import arith, math, scf

from block32.lowering.apple import builder
from block32.lowering.apple.air_metadata import DATA_LAYOUT
from block32.lowering.apple.air_printer import print_air
from block32.lowering.apple.builder import AirKernel, build_kernel, declare_callees
from block32.lowering.apple.library import compile_kernel
from block32.lowering.apple.signature import BufferParameter, KernelError, KernelSignature
from block32.tools.air_emulator.dispatch import Binding, Kernel

SIGNATURE = KernelSignature(
    "k",
    (BufferParameter("x", "f32"), BufferParameter("y", "f32", writable=True)),
    constants=1,
    threads=(32, 1, 1),
)


def _text(body: Callable[[AirKernel], None], signature: KernelSignature = SIGNATURE) -> str:
    module = build_kernel(signature, body)
    with module.context, ir.Location.unknown():
        declare_callees(module)
    return print_air(module, signature)


def _run(body: Callable[[AirKernel], None], x: np.ndarray, constant: int = 0) -> np.ndarray:
    """Runs a kernel of one simdgroup on x; gives y, of x's shape."""
    kernel = compile_kernel(SIGNATURE, build_kernel(SIGNATURE, body))
    y = np.full_like(x, np.nan)
    Kernel(kernel.bitcode, "k").dispatch(
        [Binding(x), Binding(y, output=True)], (1, 1, 1), (32, 1, 1), [constant]
    )
    return y


def _map(function: Callable[[ir.Value], ir.Value]) -> Callable[[AirKernel], None]:
    """A kernel that stores function(x[lane]) to y[lane]."""

    def body(kernel: AirKernel) -> None:
        value = kernel.buffer("x").at(kernel.lane).load()
        kernel.buffer("y").at(kernel.lane).store(function(value))

    return body


def test_pointers_are_typed_and_cast_where_they_are_seen_otherwise() -> None:
    def body(kernel: AirKernel) -> None:
        run = kernel.buffer("x").at(kernel.lane * 4).load(4, 16)
        kernel.buffer("y").at(kernel.lane * 4).store(run, 8)

    text = _text(body)
    assert "%struct.Bindings = type { float addrspace(1)*, float addrspace(1)* }" in text
    casts = re.findall(
        r"(%\w+) = bitcast float addrspace\(1\)\* %\w+ to <4 x float> addrspace", text
    )
    assert f"load <4 x float>, <4 x float> addrspace(1)* {casts[0]}, align 16" in text
    assert re.search(
        rf"store <4 x float> %\w+, <4 x float> addrspace\(1\)\* {casts[1]}, align 8", text
    )


def test_constants_are_exact() -> None:
    def body(kernel: AirKernel) -> None:
        tenth = builder.float_constant(0.1)
        kernel.buffer("y").store(arith.addf(tenth, builder.float_constant(-0.0)))

    assert "fadd float 0x3FB99999A0000000, 0x8000000000000000" in _text(body)


def test_a_loop_carries_values_in_phis() -> None:
    def body(kernel: AirKernel) -> None:
        zero = builder.float_constant(0.0)
        x = kernel.buffer("x")
        (total,) = builder.loop(
            0, kernel.constant(0), 1, [zero], lambda i, c: [arith.addf(c[0], x.at(i).load())]
        )
        kernel.buffer("y").at(kernel.lane).store(total)

    text = _text(body)
    assert text.count(" phi ") == 2
    x = np.arange(32, dtype=np.float32)
    for count in (0, 1, 32):
        np.testing.assert_array_equal(_run(body, x, count), np.float32(x[:count].sum()))


def test_branches_with_results_meet_in_a_phi() -> None:
    def body(kernel: AirKernel) -> None:
        value = kernel.buffer("x").at(kernel.lane).load()
        op = scf.IfOp(builder.less(kernel.lane, 7), [builder.f32()], has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.YieldOp([arith.negf(value)])
        with ir.InsertionPoint(op.else_block):
            scf.YieldOp([value])
        kernel.buffer("y").at(kernel.lane).store(op.results[0])

    x = np.arange(32, dtype=np.float32) + 1
    np.testing.assert_array_equal(_run(body, x), np.where(np.arange(32) < 7, -x, x))


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (math.exp, np.exp),
        (math.tanh, np.tanh),
        (math.erf, lambda x: np.vectorize(pymath.erf)(x)),
    ],
    ids=["exp", "tanh", "erf"],
)
def test_math_functions(function: Callable, reference: Callable) -> None:
    x = np.linspace(-4, 4, 32, dtype=np.float32)
    expected = reference(x.astype(np.float64))
    np.testing.assert_allclose(_run(_map(function), x), expected, rtol=3e-7, atol=3e-7)


def test_maximum_keeps_nans_on_either_side() -> None:
    x = np.array([1, -1, np.nan, np.inf, -np.inf, 0.0] + [0] * 26, np.float32)

    def against(constant: float) -> np.ndarray:
        return _run(_map(lambda v: arith.maximumf(v, builder.float_constant(constant))), x)

    np.testing.assert_array_equal(against(0.5), np.maximum(x, np.float32(0.5)))
    assert np.isnan(against(float("nan"))).all()


def test_metadata_describes_every_parameter() -> None:
    text = _text(lambda kernel: None)
    assert f'target datalayout = "{DATA_LAYOUT}"' in text
    for expected in (
        '!{i32 0, !"air.indirect_buffer", !"air.buffer_size", i32 16, !"air.location_index", i32 0',
        '!{i32 1, !"air.buffer", !"air.buffer_size", i32 4, !"air.location_index", i32 3, i32 1,',
        '!{i32 2, !"air.threadgroup_position_in_grid", !"air.arg_type_name", !"uint3",',
        '!{i32 1, !"air.buffer", !"air.location_index", i32 1, i32 1, !"air.read_write",',
        '!{i32 0, !"air.buffer", !"air.location_index", i32 0, i32 1, !"air.read",',
        '!"air.arg_type_size", i32 16, !"air.arg_type_align_size", i32 8, !"air.arg_type_name"',
        "!air.version = !{",
        '!{i32 2, !"SDK Version", [2 x i32] [i32 26, i32 0]}',
    ):
        assert expected in text


def test_data_layout_is_air_2_8s() -> None:
    assert DATA_LAYOUT == (
        "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-f32:32:32-f64:64:64-v16:16:16-"
        "v24:32:32-v32:32:32-v48:64:64-v64:64:64-v96:128:128-v128:128:128-v192:256:256-"
        "v256:256:256-v512:512:512-v1024:1024:1024-n8:16:32"
    )


def _double(kernel: AirKernel) -> None:
    value = arith.extf(ir.F64Type.get(), kernel.buffer("x").load())
    kernel.buffer("y").store(arith.truncf(builder.f32(), value))


def _matrix_of_vectors(kernel: AirKernel) -> None:
    kind = ir.VectorType.get([2, 2], builder.f32())
    arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get_f32(0.0)))
    arith.negf(arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get_f32(0))))


def _vector_cast(kernel: AirKernel) -> None:
    half = builder.vector_type(4, ir.F16Type.get())
    arith.truncf(half, kernel.buffer("x").load(4))


def _unknown_op(kernel: AirKernel) -> None:
    math.sin(kernel.buffer("x").load())


def _unknown_call(kernel: AirKernel) -> None:
    kernel.call("air.sin.f32", builder.f32(), [kernel.buffer("x").load()])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_double, "AIR has no type f64; expected one of i1"),
        (_matrix_of_vectors, "expected a vector of one dimension"),
        (_vector_cast, "'arith.truncf' op on a vector cannot be printed"),
        (_unknown_op, "'math.sin' op cannot be printed as AIR"),
        (_unknown_call, "call of 'air.sin.f32', which is not among the AIR functions"),
    ],
)
def test_what_air_does_not_have_is_refused(body: Callable[[AirKernel], None], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        _text(body)
