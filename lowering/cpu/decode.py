# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Codes of small floats become the operands of multiplications.

An operand is a vector register: pairs of bf16 along K where the machine has bf16 dot products,
f32 otherwise. Every code comes out exactly: subnormals, infinities and NaN too.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.index import Index
from block32.lowering.cpu import ops
from block32.lowering.cpu.byte_tables import BYTES, ByteTables
from block32.lowering.cpu.formats import SMALL_FLOATS, SmallFloat
from block32.lowering.cpu.isa import InstructionSet
from block32.lowering.cpu.scaled_tables import (
    byte_tables,
    scale_byte_tables,
    scale_word_table,
    word_table,
)

#: K indices of 64 neighbours in their own order.
NATURAL = tuple(range(64))
#: The order that interleaving inside 128-bit lanes gives, which is the cheapest: each operand of 32
#: takes half of every 16 bytes. What is multiplied with it must be stored in the same order.
IN_LANE = tuple(16 * lane + 8 * half + i for half in (0, 1) for lane in range(4) for i in range(8))
#: The order that shifting bytes of two 4-bit codes gives: a block of 32 is two 128-bit lanes, whose
#: 16-bit words hold every fourth code.
FOUR_BIT = tuple(
    32 * block + 4 * word + 2 * half + nibble
    for half in (0, 1)
    for block in (0, 1)
    for nibble in (0, 1)
    for word in range(8)
)
#: The order of 32 packed 4-bit codes whose low halves are decoded first, then the high ones.
NIBBLES = tuple(2 * i + high for high in (0, 1) for i in range(16))
#: Before that interleaving: 4 columns of 4 K a lane are put in the order of K pairs, so that each
#: operand is one pair of all 16 columns.
_PAIRS_OF_4_COLUMNS = tuple(
    16 * lane + 4 * column + 2 * pair + i
    for lane in range(4)
    for pair in (0, 1)
    for column in range(4)
    for i in (0, 1)
)


