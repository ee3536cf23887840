# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Read-modify-write operations of memory and LDS, by the last part of the mnemonic."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from block32.tools.gfx950_executor import floats

Update = Callable[[int, int, int], int]
"""(old bits, data bits, element bits) -> new bits."""


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _f32_bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _add_f32(old: int, data: int, bits: int) -> int:
    return _f32_bits(np.float32(_f32(old)) + np.float32(_f32(data)))


def _f64(bits: int) -> np.float64:
    return np.uint64(bits).view(np.float64)


def _packed(old: int, data: int, add: Callable[[int, int], int]) -> int:
    return add(old & 0xFFFF, data & 0xFFFF) | add(old >> 16, data >> 16) << 16


def _add_f16(a: int, b: int) -> int:
    return int((np.uint16(a).view(np.float16) + np.uint16(b).view(np.float16)).view(np.uint16))


def _add_bf16(a: int, b: int) -> int:
    words = np.array([a, b], np.uint32)
    return int(floats.to_bf16(floats.from_bf16(words).sum(keepdims=True))[0])


UPDATES: dict[str, Update] = {
    "swap": lambda old, data, bits: data,
    "add": lambda old, data, bits: old + data,
    "sub": lambda old, data, bits: old - data,
    "rsub": lambda old, data, bits: data - old,
    "smin": lambda old, data, bits: min(_signed(old, bits), _signed(data, bits)),
    "smax": lambda old, data, bits: max(_signed(old, bits), _signed(data, bits)),
    "umin": lambda old, data, bits: min(old, data),
    "umax": lambda old, data, bits: max(old, data),
    "and": lambda old, data, bits: old & data,
    "or": lambda old, data, bits: old | data,
    "xor": lambda old, data, bits: old ^ data,
    "inc": lambda old, data, bits: 0 if old >= data else old + 1,
    "dec": lambda old, data, bits: data if old == 0 or old > data else old - 1,
    "add_f32": _add_f32,
    "min_f32": lambda old, data, bits: _f32_bits(np.fmin(np.float32(_f32(old)), _f32(data))),
    "max_f32": lambda old, data, bits: _f32_bits(np.fmax(np.float32(_f32(old)), _f32(data))),
    "add_f64": lambda old, data, bits: int((_f64(old) + _f64(data)).view(np.uint64)),
    "min_f64": lambda old, data, bits: int(np.fmin(_f64(old), _f64(data)).view(np.uint64)),
    "max_f64": lambda old, data, bits: int(np.fmax(_f64(old), _f64(data)).view(np.uint64)),
    "pk_add_f16": lambda old, data, bits: _packed(old, data, _add_f16),
    "pk_add_bf16": lambda old, data, bits: _packed(old, data, _add_bf16),
}

LDS_NAMES = {
    # LDS mnemonics (after ds_, without _rtn and the type) to the names above
    "add_u": "add",
    "sub_u": "sub",
    "rsub_u": "rsub",
    "inc_u": "inc",
    "dec_u": "dec",
    "min_i": "smin",
    "max_i": "smax",
    "min_u": "umin",
    "max_u": "umax",
    "and_b": "and",
    "or_b": "or",
    "xor_b": "xor",
    "wrxchg_b": "swap",
}
