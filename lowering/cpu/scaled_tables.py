# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables that hold the bf16 of every code, multiplied by a scale.

A block of 32x32 weights has one scale: it takes a few operations to multiply the entries of the
tables by it, and then none for its 1024 weights.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.cpu import ops
from block32.lowering.cpu.formats import SmallFloat
from block32.lowering.cpu.scales import integer_exponents

#: Entries of a register of bytes, and of one of words.
BYTES, WORDS = 64, 32
#: The register pair of a table of bytes, by code.
BytePair = list[ir.Value]


def byte_tables(small: SmallFloat) -> list[BytePair]:
    """For the low and the high byte of a bf16: two registers of 64 entries, by code.

    8-bit formats are looked up by magnitude, 4-bit ones by the whole code.
    """
    return [_byte_pair([bits >> shift & 255 for bits in _entries(small)]) for shift in (0, 8)]


def word_table(small: SmallFloat) -> ir.Value:
    """The bf16 of every 4-bit code, twice: the bit above an index counts too."""
    return ops.int_table(_entries(small)[:WORDS], ops.i16())


def scale_byte_tables(small: SmallFloat, tables: list[BytePair], scale: ir.Value) -> list[BytePair]:
    """``byte_tables`` times 2^(byte - 127), where the exponent of no entry leaves its range.

    A bf16's exponent ends in the top bit of its low byte: an odd exponent turns that bit, and where
    it was 1 carries into the high byte.

    Args:
        small: The format.
        tables: Its tables.
        scale: The byte, an i8 that is safe to fold (see ``fold``).
    """
    exponent = integer_exponents(scale)
    half = _broadcast_byte(arith.shrsi(exponent, ops.splat(1, exponent.type)))
    lowest_bit = arith.andi(exponent, ops.splat(1, exponent.type))
    odd = _broadcast_byte(arith.subi(ops.splat(0, exponent.type), lowest_bit))
    entries = _entries(small)
    moves = [255 * _has_exponent(bits) for bits in entries]
    raises = _byte_pair(moves)
    turns = _byte_pair([move & 0x80 for move in moves])
    carries = _byte_pair([move & bits >> 7 & 1 for move, bits in zip(moves, entries, strict=True)])
    low, high = [], []
    for at, (old_low, old_high) in enumerate(zip(*tables, strict=True)):
        low.append(arith.xori(old_low, arith.andi(turns[at], odd)))
        raised = arith.addi(old_high, arith.andi(raises[at], half))
        high.append(arith.addi(raised, arith.andi(carries[at], odd)))
    return [low, high]


def scale_word_table(small: SmallFloat, table: ir.Value, scale: ir.Value) -> ir.Value:
    """``word_table`` times 2^(byte - 127); see ``scale_byte_tables``."""
    exponent = integer_exponents(scale)
    field = arith.shli(exponent, ops.splat(7, exponent.type))
    fields = ops.broadcast(arith.trunci(ops.i16(), field), WORDS)
    moves = [0xFFFF * _has_exponent(bits) for bits in _entries(small)[:WORDS]]
    return arith.addi(table, arith.andi(fields, ops.int_table(moves, ops.i16())))


def _entries(small: SmallFloat) -> list[int]:
    """The bits of the bf16 of each index."""
    return [small.bf16_bits(i & (15 if small.bits == 4 else 127)) for i in range(2 * BYTES)]


def _has_exponent(bits: int) -> bool:
    """Whether a bf16 is neither zero, infinity nor NaN. None of these formats' is subnormal."""
    return 0 < bits & 0x7FFF < 0x7F80


def _byte_pair(values: list[int]) -> BytePair:
    return [ops.int_table(values[at : at + BYTES], ops.i8()) for at in (0, BYTES)]


def _broadcast_byte(value: ir.Value) -> ir.Value:
    return ops.broadcast(arith.trunci(ops.i8(), value), BYTES)
