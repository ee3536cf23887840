# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Private functions and calls of them: how block32 adds operations to a program."""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir


def declare_function(
    symbol: str, inputs: Sequence[ir.Type], results: Sequence[ir.Type]
) -> ir.Operation:
    """``util.func private @symbol`` at the insertion point, without a body."""
    return ir.Operation.create(
        "util.func",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "sym_visibility": ir.StringAttr.get("private"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(list(inputs), list(results))),
            "tied_operands": index_array([-1] * len(results)),
        },
        regions=1,
    )


def private_function(
    symbol: str, inputs: Sequence[ir.Type], results: Sequence[ir.Type]
) -> tuple[ir.Operation, ir.Block]:
    """``util.func private @symbol`` at the insertion point, and its entry block without ops."""
    function = declare_function(symbol, inputs, results)
    locations = [ir.Location.unknown()] * len(inputs)
    return function, function.regions[0].blocks.append(*inputs, arg_locs=locations)


def build_return(values: Sequence[ir.Value]) -> None:
    """``util.return values``."""
    ir.Operation.create("util.return", operands=list(values))


def call(callee: str, operands: Sequence[ir.Value], results: Sequence[ir.Type]) -> ir.Operation:
    """``util.call @callee(operands) -> results``."""
    return ir.Operation.create(
        "util.call",
        results=list(results),
        operands=list(operands),
        attributes={
            "callee": ir.FlatSymbolRefAttr.get(callee),
            "tied_operands": index_array([-1] * len(results)),
        },
    )


def index_array(values: list[int]) -> ir.Attribute:
    """An array attribute of ``index`` integers."""
    index = ir.IndexType.get()
    return ir.ArrayAttr.get([ir.IntegerAttr.get(index, value) for value in values])


def inline_call(call_op: ir.Operation, function: ir.Operation) -> None:
    """Replace a call by a copy of its callee's body, which must be one block.

    IREE's own inlining comes late, after an interprocedural pass that fails on functions of
    several results (``operation's operand is unlinked``, IREE 3.13).
    """
    body = function.regions[0].blocks[0]
    values: dict[ir.Value, ir.Value] = dict(zip(body.arguments, call_op.operands, strict=True))
    *operations, terminator = [op.operation for op in body]
    with ir.InsertionPoint(call_op):
        for op in operations:
            copy = op.clone()
            _replace_operands(copy, values)
            values.update(zip(op.results, copy.results, strict=True))
    for result, returned in zip(call_op.results, terminator.operands, strict=True):
        result.replace_all_uses_with(values.get(returned, returned))
    call_op.erase()


def _replace_operands(op: ir.Operation, values: dict[ir.Value, ir.Value]) -> None:
    """Replace operands of ``op`` and of all ops inside it."""

    def visit(nested: ir.Operation) -> ir.WalkResult:
        for position, operand in enumerate(nested.operands):
            if operand in values:
                nested.operands[position] = values[operand]
        return ir.WalkResult.ADVANCE

    op.walk(visit, ir.WalkOrder.PRE_ORDER)
