# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Between builtin MLIR attributes and Python values."""

from __future__ import annotations

from typing import Any

from iree.compiler import ir


def from_python(value: Any) -> ir.Attribute:
    """An attribute for a str, bool, int, list, tuple, dict or attribute; needs an open context."""
    match value:
        case ir.Attribute():
            return value
        case bool():
            return ir.BoolAttr.get(value)
        case int():
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        case str():
            return ir.StringAttr.get(value)
        case list() | tuple():
            return ir.ArrayAttr.get([from_python(item) for item in value])
        case dict():
            return ir.DictAttr.get({name: from_python(item) for name, item in value.items()})
    raise TypeError(f"no builtin attribute for a {type(value).__name__}")


def to_python(attribute: ir.Attribute) -> Any:
    """The Python value of a builtin attribute; other attributes are given back as they are."""
    if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.StringAttr):
        return attribute.value
    if isinstance(attribute, ir.ArrayAttr):
        return [to_python(item) for item in attribute]
    if isinstance(attribute, ir.DictAttr):
        return {item.name: to_python(item.attr) for item in attribute}
    return attribute
