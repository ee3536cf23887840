# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Vector ALU instructions with one result: operands, modifiers, DPP, SDWA and the write-back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from block32.tools.gfx950_executor import dpp, floats
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.operands import VGPR_CODE, VectorSource, check_rows
from block32.tools.gfx950_executor.state import ALL_BITS, FIRST_AGPR, U32, Mask, Wave
from block32.tools.gfx950_executor.valu_ops import OPS, VectorOp

Array = Any
Step = Callable[[Wave], None]
Limits = tuple[int, int]

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "f64": np.float64,
    "u32": np.uint32,
    "i32": np.int32,
    "b32": np.uint32,
    "u24": np.uint32,
    "i24": np.int32,
    "u16": np.uint16,
    "i16": np.int16,
    "b16": np.uint16,
    "u64": np.uint64,
    "i64": np.int64,
    "b64": np.uint64,
}
_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def bits_of(kind: str) -> int:
    """Register bits of a type."""
    return 32 if kind.endswith("24") else int(kind[1:])


@dataclass
class _Dpp:
    """DPP's choice of lanes: where each lane reads, which may write, what replaces no lane."""

    source: Array
    enabled: Mask
    zero_fill: bool

    def valid(self, wave: Wave) -> Mask:
        """Lanes whose source exists and is active."""
        return (self.source >= 0) & wave.lanes[self.source]

    def writes(self, wave: Wave) -> Mask:
        """Lanes that the instruction writes."""
        lanes = wave.lanes & self.enabled
        return lanes if self.zero_fill else lanes & self.valid(wave)

    def apply(self, wave: Wave, value: U32) -> U32:
        """Move the lanes of a register."""
        return np.where(self.valid(wave), value[self.source], np.uint32(0))


def dpp_of(inst: Instruction) -> _Dpp | None:
    """The DPP part of an instruction, or None."""
    if not inst.encoding.endswith("_DPP16"):
        return None
    enabled = dpp.enabled_lanes(inst["row_mask"], inst["bank_mask"])
    return _Dpp(dpp.source_lanes(inst["dpp"]), enabled, bool(inst["bc"]))


def _select(raw: U32, choice: int, extend: int) -> U32:
    """SDWA's byte (0..3), word (4, 5) or dword (6) of a register."""
    if choice == 6:
        return raw
    width = 8 if choice < 4 else 16
    shift = np.uint32(8 * choice if choice < 4 else 16 * (choice - 4))
    part = raw >> shift & np.uint32((1 << width) - 1)
    if extend:
        sign = np.uint32(1 << (width - 1))
        part = (part ^ sign) - sign
    return part


class TypedSource:
    """One source operand, read as a type with its modifiers.

    Args:
        inst: The instruction.
        field: Its operand field.
        position: 0, 1, 2: which bit of neg, abs and op_sel belongs to it.
        kind: The type.
        limits: The kernel's registers.
    """

    def __init__(self, inst: Instruction, field: str, position: int, kind: str, limits: Limits):
        self.kind = kind
        self.bits = bits_of(kind)
        code, accumulator = _operand_code(inst, field)
        parts = 2 if self.bits == 64 else 1
        if code >= VGPR_CODE:
            check_rows(inst, code - VGPR_CODE + FIRST_AGPR * accumulator, parts, limits)
        self._parts = [
            VectorSource(inst, code, self.bits, accumulator, part) for part in range(parts)
        ]
        sdwa = "SDWA" in inst.encoding
        self._sdwa = (
            (inst.get(f"src{position}_sel", 6), inst.get(f"src{position}_sext")) if sdwa else None
        )
        if sdwa and position > 1:
            self._sdwa = None
        self._dpp = dpp_of(inst) if position == 0 else None
        # Where omod, abs and neg are a truth table they are no modifiers.
        plain = "bitop3" in inst.name
        if f"src{position}_neg" in inst.fields:
            self._negate = bool(inst[f"src{position}_neg"])
            self._absolute = bool(inst[f"src{position}_abs"])
        else:
            self._negate = not plain and bool(inst.get("neg") >> position & 1)
            self._absolute = not plain and bool(inst.get("abs") >> position & 1)
        self._high = self.bits == 16 and bool(inst.get("opsel") >> position & 1)

    def read(self, wave: Wave) -> Array:
        """The value, an array of 64 of the type."""
        raw = self._raw(wave, [p.read(wave) for p in self._parts])
        value = self._typed(raw)
        if self._absolute:
            value = self._clear_sign(value)
        if self._negate:
            value = self._flip_sign(value)
        return value

    def poison(self, wave: Wave) -> Array | None:
        """The poison mask as unsigned integers of the type's size, or None."""
        masks = [p.poison(wave) for p in self._parts]
        if all(m is None for m in masks):
            return None
        zero = np.zeros(64, np.uint32)
        raw = self._raw(wave, [zero if m is None else m for m in masks])
        if isinstance(raw, tuple):
            return raw[0].astype(np.uint64) | raw[1].astype(np.uint64) << np.uint64(32)
        if self.bits == 16:
            return (raw >> np.uint32(16 * self._high)).astype(np.uint16)
        return raw & np.uint32(0xFFFFFF) if self.kind.endswith("24") else raw

    def _raw(self, wave: Wave, parts: list[U32]) -> Any:
        if self._dpp is not None:
            parts = [self._dpp.apply(wave, p) for p in parts]
        if len(parts) == 2:
            return parts[0], parts[1]
        if self._sdwa is not None:
            return _select(parts[0], *self._sdwa)
        return parts[0]

    def _typed(self, raw: Any) -> Array:
        if self.bits == 64:
            low, high = raw
            return (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)).view(
                DTYPES[self.kind]
            )
        if self.bits == 16:
            return (raw >> np.uint32(16 * self._high)).astype(np.uint16).view(DTYPES[self.kind])
        if self.kind == "u24":
            return raw & np.uint32(0xFFFFFF)
        if self.kind == "i24":
            return (raw << np.uint32(8)).view(np.int32) >> np.int32(8)
        return raw.view(DTYPES[self.kind])

    def _flip_sign(self, value: Array) -> Array:
        unsigned = _UNSIGNED[self.bits]
        return (value.view(unsigned) ^ unsigned(1 << (self.bits - 1))).view(value.dtype)

    def _clear_sign(self, value: Array) -> Array:
        unsigned = _UNSIGNED[self.bits]
        return (value.view(unsigned) & unsigned((1 << (self.bits - 1)) - 1)).view(value.dtype)


