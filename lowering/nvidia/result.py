# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From accumulators to y: the epilogue, one rounding, and a store that stays inside y."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.control import when
from block32.lowering.common.epilogue import apply_epilogue
from block32.lowering.common.index import Index, less
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.problem import ELEMENT_BITS
from block32.lowering.target import RESULT


class ResultWriter:
    """Stores elements of y; columns past N are left out, rows past M are the caller's to guard."""

    def __init__(self, kernel: KernelContext, m: Index, block_n: int):
        """``m`` is the number of rows as i32; ``block_n`` the columns of a workgroup's tile."""
        problem = kernel.problem
        self.m = m
        self._n = problem.n
        self._epilogue = problem.epilogue
        self._element = problem.result
        self._is_ragged = problem.n % block_n != 0
        self._base = self._bind(kernel, RESULT, self._element, kernel.m * problem.n)
        sizes: dict[str, tuple[str, Index]] = {
            "row_scale": ("f32", kernel.m),
            "scale": ("f32", 1),
            "bias": (problem.epilogue.bias or "", problem.n),
            "residual": (problem.epilogue.residual or "", kernel.m * problem.n),
        }
        self._operands = {
            name: (self._bind(kernel, name, *sizes[name]), sizes[name][0])
            for name in problem.epilogue.operand_names()
        }

    @staticmethod
    def _bind(kernel: KernelContext, name: str, element: str, count: Index) -> Pointer:
        return ptx.global_pointer(kernel, name, count * (ELEMENT_BITS[element] // 8))

    def write(self, row: Index, column: Index, values: Sequence[ir.Value]) -> None:
        """Finish f32 ``values`` and store them as the elements of a row from ``column`` on.

        ``row`` is below M. ``column`` is a multiple of the number of values, which is 1 or 2.
        """
        size = ELEMENT_BITS[self._element] // 8
        if self._n % len(values) == 0:
            with when(less(column, self._n) if self._is_ragged else True):
                rounded = [
                    self._round(self._finish(value, row, column + index))
                    for index, value in enumerate(values)
                ]
                target = self._base + ptx.row_offset(row, self._n * size) + column * size
                value = ptx.make_vector(rounded) if len(rounded) > 1 else rounded[0]
                target.store(value, alignment=size * len(rounded))
            return
        for index, value in enumerate(values):
            self.write_one(row, column + index, value)

    def write_one(self, row: Index, column: Index, value: ir.Value) -> None:
        """Finish and store one element, whose column may lie past N."""
        size = ELEMENT_BITS[self._element] // 8
        with when(less(column, self._n)):
            rounded = self._round(self._finish(value, row, column))
            target = self._base + ptx.row_offset(row, self._n * size) + column * size
            target.store(rounded, alignment=size)

    def _finish(self, value: ir.Value, row: Index, column: Index) -> ir.Value:
        places: dict[str, Callable[[], ir.Value]] = {
            "row_scale": lambda: self._load("row_scale", row, 1, 0),
            "scale": lambda: self._load("scale", 0, 1, 0),
            "bias": lambda: self._load("bias", 0, 1, column),
            "residual": lambda: self._load("residual", row, self._n, column),
        }
        return apply_epilogue(value, self._epilogue, places)

    def _load(self, name: str, row: Index, pitch: int, column: Index) -> ir.Value:
        """Element (row, column) of an operand, as f32."""
        base, element = self._operands[name]
        size = ELEMENT_BITS[element] // 8
        place = base + ptx.row_offset(row, pitch * size) + column * size
        loaded = place.load(ir.Type.parse(element), alignment=size)
        return loaded if element == "f32" else arith.extf(ptx.f32(), loaded)

    def _round(self, value: ir.Value) -> ir.Value:
        match self._element:
            case "f32":
                return value
            case "bf16":
                # `arith.truncf` would become integer arithmetic.
                i16 = ir.IntegerType.get_signless(16)
                return ptx.inline_ptx("cvt.rn.bf16.f32 $0, $1;", "=h,f", [value], [i16])[0]
            case _:
                return arith.truncf(ir.Type.parse(self._element), value)
