# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From accumulators to y: where the values of a lane belong, the epilogue, guarded stores.

w is the A operand of every matrix instruction and x the B operand, so a lane holds neighbouring
columns of one row of y and stores them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.epilogue import apply_epilogue
from block32.lowering.common.index import Condition, Index, both, less
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.workgroup import Workgroup
from block32.lowering.problem import ELEMENT_BITS
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


def join_values(values: Sequence[ir.Value]) -> ir.Value:
    """A vector of values."""
    return vector.from_elements(ir.VectorType.get([len(values)], values[0].type), list(values))


def pack_values(values: Sequence[ir.Value]) -> ir.Value:
    """Values of 2 or 4 bytes as one integer or i32 vector, for a store."""
    bits = len(values) * _bits(values[0].type)
    stored = ir.IntegerType.get_signless(min(bits, 32))
    packed = vector.bitcast(ir.VectorType.get([max(1, bits // 32)], stored), join_values(values))
    return packed if bits > 32 else vector.extract(packed, [], [0])


def _bits(element: ir.Type) -> int:
    return ELEMENT_BITS[str(element)]


def store_result(workgroup: Workgroup, pieces: Sequence[Piece]) -> None:
    """Apply the epilogue to every piece, round once to y's type, and store what exists."""
    writer = _Writer.create(workgroup)
    for piece in pieces:
        writer.store(writer.finish(piece))


@dataclass(frozen=True)
class _Writer:
    """The buffers of one tile's epilogue.

    Attributes:
        workgroup: The tile.
        columns: Columns of the tile that exist.
        buffers: y, and each operand of the epilogue, from the tile's first element on.
    """

    workgroup: Workgroup
    columns: Index
    buffers: dict[str, ops.Buffer]

    @classmethod
    def create(cls, workgroup: Workgroup) -> _Writer:
        """Describe the buffers."""
        problem = workgroup.geometry.problem
        buffers = {RESULT: workgroup.matrix_buffer(RESULT, problem.result)}
        for name in problem.epilogue.operand_names():
            buffers[name] = _operand_buffer(workgroup, name)
        return cls(workgroup, workgroup.columns, buffers)

    def finish(self, piece: Piece) -> Piece:
        """The piece with the epilogue applied."""
        epilogue = self.workgroup.geometry.problem.epilogue
        if not epilogue.operand_names() and not epilogue.activation:
            return piece
        accessors = {
            name: lambda name=name: self._operand(name, piece) for name in epilogue.operand_names()
        }
        values = apply_epilogue(join_values(piece.values), epilogue, accessors)
        return piece.with_values(extract_values(values, range(len(piece.values))))

    def _operand(self, name: str, piece: Piece) -> ir.Value:
        """One operand of the epilogue for the values of a piece, as a vector of f32."""
        epilogue, count = self.workgroup.geometry.problem.epilogue, len(piece.values)
        f32 = ir.F32Type.get()
        if name in ("row_scale", "scale"):
            offset = piece.row * 4 if name == "row_scale" else 0
            scale = self.buffers[name].load(f32, offset)
            return vector.broadcast(ir.VectorType.get([count], f32), scale)
        element = ir.Type.parse(str(epilogue.bias if name == "bias" else epilogue.residual))
        row_elements = 0 if name == "bias" else self.workgroup.geometry.problem.n
        values = [
            self.buffers[name].load(element, piece.offset(row_elements, _bits(element) // 8, i))
            for i in range(count)
        ]
        loaded = join_values(values)
        if isinstance(element, ir.F32Type):
            return loaded
        return arith.extf(ir.VectorType.get([count], f32), loaded)

    def store(self, piece: Piece) -> None:
        """One store where N allows it; else one a column, since only a part may exist."""
        problem = self.workgroup.geometry.problem
        count = len(piece.values)
        width = count if problem.n % count == 0 else 1
        element = ir.Type.parse(problem.result)
        rounded = [_round(value, element) for value in piece.values]
        for first in range(0, count, width):
            exists = both(less(piece.column + first, self.columns), piece.is_owner)
            offset = piece.offset(problem.n, _bits(element) // 8, first)
            stored = pack_values(rounded[first : first + width])
            self.buffers[RESULT].store(stored, ops.or_out_of_bounds(exists, offset))


def _operand_buffer(workgroup: Workgroup, name: str) -> ops.Buffer:
    epilogue = workgroup.geometry.problem.epilogue
    if name == "row_scale":
        return workgroup.row_buffer(name, workgroup.first_row, workgroup.rows, 4)
    if name == "scale":
        return workgroup.row_buffer(name, 0, 1, 4)
    if name == "bias":
        element_bytes = ELEMENT_BITS[str(epilogue.bias)] // 8
        first, count = workgroup.first_column, workgroup.columns
        return workgroup.row_buffer(name, first, count, element_bytes)
    return workgroup.matrix_buffer(name, str(epilogue.residual))


def _round(value: ir.Value, element: ir.Type) -> ir.Value:
    return value if isinstance(element, ir.F32Type) else arith.truncf(element, value)
