# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From accumulators to y: rounded once, guarded at the edges."""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.control import when
from block32.lowering.common.index import Index, less
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.problem import ELEMENT_BITS


class ResultWriter:
    """Stores elements of y; columns past N are left out, rows past M are the caller's to guard."""

    def __init__(self, kernel: KernelContext, m: Index, block_n: int):
        """``m`` is the number of rows as i32; ``block_n`` the columns of a workgroup's tile."""
        problem = kernel.problem
        self.m = m
        self._n = problem.n
        self._element = ir.Type.parse(problem.result)
        self._bytes = ELEMENT_BITS[problem.result] // 8
        self._is_ragged = problem.n % block_n != 0
        self._base = ptx.global_pointer(kernel, "result", kernel.m * (problem.n * self._bytes))

    def write(self, row: Index, column: Index, values: Sequence[ir.Value]) -> None:
        """Store f32 ``values`` as the elements of a row from ``column`` on.

        ``row`` is below M. ``column`` is a multiple of the number of values, which is 1 or 2.
        """
        rounded = [self._round(value) for value in values]
        place = self._base + ptx.row_offset(row, self._n * self._bytes)
        if self._n % len(values) == 0:
            with when(less(column, self._n) if self._is_ragged else True):
                target = place + column * self._bytes
                value = ptx.make_vector(rounded) if len(rounded) > 1 else rounded[0]
                target.store(value, alignment=self._bytes * len(rounded))
            return
        for index, value in enumerate(rounded):
            with when(less(column + index, self._n)):
                (place + (column + index) * self._bytes).store(value, alignment=self._bytes)

    def _round(self, value: ir.Value) -> ir.Value:
        if self._element == ptx.f32():
            return value
        if self._element == ir.BF16Type.get():
            # `arith.truncf` would become integer arithmetic.
            i16 = ir.IntegerType.get_signless(16)
            return ptx.inline_ptx("cvt.rn.bf16.f32 $0, $1;", "=h,f", [value], [i16])[0]
        return arith.truncf(self._element, value)
