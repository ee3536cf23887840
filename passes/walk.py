# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collecting ops before rewriting them: a handle may not outlive a rewrite of its op."""

from __future__ import annotations

from iree.compiler import ir


def operations_named(module: ir.Module, *names: str) -> list[ir.Operation]:
    """All ops of these names in program order, outside executables.

    Executables hold kernels, whose ops are not the program's.
    """
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in ("hal.executable.source", "hal.executable"):
            return ir.WalkResult.SKIP
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
