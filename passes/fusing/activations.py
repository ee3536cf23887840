# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Activation functions as scalar arithmetic, in the forms that importers write them."""

from __future__ import annotations

import math
from collections.abc import Callable

from iree.compiler import ir

from block32.passes.walk import producer

#: Reads an activation that ends in an op: its name and its argument, or None.
Reader = Callable[[ir.Operation], "tuple[str, ir.Value] | None"]


def read_activation(value: ir.Value) -> tuple[str, ir.Value] | None:
    """The activation (by the name in ``Epilogue.activation``) whose result ``value`` is, and x."""
    op = producer(value)
    if op is None or op.name not in _READERS:
        return None
    for reader in _READERS[op.name]:
        found = reader(op)
        if found is not None:
            return found
    return None


def constant_of(value: ir.Value) -> float | None:
    """The number that a scalar constant is."""
    op = producer(value)
    if op is None or op.name != "arith.constant":
        return None
    attribute = op.attributes["value"]
    return attribute.value if isinstance(attribute, ir.FloatAttr) else None


def is_constant(value: ir.Value, wanted: float) -> bool:
    """Whether ``value`` is the constant ``wanted``, as rounded to any float type of 16 bits up."""
    found = constant_of(value)
    return found is not None and math.isclose(found, wanted, rel_tol=4e-3, abs_tol=0.0)


def _is(value: ir.Value, name: str) -> ir.Operation | None:
    op = producer(value)
    return op if op is not None and op.name == name else None


def _either_order(op: ir.Operation) -> list[tuple[ir.Value, ir.Value]]:
    a, b = op.operands
    return [(a, b), (b, a)]


def _relu(op: ir.Operation) -> tuple[str, ir.Value] | None:
    """``maximumf(x, 0)``."""
    for x, zero in _either_order(op):
        if constant_of(zero) == 0.0:
            return "relu", x
    return None


def _relu_by_select(op: ir.Operation) -> tuple[str, ir.Value] | None:
    """``select(x > 0, x, 0)``; only the unordered comparison keeps a NaN, as ours does."""
    condition, x, zero = op.operands
    compare = _is(condition, "arith.cmpf")
    if compare is None or constant_of(zero) != 0.0 or "ugt" not in _predicate(compare):
        return None
    is_zero = constant_of(compare.operands[1]) == 0.0
    return ("relu", x) if is_zero and compare.operands[0] == x else None


def _predicate(compare: ir.Operation) -> str:
    #: arith.cmpf's predicates by number: 8 is ugt.
    return "ugt" if ir.IntegerAttr(compare.attributes["predicate"]).value == 8 else ""


def _tanh(op: ir.Operation) -> tuple[str, ir.Value] | None:
    return "tanh", op.operands[0]


def _silu_by_division(op: ir.Operation) -> tuple[str, ir.Value] | None:
    """``x / (1 + exp(-x))``."""
    x, divisor = op.operands
    return ("silu", x) if _is_one_plus_exp_of_minus(divisor, x) else None


def _silu_by_product(op: ir.Operation) -> tuple[str, ir.Value] | None:
    """``x * (1 / (1 + exp(-x)))``."""
    for x, sigmoid in _either_order(op):
        if is_sigmoid(sigmoid, x):
            return "silu", x
    return None


def is_sigmoid(value: ir.Value, x: ir.Value) -> bool:
    """Whether ``value`` is ``1 / (1 + exp(-x))``."""
    division = _is(value, "arith.divf")
    if division is None or not is_constant(division.operands[0], 1.0):
        return False
    return _is_one_plus_exp_of_minus(division.operands[1], x)


def _is_one_plus_exp_of_minus(value: ir.Value, x: ir.Value) -> bool:
    total = _is(value, "arith.addf")
    if total is None:
        return False
    for exponential, one in _either_order(total):
        exp = _is(exponential, "math.exp")
        negated = None if exp is None else _is(exp.operands[0], "arith.negf")
        if is_constant(one, 1.0) and negated is not None and negated.operands[0] == x:
            return True
    return False


def _gelu(op: ir.Operation) -> tuple[str, ir.Value] | None:
    """A product of x, 1/2 and ``1 + erf(x / sqrt 2)`` or its form with tanh, in any order."""
    factors = _factors(op)
    halves = [f for f in factors if is_constant(f, 0.5)]
    others = [f for f in factors if not is_constant(f, 0.5)]
    if len(halves) != 1 or len(others) != 2:
        return None
    for x, bracket in (others, others[::-1]):
        name = _gelu_bracket(bracket, x)
        if name is not None:
            return name, x
    return None


def _factors(op: ir.Operation) -> list[ir.Value]:
    """The factors of a product of products, at most three."""
    found: list[ir.Value] = []
    for operand in op.operands:
        inner = _is(operand, "arith.mulf")
        found += [operand] if inner is None else list(inner.operands)
    return found


def _gelu_bracket(value: ir.Value, x: ir.Value) -> str | None:
    total = _is(value, "arith.addf")
    if total is None:
        return None
    for function, one in _either_order(total):
        if not is_constant(one, 1.0):
            continue
        erf, tanh = _is(function, "math.erf"), _is(function, "math.tanh")
        if erf is not None and _is_scaled(erf.operands[0], x, math.sqrt(0.5)):
            return "gelu"
        if tanh is not None and _is_tanh_argument(tanh.operands[0], x):
            return "gelu_tanh"
    return None


def _is_scaled(value: ir.Value, x: ir.Value, factor: float) -> bool:
    """``x * factor``, or ``x / (1 / factor)``."""
    product, division = _is(value, "arith.mulf"), _is(value, "arith.divf")
    if product is not None:
        return any(a == x and is_constant(b, factor) for a, b in _either_order(product))
    if division is not None:
        return division.operands[0] == x and is_constant(division.operands[1], 1.0 / factor)
    return False


def _is_tanh_argument(value: ir.Value, x: ir.Value) -> bool:
    """``sqrt(2/pi) * (x + 0.044715 * x^3)``."""
    product = _is(value, "arith.mulf")
    if product is None:
        return False
    for bracket, factor in _either_order(product):
        total = _is(bracket, "arith.addf")
        if total is None or not is_constant(factor, math.sqrt(2.0 / math.pi)):
            continue
        for a, b in _either_order(total):
            cubic = _is(b, "arith.mulf")
            if a == x and cubic is not None and _is_cubic(cubic, x):
                return True
    return False


def _is_cubic(op: ir.Operation, x: ir.Value) -> bool:
    """``0.044715 * x^3``, the cube as products or as a power."""
    for cube, factor in _either_order(op):
        if is_constant(factor, 0.044715) and _is_cube(cube, x):
            return True
    return False


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    op = producer(value)
    if op is None:
        return False
    if op.name == "math.fpowi" or op.name == "math.powf":
        exponent = producer(op.operands[1])
        is_three = exponent is not None and "3" in str(exponent.attributes["value"])[:2]
        return op.operands[0] == x and is_three
    return op.name == "arith.mulf" and _factors(op) == [x, x, x]


_READERS: dict[str, tuple[Reader, ...]] = {
    "arith.maximumf": (_relu,),
    "arith.select": (_relu_by_select,),
    "math.tanh": (_tanh,),
    "arith.divf": (_silu_by_division,),
    "arith.mulf": (_silu_by_product, _gelu),
}