def _operand_code(inst: Instruction, field: str) -> tuple[int, bool]:
    """Source code of an operand field and whether it names an AGPR."""
    code = inst[field]
    if field == "src0" and code in (249, 250) and "vsrc0" in inst.fields:
        code = inst["vsrc0"]
        if inst.get("s0"):  # SDWA: a scalar register instead
            code -= VGPR_CODE
    if field == "vsrc1" and inst.get("s1"):
        code -= VGPR_CODE
    return code, inst.name in ("v_accvgpr_read", "v_accvgpr_mov_b32")


def source_fields(inst: Instruction, count: int) -> list[str]:
    """The operand fields that hold an operation's sources, in order."""
    names = ["src0", "vsrc1" if "vsrc1" in inst.fields else "src1", "src2"]
    return names[:count]


class Target:
    """The vector register that an instruction writes.

    Args:
        inst: The instruction.
        kind: Type of the result.
        limits: The kernel's registers.
        keeps_high: See ``VectorOp``.
    """

    def __init__(self, inst: Instruction, kind: str, limits: Limits, keeps_high: bool = False):
        accumulator = inst.name in ("v_accvgpr_write", "v_accvgpr_mov_b32")
        self.row = inst["vdst"] - VGPR_CODE + FIRST_AGPR * accumulator
        self.bits = bits_of(kind)
        check_rows(inst, self.row, max(1, self.bits // 32), limits)
        self._high = self.bits == 16 and bool(inst.get("opsel") >> 3 & 1)
        self._keeps = keeps_high or self._high
        self._dpp = dpp_of(inst)
        self._sdwa = (inst["dst_sel"], inst["dst_unused"]) if "dst_sel" in inst.fields else None

    def write(self, wave: Wave, value: Array, poison: Array | None) -> None:
        """Write a typed result and its poison (unsigned integers of the type's size)."""
        lanes = None if self._dpp is None else self._dpp.writes(wave)
        if self.bits == 64:
            raw = value.view(np.uint64)
            for part, shift in ((0, np.uint64(0)), (1, np.uint64(32))):
                mask = None if poison is None else (poison >> shift).astype(np.uint32)
                wave.write_v(self.row + part, (raw >> shift).astype(np.uint32), mask, lanes)
            return
        if self.bits == 16:
            word = value.view(np.uint16).astype(np.uint32)
            mask = None if poison is None else poison.astype(np.uint32)
            field = 0xFFFF
        else:
            word, mask, field = value.view(np.uint32), poison, ALL_BITS
        if self._sdwa is not None and self._sdwa[0] != 6:
            self._write_part(wave, word, mask, lanes)
            return
        if self.bits == 16 and self._keeps:
            shift = np.uint32(16 * self._high)
            self.merge(
                wave,
                word << shift,
                None if mask is None else mask << shift,
                field << int(shift),
                lanes,
            )
            return
        wave.write_v(self.row, word, mask, lanes)

    def _write_part(self, wave: Wave, word: U32, mask: U32 | None, lanes: Mask | None) -> None:
        assert self._sdwa is not None
        choice, unused = self._sdwa
        width = 8 if choice < 4 else 16
        shift = 8 * choice if choice < 4 else 16 * (choice - 4)
        field = ((1 << width) - 1) << shift
        if unused == 2:  # preserve the rest
            moved = None if mask is None else mask << np.uint32(shift)
            self.merge(wave, word << np.uint32(shift), moved, field, lanes)
            return
        if unused == 1:
            raise UnknownInstructionError("SDWA with a sign-extended destination")
        kept = np.uint32(field)
        moved = None if mask is None else mask << np.uint32(shift) & kept
        wave.write_v(self.row, word << np.uint32(shift) & kept, moved, lanes)

    def merge(
        self, wave: Wave, word: U32, mask: U32 | None, field: int, lanes: Mask | None
    ) -> None:
        """Write the bits of ``field`` and keep the others."""
        taken, kept = np.uint32(field & ALL_BITS), np.uint32(~field & ALL_BITS)
        old = wave.read_v(self.row)
        old_mask = wave.poison_v(self.row)
        zero = np.zeros(64, np.uint32)
        merged = ((zero if old_mask is None else old_mask) & kept) | (
            (zero if mask is None else mask) & taken
        )
        wave.write_v(self.row, old & kept | word & taken, merged, lanes)


def combined_poison(masks: list[Array | None], values: list[Array], op: VectorOp) -> Array | None:
    """The poison of a result: by the operation's own rule, or all bits of a touched lane."""
    if all(m is None for m in masks):
        return None
    filled = [
        np.zeros(64, _UNSIGNED[v.dtype.itemsize * 8]) if m is None else m
        for m, v in zip(masks, values, strict=True)
    ]
    unsigned = _UNSIGNED[bits_of(op.result)]
    if op.poison is not None:
        plain = [v.view(_UNSIGNED[v.dtype.itemsize * 8]) for v in values]
        return op.poison(plain, filled).astype(unsigned)
    touched = filled[0] != 0
    for mask in filled[1:]:
        touched = touched | (mask != 0)
    return np.where(touched, ~unsigned(0), unsigned(0))


_OMOD = {1: 2.0, 2: 4.0, 3: 0.5}
_INTEGER_CLAMPS = {
    # name: exact result from wide integers
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_add_u16": lambda a, b: a + b,
    "v_sub_u16": lambda a, b: a - b,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_add_i16": lambda a, b: a + b,
    "v_sub_i16": lambda a, b: a - b,
}


def _with_output_modifiers(inst: Instruction, op: VectorOp) -> Callable[..., Array]:
    """Add clamp and omod to an operation."""
    clamp = inst.get("clmp")
    omod = inst.get("omod")
    if not clamp and not omod:
        return op.compute
    kind = DTYPES[op.result]
    if op.result[0] == "f":

        def modified(*values: Array) -> Array:
            result = op.compute(*values)
            if omod:
                result = result * kind(_OMOD[omod])
            return np.fmax(np.fmin(result, kind(1)), kind(0)) if clamp else result

        return modified
    if inst.name not in _INTEGER_CLAMPS:
        raise UnknownInstructionError(f"{inst.name} with clamp")
    exact, limits = _INTEGER_CLAMPS[inst.name], np.iinfo(kind)
    return lambda a, b: np.clip(
        exact(a.astype(np.int64), b.astype(np.int64)), limits.min, limits.max
    ).astype(kind)


def compile_simple(inst: Instruction, limits: Limits) -> Step:
    """The meaning of an instruction of the table ``OPS``."""
    op = OPS[inst.name]
    named = len(op.sources) - op.reads_target
    kinds = list(op.sources)
    fields = source_fields(inst, named)
    if inst.name in ("v_fmamk_f32", "v_fmaak_f32"):
        fields = ["src0", "vsrc1"]
    sources = [
        TypedSource(inst, field, position, kinds[position], limits)
        for position, field in enumerate(fields)
    ]
    if op.reads_target:
        sources.append(TypedSource(inst, "vdst", 2, kinds[-1], limits))
    constant = None
    if inst.name in ("v_fmamk_f32", "v_fmaak_f32"):
        constant = np.full(64, inst.literal or 0, np.uint32).view(np.float32)
    at = 1 if inst.name == "v_fmamk_f32" else 2
    target = Target(inst, op.result, limits, op.keeps_high)
    compute = _with_output_modifiers(inst, op)
    single = "f32" in op.sources or op.result == "f32"
    moves = op.poison is not None and op.result == "b32"
    flushes_always = not op.denormals

    def run(wave: Wave) -> None:
        values = [s.read(wave) for s in sources]
        masks = [s.poison(wave) for s in sources]
        if constant is not None:
            values.insert(at, constant)
            masks.insert(at, None)
        flushing = single and not moves and (flushes_always or wave.flush_f32)
        if flushing:
            values = [floats.flush(v) if v.dtype == np.float32 else v for v in values]
        result = compute(*values)
        if flushing and result.dtype == np.float32:
            result = floats.flush(result)
        poison = (
            None if not any(m is not None for m in masks) else combined_poison(masks, values, op)
        )
        target.write(wave, result, poison)

    return run
