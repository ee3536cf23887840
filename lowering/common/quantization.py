# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising to MXFP8: scale bytes and e4m3 or e5m2 codes by integer arithmetic.

Every function works on a scalar or on a vector, so that all targets share the rule bit for bit.
Values are f32; bf16 and f16 are extended first, which is exact. Rules: OCP Microscaling Formats
1.0, section 6.3 (``floor``), and the round-up rule of the kernels that MXFP8 models are served
with (``rceil``, the default).
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith


@dataclass(frozen=True)
class CodeFormat:
    """An fp8 format as a target of rounding.

    Attributes:
        mantissa_bits: Width of the mantissa.
        bias: Exponent bias.
        largest: Code of the largest finite magnitude.
        nan: Magnitude code that a NaN gets.
        largest_exponent: Exponent of the largest finite magnitude.
        largest_mantissa: Its mantissa, as bits of an f32's.
    """

    mantissa_bits: int
    bias: int
    largest: int
    nan: int
    largest_exponent: int
    largest_mantissa: int


#: OCP 8-bit floating point specification 1.0, table 1.
CODE_FORMATS = {
    "f8E4M3FN": CodeFormat(3, 7, 0x7E, 0x7F, 8, 0b110 << 20),
    "f8E5M2": CodeFormat(2, 15, 0x7B, 0x7E, 15, 0b11 << 21),
}

_F32_INFINITY = 0x7F800000
_SMALLEST_NORMAL = 1 << 23
_MANTISSA = (1 << 23) - 1
#: The scale of a block that holds an infinity: the largest finite one.
INFINITE_SCALE = 254


def scale_byte(amax: ir.Value, rule: str, element: str) -> ir.Value:
    """The E8M0 byte of a block whose largest magnitude is ``amax``.

    Args:
        amax: f32, not negative and not NaN; a scalar or vector.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.
        element: ``f8E4M3FN`` or ``f8E5M2``.

    Returns:
        i32 in 0..254, of amax's shape.
    """
    layout = CODE_FORMATS[element]
    i32 = _integer_like(amax)
    bits = arith.bitcast(i32, amax)
    is_infinite = _compare("uge", bits, _F32_INFINITY)
    bits = arith.maxui(bits, _int(i32, _SMALLEST_NORMAL))
    rounded = arith.addi(bits, _int(i32, _rounding_addend(rule, layout)))
    exponent = arith.shrui(rounded, _int(i32, 23))
    byte = arith.subi(exponent, _int(i32, layout.largest_exponent))
    byte = arith.maxsi(byte, _int(i32, 0))
    return arith.select(is_infinite, _int(i32, INFINITE_SCALE), byte)


def _rounding_addend(rule: str, layout: CodeFormat) -> int:
    """What is added to amax's bits so that its exponent field becomes the scale's.

    ``rceil`` carries when the mantissa is above the largest code's, ``ceil`` when it is above
    zero, ``even`` when rounding it to the element's mantissa bits reaches the next power of two.
    """
    match rule:
        case "floor":
            return 0
        case "rceil":
            return _MANTISSA - layout.largest_mantissa
        case "ceil":
            return _MANTISSA
        case "even":
            return 1 << (22 - layout.mantissa_bits)
    raise ValueError(f"unknown scale rule {rule}")


def quantized_code(value: ir.Value, byte: ir.Value, element: str) -> ir.Value:
    """The code of ``value * 2^(127 - byte)``: nearest, ties to even, saturating.

    The power of two is applied in two factors: each is a normal number for every byte. A
    subnormal value is taken as the integer that its bits are, since many devices would read 0.

    Args:
        value: f32, a scalar or vector.
        byte: i32 scale bytes of the same shape.
        element: ``f8E4M3FN`` or ``f8E5M2``.

    Returns:
        i32 codes in 0..255; NaN gives the NaN code with its sign.
    """
    i32, f32 = byte.type, value.type
    exponent = arith.subi(_int(i32, 127), byte)
    first = arith.shrsi(exponent, _int(i32, 1))
    second = arith.subi(exponent, first)
    scaled = arith.mulf(arith.mulf(value, _power_of_two(first, f32)), _power_of_two(second, f32))
    return encode(_with_subnormals(value, byte, scaled), CODE_FORMATS[element])


