# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From accumulators to y: where the values of a lane belong, one rounding, guarded stores.

w is the A operand of every matrix instruction and x the B operand, so a lane holds neighbouring
columns of one row of y and stores them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, vector

from block32.lowering.common.index import Condition, Index, as_value, both, less
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.workgroup import Workgroup
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ELEMENT_BITS, ScaledMatmul
from block32.lowering.target import RESULT


@dataclass(frozen=True)
class Piece:
    """Neighbouring values of one row of the tile, in one lane.

    Attributes:
        row: Their row, from the tile's first.
        column: The column of the first, from the tile's first; a multiple of the number of values.
        values: 1, 2 or 4 f32 values.
        is_owner: Whether this lane is the one to store them, True where every lane is.
    """

    row: Index
    column: Index
    values: tuple[ir.Value, ...]
    is_owner: Condition = True

    def with_values(self, values: Sequence[ir.Value]) -> Piece:
        """The same place with other values."""
        return Piece(self.row, self.column, tuple(values), self.is_owner)

    def offset(self, row_elements: int, element_bytes: int, value: int = 0) -> Index:
        """Bytes from the tile's first element to one of the values."""
        return (self.row * row_elements + self.column + value) * element_bytes


def extract_values(vector_value: ir.Value, positions: Sequence[int]) -> list[ir.Value]:
    """Some elements of a vector."""
    return [vector.extract(vector_value, [], [position]) for position in positions]


def pack_values(values: Sequence[ir.Value], element: ir.Type) -> ir.Value:
    """Values as one integer or i32 vector, for a store; ``element`` is their type."""
    bits = len(values) * ir.IntegerType(_integer_like(element)).width
    joined = vector.from_elements(ir.VectorType.get([len(values)], element), list(values))
    stored = ir.IntegerType.get_signless(min(bits, 32))
    packed = vector.bitcast(ir.VectorType.get([max(1, bits // 32)], stored), joined)
    return packed if bits > 32 else vector.extract(packed, [], [0])


def _integer_like(element: ir.Type) -> ir.Type:
    return ir.IntegerType.get_signless(32 if isinstance(element, ir.F32Type) else 16)


def store_result(workgroup: Workgroup, pieces: Sequence[Piece]) -> None:
    """Round the values of every piece to y's type and store those that exist."""
    problem = workgroup.geometry.problem
    y = workgroup.y()
    columns = workgroup.columns
    for piece in pieces:
        _store_piece(problem, y, columns, piece)


def store_to_memory(problem: ScaledMatmul, kernel: KernelContext, piece: Piece) -> None:
    """Store a piece whose row and column are those of y, in a lane that knows they exist.

    Only the first column has to exist; the others are checked.
    """
    element = ir.Type.parse(problem.result)
    element_bytes = ELEMENT_BITS[problem.result] // 8
    count = len(piece.values)
    width = count if problem.n % count == 0 else 1
    start = ops.as_i64(piece.row) * problem.n + ops.as_i64(piece.column)
    address = ops.global_pointer(kernel, RESULT) + start * element_bytes
    rounded = [_round(value, element) for value in piece.values]
    for first in range(0, count, width):
        stored = pack_values(rounded[first : first + width], element)

        def store(_: list[ir.Value], stored: ir.Value = stored, first: int = first):
            pointer_type = ir.Type.parse("!llvm.ptr<1>")
            pointer = llvm.inttoptr(pointer_type, as_value(address + first * element_bytes))
            llvm.StoreOp(stored, pointer, alignment=width * element_bytes)
            return []

        ops.if_then(first == 0 or less(piece.column + first, problem.n), [], store)


def _store_piece(problem: ScaledMatmul, y: ops.Buffer, columns: Index, piece: Piece) -> None:
    """One store where N allows it; else one a column, since only a part may exist."""
    count = len(piece.values)
    width = count if problem.n % count == 0 else 1
    element = ir.Type.parse(problem.result)
    element_bytes = ELEMENT_BITS[problem.result] // 8
    rounded = [_round(value, element) for value in piece.values]
    for first in range(0, count, width):
        exists = both(less(piece.column + first, columns), piece.is_owner)
        offset = piece.offset(problem.n, element_bytes, first)
        stored = pack_values(rounded[first : first + width], element)
        y.store(stored, ops.or_out_of_bounds(exists, offset))


def _round(value: ir.Value, element: ir.Type) -> ir.Value:
    return value if isinstance(element, ir.F32Type) else arith.truncf(element, value)
