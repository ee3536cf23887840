# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""What each vector ALU instruction computes: one table, mnemonic to typed function.

A type is written as in the mnemonics: f32, f16, f64, u32, i32, u16, i16, u24, i24, u64, i64,
b32 (bits), b16, b64. Functions take and return NumPy arrays of those types, one element a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from block32.tools.gfx950_executor import floats

Array = Any
PoisonRule = Callable[[list[Array], list[Array]], Array]


@dataclass(frozen=True)
class VectorOp:
    """One operation.

    Attributes:
        result: Type of the result.
        sources: Types of the sources.
        compute: The function.
        poison: Exact rule for poison masks (values, masks) -> mask; None: any poisoned bit of a
            source poisons the whole result.
        reads_target: Whether the target register is the last source (v_fmac).
        keeps_high: Whether a 16-bit result leaves the target's other half alone; most
            instructions of this generation clear it.
        denormals: False where the hardware flushes subnormals whatever the mode.
    """

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., Array]
    poison: PoisonRule | None = None
    reads_target: bool = False
    keeps_high: bool = False
    denormals: bool = True


OPS: dict[str, VectorOp] = {}


def define(
    name: str,
    types: str,
    compute: Callable[..., Array],
    poison: PoisonRule | None = None,
    **rest: Any,
) -> None:
    """Add an operation to the table; ``types`` names its result and sources, parted by blanks."""
    result, *sources = types.split()
    OPS[name] = VectorOp(result, tuple(sources), compute, poison, **rest)


def _u(value: int) -> np.uint32:
    return np.uint32(value)


# ---- poison rules that follow single bits


def _either(_: list[Array], masks: list[Array]) -> Array:
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def _and_rule(values: list[Array], masks: list[Array]) -> Array:
    (a, b), (p, q) = values, masks
    return (p & q) | (p & b) | (q & a)


def _or_rule(values: list[Array], masks: list[Array]) -> Array:
    (a, b), (p, q) = values, masks
    return (p & q) | (p & ~b) | (q & ~a)


def spread(mask: Array) -> Array:
    """All ones where a lane has any poison."""
    kind = mask.dtype.type
    return np.where(mask != 0, ~kind(0), kind(0))


def _shift_rule(compute: Callable[[Array, Array], Array], bits: int) -> PoisonRule:
    """Shift the mask like the value; a poisoned amount poisons all."""

    def rule(values: list[Array], masks: list[Array]) -> Array:
        moved = compute(values[0].view(masks[1].dtype), masks[1])
        return moved | spread(masks[0] & masks[0].dtype.type(bits - 1)).astype(moved.dtype)

    return rule


# ---- float32