def _with_subnormals(value: ir.Value, byte: ir.Value, scaled: ir.Value) -> ir.Value:
    """``scaled``, or for a subnormal ``value`` the product made from its bits.

    ``bits * 2^-149 * 2^(127 - byte)``. From byte 100 on that is below 2^-99, so no code but 0;
    the byte is held there, which keeps the power of two a normal number.
    """
    i32, f32 = byte.type, value.type
    bits = arith.bitcast(i32, value)
    magnitude = arith.andi(bits, _int(i32, 0x7FFFFFFF))
    exponent = arith.subi(_int(i32, 127 - 149), arith.minui(byte, _int(i32, 100)))
    product = arith.mulf(arith.uitofp(f32, magnitude), _power_of_two(exponent, f32))
    sign = arith.andi(bits, _int(i32, -(1 << 31)))
    signed = arith.ori(arith.bitcast(i32, product), sign)
    is_subnormal = _compare("ult", magnitude, _SMALLEST_NORMAL)
    return arith.select(is_subnormal, arith.bitcast(f32, signed), scaled)


def encode(value: ir.Value, layout: CodeFormat) -> ir.Value:
    """The code nearest to an f32 value, ties to even, saturating; see ``quantized_code``."""
    i32 = _integer_like(value)
    bits = arith.bitcast(i32, value)
    sign = arith.andi(arith.shrui(bits, _int(i32, 24)), _int(i32, 0x80))
    magnitude = arith.andi(bits, _int(i32, 0x7FFFFFFF))
    is_nan = _compare("ugt", magnitude, _F32_INFINITY)
    normal = _round_normal(magnitude, layout)
    subnormal = _round_subnormal(magnitude, value.type, layout)
    smallest_normal = (127 + 1 - layout.bias) << 23
    is_normal = _compare("uge", magnitude, smallest_normal)
    code = arith.select(is_normal, normal, subnormal)
    code = arith.minui(code, _int(i32, layout.largest))
    code = arith.select(is_nan, _int(i32, layout.nan), code)
    return arith.ori(code, sign)


def _round_normal(magnitude: ir.Value, layout: CodeFormat) -> ir.Value:
    """Round the f32 mantissa to the format's, and move the exponent to its bias."""
    i32 = magnitude.type
    dropped = 23 - layout.mantissa_bits
    odd = arith.andi(arith.shrui(magnitude, _int(i32, dropped)), _int(i32, 1))
    rounded = arith.addi(magnitude, arith.addi(odd, _int(i32, (1 << (dropped - 1)) - 1)))
    code = arith.shrui(rounded, _int(i32, dropped))
    return arith.subi(code, _int(i32, (127 - layout.bias) << layout.mantissa_bits))


def _round_subnormal(magnitude: ir.Value, f32: ir.Type, layout: CodeFormat) -> ir.Value:
    """Round to a multiple of the smallest subnormal: an addition to a large number does that."""
    i32 = magnitude.type
    unit_exponent = 1 - layout.bias - layout.mantissa_bits
    large = (127 + 23 + unit_exponent) << 23
    total = arith.addf(arith.bitcast(f32, magnitude), arith.bitcast(f32, _int(i32, large)))
    return arith.subi(arith.bitcast(i32, total), _int(i32, large))


def _power_of_two(exponent: ir.Value, f32: ir.Type) -> ir.Value:
    i32 = exponent.type
    bits = arith.shli(arith.addi(exponent, _int(i32, 127)), _int(i32, 23))
    return arith.bitcast(f32, bits)


def _integer_like(value: ir.Value) -> ir.Type:
    """i32, or a vector of it of the same shape."""
    i32 = ir.IntegerType.get_signless(32)
    if isinstance(value.type, ir.VectorType):
        return ir.VectorType.get(value.type.shape, i32)
    return i32


def _int(integer_type: ir.Type, value: int) -> ir.Value:
    if isinstance(integer_type, ir.VectorType):
        element = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
        return arith.constant(integer_type, ir.DenseElementsAttr.get_splat(integer_type, element))
    return arith.constant(integer_type, value)


def _compare(predicate: str, value: ir.Value, constant_value: int) -> ir.Value:
    return arith.cmpi(
        getattr(arith.CmpIPredicate, predicate), value, _int(value.type, constant_value)
    )
