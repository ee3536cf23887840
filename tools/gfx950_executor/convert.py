# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Conversions to and from narrow floats: v_cvt_pk_fp8_f32, v_cvt_scalef32_* and relatives.

A scale operand is a float32 of which only the exponent counts. Converting to a narrow format
divides by 2^(exponent - 127), converting from it multiplies. gfx950 has the OCP formats. What
overflows an 8-bit format is clamped if the mode bit FP16_OVFL is set, else infinity or NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from block32.tools.gfx950_executor import floats
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.operands import VGPR_CODE, VectorSource, check_rows
from block32.tools.gfx950_executor.state import ALL_BITS, LANES, U32, Wave
from block32.tools.gfx950_executor.valu import Limits, Step, TypedSource

Array = Any
_NARROW = {"fp8": "e4m3", "bf8": "e5m2", "fp6": "e2m3", "bf6": "e3m2", "fp4": "e2m1"}
_WIDE_BITS = {"f32": 32, "f16": 16, "bf16": 16}


def _exponent(scale: U32) -> Array:
    """Power of two of a float32 scale; NaN and infinity give NaN, as E8M0 does."""
    biased = (scale >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)
    return np.where(biased == 255, np.nan, np.ldexp(1.0, biased - 127))


def _narrow_to_wide(code: U32, form: floats.NarrowFormat, scale: Array, wide: str) -> U32:
    value = floats.decode_table(form)[code].astype(np.float64) * scale
    return _encode_wide(value, wide)


def _encode_wide(value: Array, wide: str) -> U32:
    if wide == "f32":
        return value.astype(np.float32).view(np.uint32)
    if wide == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint32)
    return floats.to_bf16(value.astype(np.float32))


def _decode_wide(bits: U32, wide: str) -> Array:
    if wide == "f32":
        return bits.view(np.float32).astype(np.float64)
    if wide == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return floats.from_bf16(bits).astype(np.float64)


class _Operand:
    """Some consecutive registers of a vector operand."""

    def __init__(self, inst: Instruction, field: str, registers: int, limits: Limits):
        code = inst[field]
        if code >= VGPR_CODE:
            check_rows(inst, code - VGPR_CODE, registers, limits)
        self._parts = [VectorSource(inst, code, 32, part=p) for p in range(registers)]

    def bits(self, wave: Wave) -> list[U32]:
        return [p.read(wave) for p in self._parts]

    def touched(self, wave: Wave) -> Array:
        """Lanes with any poison."""
        result = np.zeros(LANES, np.bool_)
        for part in self._parts:
            mask = part.poison(wave)
            if mask is not None:
                result |= mask != 0
        return result


def _elements(words: list[U32], bits: int, count: int) -> list[U32]:
    """Consecutive bit fields of a lane's registers, lowest first."""
    result = []
    for i in range(count):
        first, shift = divmod(i * bits, 32)
        value = words[first].astype(np.uint64)
        if shift + bits > 32:
            value = value | words[first + 1].astype(np.uint64) << np.uint64(32)
        field = value >> np.uint64(shift) & np.uint64((1 << bits) - 1)
        result.append(field.astype(np.uint32))
    return result


