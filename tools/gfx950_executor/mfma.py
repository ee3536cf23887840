# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Matrix instructions: where each lane's elements lie, and what is computed from them.

Lane tables (l is the lane; source: AMD's matrix instruction calculator and ISA documents):

- 8-bit operands of the scaled instructions hold two runs of 16 along K: bytes 0..15 are
  K = 16g.., bytes 16..31 are K = K/2 + 16g.., with g = l / rows.
- 6-bit and 4-bit operands hold one run of 32: K = 32g..
- The scale byte of lane l is that of its row and K block g, whatever the format.
- Other instructions hold one run of K / groups elements.
- C and D: element r of lane l is column l % cols; rows are blocks of four.

EXEC is ignored: all lanes take part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from block32.tools.gfx950_executor import floats
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.operands import VGPR_CODE, check_rows, inline_constant
from block32.tools.gfx950_executor.state import ALL_BITS, FIRST_AGPR, LANES, U32, Wave
from block32.tools.gfx950_executor.valu import Limits, Step

Array = Any
_LANE = np.arange(LANES)
_ALL_LANES = np.ones(LANES, np.bool_)
# 2^(byte - 127), and NaN for byte 255.
_E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)


@dataclass(frozen=True)
class Shape:
    """M x N x K of one matrix instruction, M = N, with one block."""

    mn: int
    k: int

    @property
    def groups(self) -> int:
        """Lanes that share a row of A."""
        return LANES // self.mn

    @property
    def results(self) -> int:
        """Elements of D a lane holds."""
        return self.mn * self.mn // LANES


def result_rows(shape: Shape) -> Array:
    """Row of D for each lane and element, int[64, results]."""
    r = np.arange(shape.results)
    block = r // 4 * 4 * shape.groups + r % 4
    return 4 * (_LANE // shape.mn)[:, None] + block[None, :]


def k_of_elements(shape: Shape, bits: int, scaled: bool) -> Array:
    """K index of each element a lane holds, int[64, elements].

    Args:
        shape: The instruction.
        bits: Of an operand's element.
        scaled: Whether it is one of the f8f6f4 instructions, whose 8-bit operands are split.
    """
    count = shape.k // shape.groups
    group = _LANE // shape.mn
    element = np.arange(count)
    if scaled and bits == 8:
        half = count // 2
        return (element // half * (shape.k // 2) + element % half)[None, :] + half * group[:, None]
    return element[None, :] + count * group[:, None]


class _Registers:
    """Consecutive vector registers of an operand, or an inline constant."""

    def __init__(self, inst: Instruction, code: int, count: int, accumulator: bool, limits: Limits):
        self.count = count
        self.constant: U32 | None = None
        self.first = -1
        if code < VGPR_CODE:
            value = inline_constant(code, 32)
            if value is None:
                raise UnknownInstructionError(f"{inst.name} with a scalar operand")
            self.constant = np.full((count, LANES), value, np.uint32)
            return
        self.first = code - VGPR_CODE + FIRST_AGPR * accumulator
        check_rows(inst, self.first, count, limits)

    def read(self, wave: Wave) -> U32:
        """uint32[registers, 64]."""
        if self.constant is not None:
            return self.constant
        last = self.first + self.count
        if any(wave.v_locked[self.first : last]):
            for row in range(self.first, last):
                wave.read_v(row)
        return wave.v[self.first : last]

    def touched(self, wave: Wave) -> Array | None:
        """Lanes with any poison, or None."""
        last = self.first + self.count
        if self.constant is not None or not any(wave.v_dirty[self.first : last]):
            return None
        return wave.v_poison[self.first : last].any(axis=0)


def _unpack(registers: U32, bits: int) -> Array:
    """uint32[registers, 64] to elements uint[64, n]; 16- and 32-bit ones stay whole."""
    lanes = np.ascontiguousarray(registers.T)
    if bits == 32:
        return lanes
    if bits == 16:
        return lanes.view("<u2")
    raw = lanes.view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(LANES, -1)
    triples = raw.reshape(LANES, -1, 3).astype(np.uint32)  # 6 bits: four elements in three bytes
    word = triples[..., 0] | triples[..., 1] << np.uint32(8) | triples[..., 2] << np.uint32(16)
    parts = [word >> np.uint32(6 * i) & np.uint32(63) for i in range(4)]
    return np.stack(parts, axis=-1).reshape(LANES, -1)


def _places(shape: Shape, k: Array) -> Array:
    """For each element of a matrix [rows, K], which of the lanes' elements it is."""
    places = np.empty((shape.mn, shape.k), np.int64)
    places[(_LANE % shape.mn)[:, None], k] = np.arange(k.size).reshape(k.shape)
    return places


def _poisoned_rows(touched: Array | None, shape: Shape) -> Array:
    rows = np.zeros(shape.mn, np.bool_)
    if touched is not None:
        np.logical_or.at(rows, _LANE % shape.mn, touched)
    return rows


class _Result:
    """The accumulator in and out: C added in float32 or int32, poison by row and column."""

    def __init__(self, inst: Instruction, shape: Shape, limits: Limits):
        accumulator = bool(inst["acc_cd"])
        self.shape = shape
        self.row = inst["vdst"] - VGPR_CODE + FIRST_AGPR * accumulator
        check_rows(inst, self.row, shape.results, limits)
        self.c = _Registers(inst, inst["src2"], shape.results, accumulator, limits)
        self._rows = result_rows(shape)
        self._columns = (_LANE % shape.mn)[:, None]
        self._flat = (self._rows * shape.mn + self._columns).T  # [results, 64]

    def write(
        self,
        wave: Wave,
        product: Array,
        kind: type,
        a_touched: Array | None,
        b_touched: Array | None,
    ) -> None:
        """Add C to a product [M, N] and write D in all lanes."""
        c_touched = self.c.touched(wave)
        c = self.c.read(wave).view(kind)
        d = product.ravel()[self._flat]
        words = (d + c.astype(d.dtype)).astype(kind).view(np.uint32)
        poison = None
        if not (a_touched is None and b_touched is None and c_touched is None):
            a_rows = _poisoned_rows(a_touched, self.shape)[self._rows]
            b_rows = _poisoned_rows(b_touched, self.shape)[self._columns]
            bad = np.logical_or(a_rows, b_rows).T
            if c_touched is not None:
                bad = bad | (wave.v_poison[self.c.first : self.c.first + self.c.count] != 0)
            poison = np.where(bad, np.uint32(ALL_BITS), np.uint32(0))
        for r in range(self.shape.results):
            mask = None if poison is None else poison[r]
            wave.write_v(self.row + r, words[r], mask, _ALL_LANES)


_SCALED = re.compile(r"v_mfma_(?:scale_)?f32_(\d+)x\d+x(\d+)_f8f6f4$")
_PLAIN = re.compile(r"v_mfma_(f32|i32|f64)_(\d+)x\d+x(\d+)_(?:\d+b_)?(\w+)$")


def _accumulator_bits(inst: Instruction) -> tuple[bool, bool]:
    return bool(inst["acc"] & 1), bool(inst["acc"] >> 1)


class _Operand:
    """A or B of a scaled instruction as a matrix of scaled values."""

    def __init__(self, inst: Instruction, side: int, shape: Shape, limits: Limits):
        number = inst[("cbsz", "blgp")[side]]
        if number >= len(floats.FORMATS):
            raise UnknownInstructionError(f"{inst.name} with format {number}")
        self.form = floats.FORMATS[number]
        registers = 32 * self.form.bits // 32
        self.shape = shape
        self.registers = _Registers(
            inst, inst[f"src{side}"], registers, _accumulator_bits(inst)[side], limits
        )
        self.places = _places(shape, k_of_elements(shape, self.form.bits, scaled=True))
        self.table = floats.decode_table(self.form).astype(np.float64)
        self.scale: _Registers | None = None
        self.scale_byte = np.uint32(0)
        if "scale_src0" in inst.fields:
            self._use_scale(inst, side, limits)

    def _use_scale(self, inst: Instruction, side: int, limits: Limits) -> None:
        code = inst[f"scale_src{side}"]
        if code < VGPR_CODE:
            raise UnknownInstructionError(
                f"{inst.name} takes a scale from a scalar or a constant, where the hardware reads "
                "bits 30:23 instead of a byte; keep scales in VGPRs"
            )
        self.scale = _Registers(inst, code, 1, False, limits)
        # The byte is {op_sel_hi, op_sel}.
        byte = (inst["opsel_hi"] >> side & 1) << 1 | inst["opsel"] >> side & 1
        self.scale_byte = np.uint32(8 * byte)

    def read(self, wave: Wave) -> tuple[Array, Array | None]:
        """Scaled values [rows, K], exact in float64, and the lanes with poison."""
        codes = _unpack(self.registers.read(wave), self.form.bits)
        values = self.table[codes.ravel()[self.places]]
        touched = self.registers.touched(wave)
        if self.scale is None:
            return values, touched
        field = np.uint32(255) << self.scale_byte
        byte = (self.scale.read(wave)[0] & field) >> self.scale_byte
        # Lane l has the scale of row l % rows and K block l / rows.
        scales = _E8M0[byte].reshape(-1, self.shape.mn).T
        blocks = values.reshape(self.shape.mn, -1, 32) * scales[:, :, None]
        if self.scale.touched(wave) is not None:
            bad = (wave.v_poison[self.scale.first] & field) != 0
            touched = bad if touched is None else touched | bad
        return blocks.reshape(values.shape), touched


def compile_scaled(inst: Instruction, limits: Limits) -> Step:
    """v_mfma_scale_f32_16x16x128_f8f6f4, ..._32x32x64_..., and both without scales."""
    match = _SCALED.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    shape = Shape(int(match[1]), int(match[2]))
    # Bit 0 of abid says that the instruction has scales.
    if inst["abid"] != int(inst.encoding == "VOP3PX2") or inst.get("neg") or inst.get("neg_hi"):
        raise UnknownInstructionError(f"{inst.name} with abid {inst['abid']} or neg")
    a, b = (_Operand(inst, side, shape, limits) for side in (0, 1))
    result = _Result(inst, shape, limits)

    def run(wave: Wave) -> None:
        (left, a_touched), (right, b_touched) = a.read(wave), b.read(wave)
        result.write(wave, left @ right.T, np.float32, a_touched, b_touched)

    return run


_ELEMENT_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8, "bf16_1k": 16}


def _plain_elements(codes: Array, kind: str) -> Array:
    if kind == "bf16":
        return floats.from_bf16(codes.astype(np.uint32)).astype(np.float64)
    if kind == "f16":
        return codes.view(np.float16).astype(np.float64)
    if kind == "f32":
        return codes.view(np.float32).astype(np.float64)
    if kind == "i8":
        return codes.view(np.int8).astype(np.int64)
    return floats.decode_table(floats.BY_NAME[{"fp8": "e4m3", "bf8": "e5m2"}[kind]])[codes].astype(
        np.float64
    )


def compile_plain(inst: Instruction, limits: Limits) -> Step:
    """Dense MFMA of one block: f16, bf16, f32, i8 and fp8 operands, 16x16 and 32x32."""
    match = _PLAIN.match(inst.name)
    if match is None or match[1] == "f64":
        raise UnknownInstructionError(inst.name)
    shape = Shape(int(match[2]), int(match[3]))
    kinds = match[4].split("_") if match[4].count("8") == 2 else [match[4]] * 2
    if shape.mn not in (16, 32) or re.search(r"x\d+_\d+b_", inst.name):
        raise UnknownInstructionError(inst.name)
    if inst["cbsz"] or inst["abid"] or inst["blgp"]:
        raise UnknownInstructionError(f"{inst.name} with broadcast or negation")
    number = np.int32 if match[1] == "i32" else np.float32
    sides = []
    for side, kind in enumerate(kinds):
        bits = _ELEMENT_BITS.get(kind, 8)
        registers = max(1, shape.k // shape.groups * bits // 32)
        operand = _Registers(
            inst, inst[f"src{side}"], registers, _accumulator_bits(inst)[side], limits
        )
        sides.append((operand, bits, kind))
    places = _places(shape, k_of_elements(shape, 16, scaled=False))
    result = _Result(inst, shape, limits)

    def run(wave: Wave) -> None:
        a, b = (
            _plain_elements(_unpack(operand.read(wave), bits), kind).ravel()[places]
            for operand, bits, kind in sides
        )
        touched = [operand.touched(wave) for operand, _, _ in sides]
        result.write(wave, a @ b.T, number, *touched)

    return run


def compile_mfma(inst: Instruction, limits: Limits) -> Step:
    """The meaning of a matrix instruction."""
    return compile_scaled(inst, limits) if "f8f6f4" in inst.name else compile_plain(inst, limits)
