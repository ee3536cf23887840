# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the ``air.*`` functions compute.

A simdgroup function sees whole simdgroups: arrays with a row a thread, 32 rows a simdgroup in lane
order. The lane layout of the matrix instruction is stated here anew, as an array, and not taken
from the code that writes kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from block32.tools.air_emulator.faults import UnsupportedError
from block32.tools.air_emulator.frame import SIMDGROUP_SIZE
from block32.tools.air_emulator.instructions import flush

_SLOTS = 8
_TILE = 16


_SMALL_TILE = 8


def _small_lane_layout() -> np.ndarray:
    """For each (row, column) of an 8x8 tile in row-major order, 2 * lane + slot."""
    lane, slot = np.divmod(np.arange(2 * SIMDGROUP_SIZE), 2)
    row = lane // 2 % 4 + 4 * (lane // 16)
    column = 2 * (lane % 2) + 4 * (lane // 8 % 2) + slot
    where = np.empty(_SMALL_TILE * _SMALL_TILE, np.int64)
    where[row * _SMALL_TILE + column] = np.arange(where.size)
    return where


def _lane_layout() -> np.ndarray:
    """For each (row, column) of the tile in row-major order, 8 * lane + slot."""
    lane, slot = np.divmod(np.arange(SIMDGROUP_SIZE * _SLOTS), _SLOTS)
    quad, half = lane // 8, lane % 8
    row = half // 2 + 4 * (quad // 2) + 8 * (slot // 4)
    column = 4 * (half % 2) + 8 * (quad % 2) + slot % 4
    where = np.empty(_TILE * _TILE, np.int64)
    where[row * _TILE + column] = np.arange(where.size)
    return where


_TO_TILE = _lane_layout()
_TO_LANES = np.argsort(_TO_TILE)
_SMALL_TO_TILE = _small_lane_layout()
_SMALL_TO_LANES = np.argsort(_SMALL_TO_TILE)

_CODES = np.arange(256, dtype=np.uint8)
_DECODE = {
    "f8e4m3fn": _CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "f8e5m2": _CODES.view(ml_dtypes.float8_e5m2).astype(np.float32),
}


def _tiles(lanes: np.ndarray, transposed: bool) -> np.ndarray:
    """Lane registers [threads, 8] as tiles [simdgroups, 16, 16]."""
    flat = lanes.reshape(-1, SIMDGROUP_SIZE * _SLOTS)
    tiles = flat[:, _TO_TILE].reshape(-1, _TILE, _TILE)
    return tiles.transpose(0, 2, 1) if transposed else tiles


def _matrix_multiply(lhs_type: str, rhs_type: str) -> Callable[..., np.ndarray]:
    def operand(lanes: np.ndarray, kind: str) -> np.ndarray:
        return _DECODE[kind][lanes] if kind in _DECODE else flush(lanes.astype(np.float32))

    def multiply(
        a: np.ndarray, a_flag: np.ndarray, b: np.ndarray, b_flag: np.ndarray, c: np.ndarray
    ) -> np.ndarray:
        lhs, rhs = (
            _tiles(operand(a, lhs_type), bool(a_flag)),
            _tiles(operand(b, rhs_type), bool(b_flag)),
        )
        with np.errstate(all="ignore"):
            result = np.matmul(lhs, rhs) + _tiles(c, False)
        return flush(result.reshape(-1, _TILE * _TILE)[:, _TO_LANES].reshape(-1, _SLOTS))

    return multiply


def _small_multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The 8x8 form: of a lane's 64 elements the first two are its own, the others nothing."""

    def tiles(lanes: np.ndarray) -> np.ndarray:
        own = flush(lanes[:, :2].astype(np.float32)).reshape(-1, 2 * SIMDGROUP_SIZE)
        return own[:, _SMALL_TO_TILE].reshape(-1, _SMALL_TILE, _SMALL_TILE)

    with np.errstate(all="ignore"):
        result = np.matmul(tiles(a), tiles(b)) + tiles(c)
    own = flush(result.reshape(-1, _SMALL_TILE * _SMALL_TILE)[:, _SMALL_TO_LANES].reshape(-1, 2))
    lanes = np.full((len(own), _SMALL_TILE * _SMALL_TILE), np.nan, np.float32)
    lanes[:, :2] = own
    return lanes


def _shuffle_xor(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    lanes = np.arange(SIMDGROUP_SIZE) ^ int(mask)
    if lanes.max() >= SIMDGROUP_SIZE:
        raise UnsupportedError(f"shuffle with mask {int(mask)}")
    return value.reshape(-1, SIMDGROUP_SIZE)[:, lanes].reshape(-1)


def _leading_zeros(value: np.ndarray, zero_is_undefined: np.ndarray) -> np.ndarray:
    if bool(zero_is_undefined) and (value == 0).any():
        raise UnsupportedError("leading zeros of 0 where that is undefined")
    bits = np.floor(np.log2(np.maximum(value, 1).astype(np.float64))).astype(np.int64)
    return np.where(value == 0, 32, 31 - bits).astype(np.uint32)


def _f32(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def apply(value: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return flush(np.asarray(function(flush(value)), np.float32))

    return apply


#: Functions of one lane.
LANE_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "air.clz.i32": _leading_zeros,
    "air.exp.f32": _f32(np.exp),
    "air.tanh.f32": _f32(np.tanh),
    "air.fabs.f32": _f32(np.abs),
}

_MATRIX = re.compile(
    r"air\.simdgroup_matrix_16x16x16_multiply_accumulate\.f\.f\."
    r"v8f32\.v8(f16|bf16|f32|f8e4m3fn|f8e5m2)\.v8(f16|bf16|f32|f8e4m3fn|f8e5m2)\.v8f32$"
)


_SMALL_MATRIX = re.compile(
    r"air\.simdgroup_matrix_8x8_multiply_accumulate\."
    r"v64f32\.v64(f16|bf16|f32)\.v64(f16|bf16|f32)\.v64f32$"
)


def simdgroup_function(name: str) -> Callable[..., np.ndarray] | None:
    """What a simdgroup function computes, or None where ``name`` is no such function."""
    if name == "air.simd_shuffle_xor.f32":
        return _shuffle_xor
    if _SMALL_MATRIX.match(name):
        return _small_multiply
    match = _MATRIX.match(name)
    return _matrix_multiply(match[1], match[2]) if match else None
