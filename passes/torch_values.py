# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Between tensors of the torch dialect, which has no bindings here, and builtin ones."""

from __future__ import annotations

import re
from typing import Final

from iree.compiler import ir

_TORCH_TENSOR: Final = re.compile(r"!torch\.vtensor<\[([\d,?]*)\],(\w+)>")


def operator_name(op: ir.Operation) -> str:
    """The name of an operator that an importer passed on as it is; empty for another op."""
    is_operator = op.name == "torch.operator" and "name" in op.attributes
    return ir.StringAttr(op.attributes["name"]).value if is_operator else ""


def tensor_type(value: ir.Value) -> ir.RankedTensorType | None:
    """The builtin type of what a ``!torch.vtensor`` holds; None for another type."""
    match = _TORCH_TENSOR.fullmatch(str(value.type))
    if match is None:
        return None
    dynamic = ir.ShapedType.get_dynamic_size()
    sizes = [dynamic if size == "?" else int(size) for size in match[1].split(",") if size]
    with value.context, ir.Location.unknown():
        element = ir.Type.parse(re.sub(r"^[us]i", "i", match[2]))
        return ir.RankedTensorType.get(sizes, element)


def to_builtin(value: ir.Value) -> ir.Value:
    """``torch_c.to_builtin_tensor`` at the insertion point."""
    return ir.Operation.create(
        "torch_c.to_builtin_tensor", results=[tensor_type(value)], operands=[value]
    ).result


def from_builtin(value: ir.Value, torch_type: ir.Type) -> ir.Value:
    """``torch_c.from_builtin_tensor`` at the insertion point."""
    return ir.Operation.create(
        "torch_c.from_builtin_tensor", results=[torch_type], operands=[value]
    ).result
