# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Vector instructions that do not fit "sources in, one register out, lane by lane"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from block32.tools.gfx950_executor import floats
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.operands import VGPR_CODE, check_rows, scalar_source
from block32.tools.gfx950_executor.state import (
    ALL_BITS,
    EXEC,
    LANES,
    VCC,
    Wave,
    lanes_of,
    mask_of,
)
from block32.tools.gfx950_executor.valu import (
    Limits,
    Step,
    Target,
    TypedSource,
    dpp_of,
    source_fields,
)
from block32.tools.gfx950_executor.valu_ops import OPS

Array = Any


def _any_lane(masks: list[Array | None]) -> Array | None:
    """Lanes with poison in any operand, as booleans; None where there are none."""
    touched = None
    for mask in masks:
        if mask is not None:
            touched = mask != 0 if touched is None else touched | (mask != 0)
    return touched


# ---- comparisons

_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "f": lambda a, b: np.zeros(LANES, np.bool_),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(LANES, np.bool_),
    "t": lambda a, b: np.ones(LANES, np.bool_),
}


def _class(a: Array, mask: Array) -> Array:
    """v_cmp_class: which of ten kinds of float a value is, against a mask of kinds."""
    tiny = np.finfo(a.dtype).tiny
    negative = np.signbit(a)
    magnitude = np.abs(a)
    subnormal = (magnitude > 0) & (magnitude < tiny)
    normal = np.isfinite(a) & (magnitude >= tiny)
    unsigned = a.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])
    quiet_bit = np.finfo(a.dtype).nmant - 1
    quiet = unsigned >> unsigned.dtype.type(quiet_bit) & unsigned.dtype.type(1) != 0
    kinds = [
        np.isnan(a) & ~quiet,
        np.isnan(a) & quiet,
        np.isinf(a) & negative,
        normal & negative,
        subnormal & negative,
        (magnitude == 0) & negative,
        (magnitude == 0) & ~negative,
        subnormal & ~negative,
        normal & ~negative,
        np.isinf(a) & ~negative,
    ]
    result = np.zeros(LANES, np.bool_)
    for bit, kind in enumerate(kinds):
        result |= kind & (mask >> np.uint32(bit) & np.uint32(1) != 0)
    return result


def _mask_target(inst: Instruction) -> int:
    """The scalar pair that a comparison writes."""
    if inst.encoding == "VOP3_SDST":
        return inst["vdst"]
    if "sd" in inst.fields and inst["sd"]:
        return inst["sdst"]
    return VCC


def compile_compare(inst: Instruction, limits: Limits) -> Step:
    """v_cmp_* and v_cmpx_*: a bit a lane into a scalar pair (and EXEC)."""
    _, head, kind, form = inst.name.split("_")
    to_exec = head == "cmpx"
    second_kind = "u32" if kind == "class" else form
    first_field, second_field = source_fields(inst, 2)
    first = TypedSource(inst, first_field, 0, form, limits)
    second = TypedSource(inst, second_field, 1, second_kind, limits)
    compare = _class if kind == "class" else _ORDERED[kind]
    target = _mask_target(inst)

    def run(wave: Wave) -> None:
        a, b = first.read(wave), second.read(wave)
        if wave.flush_f32 and form == "f32" and kind != "class":
            a, b = floats.flush(a), floats.flush(b)
        result = mask_of(compare(a, b) & wave.lanes)
        touched = _any_lane([first.poison(wave), second.poison(wave)])
        poison = 0 if touched is None else mask_of(touched & wave.lanes)
        wave.write_s64(target, result, poison)
        if to_exec:
            wave.write_s64(EXEC, result, poison)

    return run


def compile_select(inst: Instruction, limits: Limits) -> Step:
    """v_cndmask_b32: the second source where the mask's bit is set."""
    fields = source_fields(inst, 2)
    first, second = (TypedSource(inst, f, i, "b32", limits) for i, f in enumerate(fields))
    mask_code = inst["src2"] if "src2" in inst.fields else VCC
    mask_of_lanes = (
        (lambda wave: (wave.read_s64(VCC), wave.poison_s64(VCC)))
        if mask_code == VCC
        else scalar_source(inst, "src2", 2)
    )
    target = Target(inst, "b32", limits)

    def run(wave: Wave) -> None:
        mask, mask_poison = mask_of_lanes(wave)
        chosen = lanes_of(mask)
        result = np.where(chosen, second.read(wave), first.read(wave))
        a, b = first.poison(wave), second.poison(wave)
        poison = None
        if a is not None or b is not None or mask_poison:
            zero = np.zeros(LANES, np.uint32)
            poison = np.where(chosen, zero if b is None else b, zero if a is None else a)
            poison = np.where(lanes_of(mask_poison), np.uint32(ALL_BITS), poison)
        target.write(wave, result, poison)

    return run


