# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Narrow floats and exactly rounded arithmetic, on arrays of bit patterns.

Formats are those of the OCP Microscaling specification, numbered as cbsz and blgp do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class NarrowFormat:
    """A float of at most 8 bits.

    Attributes:
        name: As the OCP specification writes it, in lower case.
        bits, exponent_bits, mantissa_bits, bias: the layout; one sign bit.
        largest: The largest finite magnitude.
        infinity: The bit pattern of +inf, or None.
        nan: A bit pattern that is NaN, or None where the format has none.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    infinity: int | None
    nan: int | None


FORMATS = (
    NarrowFormat("e4m3", 8, 4, 3, 7, 448.0, None, 0x7F),
    NarrowFormat("e5m2", 8, 5, 2, 15, 57344.0, 0x7C, 0x7F),
    NarrowFormat("e2m3", 6, 2, 3, 1, 7.5, None, None),
    NarrowFormat("e3m2", 6, 3, 2, 3, 28.0, None, None),
    NarrowFormat("e2m1", 4, 2, 1, 1, 6.0, None, None),
)
BY_NAME = {f.name: f for f in FORMATS}


@cache
def decode_table(form: NarrowFormat) -> F32:
    """float32 value of every bit pattern of a format."""
    values = np.zeros(1 << form.bits, np.float32)
    for code in range(1 << form.bits):
        magnitude = code & ((1 << (form.bits - 1)) - 1)
        exponent = magnitude >> form.mantissa_bits
        mantissa = magnitude & ((1 << form.mantissa_bits) - 1)
        if exponent:
            fraction = 1 + mantissa / (1 << form.mantissa_bits)
            value = fraction * 2.0 ** (exponent - form.bias)
        else:
            value = mantissa / (1 << form.mantissa_bits) * 2.0 ** (1 - form.bias)
        if form.infinity is not None and magnitude >= form.infinity:
            value = np.inf if magnitude == form.infinity else np.nan
        if form.infinity is None and form.nan is not None and magnitude == form.nan:
            value = np.nan
        values[code] = -value if code >> (form.bits - 1) else value
    return values


def encode(values: F64, form: NarrowFormat, saturate: bool = True) -> Bits:
    """Round to nearest even to a narrow format.

    Args:
        values: What to round.
        form: The format.
        saturate: Whether what lies beyond the largest value (infinity too) becomes that; if not
            it becomes infinity, or NaN in e4m3. Formats without either always saturate, NaN too.
    """
    magnitude = np.abs(values)
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 0.0))
    exponent = np.maximum(exponent - 1, 1 - form.bias)
    step = np.ldexp(1.0, exponent - form.mantissa_bits)
    rounded = np.where(np.isfinite(magnitude), np.rint(magnitude / step) * step, np.inf)
    table = decode_table(form)[: 1 << (form.bits - 1)]
    finite = np.flatnonzero(np.isfinite(table))
    code = finite[np.searchsorted(table[finite], np.minimum(rounded, form.largest))]
    code = code.astype(np.uint32)
    if not saturate and form.nan is not None:
        beyond = form.nan if form.infinity is None else form.infinity
        code = np.where(rounded > form.largest, np.uint32(beyond), code)
    if form.nan is not None:
        code = np.where(np.isnan(values), np.uint32(form.nan), code)
    return code | np.signbit(values).astype(np.uint32) << np.uint32(form.bits - 1)


def to_bf16(values: F32) -> Bits:
    """Round float32 to bf16 bit patterns, to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded)


def from_bf16(bits: Bits) -> F32:
    """bf16 bit patterns (low 16 bits) to float32, exactly."""
    return (bits << np.uint32(16)).view(np.float32)


def fma32(a: F32, b: F32, c: F32) -> F32:
    """Fused multiply-add: the sum of a product and c, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it again
    to float32 gives the right value.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    if inexact.any():
        toward = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(inexact, (total.view(np.int64) + toward).view(np.float64), total)
    return total.astype(np.float32)


def flush(values: F32) -> F32:
    """Subnormal float32 values to zeros of their sign."""
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values)
