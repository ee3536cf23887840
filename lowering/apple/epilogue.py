# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What happens to f32 accumulators on the way to y: the epilogue, the rounding, the store."""

from __future__ import annotations

import math

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.builder import AirKernel, Pointer, Word, float_constant, wide
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import ELEMENT_TYPES
from block32.lowering.common.epilogue import apply_epilogue


def run_alignment(row_elements: int, element: str, run: int = 4) -> int:
    """Bytes that every run of ``run`` elements at a multiple of ``run`` in a row is aligned to."""
    size = ELEMENT_TYPES[element].size
    return math.gcd(row_elements * size, run * size)


def store_run(
    kernel: AirKernel,
    matmul: Matmul,
    values: list[ir.Value],
    row: Word,
    column: Word,
    expert: Word | None = None,
) -> None:
    """Finishes neighbouring elements of one row and stores them with one instruction.

    Args:
        kernel: The kernel.
        matmul: What it computes.
        values: f32 accumulators of columns ``column``, ``column + 1``, ...; all are in bounds.
        row: Row of y.
        column: First column.
        expert: The expert whose scale applies, in a grouped matmul.
    """
    offset = wide(row) * matmul.n + wide(column)
    values = _finish(kernel, matmul, values, row, column, offset, expert)
    stored = [cast(value, matmul.result) for value in values]
    target = kernel.buffer("result").at(offset)
    _store(target, stored, matmul.n)


def store_zeros(kernel: AirKernel, matmul: Matmul, count: int, row: Word, column: Word) -> None:
    """Stores ``count`` zeros at (row, column) and right of it."""
    zero = float_constant(0.0, builder.element_type(matmul.result))
    _store(
        kernel.buffer("result").at(wide(row) * matmul.n + wide(column)), [zero] * count, matmul.n
    )


def _store(target: Pointer, values: list[ir.Value], row_elements: int) -> None:
    if len(values) == 1:
        target.store(values[0])
        return
    alignment = run_alignment(row_elements, target.element, len(values))
    target.store(builder.from_elements(values), alignment)


def _load(source: Pointer, count: int, row_elements: int) -> list[ir.Value]:
    """Neighbouring elements as f32."""
    if count == 1:
        return [as_f32(source.load())]
    vector = source.load(count, run_alignment(row_elements, source.element, count))
    return [as_f32(builder.extract(vector, i)) for i in range(count)]


def as_f32(value: ir.Value) -> ir.Value:
    """A scalar of any floating-point type as f32; exact."""
    return value if value.type == builder.f32() else arith.extf(builder.f32(), value)


def cast(value: ir.Value, element: str) -> ir.Value:
    """An f32 scalar rounded to nearest even."""
    return value if element == "f32" else arith.truncf(builder.element_type(element), value)


def _finish(
    kernel: AirKernel,
    matmul: Matmul,
    values: list[ir.Value],
    row: Word,
    column: Word,
    offset: Word,
    expert: Word | None,
) -> list[ir.Value]:
    """Neighbouring accumulators after the expert's scale and the epilogue."""
    if expert is not None and matmul.expert_scale:
        factor = kernel.buffer("expert_scale").at(expert).load()
        values = [arith.mulf(value, factor) for value in values]
    epilogue, count = matmul.epilogue, len(values)
    operands: dict[str, list[ir.Value]] = {}
    if epilogue.row_scale:
        operands["row_scale"] = [kernel.buffer("row_scale").at(row).load()] * count
    if epilogue.scale:
        operands["scale"] = [kernel.buffer("scale").load()] * count
    if epilogue.bias is not None:
        operands["bias"] = _load(kernel.buffer("bias").at(column), count, matmul.n)
    if epilogue.residual is not None:
        operands["residual"] = _load(kernel.buffer("residual").at(offset), count, matmul.n)

    def finish(index: int) -> ir.Value:
        accessors = {name: lambda v=loaded[index]: v for name, loaded in operands.items()}
        return apply_epilogue(values[index], epilogue, accessors)

    return [finish(index) for index in range(count)]
