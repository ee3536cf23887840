# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Index arithmetic that runs on integers in tests and on SSA values in a kernel.

Index maps (partition, packing, tile order) are written once as plain Python. Given integers they
give integers; given an ``IndexValue`` they build ``arith`` ops at the current insertion point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from iree.compiler import ir
from iree.compiler.dialects import arith


class IndexValue:
    """An SSA value of type ``index``, or of an integer type, with Python's integer operators.

    Values are taken to be non-negative: ``//``, ``%`` and ``>>`` are unsigned. Integers that meet a
    value become constants of its type; two values must be of one type.
    """

    def __init__(self, value: ir.Value):
        """Wrap ``value``, which must be of type ``index`` or of a signless integer type."""
        self.value = value

    def __add__(self, other: Index) -> Index:
        return self if _is_int(other, 0) else _build(arith.addi, self, other)

    def __radd__(self, other: int) -> Index:
        return self + other

    def __sub__(self, other: Index) -> Index:
        return self if _is_int(other, 0) else _build(arith.subi, self, other)

    def __rsub__(self, other: int) -> Index:
        return _build(arith.subi, other, self)

    def __mul__(self, other: Index) -> Index:
        if _is_int(other, 0):
            return 0
        return self if _is_int(other, 1) else _build(arith.muli, self, other)

    def __rmul__(self, other: int) -> Index:
        return self * other

    def __floordiv__(self, other: Index) -> Index:
        return self if _is_int(other, 1) else _build(arith.divui, self, other)

    def __mod__(self, other: Index) -> Index:
        return 0 if _is_int(other, 1) else _build(arith.remui, self, other)

    def __and__(self, other: Index) -> Index:
        return _build(arith.andi, self, other)

    def __or__(self, other: Index) -> Index:
        return _build(arith.ori, self, other)

    def __rfloordiv__(self, other: int) -> Index:
        return _build(arith.divui, other, self)

    def __rmod__(self, other: int) -> Index:
        return _build(arith.remui, other, self)

    def __xor__(self, other: Index) -> Index:
        return self if _is_int(other, 0) else _build(arith.xori, self, other)

    def __rxor__(self, other: int) -> Index:
        return self ^ other

    def __lshift__(self, other: Index) -> Index:
        return self if _is_int(other, 0) else _build(arith.shli, self, other)

    def __rshift__(self, other: Index) -> Index:
        return self if _is_int(other, 0) else _build(arith.shrui, self, other)


#: What index maps take and give.
Index: TypeAlias = int | IndexValue


def _is_int(value: Index, wanted: int) -> bool:
    return isinstance(value, int) and value == wanted


def constant(value: int) -> ir.Value:
    """An ``arith.constant`` of type ``index``."""
    return arith.constant(ir.IndexType.get(), value)


def as_value(value: Index) -> ir.Value:
    """The SSA value of an index; a Python integer becomes a constant."""
    return constant(value) if isinstance(value, int) else value.value


def as_typed_value(value: Index, value_type: ir.Type) -> ir.Value:
    """The SSA value of an index; a Python integer becomes a constant of ``value_type``."""
    return arith.constant(value_type, value) if isinstance(value, int) else value.value


def _build(op: Callable[..., Any], a: Index, b: Index) -> IndexValue:
    return IndexValue(op(*as_values(a, b)))


def as_values(a: Index, b: Index) -> tuple[ir.Value, ir.Value]:
    """Two indices as SSA values of one type; an integer takes the type of the other."""
    if isinstance(a, IndexValue):
        return a.value, b.value if isinstance(b, IndexValue) else arith.constant(a.value.type, b)
    if isinstance(b, IndexValue):
        return arith.constant(b.value.type, a), b.value
    return constant(a), constant(b)


#: What a comparison of indices gives.
Condition: TypeAlias = bool | ir.Value


def less(a: Index, b: Index) -> Condition:
    """``a < b`` for non-negative indices; a Python bool where both are integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return _compare(arith.CmpIPredicate.ult, a, b)


def equal(a: Index, b: Index) -> Condition:
    """``a == b``; a Python bool where both are integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return _compare(arith.CmpIPredicate.eq, a, b)


def _compare(predicate: arith.CmpIPredicate, a: Index, b: Index) -> ir.Value:
    return arith.cmpi(predicate, *as_values(a, b))


def both(a: Condition, b: Condition) -> Condition:
    """``a and b``."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return arith.andi(a, b)


def either(a: Condition, b: Condition) -> Condition:
    """``a or b``."""
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return arith.ori(a, b)


def choose(condition: Condition, a: Index, b: Index) -> Index:
    """``a if condition else b``; two Python integers become values of type ``index``."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, int) and isinstance(b, int) and a == b:
        return a
    return IndexValue(arith.select(condition, *as_values(a, b)))


def minimum(a: Index, b: Index) -> Index:
    """The smaller of two non-negative indices."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return _build(arith.minui, a, b)


def maximum(a: Index, b: Index) -> Index:
    """The larger of two non-negative indices."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return _build(arith.maxui, a, b)


def ceil_div(a: Index, b: int) -> Index:
    """``a / b`` rounded up, for ``b > 0``."""
    return (a + (b - 1)) // b


def round_up(a: Index, multiple: int) -> Index:
    """The smallest multiple of ``multiple`` that is not below ``a``."""
    return ceil_div(a, multiple) * multiple


def as_integer(value: Index) -> int:
    """The integer of an index that is known while a kernel is written."""
    assert isinstance(value, int), "the index is known only at run time"
    return value
