# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An activation without scales (bf16, f16, f32) times an MX weight, exact but for f32 sums.

The scaled matrix instructions take no 16-bit operand, so the weight becomes bf16 and the products
are those of ``v_mfma_f32_16x16x32_bf16``, which is one K block. As in the packed form, the waves of
a workgroup take K steps in turn, and both operands go from memory to registers.

**The weight's scale** is 2^(byte - 127). Half of its exponent goes into the conversion of the
weight (any fp8 or fp4 value times 2^-63 .. 2^64 is a bf16 without rounding), the other half into
the multiplication by which the block's sum joins the accumulator. Neither half leaves the normal
numbers, so that every byte is right; a whole scale would not fit into a bf16.

**The activation** is cut into bf16 parts whose sum it is: 8 bits of mantissa in each, so one for
bf16, two for f16, three for f32. The parts' products are added in f32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import amdgpu, arith, math, vector

from block32.lowering.common.bf16_parts import PARTS, split_f32
from block32.lowering.common.index import Index
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.epilogue import Piece, extract_values
from block32.lowering.gfx950.fragments import OperandRows, ScaleRows
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.stream import StreamLoop, emit_streamed
from block32.lowering.gfx950.tiled import (
    activation_rows,
    weight_rows,
    weight_scale_rows,
    zero_accumulator,
)
from block32.lowering.gfx950.workgroup import Lane, Workgroup
from block32.lowering.kernel_context import KernelContext

#: The scale byte of a block that is NaN.
_NAN_BYTE = 255


def emit_w8a16(geometry: Geometry, kernel: KernelContext) -> None:
    """Write the kernel's body."""
    emit_streamed(geometry, kernel, W8A16Loop.create, result_pieces)


def result_pieces(geometry: Geometry, lane: Lane, accumulators: Sequence[ir.Value]) -> list[Piece]:
    """Where a wave's accumulators belong in the tile: each register is one row of a column.

    w is the B operand here: a lane then needs the scales of one row of w alone.
    """
    atom, pieces = geometry.atom, []
    for m in range(geometry.fragments_m):
        for n in range(geometry.fragments_n):
            accumulator = accumulators[m * geometry.fragments_n + n]
            values = extract_values(accumulator, range(atom.result_registers))
            for register, value in enumerate(values):
                row = atom.result_row(lane.group, register) + m * atom.m
                pieces.append(Piece(row, lane.row + n * atom.m, (value,)))
    return pieces


@dataclass(frozen=True)
class BlockScale:
    """The scale of one K block of a row of w, as two f32 factors of about half its exponent."""

    in_weight: ir.Value
    in_sum: ir.Value

    @classmethod
    def of_byte(cls, word: ir.Value, position: int) -> BlockScale:
        """From a byte of an i32.

        ``byte - 127`` is ``(byte // 2 - 63) + ((byte + 1) // 2 - 64)``, and 127 more are the
        exponent field of an f32.
        """
        shifted = arith.shrui(word, ops.i32_value(8 * position)) if position else word
        byte = arith.andi(shifted, ops.i32_value(0xFF))
        one = ops.i32_value(1)
        low_half = arith.shrui(byte, one)
        high_half = arith.shrui(arith.addi(byte, one), one)
        f32 = ir.F32Type.get()
        nan = arith.constant(f32, float("nan"))
        is_nan = arith.cmpi(arith.CmpIPredicate.eq, byte, ops.i32_value(_NAN_BYTE))
        in_sum = _power_of_two(high_half, 127 - 64)
        return cls(_power_of_two(low_half, 127 - 63), arith.select(is_nan, nan, in_sum))


def _power_of_two(exponent: ir.Value, bias: int) -> ir.Value:
    """The f32 whose exponent field is ``exponent + bias``."""
    field = arith.addi(exponent, ops.i32_value(bias))
    return arith.bitcast(ir.F32Type.get(), arith.shli(field, ops.i32_value(23)))


def bf16_weights(chunk: ir.Value, element: str, scale: ir.Value) -> ir.Value:
    """A lane's 8 elements of w times a power of two, as bf16.

    Args:
        chunk: i32, or a vector of two: the codes.
        element: MLIR name of their type.
        scale: The power of two, f32.
    """
    words = [chunk]
    if isinstance(chunk.type, ir.VectorType):
        words = extract_values(chunk, range(ir.VectorType(chunk.type).shape[0]))
    in_word = 8 // len(words)
    codes_type = ir.VectorType.get([in_word], ir.Type.parse(element))
    pair_type = ir.VectorType.get([2], ir.BF16Type.get())
    pairs = []
    for word in words:
        single = vector.from_elements(ir.VectorType.get([1], ops.i32_type()), [word])
        codes = vector.bitcast(codes_type, single)
        pairs += [
            amdgpu.scaled_ext_packed(pair_type, codes, scale, position)
            for position in range(in_word // 2)
        ]
    low, high = (vector.shuffle(a, b, [0, 1, 2, 3]) for a, b in (pairs[:2], pairs[2:]))
    return vector.shuffle(low, high, list(range(8)))


def bf16_parts(chunks: Sequence[ir.Value], element: str) -> list[ir.Value]:
    """A lane's 8 elements of x as vectors of bf16 that add up to them, the largest part first."""
    elements = ir.VectorType.get([8], ir.Type.parse(element))
    x = vector.bitcast(elements, ops.concatenate(chunks))
    count = PARTS[element]
    if count == 1:
        return [x]
    f32 = ir.VectorType.get([8], ir.F32Type.get())
    bf16 = ir.VectorType.get([8], ir.BF16Type.get())
    value = x if element == "f32" else arith.extf(f32, x)
    return [arith.truncf(bf16, part) for part in split_f32(value, count)]


@dataclass(frozen=True)
class W8A16Loop(StreamLoop):
    """The walk along K of one wave.

    Attributes:
        x: The wave's rows of x.
        w: The wave's rows of w.
        w_scales: The scales of those rows of w; all lanes of a row load the same.
    """

    x: OperandRows
    w: OperandRows
    w_scales: ScaleRows

    @classmethod
    def create(cls, workgroup: Workgroup, lane: Lane) -> W8A16Loop:
        """Set up the addresses of a wave."""
        geometry = workgroup.geometry
        rows = [lane.row + m * geometry.atom.m for m in range(geometry.fragments_m)]
        columns = [lane.row + n * geometry.atom.m for n in range(geometry.fragments_n)]
        x = activation_rows(workgroup, rows, lane.group)
        w = weight_rows(workgroup, columns, lane.group)
        w_scales = weight_scale_rows(workgroup, columns, geometry.atom.m, group=0)
        return cls(workgroup, lane.wave, x, w, w_scales)

    def load(self, k: Index) -> list[ir.Value]:
        """The operands of one step: for each K block w's chunks and x's; then scale words."""
        geometry, window = self.geometry, self.geometry.window
        values: list[ir.Value] = []
        for instruction in range(geometry.instructions):
            number, inside = divmod(instruction, window.spread)
            for rows in (self.w, self.x):
                for offset in rows.lane_offsets(window):
                    values += rows.load(offset, window, inside, k + number * window.k)
        offsets = self.w_scales.lane_offsets(window)
        for number in range(geometry.instructions // window.spread):
            values += [
                self.w_scales.load(offset, window, k + number * window.k) for offset in offsets
            ]
        return values

    def multiply(self, loaded: list[ir.Value], accumulators: list[ir.Value]) -> list[ir.Value]:
        """All products of a step whose operands ``load`` gave."""
        geometry = self.geometry
        values = iter(loaded)
        operands = [
            (self._take(values, self.w), self._take(values, self.x))
            for _ in range(geometry.instructions)
        ]
        words = list(values)
        distinct = len(self.w_scales.rows)
        for instruction, (w, x) in enumerate(operands):
            window, byte = divmod(instruction, geometry.window.spread)
            of_window = words[window * distinct : (window + 1) * distinct]
            accumulators = self._multiply_block(w, x, of_window, byte, accumulators)
        return accumulators

    def _take(self, values: Iterator[ir.Value], rows: OperandRows) -> list[list[ir.Value]]:
        """The chunks of each fragment for one instruction."""
        count = self.geometry.atom.chunks(rows.bits)
        return [[next(values) for _ in range(count)] for _ in rows.rows]

    def _multiply_block(
        self,
        w: Sequence[Sequence[ir.Value]],
        x: Sequence[Sequence[ir.Value]],
        words: Sequence[ir.Value],
        byte: int,
        accumulators: Sequence[ir.Value],
    ) -> list[ir.Value]:
        """One K block of all fragments: its sum from zero, times the rest of its scale."""
        scales = [BlockScale.of_byte(word, byte) for word in words]
        scale_of = [scales[row] for row in self.w_scales.row_of_fragment]
        weights = [
            bf16_weights(chunks[0], self.w.element, scale.in_weight)
            for chunks, scale in zip(w, scale_of, strict=True)
        ]
        summed = []
        for chunks in x:
            parts = bf16_parts(chunks, self.x.element)
            for weight, scale in zip(weights, scale_of, strict=True):
                total = zero_accumulator(self.geometry.atom.result_registers)
                for part in reversed(parts):
                    total = amdgpu.mfma(16, 16, 32, part, weight, total)
                factor = vector.broadcast(total.type, scale.in_sum)
                summed.append(math.fma(total, factor, accumulators[len(summed)]))
        return summed

    def guarded_steps(
        self, k: Index, instructions: int, accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step with checked loads."""
        atom = self.geometry.atom
        for instruction in range(instructions):
            here = k + instruction * atom.k
            words = [
                self.w_scales.load_guarded(row, atom, here)
                for row in range(len(self.w_scales.rows))
            ]
            w, x = (
                [rows.load_guarded(fragment, atom, here) for fragment in range(len(rows.rows))]
                for rows in (self.w, self.x)
            )
            accumulators = self._multiply_block(w, x, words, 0, accumulators)
        return accumulators
