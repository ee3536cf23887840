# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``linalg.scaled_contract``, whose maps say everything."""

from __future__ import annotations

from iree.compiler import ir

from block32.passes.raising.contraction import NotServedError, Operand, ScaledContraction

OP_NAME = "linalg.scaled_contract"


def match(op: ir.Operation) -> ScaledContraction | None:
    """Read the op; its operands are A, A's scales, B, B's scales and the init.

    Raises:
        NotServedError: The ``cast`` attribute asks for unsigned integers.
    """
    if op.name != OP_NAME:
        return None
    if "cast" in op.attributes and "unsigned" in str(op.attributes["cast"]):
        raise NotServedError("expected a signed cast")
    maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
    lhs, lhs_scale, rhs, rhs_scale = (
        Operand(value, affine_map)
        for value, affine_map in zip(list(op.operands)[:4], maps[:4], strict=True)
    )
    return ScaledContraction(lhs, lhs_scale, rhs, rhs_scale, maps[4])
