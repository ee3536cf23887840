# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The small float formats as kernels see them: fields, and the value of every code."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class SmallFloat:
    """A float format of 4 or 8 bits (OCP Microscaling Formats 1.0; OCP 8-bit floating point 1.0).

    Attributes:
        name: Its MLIR name.
        bits: Bits of a code, the sign included.
        mantissa_bits: Bits after the binary point.
        bias: The exponent's bias.
        first_special: The smallest magnitude code that is no finite number.
        infinity: The magnitude code of infinity, or None.
    """

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    first_special: int
    infinity: int | None = None

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def magnitude_mask(self) -> int:
        """All bits of a code but the sign."""
        return self.sign_mask - 1

    @property
    def has_specials(self) -> bool:
        """Whether some codes are NaN or infinity."""
        return self.first_special <= self.magnitude_mask

    def magnitude(self, code: int) -> float:
        """The value of a code without its sign."""
        if code == self.infinity:
            return math.inf
        if code >= self.first_special:
            return math.nan
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        if exponent == 0:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        significand = (1 << self.mantissa_bits) + mantissa
        return math.ldexp(significand, exponent - self.bias - self.mantissa_bits)

    def bf16_bits(self, code: int) -> int:
        """The bits of a bf16 that is exactly the value of a code, sign included."""
        value = self.magnitude(code & self.magnitude_mask)
        sign = 0x8000 if code & self.sign_mask else 0
        if math.isnan(value):
            return sign | 0x7FC0
        return sign | struct.unpack("<I", struct.pack("<f", value))[0] >> 16


SMALL_FLOATS = {
    small.name: small
    for small in (
        SmallFloat("f8E4M3FN", 8, 3, 7, first_special=0x7F),
        SmallFloat("f8E5M2", 8, 2, 15, first_special=0x7C, infinity=0x7C),
        SmallFloat("f4E2M1FN", 4, 1, 1, first_special=0x8),
    )
}
