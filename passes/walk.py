# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finding ops: those of a program, and the one that gives a value.

They are collected before they are rewritten, since a handle may not outlive a rewrite of its op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iree.compiler import ir

from block32.dialects.composite import is_composite

#: What holds kernels, or the matchers of a transform spec: their ops are not the program's.
_NOT_THE_PROGRAM: Final = ("hal.executable.source", "hal.executable", "transform.named_sequence")


def operations_where(
    module: ir.Module, wanted: Callable[[ir.Operation], bool]
) -> list[ir.Operation]:
    """All ops of the program that are ``wanted``, in program order.

    What is inside a composite is its meaning, and no part of the program.
    """
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _NOT_THE_PROGRAM:
            return ir.WalkResult.SKIP
        if wanted(op):
            found.append(op)
        return ir.WalkResult.SKIP if is_composite(op) else ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def operations_named(module: ir.Module, *names: str) -> list[ir.Operation]:
    """All ops of these names in program order, outside executables."""
    return operations_where(module, lambda op: op.name in names)


def producer(value: ir.Value) -> ir.Operation | None:
    """The op that gives ``value``; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation
