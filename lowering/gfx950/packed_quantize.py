# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""x quantised on its way to the matrix unit, in the packed form: one launch fewer for few rows.

A lane holds 16 elements each of two K blocks, and the lane 16 further has the other halves: two
chunks of an instruction are the halves ``g % 2`` of the blocks ``g // 2`` and ``2 + g // 2`` for
group g, while the instruction takes the scale of block g from it. So largest magnitudes are
exchanged with the neighbouring group, and scale bytes between the halves of the wave.

Codes and scales are bit for bit those of ``lowering/common/quantization.py``, and they are
multiplied in the same order as codes from memory: so is the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import amdgpu, arith, llvm, rocdl, vector

from block32.lowering.common.index import Index, equal
from block32.lowering.common.quantization import scale_byte
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.fragments import OperandRows
from block32.lowering.gfx950.geometry import QuantizingGeometry
from block32.lowering.gfx950.machine import CHUNK_BYTES
from block32.lowering.gfx950.packed_operands import Elements, PackedOperand

#: Elements of a K block in one lane.
HALF_BLOCK = 16

#: Scale rules with which no finite value is above the largest code. With the others the conversion
#: instructions would make a NaN where the rule says that the value saturates.
FUSED_RULES = ("rceil", "ceil")

_MAGNITUDE = 0x7FFFFFFF
_TWO_MAGNITUDES = 0x7FFF7FFF
_INFINITY = 0x7F800000
_LARGEST_CODE = 0x7E


@dataclass(frozen=True)
class QuantizedRows(PackedOperand):
    """Rows of x as bf16, f16 or f32.

    Attributes:
        geometry: Sizes.
        rows: The wave's packed rows; their bits are those of x before it is quantised.
    """

    geometry: QuantizingGeometry
    rows: OperandRows

    @property
    def _loads_of_chunk(self) -> int:
        return HALF_BLOCK * self.rows.bits // 8 // CHUNK_BYTES

    def load_elements(self, k: Index) -> list[ir.Value]:
        """For each instruction, fragment and chunk of 16 elements: two loads, or four of an f32."""
        window, rows = self.geometry.window, self.rows
        four = ops.vector_type(4, ops.i32_type())
        first = rows.panel_k + window.chunk_k(rows.group, 0, 0, bits=8)
        offsets = [row + rows.bytes_of(first) for row in rows.rows]
        values: list[ir.Value] = []
        for instruction in range(self.geometry.instructions):
            number, inside = divmod(instruction, window.spread)
            for offset in offsets:
                for chunk in range(window.atom.chunks(bits=8)):
                    step = window.chunk_step(chunk, inside, bits=8)
                    start = rows.bytes_of(k + number * window.k) + rows.bytes_of(step)
                    values += [
                        rows.buffer.load(four, offset, start + piece * CHUNK_BYTES)
                        for piece in range(self._loads_of_chunk)
                    ]
        return values

    def load_scales(self, k: Index) -> list[ir.Value]:
        """None: they are made of the elements."""
        del k
        return []

    def take_elements(self, values: Iterator[ir.Value]) -> Elements:
        """All pieces of a lane's 32 elements."""
        count = self.geometry.atom.chunks(bits=8) * self._loads_of_chunk
        return [
            [[next(values) for _ in range(count)] for _ in self.rows.rows]
            for _ in range(self.geometry.instructions)
        ]

    def operands(
        self, elements: Elements, values: Iterator[ir.Value]
    ) -> list[list[ops.MatrixOperand]]:
        """Quantised."""
        del values
        return [[self._quantize(pieces) for pieces in fragments] for fragments in elements]

    def guarded(self, k: Index) -> list[ops.MatrixOperand]:
        """With checked loads; zeros past the end of K change no scale."""
        atom = self.geometry.atom
        in_piece = CHUNK_BYTES * 8 // self.rows.bits
        operands = []
        for fragment in range(len(self.rows.rows)):
            pieces = [
                self.rows.load_chunk_guarded(
                    fragment,
                    k + atom.chunk_k(self.rows.group, chunk, bits=8) + piece * in_piece,
                    CHUNK_BYTES,
                )
                for chunk in range(atom.chunks(bits=8))
                for piece in range(self._loads_of_chunk)
            ]
            operands.append(self._quantize(pieces))
        return operands

    def _quantize(self, pieces: Sequence[ir.Value]) -> ops.MatrixOperand:
        """A lane's operand of one instruction from its two half blocks."""
        rule = self.geometry.source.lhs_quantize
        halves = [
            HalfBlock.of_pieces(pieces[first : first + self._loads_of_chunk], self.rows.element)
            for first in range(0, len(pieces), self._loads_of_chunk)
        ]
        largest = [_exchange_largest(half.largest()) for half in halves]
        state = [
            value
            for half, bits in zip(halves, largest, strict=True)
            for value in half.quantize(bits, rule)
        ]
        state = ops.if_then(
            _any_special(largest),
            state,
            lambda _: [value for half in halves for value in half.quantize_special(rule)],
        )
        low, low_codes, high, high_codes = state
        even, odd = _swap(rocdl.permlane32_swap, low, high)
        is_even = equal(self.rows.group % 2, 0)
        word = arith.select(as_condition(is_even), even, odd)
        return ops.MatrixOperand(ops.lane_operand([low_codes, high_codes], "f8E4M3FN"), word, 0)


