# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``linalg.generic`` with two ``arith.scaling_extf`` in its body, as IREE's own tests write it.

The body multiplies the two extended values and adds the product to the accumulator, in any order
of operands.
"""

from __future__ import annotations

from iree.compiler import ir

from block32.passes.raising.contraction import NotServedError, Operand, ScaledContraction
from block32.passes.walk import producer

OP_NAME = "linalg.generic"
_EXTEND = "arith.scaling_extf"


def match(op: ir.Operation) -> ScaledContraction | None:
    """Read the op; None unless its body extends two operands by their scales.

    Raises:
        NotServedError: Two scaled operands that are not multiplied and summed.
    """
    if op.name != OP_NAME or len(op.operands) != 5:
        return None
    body = op.regions[0].blocks[0]
    operations = {operation.operation.name: operation.operation for operation in body}
    extends = [o.operation for o in body if o.operation.name == _EXTEND]
    if len(extends) != 2:
        return None
    terminator = operations["linalg.yield"]
    product = _other_addend(terminator.operands[0], body.arguments[4])
    factors = _factors(product)
    if {_key(f) for f in factors} != {_key(e.results[0]) for e in extends}:
        raise NotServedError("expected the body to sum the product of the two scaled operands")
    maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
    operands = [Operand(v, m) for v, m in zip(list(op.operands)[:4], maps[:4], strict=True)]

    def operand_of(argument: ir.Value) -> Operand:
        if not isinstance(argument, ir.BlockArgument) or argument.arg_number > 3:
            raise NotServedError("expected the operands to be extended as they are")
        return operands[argument.arg_number]

    (lhs, lhs_scale), (rhs, rhs_scale) = (
        (operand_of(e.operands[0]), operand_of(e.operands[1])) for e in extends
    )
    return ScaledContraction(lhs, lhs_scale, rhs, rhs_scale, maps[4])


def _other_addend(value: ir.Value, accumulator: ir.Value) -> ir.Value:
    """The addend of ``value = accumulator + addend``, through a final cast of none."""
    add = _producer(value, "arith.addf")
    for this, other in ((0, 1), (1, 0)):
        if _key(add.operands[this]) == _key(accumulator):
            return add.operands[other]
    raise NotServedError("expected the body to add to its accumulator")


def _factors(product: ir.Value) -> list[ir.Value]:
    return list(_producer(product, "arith.mulf").operands)


def _producer(value: ir.Value, name: str) -> ir.Operation:
    operation = producer(value)
    if operation is None or operation.name != name:
        raise NotServedError(f"expected an {name} in the body")
    return operation


def _key(value: ir.Value) -> int:
    return hash(value)
