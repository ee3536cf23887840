# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The launch that quantises x: a workgroup takes 64 rows of one K block.

Four neighbouring lanes share a row, with 8 elements each.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.index import Index, ceil_div, equal, less, minimum
from block32.lowering.common.quantization import quantized_code, scale_byte
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.fragments import OperandRows, aligned_width
from block32.lowering.gfx950.machine import CHUNK_BYTES
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ELEMENT_BITS, ScaledMatmul

#: Rows of a workgroup, its threads, and the elements of each.
ROWS = 64
THREADS = 256
ELEMENTS = ROWS * BLOCK_K // THREADS
_LANES_OF_ROW = THREADS // ROWS

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def workgroups(problem: ScaledMatmul, m: Index) -> Index:
    """The size of the launch."""
    return ceil_div(m, ROWS) * problem.k_blocks


def emit_quantize(problem: ScaledMatmul, kernel: KernelContext) -> None:
    """Write the kernel's body."""
    m, number, thread = (
        ops.as_i32(kernel.m),
        ops.as_i32(kernel.workgroup_id(0)),
        ops.thread_id(),
    )
    first_row = number // problem.k_blocks * ROWS
    block = number % problem.k_blocks
    rows = minimum(m - first_row, ROWS)
    row, part = thread // _LANES_OF_ROW, thread % _LANES_OF_ROW
    k = block * BLOCK_K + part * ELEMENTS
    x = _load(problem, kernel, first_row, rows, row, k)
    byte = scale_byte(_largest_of_row(x), problem.lhs_quantize, problem.quantized().lhs)
    bytes_of_lane = vector.broadcast(ir.VectorType.get([ELEMENTS], ops.i32_type()), byte)
    codes = quantized_code(x, bytes_of_lane, problem.quantized().lhs)
    i8 = ir.IntegerType.get_signless(8)
    _store_codes(
        _rows_of(kernel, CODES, first_row, rows, problem.k),
        arith.trunci(ir.VectorType.get([ELEMENTS], i8), codes),
        row * problem.k,
        k,
        problem.k,
    )
    scales = _rows_of(kernel, SCALES, first_row, rows, problem.k_blocks)
    offset = ops.or_out_of_bounds(equal(part, 0), row * problem.k_blocks + block)
    scales.store(arith.trunci(i8, byte), offset)


def _rows_of(
    kernel: KernelContext, name: str, first_row: Index, rows: Index, row_bytes: int
) -> ops.Buffer:
    """The workgroup's rows of a matrix."""
    address = ops.global_pointer(kernel, name) + ops.as_i64(first_row) * row_bytes
    return ops.make_buffer(address, rows * row_bytes)


def _load(
    problem: ScaledMatmul,
    kernel: KernelContext,
    first_row: Index,
    rows: Index,
    row: Index,
    k: Index,
) -> ir.Value:
    """A lane's elements as f32, zeros past the end of K."""
    bits, row_bytes = ELEMENT_BITS[problem.lhs], problem.lhs_row_bytes
    buffer = _rows_of(kernel, "lhs", first_row, rows, row_bytes)
    operand = OperandRows(buffer, problem.lhs, bits, row_bytes, (row * row_bytes,), 0)
    in_piece = CHUNK_BYTES * 8 // bits
    pieces = [
        operand.load_chunk_guarded(0, k + first, CHUNK_BYTES)
        for first in range(0, ELEMENTS, in_piece)
    ]
    words = ops.concatenate(pieces)
    x = vector.bitcast(ir.VectorType.get([ELEMENTS], ir.Type.parse(problem.lhs)), words)
    f32 = ir.VectorType.get([ELEMENTS], ir.F32Type.get())
    return x if problem.lhs == "f32" else arith.extf(f32, x)


def _largest_of_row(x: ir.Value) -> ir.Value:
    """The largest magnitude of the block in all four lanes of a row; NaNs are passed over."""
    i32 = ir.VectorType.get([ELEMENTS], ops.i32_type())
    bits = arith.andi(arith.bitcast(i32, x), _splat(i32, _MAGNITUDE))
    is_nan = arith.cmpi(arith.CmpIPredicate.ugt, bits, _splat(i32, _INFINITY))
    bits = arith.select(is_nan, _splat(i32, 0), bits)
    largest = vector.reduction(ops.i32_type(), vector.CombiningKind.MAXUI, bits)
    for neighbours in ops.QUAD_NEIGHBOURS:
        largest = arith.maxui(largest, ops.quad_permute(largest, neighbours))
    return arith.bitcast(ir.F32Type.get(), largest)


def _store_codes(
    buffer: ops.Buffer, codes: ir.Value, row_offset: Index, k: Index, row_bytes: int
) -> None:
    """Store a lane's codes in pieces that lie wholly inside the row or wholly outside."""
    width = aligned_width(row_bytes, min(4, ELEMENTS))
    piece = ir.IntegerType.get_signless(8 * width)
    pieces = vector.bitcast(ir.VectorType.get([ELEMENTS // width], piece), codes)
    for number in range(ELEMENTS // width):
        start = k + number * width
        offset = ops.or_out_of_bounds(less(start, row_bytes), row_offset + start)
        buffer.store(vector.extract(pieces, [], [number]), offset)


def _splat(vector_type: ir.Type, value: int) -> ir.Value:
    attribute = ir.IntegerAttr.get(ops.i32_type(), value)
    return arith.constant(vector_type, ir.DenseElementsAttr.get_splat(vector_type, attribute))