define("v_add_f32", "f32 f32 f32", lambda a, b: a + b)
define("v_sub_f32", "f32 f32 f32", lambda a, b: a - b)
define("v_subrev_f32", "f32 f32 f32", lambda a, b: b - a)
define("v_mul_f32", "f32 f32 f32", lambda a, b: a * b)
define(
    "v_mul_legacy_f32",
    "f32 f32 f32",
    lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b),
)
define("v_min_f32", "f32 f32 f32", np.fmin)
define("v_max_f32", "f32 f32 f32", np.fmax)
define("v_fma_f32", "f32 f32 f32 f32", floats.fma32)
define("v_fmac_f32", "f32 f32 f32 f32", floats.fma32, reads_target=True)
define("v_fmamk_f32", "f32 f32 f32 f32", floats.fma32)
define("v_fmaak_f32", "f32 f32 f32 f32", floats.fma32)
define("v_min3_f32", "f32 f32 f32 f32", lambda a, b, c: np.fmin(np.fmin(a, b), c))
define("v_max3_f32", "f32 f32 f32 f32", lambda a, b, c: np.fmax(np.fmax(a, b), c))
define("v_minimum3_f32", "f32 f32 f32 f32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
define("v_maximum3_f32", "f32 f32 f32 f32", lambda a, b, c: np.maximum(np.maximum(a, b), c))


def _median(a: Array, b: Array, c: Array) -> Array:
    low, high = np.fmin(a, b), np.fmax(a, b)
    return np.fmax(low, np.fmin(high, c))


define("v_med3_f32", "f32 f32 f32 f32", _median)
define("v_floor_f32", "f32 f32", np.floor)
define("v_ceil_f32", "f32 f32", np.ceil)
define("v_trunc_f32", "f32 f32", np.trunc)
define("v_rndne_f32", "f32 f32", np.rint)
define("v_fract_f32", "f32 f32", lambda a: np.fmin(a - np.floor(a), np.float32(1 - 2**-24)))


def _through_f64(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The hardware's approximations are within an ulp; take the rounded exact value."""
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


for _name, _function in {
    "v_exp_f32": np.exp2,
    "v_log_f32": np.log2,
    "v_rcp_f32": lambda a: 1.0 / a,
    "v_rcp_iflag_f32": lambda a: 1.0 / a,
    "v_rsq_f32": lambda a: 1.0 / np.sqrt(a),
    "v_sqrt_f32": np.sqrt,
    "v_sin_f32": lambda a: np.sin(2 * np.pi * a),
    "v_cos_f32": lambda a: np.cos(2 * np.pi * a),
}.items():
    define(_name, "f32 f32", _through_f64(_function), denormals=False)


def _ldexp(a: Array, b: Array) -> Array:
    return np.ldexp(a, np.clip(b, -1000, 1000))


define(
    "v_ldexp_f32", "f32 f32 i32", lambda a, b: _ldexp(a.astype(np.float64), b).astype(np.float32)
)


def _frexp_exponent(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32)


define("v_frexp_exp_i32_f32", "i32 f32", _frexp_exponent)
define("v_frexp_exp_i32_f64", "i32 f64", _frexp_exponent)
define("v_frexp_mant_f32", "f32 f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a))
define("v_frexp_mant_f64", "f64 f64", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a))


def _div_fixup(q: Array, denominator: Array, numerator: Array) -> Array:
    sign = np.signbit(denominator) ^ np.signbit(numerator)
    one = q.dtype.type(1)
    signed = np.where(sign, -one, one)
    d, n = np.abs(denominator), np.abs(numerator)
    result = np.where(sign, -np.abs(q), np.abs(q))
    result = np.where(np.isinf(d) | (n == 0), signed * 0, result)
    result = np.where((d == 0) | np.isinf(n), signed * np.inf, result)
    undefined = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n)) | np.isnan(d) | np.isnan(n)
    return np.where(undefined, np.nan, result).astype(q.dtype)


define("v_div_fixup_f32", "f32 f32 f32 f32", _div_fixup)
define("v_div_fixup_f64", "f64 f64 f64 f64", _div_fixup)
define("v_div_fixup_f16", "f16 f16 f16 f16", _div_fixup, keeps_high=True)

# ---- float64

define("v_add_f64", "f64 f64 f64", lambda a, b: a + b)
define("v_mul_f64", "f64 f64 f64", lambda a, b: a * b)
define("v_min_f64", "f64 f64 f64", np.fmin)
define("v_max_f64", "f64 f64 f64", np.fmax)
define("v_ldexp_f64", "f64 f64 i32", lambda a, b: np.ldexp(a, np.clip(b, -5000, 5000)))
for _name, _function in {
    "v_floor_f64": np.floor,
    "v_ceil_f64": np.ceil,
    "v_trunc_f64": np.trunc,
    "v_rndne_f64": np.rint,
    "v_rcp_f64": lambda a: 1.0 / a,
    "v_rsq_f64": lambda a: 1.0 / np.sqrt(a),
    "v_sqrt_f64": np.sqrt,
}.items():
    define(_name, "f64 f64", _function)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float64)


define("v_fma_f64", "f64 f64 f64 f64", _fma64)
define("v_fmac_f64", "f64 f64 f64 f64", _fma64, reads_target=True)

# ---- float16


