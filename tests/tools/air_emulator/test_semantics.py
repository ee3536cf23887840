# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Single instructions and functions of the emulator, against values worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from block32.lowering.apple.air_parser import parse_operand
from block32.tools.air_emulator import values
from block32.tools.air_emulator.faults import UnsupportedError
from block32.tools.air_emulator.instructions import flush
from block32.tools.air_emulator.intrinsics import LANE_FUNCTIONS, simdgroup_function

MATRIX = "air.simdgroup_matrix_16x16x16_multiply_accumulate.f.f.v8f32.v8{}.v8{}.v8f32"


def _lanes(tile: np.ndarray) -> np.ndarray:
    """A 16x16 tile spread over 32 lanes, element by element by the published formula."""
    lanes = np.empty((32, 8), tile.dtype)
    for lane in range(32):
        for slot in range(8):
            row = ((lane & 7) >> 1) + ((lane & 16) >> 2) + 8 * (slot >> 2)
            column = ((lane & 1) << 2) + (lane & 8) + (slot & 3)
            lanes[lane, slot] = tile[row, column]
    return lanes


@pytest.mark.parametrize("a_flag", [False, True])
@pytest.mark.parametrize("b_flag", [False, True])
def test_matrix_multiply(a_flag: bool, b_flag: bool) -> None:
    """Integers small enough to be exact, in tiles without symmetry."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-8, 9, (16, 16)).astype(np.float32) for _ in range(3))
    multiply = simdgroup_function(MATRIX.format("bf16", "f32"))
    assert multiply is not None
    flags = np.bool_(a_flag), np.bool_(b_flag)
    result = multiply(_lanes(a), flags[0], _lanes(b), flags[1], _lanes(c))
    expected = (a.T if a_flag else a) @ (b.T if b_flag else b) + c
    np.testing.assert_array_equal(result, _lanes(expected))


@pytest.mark.parametrize(
    ("token", "kind"),
    [("f8e4m3fn", ml_dtypes.float8_e4m3fn), ("f8e5m2", ml_dtypes.float8_e5m2)],
)
def test_matrix_multiply_decodes_every_fp8_code(token: str, kind: type) -> None:
    multiply = simdgroup_function(MATRIX.format(token, "f32"))
    assert multiply is not None
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    finite = np.where(np.isfinite(codes.view(kind).astype(np.float32)), codes, 0)
    identity, zero = np.eye(16, dtype=np.float32), np.zeros((32, 8), np.float32)
    result = multiply(_lanes(finite), np.False_, _lanes(identity), np.False_, zero)
    np.testing.assert_array_equal(result, _lanes(finite.view(kind).astype(np.float32)))


def test_a_nan_reaches_its_row_alone() -> None:
    multiply = simdgroup_function(MATRIX.format("f32", "f32"))
    assert multiply is not None
    a = np.ones((16, 16), np.float32)
    a[5, 3] = np.nan
    zero = np.zeros((32, 8), np.float32)
    ones = _lanes(np.ones((16, 16), np.float32))
    result = multiply(_lanes(a), np.False_, ones, np.False_, zero)
    expected = np.full((16, 16), 16, np.float32)
    expected[5] = np.nan
    np.testing.assert_array_equal(result, _lanes(expected))


def test_unknown_matrix_names_are_no_functions() -> None:
    for name in (
        MATRIX.format("f64", "f32"),
        MATRIX.format("f32", "f32") + "x",
        "air.simd_sum.f32",
    ):
        assert simdgroup_function(name) is None


def test_shuffle_xor() -> None:
    shuffle = simdgroup_function("air.simd_shuffle_xor.f32")
    assert shuffle is not None
    value = np.arange(64, dtype=np.float32)
    expected = np.arange(64) ^ 5
    np.testing.assert_array_equal(shuffle(value, np.uint16(5)), expected)
    with pytest.raises(UnsupportedError, match="mask 32"):
        shuffle(value, np.uint16(32))


def test_leading_zeros() -> None:
    words = np.array([0, 1, 2, 3, 255, 256, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    counted = LANE_FUNCTIONS["air.clz.i32"](words, np.False_)
    np.testing.assert_array_equal(counted, [32 - int(w).bit_length() for w in words])


def test_f32_denormals_flush_and_keep_their_sign() -> None:
    x = np.array([2.0**-126, 2.0**-127, -(2.0**-149), 0.0, -0.0, 1.0], np.float32)
    expected = np.array([2.0**-126, 0.0, -0.0, 0.0, -0.0, 1.0], np.float32)
    np.testing.assert_array_equal(flush(x).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("operand", "expected"),
    [
        ("i32 -1", 2**32 - 1),
        ("i8 -128", 128),
        ("i1 true", True),
        ("float 0x3FB99999A0000000", np.float32(0.1)),
        ("float 1.000000e+00", 1.0),
        ("half 0xH3C00", 1.0),
        ("bfloat 0xR3FC0", 1.5),
        ("<2 x i32> <i32 3, i32 -1>", [3, 2**32 - 1]),
        ("<8 x float> zeroinitializer", [0.0] * 8),
    ],
)
def test_constants(operand: str, expected: object) -> None:
    parsed = parse_operand(operand)
    np.testing.assert_array_equal(values.constant(parsed.type, parsed.text), expected)


def test_bytes_of_values_there_and_back() -> None:
    words = np.array([[0x3F800000, 0xC0490FDB]], np.uint32)
    data = values.to_bytes(words, "<2 x i32>")
    assert data.tobytes().hex() == "0000803fdb0f49c0"
    np.testing.assert_array_equal(
        values.from_bytes(data, "<2 x float>"), np.array([[1.0, np.float32(-np.pi)]], np.float32)
    )
    bfloats = values.from_bytes(np.array([[0x80, 0x3F, 0xC0, 0x3F]], np.uint8), "<2 x bfloat>")
    np.testing.assert_array_equal(bfloats, [[1.0, 1.5]])
    assert values.to_bytes(bfloats, "<2 x bfloat>").tobytes() == b"\x80\x3f\xc0\x3f"


@pytest.mark.parametrize("kind", ["i32", "float", "bfloat", "half", "i8"])
def test_one_value_for_all_threads_stays_one_value(kind: str) -> None:
    """A register without an axis for threads must not get one from its bytes."""
    value = np.array(1.5, np.float16 if kind == "half" else np.float32)
    if kind in ("i32", "i8"):
        value = np.array(7, values.dtype(kind))
    data = values.to_bytes(value, kind)
    assert data.shape == (values.size_of(kind),)
    assert values.from_bytes(data, kind).shape == () and values.from_bytes(data, kind) == value


def test_rounding_to_bfloat_and_half_is_to_nearest_even() -> None:
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 65520.0], np.float32)
    np.testing.assert_array_equal(values.round_to(x, "bfloat")[:2], [1.0, 1 + 2.0**-6])
    assert np.isposinf(values.round_to(x, "half")[2])


def test_types_without_an_array_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="type double"):
        values.dtype("double")
    with pytest.raises(UnsupportedError, match="type <2 x i128>"):
        values.size_of("<2 x i128>")
