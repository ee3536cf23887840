# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The symbols that ops define, call and load."""

from __future__ import annotations

from typing import Final

from iree.compiler import ir

LOAD_NAME: Final = "util.global.load"


def symbol_of(op: ir.Operation | ir.OpView) -> str:
    """The symbol that ``op`` defines; empty where it defines none."""
    attributes = op.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def callee_of(call: ir.Operation) -> str:
    """The symbol of the function that a ``util.call`` calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def global_of(load: ir.Operation | ir.OpView) -> str:
    """The symbol of the global that a ``util.global.load`` reads."""
    return ir.FlatSymbolRefAttr(load.operation.attributes["global"]).value


def value_of_global(definition: ir.Operation) -> ir.Attribute | None:
    """What a global holds on every run: a constant or a parameter. None where that may change."""
    attributes = definition.attributes
    if "is_mutable" in attributes or "initial_value" not in attributes:
        return None
    return attributes["initial_value"]


def load_global(symbol: str, type_: ir.Type) -> ir.Value:
    """``util.global.load`` at the insertion point."""
    load = ir.Operation.create(
        LOAD_NAME,
        results=[type_],
        attributes={"global": ir.FlatSymbolRefAttr.get(symbol)},
    )
    return load.result
