# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One quantisation for all matmuls that read the same activation."""

from __future__ import annotations

from collections.abc import Hashable

from iree.compiler import ir

from block32.dialects.composite import Quantize
from block32.passes.canonical import composites_of
from block32.passes.symbols import callee_of
from block32.passes.walk import operations_named

_RESHAPES = ("tensor.collapse_shape", "tensor.expand_shape", "tensor.cast")


def share_quantisations(module: ir.Module) -> None:
    """Replace calls of one ``quantize`` on one value, in one block, by the first of them."""
    composites = composites_of(module)
    first: dict[Hashable, ir.Operation] = {}
    for call in operations_named(module, "util.call"):
        callee = callee_of(call)
        if not isinstance(composites.get(callee), Quantize):
            continue
        key = (callee, call.block, _identity(call.operands[0]))
        if key not in first:
            first[key] = call
            continue
        for result, shared in zip(call.results, first[key].results, strict=True):
            result.replace_all_uses_with(shared)
        call.erase()


def _identity(value: ir.Value) -> Hashable:
    """Equal for values that are the same reshape of the same value."""
    if isinstance(value.owner, ir.Block) or value.owner.name not in _RESHAPES:
        return value
    op = value.owner.operation
    return op.name, value.type, tuple(_identity(operand) for operand in op.operands)
