# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.layout``: the order in which the bytes of a weight are stored.

On a ``util.global`` of codes, ``block32.layout = "n16k1"`` says that they are not ``[N, K]`` as the
type has it, but in that layout of ``lowering/common/weight_layout.py``. On an op it says so of the
op's result. Without the attribute the order is the plain one.
"""

from __future__ import annotations

from iree.compiler import ir

from block32.dialects.diagnostics import BadAttributeError, error_at
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN, ROW_MULTIPLE

ATTRIBUTE = "block32.layout"

#: Element types of codes that may have another order: a byte each.
_BYTES = ("i8", "f8E4M3FN", "f8E5M2")


def parse(attribute: ir.Attribute) -> str:
    """Read the attribute: the name of a layout.

    Raises:
        BadAttributeError: It is no string, or no layout has this name.
    """
    if not isinstance(attribute, ir.StringAttr):
        raise BadAttributeError(f"expected a string but got {attribute}")
    if attribute.value != PLAIN and attribute.value not in LAYOUTS:
        known = ", ".join((PLAIN, *LAYOUTS))
        raise BadAttributeError(f"unknown layout '{attribute.value}'; expected one of {known}")
    return attribute.value


def build(name: str) -> ir.Attribute:
    """The attribute for a layout; needs an open context."""
    return ir.StringAttr.get(name)


def check(name: str, type_: ir.Type) -> None:
    """Check that a tensor of ``type_`` may be stored in a layout.

    Raises:
        BadAttributeError: It is no static matrix of bytes, or no whole number of pieces.
    """
    if name == PLAIN:
        return
    layout = LAYOUTS[name]
    wanted = f"N a multiple of {layout.rows} and K one of {ROW_MULTIPLE}"
    shaped = ir.RankedTensorType(type_) if isinstance(type_, ir.RankedTensorType) else None
    if (
        shaped is None
        or shaped.rank != 2
        or not shaped.has_static_shape
        or str(shaped.element_type) not in _BYTES
        or not layout.fits((shaped.shape[0], shaped.shape[1]))
    ):
        raise BadAttributeError(f"'{name}' is for [N, K] bytes with {wanted} but this is {type_}")


def of_global(definition: ir.Operation | ir.OpView) -> str:
    """The layout of a ``util.global``.

    Raises:
        DiagnosticError: The attribute is malformed, or does not fit the global's type.
    """
    operation = definition.operation
    if ATTRIBUTE not in operation.attributes:
        return PLAIN
    try:
        name = parse(operation.attributes[ATTRIBUTE])
        check(name, ir.TypeAttr(operation.attributes["type"]).value)
    except BadAttributeError as error:
        raise error_at(operation, f"has a malformed '{ATTRIBUTE}': {error}") from error
    return name
