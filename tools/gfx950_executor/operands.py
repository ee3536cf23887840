# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Operands: from a 9-bit source code to values and poison."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import OutOfBoundsError, UnknownInstructionError
from block32.tools.gfx950_executor.state import ALL_BITS, LANES, U32, VCC, Wave

SCC_CODE = 253
LITERAL_CODE = 255
VGPR_CODE = 256

_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_HALF_PI_INVERSE = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}

ScalarSource = Callable[[Wave], tuple[int, int]]


def inline_constant(code: int, bits: int) -> int | None:
    """The bit pattern of an inline constant for an operand of 16, 32 or 64 bits, or None."""
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & ((1 << bits) - 1)
    if code in _FLOATS:
        return int.from_bytes(
            struct.pack({16: "<e", 32: "<f", 64: "<d"}[bits], _FLOATS[code]), "little"
        )
    if code == 248:
        return _HALF_PI_INVERSE[bits]
    return None


def scalar_source(inst: Instruction, field: str, width: int) -> ScalarSource:
    """A scalar operand as a function from the wave to (value, poison mask)."""
    code = inst[field]
    if code == LITERAL_CODE:
        literal = inst.literal
        if literal is None:
            raise UnknownInstructionError(f"{inst.name} lacks its literal")
        value = literal
        if width == 2 and inst.name.endswith(("i64",)) and literal >> 31:
            value = literal | ALL_BITS << 32
        return lambda wave: (value, 0)
    constant = inline_constant(code, 32 * width)
    if constant is not None:
        return lambda wave: (constant, 0)
    if code == SCC_CODE:
        return lambda wave: (wave.scc, int(wave.scc_poison))
    if code == 251:
        return lambda wave: (int(wave.read_s64(VCC) == 0), int(bool(wave.poison_s64(VCC))))
    if code == 252:
        return lambda wave: (int(wave.exec_mask == 0), 0)
    if code >= 128:
        raise UnknownInstructionError(f"{inst.name} with the special source {code}")
    if width == 2:
        return lambda wave: (wave.read_s64(code), wave.poison_s64(code))
    return lambda wave: (wave.read_s(code), wave.s_poison[code])


class VectorSource:
    """A 32-bit operand of a vector instruction: ``read(wave)`` and ``poison(wave)``.

    Args:
        code: The 9-bit source code.
        inst: The instruction, for its literal and for messages.
        bits: How wide the operation reads the operand, for inline constants.
        accumulator: Whether a VGPR code names an AGPR.
        part: Which 32-bit register of a wider operand.
    """

    def __init__(
        self, inst: Instruction, code: int, bits: int = 32, accumulator: bool = False, part: int = 0
    ):
        self.row = -1
        self.read: Callable[[Wave], U32]
        self.poison: Callable[[Wave], U32 | None] = lambda wave: None
        if code >= VGPR_CODE:
            self._vector(code - VGPR_CODE + part + (256 if accumulator else 0))
            return
        constant = inst.literal if code == LITERAL_CODE else inline_constant(code, bits)
        if code == LITERAL_CODE and bits == 64:
            # A 64-bit float takes the literal as its high half, an integer as its low half.
            floating = "f64" in inst.name
            constant = (constant or 0) << 32 if floating else constant
        if constant is not None:
            value = np.full(LANES, constant >> 32 * part & ALL_BITS, np.uint32)
            self.read = lambda wave: value
            return
        scalar = _scalar_by_code(inst, code, part)
        self.read = lambda wave: np.full(LANES, scalar(wave)[0], np.uint32)

        def poison(wave: Wave) -> U32 | None:
            mask = scalar(wave)[1]
            return np.full(LANES, mask, np.uint32) if mask else None

        self.poison = poison

    def _vector(self, row: int) -> None:
        self.row = row

        def read(wave: Wave) -> U32:
            if wave.v_locked[row]:
                return wave.read_v(row)
            return wave.v[row]

        self.read = read
        self.poison = lambda wave: wave.v_poison[row] if wave.v_dirty[row] else None


def _scalar_by_code(inst: Instruction, code: int, part: int) -> ScalarSource:
    if code == SCC_CODE:
        return lambda wave: (wave.scc, ALL_BITS if wave.scc_poison else 0)
    if code >= 128:
        raise UnknownInstructionError(f"{inst.name} with the special source {code}")
    register = code + part
    return lambda wave: (wave.read_s(register), wave.s_poison[register])


def check_rows(inst: Instruction, first: int, count: int, limits: tuple[int, int]) -> None:
    """Refuse vector registers beyond the kernel's allocation.

    Args:
        inst: For the message.
        first: First row (AGPRs from 256).
        count: Rows used.
        limits: VGPRs and AGPRs allocated.
    """
    kind = first >= 256
    if first - 256 * kind + count > limits[kind]:
        name = "a" if kind else "v"
        raise OutOfBoundsError(
            f"{inst.name} uses {name}{first - 256 * kind + count - 1}; "
            f"the kernel has {limits[kind]} of them"
        )
