# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""f32 sums leave a kernel: epilogue, one rounding, and a store that stays inside y."""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.epilogue import apply_epilogue
from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.cpu import ops
from block32.lowering.kernel_context import KernelContext
from block32.lowering.target import RESULT

#: Columns that are finished and stored together.
GROUP = 16


def for_groups(
    kernel: KernelContext, columns: int, body: Callable[[IndexValue, Index], None]
) -> None:
    """Walk a workgroup's ``columns`` in groups of 16: ``body(first column, how many exist)``."""
    n = kernel.problem.n
    first = kernel.workgroup_id() * columns
    last = minimum(first + columns, n)

    def group(column: IndexValue) -> None:
        body(column, GROUP if n % GROUP == 0 else minimum(n - column, GROUP))

    ops.repeat(first, last, GROUP, group)


class ResultStore:
    """Stores rows of 16 columns of y.

    Attributes:
        y: The result as a memref.
    """

    def __init__(self, kernel: KernelContext):
        """Bind y and the epilogue's operands at the insertion point."""
        self._problem = kernel.problem
        problem = kernel.problem
        rows = "?" if problem.m is None else str(problem.m)
        sizes = (kernel.m,) if problem.m is None else ()
        epilogue = problem.epilogue
        self.y = kernel.memref(RESULT, f"memref<{rows}x{problem.n}x{problem.result}>", sizes)
        types = {
            "row_scale": (f"memref<{rows}xf32>", sizes),
            "scale": ("memref<1xf32>", ()),
            "bias": (f"memref<{problem.n}x{epilogue.bias}>", ()),
            "residual": (f"memref<{rows}x{problem.n}x{epilogue.residual}>", sizes),
        }
        self._operands = {
            name: kernel.memref(name, *types[name]) for name in epilogue.operand_names()
        }

    def store(self, values: ir.Value, row: Index, column: Index) -> None:
        """Finish 16 sums and store those whose column exists.

        Args:
            values: ``vector<16xf32>``.
            row: A row of y that exists.
            column: A multiple of 16; may lie outside y.
        """
        n = self._problem.n
        tail = n % GROUP
        if n >= GROUP:
            with ops.when(ops.is_below(column + (GROUP - 1), n)):
                self._store(values, row, column, GROUP)
        if tail:
            with ops.when(ops.is_equal(column, n - tail)):
                self._store(values, row, column, tail)

    def _store(self, values: ir.Value, row: Index, column: Index, count: int) -> None:
        accessors = {
            "row_scale": lambda: self._scalar("row_scale", row),
            "scale": lambda: self._scalar("scale", 0),
            "bias": lambda: self._vector("bias", [column], count),
            "residual": lambda: self._vector("residual", [row, column], count),
        }
        values = apply_epilogue(values, self._problem.epilogue, accessors)
        if self._problem.result != "f32":
            values = ops.convert(arith.truncf, values, ir.Type.parse(self._problem.result))
        ops.store_first(values, self.y, [row, column], count)

    def _scalar(self, name: str, position: Index) -> ir.Value:
        return ops.broadcast(ops.load_scalar(self._operands[name], [position]), GROUP)

    def _vector(self, name: str, indices: list[Index], count: int) -> ir.Value:
        loaded = ops.load_first(self._operands[name], indices, count, GROUP)
        if isinstance(ops.element_type(loaded), ir.F32Type):
            return loaded
        return ops.convert(arith.extf, loaded, ops.f32())
