# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Conversions between full-width types; they add themselves to the table of ``valu_ops``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from block32.tools.gfx950_executor import floats
from block32.tools.gfx950_executor.valu_ops import OPS, Array, define, spread

# Whoever takes the table from here has it whole.
__all__ = ["OPS"]


def _saturate(low: int, high: int, kind: type) -> Callable[[Array], Array]:
    def convert(a: Array) -> Array:
        wide = np.nan_to_num(
            np.trunc(a.astype(np.float64)), nan=0.0, posinf=2.0**40, neginf=-(2.0**40)
        )
        return np.clip(wide, low, high).astype(np.int64).astype(kind)

    return convert


_to_u32 = _saturate(0, 2**32 - 1, np.uint32)
_to_i32 = _saturate(-(2**31), 2**31 - 1, np.int32)
define("v_cvt_f32_i32", "f32 i32", lambda a: a.astype(np.float32))
define("v_cvt_f32_u32", "f32 u32", lambda a: a.astype(np.float32))
define("v_cvt_u32_f32", "u32 f32", _to_u32)
define("v_cvt_i32_f32", "i32 f32", _to_i32)
define("v_cvt_flr_i32_f32", "i32 f32", lambda a: _to_i32(np.floor(a)))
define("v_cvt_rpi_i32_f32", "i32 f32", lambda a: _to_i32(np.floor(a + np.float32(0.5))))
define("v_cvt_f64_i32", "f64 i32", lambda a: a.astype(np.float64))
define("v_cvt_f64_u32", "f64 u32", lambda a: a.astype(np.float64))
define("v_cvt_i32_f64", "i32 f64", _to_i32)
define("v_cvt_u32_f64", "u32 f64", _to_u32)
define("v_cvt_f32_f64", "f32 f64", lambda a: a.astype(np.float32))
define("v_cvt_f64_f32", "f64 f32", lambda a: a.astype(np.float64))
define("v_cvt_f16_f32", "f16 f32", lambda a: a.astype(np.float16))
define("v_cvt_f32_f16", "f32 f16", lambda a: a.astype(np.float32))
define("v_cvt_f16_u16", "f16 u16", lambda a: a.astype(np.float16))
define("v_cvt_f16_i16", "f16 i16", lambda a: a.astype(np.float16))
define("v_cvt_u16_f16", "u16 f16", _saturate(0, 2**16 - 1, np.uint16))
define("v_cvt_i16_f16", "i16 f16", _saturate(-(2**15), 2**15 - 1, np.int16))
define("v_cvt_f32_bf16", "f32 b16", lambda a: floats.from_bf16(a.astype(np.uint32)))
for _byte in range(4):
    define(
        f"v_cvt_f32_ubyte{_byte}",
        "f32 u32",
        lambda a, n=8 * _byte: (a >> np.uint32(n) & np.uint32(255)).astype(np.float32),
        lambda v, m, n=8 * _byte: spread(m[0] >> np.uint32(n) & np.uint32(255)),
    )


def _pack(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) & np.uint32(0xFFFF) | high.astype(np.uint32) << np.uint32(16)


def _halves_rule(_: list[Array], masks: list[Array]) -> Array:
    return _pack(spread(masks[0]), spread(masks[1]))


def _toward_zero_f16(a: Array) -> Array:
    nearest = a.astype(np.float16)
    too_big = np.abs(nearest.astype(np.float64)) > np.abs(a.astype(np.float64))
    bits = nearest.view(np.uint16)
    return np.where(too_big & np.isfinite(a), bits - np.uint16(1), bits).astype(np.uint16)


define(
    "v_cvt_pk_bf16_f32",
    "b32 f32 f32",
    lambda a, b: _pack(floats.to_bf16(a), floats.to_bf16(b)),
    _halves_rule,
)
define(
    "v_cvt_pk_f16_f32",
    "b32 f32 f32",
    lambda a, b: _pack(a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)),
    _halves_rule,
)
define(
    "v_cvt_pkrtz_f16_f32",
    "b32 f32 f32",
    lambda a, b: _pack(_toward_zero_f16(a), _toward_zero_f16(b)),
    _halves_rule,
)
define(
    "v_cvt_pk_u16_u32",
    "b32 u32 u32",
    lambda a, b: _pack(np.minimum(a, np.uint32(0xFFFF)), np.minimum(b, np.uint32(0xFFFF))),
    _halves_rule,
)
define(
    "v_cvt_pk_i16_i32",
    "b32 i32 i32",
    lambda a, b: _pack(np.clip(a, -32768, 32767), np.clip(b, -32768, 32767)),
    _halves_rule,
)
define(
    "v_prng_b32",
    "u32 u32",
    lambda a: (a << np.uint32(1)) ^ np.where(a >> np.uint32(31), np.uint32(197), np.uint32(0)),
)


def _dot2c(widen: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """Two products of packed halves and the target, rounded once."""

    def compute(a: Array, b: Array, c: Array) -> Array:
        total = c.astype(np.float64)
        for shift in (np.uint32(0), np.uint32(16)):
            total = total + widen(a >> shift) * widen(b >> shift)
        return total.astype(np.float32)

    return compute


define(
    "v_dot2c_f32_bf16",
    "f32 b32 b32 f32",
    _dot2c(lambda bits: floats.from_bf16(bits).astype(np.float64)),
    reads_target=True,
)
define(
    "v_dot2c_f32_f16",
    "f32 b32 b32 f32",
    _dot2c(lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float64)),
    reads_target=True,
)
