# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The body of an elementwise op as a list of epilogue steps on one of its operands."""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir

from block32.passes.fusing.activations import (
    constant_of,
    is_sigmoid,
    read_activation,
)
from block32.passes.walk import producer


@dataclass(frozen=True)
class Step:
    """One elementwise step on an accumulator.

    Attributes:
        kind: ``add``, ``multiply`` or ``activate``.
        operand: The number of the op's operand that is added or multiplied with.
        factor: The constant that is multiplied with, where there is no operand.
        activation: The name of the activation.
    """

    kind: str
    operand: int | None = None
    factor: float | None = None
    activation: str | None = None


def read_steps(op: ir.Operation, position: int) -> list[Step] | None:
    """The steps by which an elementwise op makes its result from operand ``position``.

    Returns:
        The steps in order, casts left out; None where the body does something else.
    """
    body = op.regions[0].blocks[0]
    return _steps(_yielded(body), body.arguments[position], body)


def _steps(value: ir.Value, accumulator: ir.Value, body: ir.Block) -> list[Step] | None:
    if value == accumulator:
        return []
    op = producer(value)
    if op is None:
        return None
    activation = read_activation(value)
    if activation is not None:
        name, x = activation
        return _followed(_steps(x, accumulator, body), Step("activate", activation=name))
    match op.name:
        case "arith.truncf":
            return _steps(op.operands[0], accumulator, body)
        case "arith.addf" | "arith.mulf":
            kind = "add" if op.name == "arith.addf" else "multiply"
            for x, other in (tuple(op.operands), tuple(op.operands)[::-1]):
                step = _step_with(kind, other, accumulator, body)
                before = None if step is None else _steps(x, accumulator, body)
                if step is not None and before is not None:
                    return [*before, step]
    return None


def _followed(steps: list[Step] | None, last: Step) -> list[Step] | None:
    return None if steps is None else [*steps, last]


def _step_with(kind: str, other: ir.Value, accumulator: ir.Value, body: ir.Block) -> Step | None:
    """A sum or product with another operand, extended or as it is, or with a constant."""
    factor = constant_of(other)
    if factor is not None:
        return Step(kind, factor=factor) if kind == "multiply" else None
    extended = producer(other)
    if extended is not None and extended.name == "arith.extf":
        other = extended.operands[0]
    if not isinstance(other, ir.BlockArgument) or other.owner != body or other == accumulator:
        return None
    return Step(kind, operand=other.arg_number)


def is_silu(value: ir.Value, sigmoid: ir.Operation, product: ir.Operation) -> bool:
    """Whether ``product`` is ``value * sigmoid(value)``, the sigmoid an elementwise op of its own.

    Both ops are elementwise, read ``value``, and read all they read at the element they write.
    """
    uses = [use.owner for use in sigmoid.results[0].uses]
    if len(uses) != 1 or uses[0].operation != product or len(product.operands) != 3:
        return False
    if not (_is_pointwise(sigmoid) and _is_pointwise(product)):
        return False
    body = sigmoid.regions[0].blocks[0]
    position = list(sigmoid.operands).index(value)
    if not is_sigmoid(_yielded(body), body.arguments[position]):
        return False
    body = product.regions[0].blocks[0]
    multiply = producer(_yielded(body))
    if multiply is None or multiply.name != "arith.mulf":
        return False
    factors = {v.arg_number for v in multiply.operands if isinstance(v, ir.BlockArgument)}
    read = [v for i, v in enumerate(product.operands) if i in factors]
    return len(read) == 2 and value in read and sigmoid.results[0] in read


def _is_pointwise(op: ir.Operation) -> bool:
    maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
    return all(m == maps[-1] for m in maps)


def _yielded(body: ir.Block) -> ir.Value:
    return body.operations[len(body.operations) - 1].operation.operands[0]
