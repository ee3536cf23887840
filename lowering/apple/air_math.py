# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops of the math dialect as what AIR has: calls, or arithmetic where it has no function."""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir
from iree.compiler.dialects import arith, func

from block32.lowering.apple.builder import float_constant

#: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: |error| <= 1.5e-7.
_ERF_P = 0.3275911
_ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def expand_math(module: ir.Module) -> None:
    """Replaces every op that ``_EXPANSIONS`` names, in a module of kernels on f32 scalars."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _EXPANSIONS:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for op in found:
        with ir.InsertionPoint(op), op.location:
            value = _EXPANSIONS[op.name](*op.operands)
        op.results[0].replace_all_uses_with(value)
        op.erase()


def _call(name: str, value: ir.Value) -> ir.Value:
    callee = ir.FlatSymbolRefAttr.get(f"air.{name}.f32")
    return func.CallOp([value.type], callee, [value]).results[0]


def _exp(x: ir.Value) -> ir.Value:
    return _call("exp", x)


def _tanh(x: ir.Value) -> ir.Value:
    return _call("tanh", x)


def _erf(x: ir.Value) -> ir.Value:
    """The error function; Metal has none."""
    one = float_constant(1.0)
    magnitude = _call("fabs", x)
    t = arith.divf(one, arith.addf(one, arith.mulf(float_constant(_ERF_P), magnitude)))
    polynomial = float_constant(_ERF_COEFFICIENTS[0])
    for coefficient in _ERF_COEFFICIENTS[1:]:
        polynomial = arith.addf(arith.mulf(polynomial, t), float_constant(coefficient))
    decay = _exp(arith.negf(arith.mulf(magnitude, magnitude)))
    value = arith.subf(one, arith.mulf(arith.mulf(polynomial, t), decay))
    negative = arith.cmpf(arith.CmpFPredicate.OLT, x, float_constant(0.0))
    return arith.select(negative, arith.negf(value), value)


def _maximum(a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two; NaN where either is."""
    larger = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, a, b), b, a)  # a NaN stays in a
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, b, b), b, larger)


_EXPANSIONS: dict[str, Callable[..., ir.Value]] = {
    "math.exp": _exp,
    "math.tanh": _tanh,
    "math.erf": _erf,
    "arith.maximumf": _maximum,
}
