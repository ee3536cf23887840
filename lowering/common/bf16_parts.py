# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A wider activation as a sum of bf16, so that instructions on bf16 multiply it exactly."""

from __future__ import annotations

from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith, math

#: How many bf16 add up to a value of each type: ceil(bits of its mantissa / 8).
PARTS: Final = {"bf16": 1, "f16": 2, "f32": 3}


def split_f32(value: ir.Value, count: int) -> list[ir.Value]:
    """An f32, or a vector of them, as ``count`` parts that add up to it, the largest first.

    A part but the last is what the upper 16 bits of an f32 say, a bf16. So is the last one, if the
    value has no more than 8 bits of mantissa for each part and is no smaller than 2^-110.

    An infinity is its own first part, and the others are zero. A NaN has NaN for the others, though
    its upper bits alone may be those of an infinity.
    """
    f32 = value.type
    infinity = _constant(f32, float("inf"))
    is_infinite = arith.cmpf(arith.CmpFPredicate.OEQ, math.absf(value), infinity)
    parts: list[ir.Value] = []
    rest = value
    for _ in range(count - 1):
        part = _upper_half(rest)
        rest = arith.subf(rest, part)
        if not parts:
            rest = arith.select(is_infinite, _constant(f32, 0.0), rest)
        parts.append(part)
    return [*parts, rest]


def _upper_half(value: ir.Value) -> ir.Value:
    """The value with its lower 16 bits cleared."""
    i32: ir.Type = ir.IntegerType.get_signless(32)
    if isinstance(value.type, ir.VectorType):
        i32 = ir.VectorType.get(ir.VectorType(value.type).shape, i32)
    bits = arith.andi(arith.bitcast(i32, value), _constant(i32, -(1 << 16)))
    return arith.bitcast(value.type, bits)


def _constant(value_type: ir.Type, value: float) -> ir.Value:
    """A scalar, or a vector of equal elements."""
    if not isinstance(value_type, ir.VectorType):
        return arith.constant(value_type, value)
    element = ir.VectorType(value_type).element_type
    kind = ir.FloatAttr if isinstance(element, ir.F32Type) else ir.IntegerAttr
    attribute = kind.get(element, value)
    return arith.constant(value_type, ir.DenseElementsAttr.get_splat(value_type, attribute))
