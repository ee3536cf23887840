# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LLVM values as NumPy arrays: one row a thread, or a single value where all threads agree.

A scalar has shape [threads] or [], a vector [threads, n] or [n]. Integers are unsigned arrays,
pointers int64 addresses. NumPy has no bfloat: such a value is the float32 of the same number.
"""

from __future__ import annotations

import re
import struct

import ml_dtypes
import numpy as np

from block32.lowering.apple.air_parser import element_of, split_top, vector_length
from block32.tools.air_emulator.faults import UnsupportedError

_DTYPES = {
    "i1": np.dtype(np.bool_),
    "i8": np.dtype(np.uint8),
    "i16": np.dtype(np.uint16),
    "i32": np.dtype(np.uint32),
    "i64": np.dtype(np.uint64),
    "half": np.dtype(np.float16),
    "bfloat": np.dtype(np.float32),
    "float": np.dtype(np.float32),
}

_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4}


def dtype(kind: str) -> np.dtype:
    """NumPy type of a scalar or of a vector's elements."""
    element = element_of(kind)
    if element.endswith("*"):
        return np.dtype(np.int64)
    if element not in _DTYPES:
        raise UnsupportedError(f"type {kind}")
    return _DTYPES[element]


def size_of(kind: str) -> int:
    """Bytes that a value takes in memory."""
    element = element_of(kind)
    if element.endswith("*"):
        return 8
    if element not in _SIZES:
        raise UnsupportedError(f"type {kind}")
    return _SIZES[element] * (vector_length(kind) or 1)


def to_bytes(value: np.ndarray, kind: str) -> np.ndarray:
    """The value's bytes, uint8 of shape [..., size]."""
    rows = value.shape[: value.ndim - bool(vector_length(kind))]
    value = np.ascontiguousarray(value)  # gives a single value an axis
    if element_of(kind) == "bfloat":
        value = (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return value.view(np.uint8).reshape(*rows, size_of(kind))


def from_bytes(data: np.ndarray, kind: str) -> np.ndarray:
    """A value from uint8 of shape [..., size]."""
    rows, count = data.shape[:-1], vector_length(kind)
    shape = (*rows, count) if count else rows
    data = np.ascontiguousarray(data)
    if element_of(kind) == "bfloat":
        bits = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    return data.view(dtype(kind)).reshape(shape)


def round_to(value: np.ndarray, kind: str) -> np.ndarray:
    """A float32 rounded to nearest even into another floating-point type."""
    if element_of(kind) == "bfloat":
        return value.astype(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore"):
        return value.astype(dtype(kind))


def constant(kind: str, text: str) -> np.ndarray:
    """A constant in LLVM's spelling."""
    count = vector_length(kind)
    if count:
        if text == "zeroinitializer":
            return np.zeros(count, dtype(kind))
        parts = split_top(text[1:-1])
        element = element_of(kind)
        return np.array([constant(element, p.removeprefix(element).strip()) for p in parts])
    if text == "zeroinitializer" or text == "null":
        return np.zeros((), dtype(kind))
    if kind == "i1":
        return np.array(text == "true")
    if re.match(r"-?\d+$", text):
        bits = size_of(kind) * 8
        return np.array(int(text) % (1 << bits), dtype(kind))
    return _float(kind, text)


def _float(kind: str, text: str) -> np.ndarray:
    if text.startswith("0xR"):
        return np.array(int(text[3:], 16) << 16, np.uint32).view(np.float32)
    if text.startswith("0xH"):
        return np.array(int(text[3:], 16), np.uint16).view(np.float16)
    if text.startswith("0x"):
        return np.array(struct.unpack(">d", bytes.fromhex(text[2:].zfill(16)))[0], dtype(kind))
    try:
        return np.array(float(text), dtype(kind))
    except ValueError:
        raise UnsupportedError(f"constant '{kind} {text}'") from None
