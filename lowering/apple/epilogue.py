# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What happens to f32 accumulators before they are stored: scales, bias, residual, activation, cast."""

from __future__ import annotations

import math
from collections.abc import Callable

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.builder import AirKernel, Int, Pointer, Word, float_constant, wide
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import ELEMENT_TYPES


def run_alignment(row_elements: int, element: str, run: int = 4) -> int:
    """Bytes that every run of ``run`` elements at a multiple of ``run`` in a row is aligned to."""
    size = ELEMENT_TYPES[element].size
    return math.gcd(row_elements * size, run * size)


def store_run(
    kernel: AirKernel,
    matmul: Matmul,
    values: list[ir.Value],
    row: Word,
    column: Word,
    expert: Word | None = None,
) -> None:
    """Finishes neighbouring elements of one row and stores them with one instruction.

    Args:
        kernel: the kernel.
        matmul: what it computes.
        values: f32 accumulators of columns ``column``, ``column + 1``, ...; all are in bounds.
        row: row of y.
        column: first column.
        expert: the expert whose scale applies, in a grouped matmul.
    """
    offset = wide(row) * matmul.n + wide(column)
    values = apply_epilogue(kernel, matmul, values, row, column, offset, expert)
    stored = [cast(value, matmul.result) for value in values]
    target = kernel.buffer("result").at(offset)
    _store(target, stored, matmul.n)


def store_zeros(kernel: AirKernel, matmul: Matmul, count: int, row: Word, column: Word) -> None:
    """Stores ``count`` zeros at (row, column) and right of it."""
    zero = float_constant(0.0, builder.element_type(matmul.result))
    _store(kernel.buffer("result").at(wide(row) * matmul.n + wide(column)), [zero] * count, matmul.n)


def _store(target: Pointer, values: list[ir.Value], row_elements: int) -> None:
    if len(values) == 1:
        target.store(values[0])
        return
    alignment = run_alignment(row_elements, target.element, len(values))
    target.store(builder.from_elements(values), alignment)


def _load(source: Pointer, count: int, row_elements: int) -> list[ir.Value]:
    """Neighbouring elements as f32."""
    if count == 1:
        return [as_f32(source.load())]
    vector = source.load(count, run_alignment(row_elements, source.element, count))
    return [as_f32(builder.extract(vector, i)) for i in range(count)]


def as_f32(value: ir.Value) -> ir.Value:
    """A scalar of any floating-point type as f32; exact."""
    return value if value.type == builder.f32() else arith.extf(builder.f32(), value)


def cast(value: ir.Value, element: str) -> ir.Value:
    """An f32 scalar rounded to nearest even."""
    return value if element == "f32" else arith.truncf(builder.element_type(element), value)


def apply_epilogue(
    kernel: AirKernel,
    matmul: Matmul,
    values: list[ir.Value],
    row: Word,
    column: Word,
    offset: Word,
    expert: Word | None,
) -> list[ir.Value]:
    """The epilogue of ``matmul`` on neighbouring accumulators, in its documented order."""
    epilogue = matmul.epilogue
    count = len(values)
    factors: list[tuple[str, Int]] = []
    if expert is not None and matmul.expert_scale:
        factors.append(("expert_scale", expert))
    if epilogue.row_scale:
        factors.append(("row_scale", row))
    if epilogue.scale:
        factors.append(("scale", 0))
    for name, index in factors:
        factor = kernel.buffer(name).at(index).load()
        values = [arith.mulf(value, factor) for value in values]
    if epilogue.bias is not None:
        bias = _load(kernel.buffer("bias").at(column), count, matmul.n)
        values = [arith.addf(value, b) for value, b in zip(values, bias, strict=True)]
    if epilogue.residual is not None:
        residual = _load(kernel.buffer("residual").at(offset), count, matmul.n)
        values = [arith.addf(value, r) for value, r in zip(values, residual, strict=True)]
    if epilogue.activation is not None:
        activate = _ACTIVATIONS[epilogue.activation]
        values = [activate(kernel, value) for value in values]
    return values


def _call(kernel: AirKernel, name: str, value: ir.Value) -> ir.Value:
    return kernel.call(f"air.{name}.f32", builder.f32(), [value])


def _relu(_: AirKernel, x: ir.Value) -> ir.Value:
    zero = float_constant(0.0)
    # Ordered comparison: a NaN stays a NaN.
    return arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, zero), zero, x)


def _tanh(kernel: AirKernel, x: ir.Value) -> ir.Value:
    return _call(kernel, "tanh", x)


def _silu(kernel: AirKernel, x: ir.Value) -> ir.Value:
    denominator = arith.addf(float_constant(1.0), _call(kernel, "exp", arith.negf(x)))
    return arith.divf(x, denominator)


def _gelu_tanh(kernel: AirKernel, x: ir.Value) -> ir.Value:
    cube = arith.mulf(arith.mulf(x, x), x)
    inner = arith.addf(x, arith.mulf(float_constant(0.044715), cube))
    t = _tanh(kernel, arith.mulf(float_constant(math.sqrt(2 / math.pi)), inner))
    half = arith.mulf(float_constant(0.5), x)
    return arith.mulf(half, arith.addf(float_constant(1.0), t))


def _gelu(kernel: AirKernel, x: ir.Value) -> ir.Value:
    erf = _erf(kernel, arith.mulf(x, float_constant(math.sqrt(0.5))))
    half = arith.mulf(float_constant(0.5), x)
    return arith.mulf(half, arith.addf(float_constant(1.0), erf))


#: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: |error| <= 1.5e-7.
_ERF_P = 0.3275911
_ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _erf(kernel: AirKernel, x: ir.Value) -> ir.Value:
    """The error function; Metal has none."""
    one = float_constant(1.0)
    magnitude = _call(kernel, "fabs", x)
    t = arith.divf(one, arith.addf(one, arith.mulf(float_constant(_ERF_P), magnitude)))
    polynomial = float_constant(_ERF_COEFFICIENTS[0])
    for coefficient in _ERF_COEFFICIENTS[1:]:
        polynomial = arith.addf(arith.mulf(polynomial, t), float_constant(coefficient))
    polynomial = arith.mulf(polynomial, t)
    decay = _call(kernel, "exp", arith.negf(arith.mulf(magnitude, magnitude)))
    value = arith.subf(one, arith.mulf(polynomial, decay))
    negative = arith.cmpf(arith.CmpFPredicate.OLT, x, float_constant(0.0))
    return arith.select(negative, arith.negf(value), value)


_ACTIVATIONS: dict[str, Callable[[AirKernel, ir.Value], ir.Value]] = {
    "relu": _relu,
    "tanh": _tanh,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
