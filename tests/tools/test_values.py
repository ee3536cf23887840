# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Inputs and outputs of the command line: no value is converted, and nonsense is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from block32.runtime.signature import ValueType, parse_value_type
from block32.tools.values import (
    InputError,
    describe_result,
    encode_result,
    random_value,
    read_input,
)

RNG = np.random.default_rng(3)
TYPES = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
}
F32 = parse_value_type("tensor<2x3xf32>")


def read(text: str, expected: str = "tensor<2x3xf32>", dims: dict[int, int] | None = None) -> Any:
    return read_input(text, parse_value_type(expected), dims or {}, 0)


def of_type(element: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(TYPES[element])
    raw = RNG.integers(0, 256, (2, 3 * dtype.itemsize), np.uint8)
    return raw.view(dtype)


def same_bits(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_of_types_that_numpy_cannot_name(
    tmp_path: Path, element: str, order: Any
) -> None:
    array = of_type(element)
    path = tmp_path / "x.npy"
    np.save(path, np.asarray(array, order=order))
    assert same_bits(np.ascontiguousarray(read(f"@{path}:{element}", "tensor<1xi64>")), array)
    # Without a type, the function's argument says it.
    expected = f"tensor<2x3x{element}>"
    assert same_bits(np.ascontiguousarray(read(f"@{path}", expected)), array)
    # And as unsigned integers of the same bits, which is how results are saved.
    path.write_bytes(encode_result(array, "x.npy"))
    assert np.load(path).dtype.kind == "u"
    assert same_bits(read(f"@{path}", expected), array)


@pytest.mark.parametrize("element", TYPES)
def test_raw_bytes(tmp_path: Path, element: str) -> None:
    array = of_type(element)
    path = tmp_path / "x.bin"
    path.write_bytes(encode_result(array, str(path)))
    assert same_bits(read(f"@{path}:2x3x{element}"), array)


def test_plain_npy_files_keep_their_type(tmp_path: Path) -> None:
    array = RNG.standard_normal((2, 3))
    np.save(tmp_path / "x.npy", array)
    assert same_bits(read(f"@{tmp_path}/x.npy"), array)


def npy(descr: str, shape: str, data: bytes) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


BAD_FILES = [
    ("x.npy", b"", "", "is no .npy file"),
    ("x.npy", b"\x93NUMPY\x01", "", "damaged: its .npy header"),
    ("x.npy", b"\x93NUMPY\x01\x00\xff\xffabc", "", "damaged: its .npy header"),
    ("x.npy", npy("'<f4'", "(2, 3)", bytes(23)), "", "expected 24 bytes of data but got 23"),
    ("x.npy", npy("'|V1'", "(2, 3)", bytes(5)), ":f8E4M3FN", "expected 6 bytes of data but got 5"),
    ("x.npy", npy("'<f4'", "(1 << 40,)", b""), "", "damaged: its .npy header"),
    ("x.npy", npy("'<f4'", "(99999999999999,)", b""), "", "too many"),
    ("x.npy", npy("'<f4'", "(-1,)", b""), "", "damaged: its .npy header"),
    ("x.npy", npy("'|O'", "(1,)", bytes(8)), "", "elements of type '.O'; expected numbers"),
    ("x.npy", npy("[('a', '<f4')]", "(1,)", bytes(4)), "", "damaged: its .npy header"),
    ("x.npy", npy("'|V1'", "(6,)", bytes(6)), "", "expected elements of 4 bytes .float32. but"),
    ("x.npy", npy("'<f4'", "(6,)", bytes(24)), ":2x3xf32", r"expected the shape \(2, 3\) but"),
    ("x.bin", bytes(24), "", "expected a type for the raw bytes"),
    ("x.bin", bytes(23), ":2x3xf32", "expected 24 bytes for 2x3xf32 but .* has 23"),
    ("x.bin", bytes(23), ":2x3xf4E2M1FN", "unknown type '2x3xf4E2M1FN'"),
]


@pytest.mark.parametrize(("name", "content", "suffix", "message"), BAD_FILES)
def test_refuses_files(
    tmp_path: Path, name: str, content: bytes, suffix: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(f"@{tmp_path / name}{suffix}")


def test_refuses_a_missing_file() -> None:
    with pytest.raises(InputError, match=r"cannot read no\.npy: no such file"):
        read("@no.npy")


def test_opaque_elements_need_a_type(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", of_type("bf16"))
    with pytest.raises(InputError, match=r"have no name; give their type: @.*x\.npy:TYPE"):
        read(f"@{tmp_path}/x.npy", "!hal.buffer_view")


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("2x3xf32=1.5", "tensor<2x3xf32>", np.full((2, 3), 1.5, np.float32)),
        ("2x2xi32=1,2 3, -4", "tensor<2x2xi32>", np.array([[1, 2], [3, -4]], np.int32)),
        ("[1 2 3]", "tensor<3xbf16>", np.array([1, 2, 3], ml_dtypes.bfloat16)),
        ("zeros", "tensor<2xf8E8M0FNU>", np.zeros(2, np.uint8).view(ml_dtypes.float8_e8m0fnu)),
        ("f32=2", "tensor<f32>", np.array(2, np.float32)),
        ("2xi8=0x7f", "tensor<2xi8>", np.full(2, 127, np.int8)),
    ],
)
def test_written_out_arrays(text: str, expected: str, value: np.ndarray[Any, Any]) -> None:
    assert same_bits(read(text, expected), value)


def test_written_out_scalars() -> None:
    assert read("i32=-5", "i32") == -5
    assert read("7", "index") == 7
    assert read("1e3", "f32") == 1000.0
    assert read("zeros", "i64") == 0


@pytest.mark.parametrize(
    ("text", "expected", "message"),
    [
        ("2x3xf33=1", "tensor<2x3xf32>", "unknown type '2x3xf33'; expected SHAPExTYPE"),
        ("what", "tensor<2x3xf32>", r"expected zeros, random\(SEED\), @FILE or a number"),
        ("random(x)", "tensor<2x3xf32>", "or a number .f32. but got"),
        (
            "2x3xf32=1,2",
            "tensor<2x3xf32>",
            r"expected 1 or 6 numbers for tensor<2x3xf32> but got 2",
        ),
        ("2xi8=300", "tensor<2xi8>", "300 does not fit into i8"),
        ("2xi8=1.5", "tensor<2xi8>", "or a number .i8. but got '1.5'"),
        ("2xf8E4M3FN=1.0", "tensor<2xf8E4M3FN>", "numbers are not rounded to f8E4M3FN"),
        ("2xf8E8M0FNU=127", "tensor<2xf8E8M0FNU>", "numbers are not rounded to f8E8M0FNU"),
        ("random(1)", "tensor<?x3xf32>", "dimension 0 of tensor<.x3xf32> has no size; give --dim="),
        ("99999999999x9xf32=zeros", "tensor<2xf32>", "too many"),
    ],
)
def test_refuses_values(text: str, expected: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text, expected)


def test_dynamic_dimensions_are_filled_in() -> None:
    assert read("random(1)", "tensor<?x3x?xf32>", {0: 2, 2: 5}).shape == (2, 3, 5)


@pytest.mark.parametrize("element", ["f8E4M3FN", "f8E5M2", "f8E4M3FNUZ", "f8E5M2FNUZ"])
def test_random_codes_are_finite_and_cover_them_all(element: str) -> None:
    codes = random_value(ValueType(element, (100, 100)), 5)
    assert np.isfinite(codes.astype(np.float32)).all()
    every = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)
    assert len(np.unique(codes.view(np.uint8))) == np.isfinite(every).sum()


def test_random_scales_are_bytes_around_127() -> None:
    scales = random_value(ValueType("f8E8M0FNU", (1000,)), 5).view(np.uint8)
    assert (scales.min(), scales.max()) == (123, 131)


@pytest.mark.parametrize(
    "element", ["i1", "i8", "i32", "i64", "f16", "bf16", "f32", "f64", "f8E4M3FN", "f8E8M0FNU"]
)
def test_random_values_follow_the_seed(element: str) -> None:
    kind = ValueType(element, (64,))
    first, again, other = (random_value(kind, seed) for seed in (1, 1, 2))
    assert first.dtype == kind.dtype
    assert same_bits(first, again)
    assert not same_bits(first, other)


def test_random_bytes_are_no_nan() -> None:
    codes = random_value(ValueType("i8", (10000,)), 1).view(np.uint8)
    assert not np.isin(codes, [0x7F, 0xFF]).any()


def test_results_are_described_by_type_and_head() -> None:
    x = np.arange(1000, dtype=np.float32).reshape(10, 100)
    head, full = describe_result(x, full=False), describe_result(x, full=True)
    assert head.startswith("10x100xf32\n")
    assert "..." in head
    assert "..." not in full
    assert "567." in full
    scales = np.array([0, 127, 255], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert describe_result(scales, full=False) == "3xf8E8M0FNU (bytes)\n[  0 127 255]"
    assert describe_result(7, full=False) == "int: 7"


def test_results_are_saved_whole() -> None:
    x = RNG.standard_normal((3, 4)).astype(np.float16)
    assert same_bits(np.load(io.BytesIO(encode_result(x, "y.npy"))), x)
    assert encode_result(x, "y.raw") == x.tobytes()
    assert encode_result(5, "y.npy") == encode_result(np.int64(5), "y.npy")
