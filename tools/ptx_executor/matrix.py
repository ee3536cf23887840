# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix instructions and conversions, written from the PTX ISA's figures.

Shares no code with the kernels' own lane maps: what it computes is what they are checked against.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def unpack(words: NDArray[np.unsignedinteger], name: str) -> NDArray[np.float64]:
    """The elements of 32-bit registers, ``[..., registers * elements]``."""
    return np.ascontiguousarray(words).view(_DTYPES[name]).astype(np.float64)


def encode_fp8(values: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    """The nearest codes, ties to even; what is too large, infinities too, becomes the largest."""
    largest = float(ml_dtypes.finfo(_DTYPES[name]).max)
    return np.clip(values, -largest, largest).astype(_DTYPES[name]).view(np.uint8)


def mma_sync(
    a: Words, b: Words, c: NDArray[np.float32], types: tuple[str, str]
) -> NDArray[np.float32]:
    """``mma.m16n8kX``: registers ``[32, n]`` of each operand in each lane.

    A register of A holds ``w = 32 / bits`` neighbouring K: register 0 row g, K ``w t`` on; 1 row
    g + 8; 2 row g, K 4 w further; 3 both. A register of B: column g, K ``w t`` on; 1: 4 w further.
    """
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4
    width = 4 // _DTYPES[types[0]].itemsize
    left = np.zeros((16, 8 * width))
    right = np.zeros((8 * width, 8))
    within = np.arange(width)
    for register in range(4):
        row = group + 8 * (register % 2)
        column = (thread * width + 4 * width * (register // 2))[:, None] + within
        left[row[:, None], column] = unpack(a[:, register : register + 1], types[0])
    for register in range(2):
        row = (thread * width + 4 * width * register)[:, None] + within
        right[row, group[:, None]] = unpack(b[:, register : register + 1], types[1])
    total = left @ right
    result = np.empty((32, 4), np.float32)
    for register in range(4):
        row, column = group + 8 * (register // 2), 2 * thread + register % 2
        result[:, register] = (total[row, column] + c[:, register]).astype(np.float32)
    return result


def load_matrices(rows: NDArray[np.uint8]) -> Words:
    """``ldmatrix.x4``: 16 bytes of each of the 32 row addresses to four registers a lane."""
    words = np.ascontiguousarray(rows).view(np.uint32).reshape(4, 8, 4)
    return words.reshape(4, 32).T.copy()


def wgmma(
    a: NDArray[np.uint8], b: NDArray[np.uint8], types: tuple[str, str]
) -> NDArray[np.float32]:
    """``wgmma.m64nNk32``: bytes ``[64, 32]`` and ``[N, 32]`` to registers ``[128, N / 2]``."""
    total = (
        a.view(_DTYPES[types[0]]).astype(np.float64)
        @ b.view(_DTYPES[types[1]]).astype(np.float64).T
    )
    lane = np.arange(128)
    registers = np.arange(b.shape[0] // 2)
    row = (lane // 32 * 16 + lane % 32 // 4)[:, None] + 8 * (registers // 2 % 2)
    column = (2 * (lane % 4))[:, None] + registers // 4 * 8 + registers % 2
    return total[row, column].astype(np.float32)


def swizzled_rows(descriptor: int, rows: int) -> NDArray[np.int64]:
    """Addresses ``[rows, 32]`` of the bytes that a 128-byte-swizzle descriptor's K slice names.

    The hardware xors address bits 4-6 with bits 7-9; groups of 8 rows lie ``stride`` bytes apart.
    """
    assert descriptor >> 62 == 1, "only the 128-byte swizzle"
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    row = np.arange(rows, dtype=np.int64)
    address = start + row // 8 * stride + row % 8 * 128
    address = address[:, None] + np.arange(32)
    return address ^ (address >> 7 & 7) << 4
