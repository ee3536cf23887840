# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The epilogue: elementwise work on f32 accumulators before the one rounding of the store."""

from __future__ import annotations

import math as pymath
from collections.abc import Callable, Mapping

from iree.compiler import ir
from iree.compiler.dialects import arith, math

from block32.lowering.problem import Epilogue

#: Gives an epilogue operand for the elements at hand, as f32 of the accumulator's own type.
Accessor = Callable[[], ir.Value]


def apply_epilogue(
    value: ir.Value, epilogue: Epilogue, operands: Mapping[str, Accessor]
) -> ir.Value:
    """Apply ``epilogue`` to accumulators.

    Args:
        value: f32, a scalar or a vector.
        epilogue: What to do.
        operands: For each of ``epilogue.operand_names()`` a function that loads it (or broadcasts
            it) for the elements of ``value``. Called in that order, once each.
    """
    if epilogue.row_scale:
        value = arith.mulf(value, operands["row_scale"]())
    if epilogue.scale:
        value = arith.mulf(value, operands["scale"]())
    if epilogue.bias:
        value = arith.addf(value, operands["bias"]())
    if epilogue.residual:
        value = arith.addf(value, operands["residual"]())
    if epilogue.activation:
        value = ACTIVATIONS[epilogue.activation](value)
    return value


def _constant(value: float, like: ir.Value) -> ir.Value:
    if isinstance(like.type, ir.VectorType):
        attribute = ir.FloatAttr.get(ir.VectorType(like.type).element_type, value)
        return arith.constant(like.type, ir.DenseElementsAttr.get_splat(like.type, attribute))
    return arith.constant(like.type, value)


def _relu(x: ir.Value) -> ir.Value:
    """max(x, 0); a NaN stays, which the maximum of IREE's rocm back end would lose."""
    zero = _constant(0.0, x)
    return arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, zero), zero, x)


def _gelu(x: ir.Value) -> ir.Value:
    """GELU: x/2 (1 + erf(x / sqrt 2))."""
    error = math.erf(arith.mulf(x, _constant(pymath.sqrt(0.5), x)))
    half = arith.mulf(x, _constant(0.5, x))
    return arith.mulf(half, arith.addf(error, _constant(1.0, x)))


def _gelu_tanh(x: ir.Value) -> ir.Value:
    """GELU by tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    cube = arith.mulf(arith.mulf(x, x), x)
    inner = arith.addf(x, arith.mulf(cube, _constant(0.044715, x)))
    tangent = math.tanh(arith.mulf(inner, _constant(pymath.sqrt(2.0 / pymath.pi), x)))
    half = arith.mulf(x, _constant(0.5, x))
    return arith.mulf(half, arith.addf(tangent, _constant(1.0, x)))


def _silu(x: ir.Value) -> ir.Value:
    """SiLU: x / (1 + exp(-x))."""
    exponential = math.exp(arith.negf(x))
    return arith.divf(x, arith.addf(exponential, _constant(1.0, x)))


#: By the name in ``Epilogue.activation``.
ACTIVATIONS: dict[str, Callable[[ir.Value], ir.Value]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "tanh": math.tanh,
}
