# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A matmul whose weight, and perhaps activation, the program dequantises before it."""

from __future__ import annotations

from iree.compiler import ir

from block32.passes.raising import dequantized
from block32.passes.raising.contraction import (
    ACTIVATION_TYPES,
    Operand,
    ScaledContraction,
)

OP_NAMES = ("linalg.matmul", "linalg.batch_matmul")


def match(op: ir.Operation, symbols: ir.SymbolTable) -> ScaledContraction | None:
    """Read the op; None unless its right operand is codes times scales.

    The left operand may be the same, or a bf16, f16 or f32 activation as it is.

    Raises:
        NotServedError: The scales are a constant, and not all of them are powers of two.
    """
    if op.name not in OP_NAMES:
        return None
    lhs, rhs, result = operands_of(op)
    if lhs.element not in ACTIVATION_TYPES or rhs.element not in ACTIVATION_TYPES:
        return None
    weight = dequantized.read(rhs, symbols)
    if weight is None:
        return None
    activation = dequantized.read(lhs, symbols) or (lhs, None)
    return ScaledContraction(*activation, *weight, result, from_producers=True)


def operands_of(op: ir.Operation) -> tuple[Operand, Operand, ir.AffineMap]:
    """The two operands of a named matmul with their maps, and the result's map."""
    maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
    return Operand(op.operands[0], maps[0]), Operand(op.operands[1], maps[1]), maps[2]
