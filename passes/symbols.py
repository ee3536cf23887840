# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The symbols that ops define and call."""

from __future__ import annotations

from iree.compiler import ir


def symbol_of(op: ir.Operation | ir.OpView) -> str:
    """The symbol that ``op`` defines; empty where it defines none."""
    attributes = op.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def callee_of(call: ir.Operation) -> str:
    """The symbol of the function that a ``util.call`` calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value