# ---- carries


def compile_carry(inst: Instruction, limits: Limits) -> Step:
    """v_add_co_u32 and its relatives: a carry mask out, and for v_addc and v_subb in."""
    name = inst.name
    fields = source_fields(inst, 2)
    first, second = (TypedSource(inst, f, i, "u32", limits) for i, f in enumerate(fields))
    target = Target(inst, "u32", limits)
    out = inst["sdst"] if inst.encoding == "VOP3SD" else VCC
    takes_carry = name.startswith(("v_addc", "v_subb"))
    carry_code = inst["src2"] if inst.encoding == "VOP3SD" else VCC
    reverses = "rev" in name
    adds = name.startswith("v_add")

    def run(wave: Wave) -> None:
        a, b = first.read(wave).astype(np.int64), second.read(wave).astype(np.int64)
        if reverses:
            a, b = b, a
        carry = lanes_of(wave.read_s64(carry_code)).astype(np.int64) if takes_carry else 0
        total = a + b + carry if adds else a - b - carry
        touched = _any_lane([first.poison(wave), second.poison(wave)])
        if takes_carry and wave.poison_s64(carry_code):
            bad = lanes_of(wave.poison_s64(carry_code))
            touched = bad if touched is None else touched | bad
        poison = None if touched is None else np.where(touched, np.uint32(ALL_BITS), np.uint32(0))
        carries = (total < 0) | (total > ALL_BITS)
        target.write(wave, (total & ALL_BITS).astype(np.uint32), poison)
        scalar_poison = 0 if touched is None else mask_of(touched & wave.lanes)
        wave.write_s64(out, mask_of(carries & wave.lanes), scalar_poison)

    return run


def compile_wide_mad(inst: Instruction, limits: Limits) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32: 32 x 32 + 64 bits, with a carry mask."""
    signed = inst.name == "v_mad_i64_i32"
    kind = "i32" if signed else "u32"
    first = TypedSource(inst, "src0", 0, kind, limits)
    second = TypedSource(inst, "src1", 1, kind, limits)
    third = TypedSource(inst, "src2", 2, "u64", limits)
    target = Target(inst, "u64", limits)
    out = inst["sdst"]
    wide = np.int64 if signed else np.uint64

    def run(wave: Wave) -> None:
        product = (first.read(wave).astype(wide) * second.read(wave).astype(wide)).view(np.uint64)
        addend = third.read(wave)
        total = product + addend
        undefined = third.poison(wave)
        touched = _any_lane([first.poison(wave), second.poison(wave), undefined])
        poison = None
        if touched is not None:
            # LLVM leaves the addend's high half undefined where only the low result is used.
            low_half = None if undefined is None else undefined & np.uint64(ALL_BITS)
            low = _any_lane([first.poison(wave), second.poison(wave), low_half])
            poison = np.where(touched, np.uint64(ALL_BITS << 32), np.uint64(0))
            if low is not None:
                poison = np.where(low, ~np.uint64(0), poison)
        target.write(wave, total, poison)
        scalar_poison = 0 if touched is None else mask_of(touched & wave.lanes)
        wave.write_s64(out, mask_of((total < addend) & wave.lanes), scalar_poison)

    return run


# ---- division steps


def compile_div_scale(inst: Instruction, limits: Limits) -> Step:
    """v_div_scale: bring a division's operand into range; the mask says that it mattered."""
    kind = "f64" if inst.name.endswith("f64") else "f32"
    value, denominator, numerator = (
        TypedSource(inst, f, i, kind, limits) for i, f in enumerate(("src0", "src1", "src2"))
    )
    target = Target(inst, kind, limits)
    out = inst["sdst"]
    far, power, tiny_numerator = (96, 64, 23 - 127) if kind == "f32" else (768, 128, 53 - 1023)

    def run(wave: Wave) -> None:
        s0, d, n = value.read(wave), denominator.read(wave), numerator.read(wave)
        tiny = np.finfo(s0.dtype).tiny
        up, down = np.ldexp(s0, power), np.ldexp(s0, -power)
        exponent_n, exponent_d = np.frexp(n)[1] - 1, np.frexp(d)[1] - 1
        reciprocal = 1.0 / d.astype(np.float64)
        small_reciprocal = np.abs(reciprocal) < np.finfo(np.float64).tiny
        ratio = np.abs(n / d)
        small_ratio = (ratio < tiny) & (ratio > 0)
        cases = [
            ((n == 0) | (d == 0), np.full_like(s0, np.nan), False),
            (exponent_n - exponent_d >= far, np.where(s0 == d, up, s0), True),
            ((np.abs(d) < tiny), up, False),
            (small_reciprocal & small_ratio, np.where(s0 == d, up, s0), True),
            (small_reciprocal, down, False),
            (small_ratio, np.where(s0 == n, up, s0), True),
            (exponent_n <= tiny_numerator, up, False),
        ]
        result = np.select([c for c, _, _ in cases], [r for _, r, _ in cases], s0)
        flags = np.select([c for c, _, _ in cases], [np.full(LANES, f) for _, _, f in cases], False)
        touched = _any_lane([s.poison(wave) for s in (value, denominator, numerator)])
        unsigned = np.uint64 if kind == "f64" else np.uint32
        poison = None if touched is None else np.where(touched, ~unsigned(0), unsigned(0))
        target.write(wave, result.astype(s0.dtype), poison)
        scalar_poison = 0 if touched is None else mask_of(touched & wave.lanes)
        wave.write_s64(out, mask_of(flags & wave.lanes), scalar_poison)

    return run


