# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Packed instructions (VOP3P): two halves a register, two registers a pair, mixed precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from block32.tools.gfx950_executor import floats
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.operands import (
    VGPR_CODE,
    VectorSource,
    check_rows,
    inline_constant,
)
from block32.tools.gfx950_executor.state import ALL_BITS, LANES, U32, Wave
from block32.tools.gfx950_executor.valu import Limits, Step, combined_poison
from block32.tools.gfx950_executor.valu_ops import OPS, VectorOp

Array = Any


def _scalar_op(name: str) -> tuple[VectorOp, str]:
    """The one-element operation behind a packed one, and its element type."""
    stem = name.removeprefix("v_pk_")
    kind = stem.rsplit("_", 1)[1]
    aliases = {"mul_lo_u16": "mul_lo_u16", "fmac_f16": "fma_f16"}
    op = OPS.get(f"v_{aliases.get(stem, stem)}")
    if op is None:
        raise UnknownInstructionError(name)
    return op, kind


class _Halves:
    """A packed operand: which half feeds the low result and which the high one."""

    def __init__(self, inst: Instruction, field: str, position: int, wide: bool, limits: Limits):
        code = inst[field]
        if code >= VGPR_CODE:
            check_rows(inst, code - VGPR_CODE, 1 + wide, limits)
        self._choice = (inst["opsel"] >> position & 1, self._high_choice(inst, position))
        constant = inline_constant(code, 32) is not None or code == 255
        if wide and constant and any(self._choice):
            raise UnknownInstructionError(f"{inst.name} takes the high half of a constant")
        bits = 32 if wide else 16
        self._parts = [
            VectorSource(inst, code, bits, part=p) for p in range(1 + (wide and not constant))
        ]
        self._negate = (inst["neg"] >> position & 1, inst["neg_hi"] >> position & 1)
        self._wide = wide

    @staticmethod
    def _high_choice(inst: Instruction, position: int) -> int:
        return inst["opsel_hi2"] if position == 2 else inst["opsel_hi"] >> position & 1

    def read(self, wave: Wave, half: int, dtype: Any) -> Array:
        """The element that goes to one half of the result."""
        choice = self._choice[half]
        if self._wide:
            value = self._parts[choice].read(wave).view(dtype)
        else:
            raw = self._parts[0].read(wave)
            value = (raw >> np.uint32(16 * choice)).astype(np.uint16).view(dtype)
        return -value if self._negate[half] else value

    def poison(self, wave: Wave, half: int) -> Array | None:
        """Its poison mask."""
        choice = self._choice[half]
        mask = self._parts[choice if self._wide else 0].poison(wave)
        if mask is None or self._wide:
            return mask
        return (mask >> np.uint32(16 * choice)).astype(np.uint16)


def compile_packed(inst: Instruction, limits: Limits) -> Step:
    """v_pk_*: the same operation on both halves."""
    op, kind = _scalar_op(inst.name)
    wide = kind.endswith("32")
    dtype = {
        "f32": np.float32,
        "f16": np.float16,
        "u16": np.uint16,
        "i16": np.int16,
        "b16": np.uint16,
    }[kind]
    # A shift's amount is unsigned whatever the element.
    count = len(op.sources)
    fields = ["src0", "src1", "src2"][:count]
    sources = [_Halves(inst, f, i, wide, limits) for i, f in enumerate(fields)]
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1 + wide, limits)
    if inst.get("clmp") and kind[0] != "f":
        raise UnknownInstructionError(f"{inst.name} with clamp")
    clamp = inst.get("clmp")

    def half_of(wave: Wave, half: int) -> tuple[U32, U32 | None]:
        values = [s.read(wave, half, dtype) for s in sources]
        masks = [s.poison(wave, half) for s in sources]
        if wave.flush_f32 and kind == "f32":
            values = [floats.flush(v) for v in values]
        result = op.compute(*values)
        if clamp:
            result = np.fmax(np.fmin(result, dtype(1)), dtype(0))
        poison = combined_poison(masks, values, op)
        unsigned = np.uint32 if wide else np.uint16
        return (
            result.view(unsigned).astype(np.uint32),
            None if poison is None else poison.astype(np.uint32),
        )

    def run(wave: Wave) -> None:
        (low, low_poison), (high, high_poison) = half_of(wave, 0), half_of(wave, 1)
        if wide:
            wave.write_v(row, low, low_poison)
            wave.write_v(row + 1, high, high_poison)
            return
        poison = None
        if low_poison is not None or high_poison is not None:
            zero = np.zeros(LANES, np.uint32)
            poison = (zero if low_poison is None else low_poison) | (
                zero if high_poison is None else high_poison
            ) << np.uint32(16)
        wave.write_v(row, low | high << np.uint32(16), poison)

    return run