class Decoder:
    """Decodes one format on one instruction set; its tables are built where it is created.

    Attributes:
        isa: The instruction set.
        small: The format.
    """

    def __init__(self, isa: InstructionSet, format_name: str):
        """Build the tables at the insertion point."""
        self.isa = isa
        self.small: SmallFloat = SMALL_FLOATS[format_name]
        has_tables = isa.widen == "table"
        self._tables = byte_tables(self.small) if has_tables else None
        # On Intel's processors a look-up in two registers takes three steps, so that masks are
        # cheaper; operands of bf16 pairs are those of AMD's, where it takes one.
        self._by_halves = has_tables and isa.dot == "f32" and self.small.bits == 8
        self._words = word_table(self.small) if has_tables and self.small.bits == 4 else None
        self._bytes = ByteTables(self.small) if isa.widen == "byte_table" else None

    def scaled(self, scale: ir.Value) -> Decoder:
        """This decoder, its values multiplied by 2^(byte - 127); it has tables of bf16.

        Args:
            scale: The byte, an i8 that is safe to fold.
        """
        assert self._tables is not None and not self._by_halves
        other = copy(self)
        if self._words is None:
            other._tables = scale_byte_tables(self.small, self._tables, scale)
        else:
            other._words = scale_word_table(self.small, self._words, scale)
        return other

    @property
    def k_per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.small.bits

    def load_codes(
        self, buffer: ir.Value, row: Index, k: Index, count: int, width: int
    ) -> ir.Value:
        """Load codes ``k`` to ``k + count`` of a row as a vector of ``width`` bytes, one a code.

        Codes past ``count`` are zeros. ``k`` is a multiple of 2 for packed formats.
        """
        data = self.load_bytes(buffer, row, k, count, width)
        if self.k_per_byte == 1:
            return data
        codes = vector.interleave(*_nibbles(data))
        if count % 2 == 0:
            return codes
        # The high half of the last byte is padding.
        keep = ops.int_table([255 * (i < count) for i in range(width)], ops.i8())
        return arith.andi(codes, keep)

    def load_bytes(
        self, buffer: ir.Value, row: Index, k: Index, count: int, width: int
    ) -> ir.Value:
        """The bytes of ``width`` codes, of which ``count`` exist; bytes past them are zeros."""
        per_byte = self.k_per_byte
        byte_count, byte_width = -(-count // per_byte), width // per_byte
        column = k // per_byte
        if self.isa.masked_bytes and byte_count < byte_width:
            return _masked_load(buffer, row, column, byte_count, byte_width)
        return ops.load_first(buffer, [row, column], byte_count, byte_width)

    def load_chunk(
        self, buffer: ir.Value, row: Index, k: Index, count: int, size: int | None = None
    ) -> ir.Value:
        """Load ``count`` codes of a chunk as ``decode_chunk`` takes them; the rest are zeros.

        Args:
            buffer: Rows of codes as bytes.
            row: The row.
            k: The first code, a multiple of the chunk.
            count: Codes that exist.
            size: Codes in all, where they are not a whole chunk.
        """
        size = size or self.isa.chunk
        if not self._stays_packed:
            return self.load_codes(buffer, row, k, count, size)
        data = self.load_bytes(buffer, row, k, count, size)
        if count % 2 == 0:
            return data
        keep = [255 if 2 * i + 1 < count else 15 for i in range(ops.length(data))]
        return arith.andi(data, ops.int_table(keep, ops.i8()))

    @property
    def _stays_packed(self) -> bool:
        """Whether packed codes of a chunk stay packed until they are looked up."""
        return self.small.bits == 4 and self.isa.widen in ("table", "byte_table")

    @property
    def chunk_bytes(self) -> int:
        """Bytes that ``load_chunk`` gives."""
        return self.isa.chunk // (2 if self._stays_packed else 1)

    def decode_chunk(self, data: ir.Value, raw: bool = False) -> list[ir.Value]:
        """Decode a chunk in the order that costs least: ``operand_order``.

        With tables, 32 neighbours in that order become a register of bf16 pairs, or two registers
        of f32: the firsts and the seconds of the pairs.

        Args:
            data: What ``load_chunk`` gave.
            raw: Leave out the factor ``unit``, for callers that multiply by another one anyway.
        """
        if not self._stays_packed:
            return self.operands(data, raw)
        if self._bytes is not None:
            return [operand for codes in _nibbles(data) for operand in self.operands(codes)]
        pairs = self._look_up_words(ops.bitcast(data, ops.i16()))
        if self.isa.dot == "bf16":
            return pairs
        return [half for operand in pairs for half in split_pairs(operand)]

    def _look_up_words(self, words: ir.Value) -> list[ir.Value]:
        """Four 4-bit codes a word to bf16: the look-up reads the low 5 bits of a word."""
        assert self._words is not None
        spread = ops.permute(words, [8 * block + i for block in (0, 0, 1, 1) for i in range(8)])
        operands = []
        for half in (0, 1):
            shifts = [8 * half + 4 * (lane % 2) for lane in range(4) for _ in range(8)]
            codes = arith.shrui(spread, ops.int_table(shifts, ops.i16()))
            values = ops.intrinsic(
                "llvm.x86.avx512.permvar.hi.512", codes.type, [self._words, codes]
            )
            operands.append(ops.bitcast(values, ir.BF16Type.get()))
        return operands

    @property
    def unit(self) -> float:
        """What *raw* operands have to be multiplied by to be the values of their codes."""
        return 2.0 ** (15 - self.small.bias) if self.isa.widen == "f16" else 1.0

    def operands(
        self, codes: ir.Value, raw: bool = False, order: Sequence[int] | None = None
    ) -> list[ir.Value]:
        """Decode a chunk of codes, in ``order`` with tables; see ``decode_chunk``.

        Args:
            codes: 64 codes with tables; a multiple of 16 with tables of bytes, and of ``lanes``
                without.
            raw: Leave out the factor ``unit``, for callers that multiply by another one anyway.
            order: Where the elements of the result are in ``codes``: by default as it costs least.
        """
        if self._bytes is not None:
            codes = codes if order is None else ops.permute(codes, order)
            return [
                operand
                for piece in ops.parts(codes, BYTES)
                for pairs in self._bytes.pairs(piece)
                for operand in self._in_lanes(pairs)
            ]
        if self.isa.widen == "table":
            pairs = self._bf16_pairs(codes, order or IN_LANE)
            if self.isa.dot == "bf16":
                return pairs
            return [half for operand in pairs for half in self._split(operand)]
        # Two registers of f32 come from one of 16-bit words.
        size = min(2 * self.isa.lanes, ops.length(codes))
        return [
            operand
            for piece in ops.parts(codes, size)
            for operand in ops.parts(self._widen(piece, raw), self.isa.lanes)
        ]

    def natural(self, codes: ir.Value) -> list[ir.Value]:
        """Decode a chunk of codes into operands in the order of K."""
        if self.isa.widen != "table":
            return self.operands(codes)
        pairs = self._bf16_pairs(codes, NATURAL)
        return [operand for register in pairs for operand in self._in_lanes(register)]

    def _in_lanes(self, pairs: ir.Value) -> list[ir.Value]:
        """A register of bf16 as operands in the same order."""
        if self.isa.dot == "bf16":
            return [pairs]
        # Not ``extui`` of the bits: IREE 3.13 rewrites that after a bitcast from bytes, wrongly.
        return ops.parts(vector.interleave(*self._split(pairs)), self.isa.lanes)

    def paired(self, upper: ir.Value, lower: ir.Value) -> list[ir.Value]:
        """Decode a chunk of two rows of w: each operand holds a word of the one, then of the other.

        The codes are put side by side, which is cheaper than to move what becomes of them.

        Args:
            upper: What ``load_chunk`` gave for the one row.
            lower: The same for the other.
        """
        size = ops.length(upper)
        word = self.isa.word * size // self.isa.chunk
        order = [
            at + i + row for at in range(0, size, word) for row in (0, size) for i in range(word)
        ]
        data = ops.shuffle(upper, lower, order)
        return self.operands(vector.interleave(*_nibbles(data)) if self._stays_packed else data)

    def _split(self, operand: ir.Value) -> list[ir.Value]:
        """A register of bf16 pairs as two of f32; see ``_look_up_halves``."""
        return split_pairs(operand, mantissa_bits=self.small.mantissa_bits)

    def columns(self, turned: ir.Value) -> list[ir.Value]:
        """Decode 16 columns of 4 K (with tables) or of 1 K; raw operands, in the order of K."""
        if self.isa.widen != "table":
            return self.operands(turned, raw=True)
        return self.operands(ops.permute(turned, _PAIRS_OF_4_COLUMNS))

    def _bf16_pairs(self, codes: ir.Value, order: Sequence[int]) -> list[ir.Value]:
        """Look up both bytes of every bf16, then interleave them in ``order``."""
        low, high = self._look_up_halves(codes) if self._by_halves else self._look_up(codes)
        if self._by_halves and any(i % 2 != at % 2 for at, i in enumerate(order)):
            low = arith.andi(low, ops.splat(0xFF << self._low_shift, low.type))
        operands = []
        for first in (0, 32):
            mask = [i + half * 64 for i in order[first : first + 32] for half in (0, 1)]
            operands.append(ops.bitcast(ops.shuffle(low, high, mask), ir.BF16Type.get()))
        return operands

    def _look_up(self, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The low and high bytes of the bf16 of 64 codes."""
        assert self._tables is not None
        (low0, low1), (high0, high1) = self._tables
        type_ = codes.type
        if self.small.bits == 4:
            permute = "llvm.x86.avx512.permvar.qi.512"
            return (
                ops.intrinsic(permute, type_, [low0, codes]),
                ops.intrinsic(permute, type_, [high0, codes]),
            )
        # The permute reads the low 7 bits of an index: the magnitude.
        permute = "llvm.x86.avx512.vpermi2var.qi.512"
        low = ops.intrinsic(permute, type_, [low0, codes, low1])
        magnitude = ops.intrinsic(permute, type_, [high0, codes, high1])
        sign = arith.andi(codes, ops.splat(0x80, type_))
        return low, arith.ori(magnitude, sign)

    @property
    def _low_shift(self) -> int:
        """Where the fields of an 8-bit code begin in the low byte of a bf16."""
        return 7 - self.small.mantissa_bits

    def _look_up_halves(self, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The same by look-ups in one register, for magnitudes below 64 and the others.

        The low byte of the others is the code, shifted: they are normal. As a shift moves words,
        the odd bytes have a neighbour's bits at their end, which ``_split`` leaves out.
        """
        assert self._tables is not None
        (low0, _), (high0, high1) = self._tables
        type_ = codes.type
        half = arith.andi(codes, ops.splat(64, type_))
        is_small = arith.cmpi(arith.CmpIPredicate.eq, half, ops.splat(0, type_))
        words = ops.bitcast(codes, ops.i16())
        shifted = arith.shli(words, ops.splat(self._low_shift, words.type))

        def choose(small: ir.Value, other: ir.Value) -> ir.Value:
            permute = "llvm.x86.avx512.permvar.qi.512"
            return arith.select(is_small, ops.intrinsic(permute, type_, [small, codes]), other)

        # The permute reads the low 6 bits of an index.
        others = ops.intrinsic("llvm.x86.avx512.permvar.qi.512", type_, [high1, codes])
        sign = arith.andi(codes, ops.splat(0x80, type_))
        low = choose(low0, ops.bitcast(shifted, ops.i8()))
        return low, arith.ori(choose(high0, others), sign)

    def _widen(self, codes: ir.Value, raw: bool) -> ir.Value:
        """f32 values of codes, without table look-ups."""
        if self.isa.widen == "integer":
            return self._widen_by_integers(codes)
        wide = self._widen_through_f16(codes)
        return wide if raw or self.unit == 1 else arith.mulf(wide, ops.splat(self.unit, wide.type))

    def _widen_through_f16(self, codes: ir.Value) -> ir.Value:
        """Place the fields in an f16 and convert; the other bias remains, as ``unit``.

        The conversion from f16 honours subnormals whatever the processor's flush mode is.
        """
        return ops.convert(arith.extf, self._halves_in_order(codes), ops.f32())

    def _halves_in_order(self, codes: ir.Value) -> ir.Value:
        words = ops.convert(arith.extui, codes, ops.i16())
        words = arith.shli(words, ops.splat(16 - self.small.bits, words.type))
        return self._as_halves(words)

    def halves(self, codes: ir.Value) -> list[ir.Value]:
        """The f16 of a chunk of 32 codes, in registers and an order that ``halves_at`` tells."""
        if self.isa.lanes == 16:
            return [self._halves_in_order(codes)]
        # Interleaving with zeros puts a code on top of a word in one instruction.
        nothing, found = ops.splat(0, codes.type), []
        for half in (0, 1):
            picked = [16 * lane + 8 * half + i for lane in (0, 1) for i in range(8)]
            mask = [i for k in picked for i in (0, ops.length(codes) + k)]
            words = ops.bitcast(ops.shuffle(nothing, codes, mask), ops.i16())
            if self.small.bits < 8:
                words = arith.shli(words, ops.splat(8 - self.small.bits, words.type))
            found.append(self._as_halves(words))
        return found

    def halves_at(self) -> tuple[int, ...]:
        """Where the operands of a chunk begin in what ``halves`` gives, in the order of K."""
        return (0, 16) if self.isa.lanes == 16 else (0, 16, 8, 24)

    def _as_halves(self, words: ir.Value) -> ir.Value:
        """f16 from words that have a code in their top bits; the other bias remains."""
        small = self.small
        type_ = words.type
        # The exponent goes down to where an f16's ends: the sign stays on top, and its copies are
        # masked away.
        exponent_bits = small.bits - 1 - small.mantissa_bits
        if exponent_bits < 5:
            words = arith.shrsi(words, ops.splat(5 - exponent_bits, type_))
            fields = 0x8000 | small.magnitude_mask << (10 - small.mantissa_bits)
            words = arith.andi(words, ops.splat(fields, type_))
        if small.has_specials and small.infinity is None:
            # NaN is the one code whose magnitude plus one carries into the exponent's top bit: a
            # compare would cost LLVM a blend in f32.
            unit = ops.splat(1 << (10 - small.mantissa_bits), type_)
            top = arith.andi(arith.addi(words, unit), ops.splat(0x4000, type_))
            words = arith.ori(words, top)
        return ops.bitcast(words, ir.F16Type.get())

    def _widen_by_integers(self, codes: ir.Value) -> ir.Value:
        """Rebias the fields as integers; subnormals by one exact f32 subtraction."""
        small = self.small
        words = ops.convert(arith.extui, codes, ops.i32())
        type_ = words.type
        code = arith.andi(words, ops.splat(small.magnitude_mask, type_))
        shift = 23 - small.mantissa_bits
        rebias = (127 - small.bias) << 23
        fields = arith.addi(arith.shli(code, ops.splat(shift, type_)), ops.splat(rebias, type_))
        normal = ops.bitcast(fields, ops.f32())
        # With the exponent raised by one, the fields of a subnormal read 2^min + its value.
        raised = ops.bitcast(arith.addi(fields, ops.splat(1 << 23, type_)), ops.f32())
        least = ops.splat(2.0 ** (1 - small.bias), raised.type)
        is_subnormal = arith.cmpi(
            arith.CmpIPredicate.ult, code, ops.splat(1 << small.mantissa_bits, type_)
        )
        value = arith.select(is_subnormal, arith.subf(raised, least), normal)
        bits = ops.bitcast(value, ops.i32())
        if small.has_specials:
            bits = _with_specials(small, code, bits)
        sign = arith.andi(words, ops.splat(small.sign_mask, type_))
        sign = arith.shli(sign, ops.splat(32 - small.bits, type_))
        return ops.bitcast(arith.ori(bits, sign), ops.f32())


def _nibbles(data: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The low and the high halves of bytes: of two packed codes, the first and the second."""
    low = arith.andi(data, ops.splat(15, data.type))
    return low, arith.shrui(data, ops.splat(4, data.type))


def split_pairs(operand: ir.Value, mantissa_bits: int = 7) -> list[ir.Value]:
    """A register of bf16 pairs as two of f32: the firsts, the seconds.

    Args:
        operand: The pairs.
        mantissa_bits: Those of the seconds that count; what follows them is left out.
    """
    words = ops.bitcast(operand, ops.i32())
    firsts = arith.shli(words, ops.splat(16, words.type))
    seconds = arith.andi(words, ops.splat(0xFFFFFFFF << (23 - mantissa_bits), words.type))
    return [ops.bitcast(half, ops.f32()) for half in (firsts, seconds)]


def blocks_of_chunk(operands: Sequence[ir.Value]) -> list[ir.Value]:
    """The two registers of bf16 of a chunk as one for each of its blocks.

    Decoding gives half of either block in each.
    """
    upper, lower = operands
    halves = ((*range(first, first + 16), *range(first + 32, first + 48)) for first in (0, 16))
    return [ops.shuffle(upper, lower, order) for order in halves]


def operand_order(isa: InstructionSet, format_name: str) -> Sequence[int]:
    """The order in which the codes of a chunk of weights are decoded."""
    is_packed = SMALL_FLOATS[format_name].bits == 4
    if isa.widen == "table":
        return FOUR_BIT if is_packed else IN_LANE
    if isa.widen == "byte_table" and is_packed:
        return NIBBLES
    return NATURAL[: isa.chunk]


def in_operand_order(
    isa: InstructionSet, elements: ir.Value, order: Sequence[int]
) -> list[ir.Value]:
    """A chunk of bf16 or f32 elements as operands, in the order of the weights."""
    elements = ops.permute(elements, order)
    if isa.dot == "bf16":
        return ops.parts(elements, isa.lanes * isa.pair)
    if isa.widen == "table":
        split = [32 * pair + 2 * i + half for pair in (0, 1) for half in (0, 1) for i in range(16)]
        elements = ops.permute(elements, split)
    return ops.parts(elements, isa.lanes)


def _with_specials(small: SmallFloat, code: ir.Value, bits: ir.Value) -> ir.Value:
    """Give the codes of NaN and infinity their f32 bits."""
    is_special = arith.cmpi(
        arith.CmpIPredicate.uge, code, ops.splat(small.first_special, code.type)
    )
    special = ops.splat(0x7FC00000, code.type)
    if small.infinity is not None:
        is_infinity = arith.cmpi(arith.CmpIPredicate.eq, code, ops.splat(small.infinity, code.type))
        special = arith.select(is_infinity, ops.splat(0x7F800000, code.type), special)
    return arith.select(is_special, special, bits)


def _masked_load(buffer: ir.Value, row: Index, column: Index, count: int, width: int) -> ir.Value:
    """The first ``count`` of ``width`` bytes, then zeros, by a load that takes a mask."""
    mask_type = ops.vector_type(width, ir.IntegerType.get_signless(1))
    bits = [ir.BoolAttr.get(i < count) for i in range(width)]
    mask = arith.constant(mask_type, ir.DenseElementsAttr.get(bits, mask_type))
    type_ = ops.vector_type(width, ops.i8())
    positions = [ops.as_value(row), ops.as_value(column)]
    return vector.maskedload(type_, buffer, positions, mask, ops.splat(0, type_))