def compile_div_fmas(inst: Instruction, limits: Limits) -> Step:
    """v_div_fmas: a fused multiply-add, scaled back in the lanes of VCC."""
    kind = "f64" if inst.name.endswith("f64") else "f32"
    op = OPS[f"v_fma_{kind}"]
    sources = [
        TypedSource(inst, f, i, kind, limits) for i, f in enumerate(("src0", "src1", "src2"))
    ]
    target = Target(inst, kind, limits)
    power = 64 if kind == "f64" else 32

    def run(wave: Wave) -> None:
        result = op.compute(*[s.read(wave) for s in sources])
        scaled = np.where(lanes_of(wave.read_s64(VCC)), np.ldexp(result, power), result)
        touched = _any_lane([s.poison(wave) for s in sources])
        unsigned = np.uint64 if kind == "f64" else np.uint32
        poison = None if touched is None else np.where(touched, ~unsigned(0), unsigned(0))
        target.write(wave, scaled.astype(result.dtype), poison)

    return run


# ---- across lanes


def compile_read_lane(inst: Instruction, limits: Limits) -> Step:
    """v_readfirstlane_b32 and v_readlane_b32: one lane into a scalar register."""
    row = inst["src0"] - VGPR_CODE
    if row < 0:
        scalar = scalar_source(inst, "src0", 1)
        code = inst["vdst"] & 0xFF
        return lambda wave: wave.write_s(code, *scalar(wave))
    check_rows(inst, row, 1, limits)
    target = inst["vdst"] & 0xFF
    lane_source = scalar_source(inst, "src1", 1) if inst.name == "v_readlane_b32" else None

    def run(wave: Wave) -> None:
        if lane_source is not None:
            lane = lane_source(wave)[0] & 63
        else:
            active = wave.exec_mask
            lane = (active & -active).bit_length() - 1 if active else 0
        value = wave.read_v(row)[lane]
        wave.write_s(target, int(value), int(wave.v_poison[row][lane]) if wave.v_dirty[row] else 0)

    return run


def compile_write_lane(inst: Instruction, limits: Limits) -> Step:
    """v_writelane_b32: a scalar into one lane, whatever EXEC says."""
    row = inst["vdst"] - VGPR_CODE
    check_rows(inst, row, 1, limits)
    value, lane_source = scalar_source(inst, "src0", 1), scalar_source(inst, "src1", 1)

    def run(wave: Wave) -> None:
        (word, poison), lane = value(wave), lane_source(wave)[0] & 63
        only = np.arange(LANES) == lane
        wave.write_v(row, np.full(LANES, word, np.uint32), np.full(LANES, poison, np.uint32), only)

    return run


def compile_mbcnt(inst: Instruction, limits: Limits) -> Step:
    """v_mbcnt_lo and v_mbcnt_hi: count a mask's bits below the lane, plus the second source."""
    first = TypedSource(inst, "src0", 0, "u32", limits)
    second = TypedSource(inst, "src1", 1, "u32", limits)
    target = Target(inst, "u32", limits)
    below = [(1 << lane) - 1 for lane in range(LANES)]
    high = inst.name.startswith("v_mbcnt_hi")
    part = np.array([b >> 32 if high else b & ALL_BITS for b in below], np.uint32)

    def run(wave: Wave) -> None:
        counted = np.bitwise_count(first.read(wave) & part).astype(np.uint32) + second.read(wave)
        touched = _any_lane([first.poison(wave), second.poison(wave)])
        poison = None if touched is None else np.where(touched, np.uint32(ALL_BITS), np.uint32(0))
        target.write(wave, counted, poison)

    return run