def _assemble(elements: list[U32], bits: int) -> list[U32]:
    """The reverse of ``_elements``."""
    words = [np.zeros(LANES, np.uint64) for _ in range(-(-len(elements) * bits // 32) + 1)]
    for i, element in enumerate(elements):
        first, shift = divmod(i * bits, 32)
        moved = element.astype(np.uint64) << np.uint64(shift)
        words[first] |= moved & np.uint64(ALL_BITS)
        words[first + 1] |= moved >> np.uint64(32)
    return [w.astype(np.uint32) for w in words[: -(-len(elements) * bits // 32)]]


def _write_field(wave: Wave, row: int, word: U32, touched: Array, shift: int, width: int) -> None:
    """Write some bits of a register and keep the others."""
    field = np.uint32(((1 << width) - 1) << shift)
    old_poison = wave.poison_v(row)
    kept = np.zeros(LANES, np.uint32) if old_poison is None else old_poison & ~field
    poison = kept | np.where(touched, field, np.uint32(0))
    wave.write_v(row, wave.read_v(row) & ~field | word << np.uint32(shift) & field, poison)


def _write_all(wave: Wave, row: int, words: list[U32], touched: Array) -> None:
    poison = np.where(touched, np.uint32(ALL_BITS), np.uint32(0)) if touched.any() else None
    for part, word in enumerate(words):
        wave.write_v(row + part, word, poison)


_TO_NARROW = re.compile(r"v_cvt_scalef32_(pk32|pk|2xpk16)_(fp8|bf8|fp6|bf6|fp4)_(f32|f16|bf16)$")
_TO_WIDE = re.compile(r"v_cvt_scalef32_(pk32_|pk_|)(f32|f16|bf16)_(fp8|bf8|fp6|bf6|fp4)$")


def compile_scaled_conversion(inst: Instruction, limits: Limits) -> Step:
    """v_cvt_scalef32_*, except those with stochastic rounding.

    Raises:
        UnknownInstructionError: A stochastic form.
    """
    if match := _TO_NARROW.match(inst.name):
        return _to_narrow(inst, limits, *match.groups())
    if match := _TO_WIDE.match(inst.name):
        return _to_wide(inst, limits, *match.groups())
    raise UnknownInstructionError(inst.name)


def _to_narrow(inst: Instruction, limits: Limits, shape: str, narrow: str, wide: str) -> Step:
    form = floats.BY_NAME[_NARROW[narrow]]
    row = inst["vdst"] - VGPR_CODE
    two_sources = wide == "f32" and shape != "pk32"
    per_source = {"pk": 1, "pk32": 32 * _WIDE_BITS[wide] // 32, "2xpk16": 16}[shape]
    fields = ["src0", "src1"] if two_sources else ["src0"]
    sources = [_Operand(inst, f, per_source, limits) for f in fields]
    scale = _Operand(inst, "src2" if two_sources else "src1", 1, limits)
    count = {"pk": 2, "pk32": 32, "2xpk16": 32}[shape]
    check_rows(inst, row, 1 if shape == "pk" else 6, limits)
    width = 2 * form.bits
    # op_sel[3] chooses the 16-bit half, op_sel[3:2] the byte where the result has 8 bits.
    place = inst["opsel"] >> 3 if width == 16 else inst["opsel"] >> 2

    def run(wave: Wave) -> None:
        factor = _exponent(scale.bits(wave)[0])
        touched = scale.touched(wave)
        for source in sources:
            touched = touched | source.touched(wave)
        bits = [s.bits(wave) for s in sources]
        if two_sources:  # elements of the two sources alternate
            values = [w for pair in zip(*bits, strict=True) for w in pair]
        else:
            values = _elements(bits[0], _WIDE_BITS[wide], count)
        saturate = wave.clamps_overflow
        codes = [floats.encode(_decode_wide(v, wide) / factor, form, saturate) for v in values]
        if shape == "pk":
            word = codes[0] | codes[1] << np.uint32(form.bits)
            _write_field(wave, row, word, touched, width * place, width)
        else:
            _write_all(wave, row, _assemble(codes, form.bits), touched)

    return run


def _to_wide(inst: Instruction, limits: Limits, shape: str, wide: str, narrow: str) -> Step:
    form = floats.BY_NAME[_NARROW[narrow]]
    row = inst["vdst"] - VGPR_CODE
    count = {"pk32_": 32, "pk_": 2, "": 1}[shape]
    source = _Operand(inst, "src0", 6 if count == 32 else 1, limits)
    scale = _Operand(inst, "src1", 1, limits)
    check_rows(inst, row, max(1, count * _WIDE_BITS[wide] // 32), limits)
    width = form.bits * count
    select = inst["opsel"]
    shift = 0 if count == 32 else 16 * (select & 1) if width == 16 else 8 * (select & 3)
    half = 16 * (select >> 3) if count == 1 and wide != "f32" else None

    def run(wave: Wave) -> None:
        factor = _exponent(scale.bits(wave)[0])
        touched = source.touched(wave) | scale.touched(wave)
        words = source.bits(wave)
        if count < 32:
            words = [words[0] >> np.uint32(shift)]
        codes = _elements(words, form.bits, count)
        values = [_narrow_to_wide(c, form, factor, wide) for c in codes]
        if half is not None:
            _write_field(wave, row, values[0], touched, half, 16)
        else:
            _write_all(wave, row, _assemble(values, _WIDE_BITS[wide]), touched)

    return run


def compile_pack_fp8(inst: Instruction, limits: Limits) -> Step:
    """v_cvt_pk_fp8_f32 and v_cvt_pk_bf8_f32: two floats into one half of a register."""
    form = floats.BY_NAME["e4m3" if "fp8" in inst.name else "e5m2"]
    sources = [TypedSource(inst, f, i, "f32", limits) for i, f in enumerate(("src0", "src1"))]
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1, limits)
    shift = 16 * (inst["opsel"] >> 3)

    def run(wave: Wave) -> None:
        wide = [s.read(wave).astype(np.float64) for s in sources]
        codes = [floats.encode(w, form, wave.clamps_overflow) for w in wide]
        touched = np.zeros(LANES, np.bool_)
        for source in sources:
            mask = source.poison(wave)
            if mask is not None:
                touched |= mask != 0
        _write_field(wave, row, codes[0] | codes[1] << np.uint32(8), touched, shift, 16)

    return run


def compile_unpack_fp8(inst: Instruction, limits: Limits) -> Step:
    """v_cvt_f32_fp8 (a byte) and v_cvt_pk_f32_fp8 (a word), chosen by SDWA or op_sel."""
    form = floats.BY_NAME["e4m3" if inst.name.endswith("fp8") else "e5m2"]
    pair = "_pk_" in inst.name
    plain = "SDWA" not in inst.encoding
    source = TypedSource(inst, "src0", 0, "b32", limits)
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1 + pair, limits)
    select = inst.get("opsel") & (1 if pair else 3) if plain else 0
    shift = np.uint32(select * (16 if pair else 8))

    def run(wave: Wave) -> None:
        raw = source.read(wave) >> shift
        mask = source.poison(wave)
        zero = np.zeros(LANES, np.uint32)
        mask = zero if mask is None else mask >> shift
        for part in range(1 + pair):
            byte = np.uint32(8 * part)
            value = floats.decode_table(form)[raw >> byte & np.uint32(0xFF)].view(np.uint32)
            touched = (mask >> byte & np.uint32(0xFF)) != 0
            poison = np.where(touched, np.uint32(ALL_BITS), np.uint32(0)) if touched.any() else None
            wave.write_v(row + part, value, poison)

    return run


CONVERT: dict[str, Callable[[Instruction, Limits], Step]] = {
    "v_cvt_pk_fp8_f32": compile_pack_fp8,
    "v_cvt_pk_bf8_f32": compile_pack_fp8,
    "v_cvt_f32_fp8": compile_unpack_fp8,
    "v_cvt_f32_bf8": compile_unpack_fp8,
    "v_cvt_pk_f32_fp8": compile_unpack_fp8,
    "v_cvt_pk_f32_bf8": compile_unpack_fp8,
}