def _fma16(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


define("v_add_f16", "f16 f16 f16", lambda a, b: a + b)
define("v_sub_f16", "f16 f16 f16", lambda a, b: a - b)
define("v_subrev_f16", "f16 f16 f16", lambda a, b: b - a)
define("v_mul_f16", "f16 f16 f16", lambda a, b: a * b)
define("v_min_f16", "f16 f16 f16", np.fmin)
define("v_max_f16", "f16 f16 f16", np.fmax)
define("v_fma_f16", "f16 f16 f16 f16", _fma16, keeps_high=True)
define("v_min3_f16", "f16 f16 f16 f16", lambda a, b, c: np.fmin(np.fmin(a, b), c), keeps_high=True)
define("v_max3_f16", "f16 f16 f16 f16", lambda a, b, c: np.fmax(np.fmax(a, b), c), keeps_high=True)
define("v_med3_f16", "f16 f16 f16 f16", _median, keeps_high=True)
define(
    "v_ldexp_f16", "f16 f16 i16", lambda a, b: _ldexp(a.astype(np.float64), b).astype(np.float16)
)
for _name, _function in {
    "v_floor_f16": np.floor,
    "v_ceil_f16": np.ceil,
    "v_trunc_f16": np.trunc,
    "v_rndne_f16": np.rint,
    "v_rcp_f16": lambda a: 1.0 / a.astype(np.float64),
    "v_sqrt_f16": lambda a: np.sqrt(a.astype(np.float64)),
    "v_rsq_f16": lambda a: 1.0 / np.sqrt(a.astype(np.float64)),
    "v_exp_f16": lambda a: np.exp2(a.astype(np.float64)),
    "v_log_f16": lambda a: np.log2(a.astype(np.float64)),
}.items():
    define(_name, "f16 f16", lambda a, f=_function: f(a).astype(np.float16))

# ---- integers

define("v_add_u32", "u32 u32 u32", lambda a, b: a + b)
define("v_sub_u32", "u32 u32 u32", lambda a, b: a - b)
define("v_subrev_u32", "u32 u32 u32", lambda a, b: b - a)
define("v_add_i32", "i32 i32 i32", lambda a, b: a + b)
define("v_sub_i32", "i32 i32 i32", lambda a, b: a - b)
define("v_mul_lo_u32", "u32 u32 u32", lambda a, b: a * b)
define(
    "v_mul_hi_u32",
    "u32 u32 u32",
    lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32),
)
define(
    "v_mul_hi_i32",
    "i32 i32 i32",
    lambda a, b: (a.astype(np.int64) * b >> np.int64(32)).astype(np.int32),
)
define("v_mul_u32_u24", "u32 u24 u24", lambda a, b: a * b)
define("v_mul_i32_i24", "i32 i24 i24", lambda a, b: a * b)
define(
    "v_mul_hi_u32_u24",
    "u32 u24 u24",
    lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32),
)
define(
    "v_mul_hi_i32_i24",
    "i32 i24 i24",
    lambda a, b: (a.astype(np.int64) * b >> np.int64(32)).astype(np.int32),
)
define("v_mad_u32_u24", "u32 u24 u24 u32", lambda a, b, c: a * b + c)
define("v_mad_i32_i24", "i32 i24 i24 i32", lambda a, b, c: a * b + c)
define("v_mad_u32_u16", "u32 u16 u16 u32", lambda a, b, c: a.astype(np.uint32) * b + c)
define("v_mad_i32_i16", "i32 i16 i16 i32", lambda a, b, c: a.astype(np.int32) * b + c)
for _sign in "iu":
    _t = f"{_sign}32"
    define(f"v_min_{_t}", f"{_t} {_t} {_t}", np.minimum)
    define(f"v_max_{_t}", f"{_t} {_t} {_t}", np.maximum)
    define(f"v_min3_{_t}", f"{_t} {_t} {_t} {_t}", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    define(f"v_max3_{_t}", f"{_t} {_t} {_t} {_t}", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define(
        f"v_med3_{_t}",
        f"{_t} {_t} {_t} {_t}",
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    )
    _h = f"{_sign}16"
    define(f"v_min_{_h}", f"{_h} {_h} {_h}", np.minimum)
    define(f"v_max_{_h}", f"{_h} {_h} {_h}", np.maximum)
    define(f"v_mad_{_h}", f"{_h} {_h} {_h} {_h}", lambda a, b, c: a * b + c, keeps_high=True)
define("v_add_u16", "u16 u16 u16", lambda a, b: a + b)
define("v_sub_u16", "u16 u16 u16", lambda a, b: a - b)
define("v_subrev_u16", "u16 u16 u16", lambda a, b: b - a)
define("v_add_i16", "i16 i16 i16", lambda a, b: a + b)
define("v_sub_i16", "i16 i16 i16", lambda a, b: a - b)
define("v_mul_lo_u16", "u16 u16 u16", lambda a, b: a * b)
define("v_add3_u32", "u32 u32 u32 u32", lambda a, b, c: a + b + c)
define("v_xad_u32", "u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c)
define("v_lshl_add_u32", "u32 u32 u32 u32", lambda a, b, c: (a << (b & _u(31))) + c)
define("v_add_lshl_u32", "u32 u32 u32 u32", lambda a, b, c: (a + b) << (c & _u(31)))
define(
    "v_lshl_add_u64", "u64 u64 u32 u64", lambda a, b, c: (a << (b & _u(7)).astype(np.uint64)) + c
)
define("v_sad_u32", "u32 u32 u32 u32", lambda a, b, c: np.where(a > b, a - b, b - a) + c)

# ---- bits

define("v_and_b32", "b32 b32 b32", lambda a, b: a & b, _and_rule)
define("v_or_b32", "b32 b32 b32", lambda a, b: a | b, _or_rule)
define("v_xor_b32", "b32 b32 b32", lambda a, b: a ^ b, _either)
define("v_xnor_b32", "b32 b32 b32", lambda a, b: ~(a ^ b), _either)
define("v_not_b32", "b32 b32", lambda a: ~a, _either)
define("v_mov_b32", "b32 b32", lambda a: a, _either)
define("v_mov_b64", "b64 b64", lambda a: a, _either)
define("v_accvgpr_read", "b32 b32", lambda a: a, _either)
define("v_accvgpr_write", "b32 b32", lambda a: a, _either)
define("v_accvgpr_mov_b32", "b32 b32", lambda a: a, _either)


def _shift(name: str, types: str, compute: Callable[[Array, Array], Array], bits: int) -> None:
    define(name, types, compute, _shift_rule(compute, bits))


_shift("v_lshlrev_b32", "b32 u32 b32", lambda a, b: b << (a & _u(31)), 32)
_shift("v_lshrrev_b32", "b32 u32 b32", lambda a, b: b >> (a & _u(31)), 32)
_shift(
    "v_ashrrev_i32",
    "b32 u32 b32",
    lambda a, b: (b.view(np.int32) >> (a & _u(31)).view(np.int32)).view(np.uint32),
    32,
)
_shift("v_lshlrev_b16", "b16 u16 b16", lambda a, b: b << (a & np.uint16(15)), 16)
_shift("v_lshrrev_b16", "b16 u16 b16", lambda a, b: b >> (a & np.uint16(15)), 16)
_shift(
    "v_ashrrev_i16",
    "b16 u16 b16",
    lambda a, b: (b.view(np.int16) >> (a & np.uint16(15)).view(np.int16)).view(np.uint16),
    16,
)


def _shift64(name: str, compute: Callable[[Array, Array], Array]) -> None:
    def rule(values: list[Array], masks: list[Array]) -> Array:
        return compute(values[0], masks[1]) | spread((masks[0] & _u(63)).astype(np.uint64))

    define(name, "b64 u32 b64", compute, rule)


_shift64("v_lshlrev_b64", lambda a, b: b << (a & _u(63)).astype(np.uint64))
_shift64("v_lshrrev_b64", lambda a, b: b >> (a & _u(63)).astype(np.uint64))
_shift64(
    "v_ashrrev_i64",
    lambda a, b: (b.view(np.int64) >> (a & _u(63)).astype(np.int64)).view(np.uint64),
)


def _or3_rule(values: list[Array], masks: list[Array]) -> Array:
    first = _or_rule(values[:2], masks[:2])
    return _or_rule([values[0] | values[1], values[2]], [first, masks[2]])


def _and_or_rule(values: list[Array], masks: list[Array]) -> Array:
    first = _and_rule(values[:2], masks[:2])
    return _or_rule([values[0] & values[1], values[2]], [first, masks[2]])


def _lshl_or_rule(values: list[Array], masks: list[Array]) -> Array:
    amount = values[1] & _u(31)
    first = masks[0] << amount | spread(masks[1] & _u(31))
    return _or_rule([values[0] << amount, values[2]], [first, masks[2]])


define("v_or3_b32", "b32 b32 b32 b32", lambda a, b, c: a | b | c, _or3_rule)
define("v_and_or_b32", "b32 b32 b32 b32", lambda a, b, c: (a & b) | c, _and_or_rule)
define("v_lshl_or_b32", "b32 b32 u32 b32", lambda a, b, c: a << (b & _u(31)) | c, _lshl_or_rule)


def _bfi_rule(values: list[Array], masks: list[Array]) -> Array:
    return masks[0] | (values[0] & masks[1]) | (~values[0] & masks[2])


define("v_bfi_b32", "b32 b32 b32 b32", lambda a, b, c: (a & b) | (~a & c), _bfi_rule)
define("v_bfm_b32", "b32 u32 u32", lambda a, b: ((_u(1) << (a & _u(31))) - _u(1)) << (b & _u(31)))


def _bfe_u32(a: Array, b: Array, c: Array) -> Array:
    return a >> (b & _u(31)) & ((_u(1) << (c & _u(31))) - _u(1))


def _bfe_i32(a: Array, b: Array, c: Array) -> Array:
    width = c & _u(31)
    field = _bfe_u32(a, b, c)
    sign = np.where(width > 0, _u(1) << ((width - _u(1)) & _u(31)), _u(0))
    return (field ^ sign) - sign


def _bfe_rule(values: list[Array], masks: list[Array]) -> Array:
    control = spread((masks[1] | masks[2]) & _u(31))
    return _bfe_i32(masks[0], values[1], values[2]) | control


define("v_bfe_u32", "b32 b32 u32 u32", _bfe_u32, _bfe_rule)
define("v_bfe_i32", "b32 b32 u32 u32", _bfe_i32, _bfe_rule)


def _align(bits_per: int) -> tuple[Callable[..., Array], PoisonRule]:
    def compute(a: Array, b: Array, c: Array) -> Array:
        amount = (c & _u(31 // bits_per)).astype(np.uint64) * np.uint64(bits_per)
        both = a.astype(np.uint64) << np.uint64(32) | b
        return (both >> amount).astype(np.uint32)

    def rule(values: list[Array], masks: list[Array]) -> Array:
        return compute(masks[0], masks[1], values[2]) | spread(masks[2] & _u(31))

    return compute, rule


define("v_alignbit_b32", "b32 b32 b32 u32", *_align(1))
define("v_alignbyte_b32", "b32 b32 b32 u32", *_align(8))


def _perm(a: Array, b: Array, selector: Array) -> Array:
    both = np.ascontiguousarray(np.stack([b, a], axis=-1)).view(np.uint8).reshape(-1, 8)
    choice = np.ascontiguousarray(selector).view(np.uint8).reshape(-1, 4)
    picked = np.take_along_axis(both, (choice & 7).astype(np.int64), axis=1)
    signs = np.take_along_axis(both, np.clip((choice.astype(np.int64) - 8) * 2 + 1, 0, 7), axis=1)
    result = np.where(choice >= 8, np.where(signs >> 7, 0xFF, 0), picked)
    result = np.where(choice == 12, 0, np.where(choice > 12, 0xFF, result))
    return np.ascontiguousarray(result.astype(np.uint8)).view("<u4").ravel()


def _perm_rule(values: list[Array], masks: list[Array]) -> Array:
    moved = _perm(masks[0], masks[1], values[2])
    constant = np.ascontiguousarray(values[2]).view(np.uint8) >= 12
    cleared = np.where(constant, 0, np.ascontiguousarray(moved).view(np.uint8)).astype(np.uint8)
    return cleared.view("<u4") | spread(masks[2])


define("v_perm_b32", "b32 b32 b32 b32", _perm, _perm_rule)
define(
    "v_pack_b32_f16",
    "b32 b16 b16",
    lambda a, b: a.astype(np.uint32) | b.astype(np.uint32) << _u(16),
    lambda v, m: m[0].astype(np.uint32) | m[1].astype(np.uint32) << _u(16),
)


def _bit_reverse(a: Array) -> Array:
    raw = np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return (
        np.ascontiguousarray(np.packbits(raw[:, ::-1], axis=1, bitorder="little"))
        .view("<u4")
        .ravel()
    )


define("v_bfrev_b32", "b32 b32", _bit_reverse, lambda v, m: _bit_reverse(m[0]))


def _count_leading(a: Array) -> Array:
    exponent = np.frexp(a.astype(np.float64))[1]
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32).view(np.uint32)


def _count_trailing(a: Array) -> Array:
    lowest = a & (~a + _u(1))
    return (
        np.where(a == 0, -1, np.frexp(lowest.astype(np.float64))[1] - 1)
        .astype(np.int32)
        .view(np.uint32)
    )


define("v_ffbh_u32", "u32 u32", _count_leading)
define("v_ffbl_b32", "u32 u32", _count_trailing)
define("v_ffbh_i32", "u32 u32", lambda a: _count_leading(np.where(a >> _u(31), ~a, a)))
define("v_bcnt_u32_b32", "u32 u32 u32", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b)
define("v_prng_b32", "u32 u32", lambda a: (a << _u(1)) ^ np.where(a >> _u(31), _u(197), _u(0)))