def compile_permlane_swap(inst: Instruction, limits: Limits) -> Step:
    """v_permlane16_swap and v_permlane32_swap: exchange lanes between two registers."""
    if dpp_of(inst) is not None:
        raise UnknownInstructionError(f"{inst.name} with DPP")
    first, second = inst["vdst"] - VGPR_CODE, inst["src0"] - VGPR_CODE
    check_rows(inst, first, 1, limits)
    check_rows(inst, second, 1, limits)
    span = 16 if inst.name.startswith("v_permlane16") else 32
    lane = np.arange(LANES)
    upper = lane // span % 2 == 1

    def run(wave: Wave) -> None:
        a, b = wave.read_v(first).copy(), wave.read_v(second).copy()
        pa, pb = wave.v_poison[first].copy(), wave.v_poison[second].copy()
        # The upper rows of the target trade places with the lower rows of the source.
        wave.write_v(
            first, np.where(upper, np.roll(b, span), a), np.where(upper, np.roll(pb, span), pa)
        )
        wave.write_v(
            second, np.where(upper, b, np.roll(a, -span)), np.where(upper, pb, np.roll(pa, -span))
        )

    return run


def compile_swap(inst: Instruction, limits: Limits) -> Step:
    """v_swap_b32: exchange two registers."""
    first, second = inst["vdst"] - VGPR_CODE, inst["src0"] - VGPR_CODE
    check_rows(inst, first, 1, limits)
    check_rows(inst, second, 1, limits)

    def run(wave: Wave) -> None:
        a, b = wave.read_v(first).copy(), wave.read_v(second).copy()
        pa, pb = wave.v_poison[first].copy(), wave.v_poison[second].copy()
        wave.write_v(first, b, pb)
        wave.write_v(second, a, pa)

    return run


# ---- three-input bit operations


def compile_bitop3(inst: Instruction, limits: Limits) -> Step:
    """v_bitop3: any function of three bits; omod, abs and neg hold its truth table."""
    kind = "b16" if inst.name.endswith("b16") else "b32"
    table = inst["omod"] << 6 | inst["abs"] << 3 | inst["neg"]
    sources = [
        TypedSource(inst, f, i, kind, limits) for i, f in enumerate(("src0", "src1", "src2"))
    ]
    target = Target(inst, kind, limits)

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                term = a if row & 4 else ~a
                term = term & (b if row & 2 else ~b)
                result |= term & (c if row & 1 else ~c)
        return result

    def run(wave: Wave) -> None:
        values = [s.read(wave) for s in sources]
        masks = [s.poison(wave) for s in sources]
        result = evaluate(*values)
        poison = None
        if any(m is not None for m in masks):
            # A bit is poisoned where flipping some subset of the poisoned inputs changes it.
            filled = [
                np.zeros_like(v) if m is None else m for m, v in zip(masks, values, strict=True)
            ]
            poison = np.zeros_like(result)
            for subset in range(1, 8):
                flipped = [
                    v ^ m if subset >> i & 1 else v
                    for i, (v, m) in enumerate(zip(values, filled, strict=True))
                ]
                poison |= evaluate(*flipped) ^ result
        target.write(wave, result, poison)

    return run


SPECIAL: dict[str, Callable[[Instruction, Limits], Step]] = {
    "v_cndmask_b32": compile_select,
    "v_readfirstlane_b32": compile_read_lane,
    "v_readlane_b32": compile_read_lane,
    "v_writelane_b32": compile_write_lane,
    "v_mbcnt_lo_u32_b32": compile_mbcnt,
    "v_mbcnt_hi_u32_b32": compile_mbcnt,
    "v_permlane16_swap_b32": compile_permlane_swap,
    "v_permlane32_swap_b32": compile_permlane_swap,
    "v_swap_b32": compile_swap,
    "v_bitop3_b32": compile_bitop3,
    "v_bitop3_b16": compile_bitop3,
    "v_mad_u64_u32": compile_wide_mad,
    "v_mad_i64_i32": compile_wide_mad,
    "v_div_scale_f32": compile_div_scale,
    "v_div_scale_f64": compile_div_scale,
    "v_div_fmas_f32": compile_div_fmas,
    "v_div_fmas_f64": compile_div_fmas,
    "v_nop": lambda inst, limits: lambda wave: None,
    **{
        f"v_{kind}_co_u32": compile_carry
        for kind in ("add", "sub", "subrev", "addc", "subb", "subbrev")
    },
}