def as_condition(condition: bool | ir.Value) -> ir.Value:
    """An i1."""
    if isinstance(condition, bool):
        return arith.constant(ir.IntegerType.get_signless(1), int(condition))
    return condition


def _any_special(largest: Sequence[ir.Value]) -> ir.Value:
    """Whether an infinity or a NaN is in any lane's blocks; the same in all lanes."""
    infinity = ops.i32_value(_INFINITY)
    of_lane = arith.cmpi(arith.CmpIPredicate.uge, arith.maxui(*largest), infinity)
    lanes = rocdl.ballot(ops.i64_type(), of_lane)
    return arith.cmpi(arith.CmpIPredicate.ne, lanes, arith.constant(ops.i64_type(), 0))


def _exchange_largest(largest: ir.Value) -> ir.Value:
    """The larger of a lane's value and that of the lane with the block's other half."""
    return arith.maxui(*_swap(rocdl.permlane16_swap, largest, largest))


@dataclass(frozen=True)
class HalfBlock:
    """16 neighbouring elements of x in a lane.

    Attributes:
        words: Their bytes, ``vector<i32>``.
        element: MLIR name of their type.
    """

    words: ir.Value
    element: str

    @classmethod
    def of_pieces(cls, pieces: Sequence[ir.Value], element: str) -> HalfBlock:
        """From vectors of four i32 in memory order."""
        words = list(pieces)
        while len(words) > 1:
            count = ir.VectorType(words[0].type).shape[0]
            both = list(range(2 * count))
            pairs = zip(words[::2], words[1::2], strict=True)
            words = [vector.shuffle(a, b, both) for a, b in pairs]
        return cls(words[0], element)

    @property
    def x(self) -> ir.Value:
        """``vector<16x T>``."""
        x_type = ir.VectorType.get([HALF_BLOCK], ir.Type.parse(self.element))
        return vector.bitcast(x_type, self.words)

    def largest(self) -> ir.Value:
        """The f32 bits of the largest magnitude, i32; with a NaN among them those of a NaN.

        Magnitudes order as their bits do, and 16-bit ones are compared two in an instruction.
        """
        is_wide = self.element == "f32"
        lanes = 1 if is_wide else 2
        integer = ir.IntegerType.get_signless(32 // lanes)
        count = ir.VectorType(self.words.type).shape[0]
        values = [vector.extract(self.words, [], [number]) for number in range(count)]
        mask = ops.i32_value(_MAGNITUDE if is_wide else _TWO_MAGNITUDES)
        values = [arith.andi(value, mask) for value in values]
        if not is_wide:
            pair = ir.VectorType.get([2], integer)
            values = [_bitcast_word(value, pair) for value in values]
        while len(values) > 1:
            values = [arith.maxui(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        if is_wide:
            return values[0]
        of_pair = arith.maxui(*(vector.extract(values[0], [], [i]) for i in range(2)))
        value = arith.bitcast(ir.Type.parse(self.element), of_pair)
        return arith.bitcast(ops.i32_type(), arith.extf(ir.F32Type.get(), value))

    def quantize(self, largest: ir.Value, rule: str) -> tuple[ir.Value, ir.Value]:
        """Scale byte (i32) and codes (``vector<4xi32>``) of finite values.

        Args:
            largest: The f32 bits of the whole block's largest magnitude.
            rule: One of ``FUSED_RULES``.
        """
        byte = scale_byte(arith.bitcast(ir.F32Type.get(), largest), rule, "f8E4M3FN")
        return byte, self._codes(byte)

    def quantize_special(self, rule: str) -> tuple[ir.Value, ir.Value]:
        """The same for any values: NaNs are passed over for the scale, infinities saturate.

        The conversion would make a NaN of an infinity.
        """
        i32 = ir.VectorType.get([HALF_BLOCK], ops.i32_type())
        f32 = ir.VectorType.get([HALF_BLOCK], ir.F32Type.get())
        bits = arith.bitcast(i32, self.x if self.element == "f32" else arith.extf(f32, self.x))
        magnitudes = arith.andi(bits, _splat(i32, _MAGNITUDE))
        is_nan = arith.cmpi(arith.CmpIPredicate.ugt, magnitudes, _splat(i32, _INFINITY))
        finite = arith.select(is_nan, _splat(i32, 0), magnitudes)
        largest = vector.reduction(ops.i32_type(), vector.CombiningKind.MAXUI, finite)
        byte, codes = self.quantize(_exchange_largest(largest), rule)
        bytes_type = ir.VectorType.get([HALF_BLOCK], ir.IntegerType.get_signless(8))
        is_infinite = arith.cmpi(arith.CmpIPredicate.eq, magnitudes, _splat(i32, _INFINITY))
        sign = arith.andi(arith.shrui(bits, _splat(i32, 24)), _splat(i32, 0x80))
        saturated = arith.trunci(bytes_type, arith.ori(sign, _splat(i32, _LARGEST_CODE)))
        chosen = arith.select(is_infinite, saturated, vector.bitcast(bytes_type, codes))
        return byte, vector.bitcast(codes.type, chosen)

    def _codes(self, byte: ir.Value) -> ir.Value:
        """The codes of x over a power of two, ``vector<4xi32>``."""
        scale = arith.bitcast(ir.F32Type.get(), arith.shli(byte, ops.i32_value(23)))
        word_type = ir.VectorType.get([4], ir.Type.parse("f8E4M3FN"))
        x, words = self.x, []
        for first in range(0, HALF_BLOCK, 4):
            low, high = (vector.shuffle(x, x, [first + i, first + i + 1]) for i in (0, 2))
            word = amdgpu.packed_scaled_trunc(word_type, low, scale, 0)
            word = amdgpu.packed_scaled_trunc(word_type, high, scale, 1, existing=word)
            single = vector.bitcast(ir.VectorType.get([1], ops.i32_type()), word)
            words.append(vector.extract(single, [], [0]))
        return vector.from_elements(ops.vector_type(4, ops.i32_type()), words)


def _bitcast_word(word: ir.Value, vector_type: ir.Type) -> ir.Value:
    single = vector.from_elements(ir.VectorType.get([1], ops.i32_type()), [word])
    return vector.bitcast(vector_type, single)


def _swap(swap, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Both registers after ``v_permlane16_swap`` or ``v_permlane32_swap``."""
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    swapped = swap(pair, a, b, False, False)
    first, second = (
        llvm.extractvalue(ops.i32_type(), swapped, ir.DenseI64ArrayAttr.get([i])) for i in (0, 1)
    )
    return first, second


def _splat(vector_type: ir.Type, value: int) -> ir.Value:
    attribute = ir.IntegerAttr.get(ops.i32_type(), value)
    return arith.constant(vector_type, ir.DenseElementsAttr.get_splat(vector_type, attribute))