def compile_packed_move(inst: Instruction, limits: Limits) -> Step:
    """v_pk_mov_b32: op_sel[0] picks of the first pair, op_sel[1] of the second."""
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 2, limits)
    sources = []
    for position, field in enumerate(("src0", "src1")):
        code = inst[field]
        part = inst["opsel"] >> position & 1
        if code >= VGPR_CODE:
            check_rows(inst, code - VGPR_CODE, 2, limits)
        elif part and inline_constant(code, 32) is not None:
            raise UnknownInstructionError(f"{inst.name} takes the high half of a constant")
        sources.append(VectorSource(inst, code, 32, part=part))

    def run(wave: Wave) -> None:
        values = [(s.read(wave).copy(), s.poison(wave)) for s in sources]
        values = [(v, None if p is None else p.copy()) for v, p in values]
        for part, (value, poison) in enumerate(values):
            wave.write_v(row + part, value, poison)

    return run


class _Mixed:
    """An operand of v_mad_mix: float32, or one half of a register as float16."""

    def __init__(self, inst: Instruction, position: int, limits: Limits):
        code = inst[f"src{position}"]
        if code >= VGPR_CODE:
            check_rows(inst, code - VGPR_CODE, 1, limits)
        high = inst["opsel_hi2"] if position == 2 else inst["opsel_hi"] >> position & 1
        self._half = bool(high)
        self._choice = np.uint32(16 * (inst["opsel"] >> position & 1))
        self._source = VectorSource(inst, code, 16 if high else 32)
        self._negate = inst["neg"] >> position & 1
        self._absolute = inst["neg_hi"] >> position & 1

    def read(self, wave: Wave) -> Array:
        raw = self._source.read(wave)
        if self._half:
            value = (raw >> self._choice).astype(np.uint16).view(np.float16).astype(np.float32)
        else:
            value = raw.view(np.float32)
        value = np.abs(value) if self._absolute else value
        return -value if self._negate else value

    def poison(self, wave: Wave) -> U32 | None:
        mask = self._source.poison(wave)
        if mask is None or not self._half:
            return mask
        return mask >> self._choice & np.uint32(0xFFFF)


def compile_mix(inst: Instruction, limits: Limits) -> Step:
    """v_mad_mix_f32, v_mad_mixlo_f16, v_mad_mixhi_f16 (fused on this generation)."""
    sources = [_Mixed(inst, i, limits) for i in range(3)]
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1, limits)
    half = {"v_mad_mix_f32": None, "v_mad_mixlo_f16": 0, "v_mad_mixhi_f16": 16}[inst.name]
    if inst.get("clmp"):
        raise UnknownInstructionError(f"{inst.name} with clamp")

    def run(wave: Wave) -> None:
        values = [s.read(wave) for s in sources]
        masks = [s.poison(wave) for s in sources]
        touched = np.zeros(LANES, np.bool_)
        for mask in masks:
            if mask is not None:
                touched |= mask != 0
        full = np.where(touched, np.uint32(ALL_BITS), np.uint32(0)) if touched.any() else None
        if half is None:
            wave.write_v(row, floats.fma32(*values).view(np.uint32), full)
            return
        exact = values[0].astype(np.float64) * values[1].astype(np.float64) + values[2]
        word = exact.astype(np.float16).view(np.uint16).astype(np.uint32) << np.uint32(half)
        field = np.uint32(0xFFFF << half)
        old_poison = wave.poison_v(row)
        kept = np.zeros(LANES, np.uint32) if old_poison is None else old_poison & ~field
        poison = kept if full is None else kept | full & field
        wave.write_v(row, wave.read_v(row) & ~field | word, poison)

    return run


def compile_dot2(inst: Instruction, limits: Limits) -> Step:
    """v_dot2_f32_f16 and v_dot2_f32_bf16: two products and an addend."""
    half = inst.name.endswith("bf16")
    sources = [_Halves(inst, f, i, False, limits) for i, f in enumerate(("src0", "src1"))]
    addend = VectorSource(inst, inst["src2"], 32)
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1, limits)

    def widen(value: Array) -> Array:
        if half:
            return floats.from_bf16(value.astype(np.uint32)).astype(np.float64)
        return value.view(np.float16).astype(np.float64)

    def run(wave: Wave) -> None:
        total = addend.read(wave).view(np.float32).astype(np.float64)
        touched = np.zeros(LANES, np.bool_)
        masks: list[Array | None] = [addend.poison(wave)]
        for part in (0, 1):
            a, b = (widen(s.read(wave, part, np.uint16)) for s in sources)
            total = total + a * b
            masks += [s.poison(wave, part) for s in sources]
        for mask in masks:
            if mask is not None:
                touched |= mask != 0
        poison = np.where(touched, np.uint32(ALL_BITS), np.uint32(0)) if touched.any() else None
        wave.write_v(row, total.astype(np.float32).view(np.uint32), poison)

    return run


PACKED = {
    "v_pk_mov_b32": compile_packed_move,
    "v_mad_mix_f32": compile_mix,
    "v_mad_mixlo_f16": compile_mix,
    "v_mad_mixhi_f16": compile_mix,
    "v_dot2_f32_f16": compile_dot2,
    "v_dot2_f32_bf16": compile_dot2,
}
