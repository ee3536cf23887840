# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Inputs as a command line gives them, and results as it shows and saves them.

An input is ``@file.npy``, ``@file.npy:TYPE``, ``@file:SHAPExTYPE`` (raw bytes), or a value with its
type before an equals sign, which may be left out: ``4x64xf32=random(7)``, ``zeros``, ``i32=5``.
"""

from __future__ import annotations

import ast
import io
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from block32.runtime.signature import DTYPES, SCALARS, ValueType, shape_text, signless

AnyArray = npt.NDArray[Any]

#: Sizes past this are refused before memory is asked for: 64 GiB.
_MAX_BYTES: Final = 1 << 36
_TYPE: Final = re.compile(r"(?P<shape>(?:\d+x)*)(?P<element>[A-Za-z]\w*(?:<f\d+>)?)$")
_RANDOM: Final = re.compile(r"random(?:\((?P<seed>\d+)\))?$")
_NPY_MAGIC: Final = b"\x93NUMPY"
#: E8M0 bytes of random scales: 2^-4 to 2^4, so that products stay well inside f32.
_SCALE_BYTES: Final = (123, 131)


class InputError(ValueError):
    """An input that cannot be read or made; the text says what is wrong and what would be right."""


def parse_type(text: str) -> ValueType:
    """``4x64xf32`` as a tensor, ``f32`` as a scalar.

    Raises:
        InputError: It is no type, or one that cannot be passed.
    """
    match = _TYPE.match(text)
    if not match or match["element"] not in {**DTYPES, **SCALARS}:
        known = ", ".join(DTYPES)
        raise InputError(f"unknown type '{text}'; expected SHAPExTYPE, such as 4x64xf32 ({known})")
    sizes = [int(size) for size in match["shape"].split("x")[:-1]]
    return ValueType(match["element"], tuple(sizes) if sizes else None)


def read_input(text: str, expected: ValueType, dims: Mapping[int, int], seed: int) -> Any:
    """The value that an ``--input`` means for an argument of type ``expected``.

    Args:
        text: The option's value.
        expected: The argument's type; the function checks the value against it later.
        dims: Sizes for dynamic dimensions by their position, for values without a type.
        seed: For ``random`` without one.

    Raises:
        InputError: The text is malformed, or its file cannot be read or does not fit its type.
    """
    if text.startswith("@"):
        return _read_file(text[1:], expected)
    declared, equals, value = text.rpartition("=")
    if equals:
        kind = parse_type(declared)
        if kind.shape is None and expected.shape == ():
            kind = ValueType(kind.element, ())
    else:
        kind = with_dims(expected, dims)
    return _make(value.strip(), kind, seed)


def with_dims(expected: ValueType, dims: Mapping[int, int]) -> ValueType:
    """``expected`` with its dynamic dimensions filled in from ``dims``.

    Raises:
        InputError: One has no size.
    """
    if expected.shape is None:
        return expected
    shape: list[int] = []
    for position, size in enumerate(expected.shape):
        filled = dims.get(position) if size is None else size
        if filled is None:
            raise InputError(f"dimension {position} of {expected} has no size; give --dim=M=SIZE")
        shape.append(filled)
    return ValueType(expected.element, tuple(shape))


def _make(value: str, kind: ValueType, seed: int) -> Any:
    """A generated or written-out value of a type without dynamic dimensions."""
    random = _RANDOM.match(value)
    if random:
        return random_value(kind, int(random["seed"] or seed))
    if kind.shape is None:
        return 0 if value == "zeros" else _number(value, kind)
    dtype, shape = _dtype_of(kind), _static(kind)
    if value == "zeros":
        # Bytes, not numbers: E8M0 has no zero, and casting one is not defined.
        return np.zeros(_byte_count(shape, dtype), np.uint8).view(dtype).reshape(shape)
    if dtype.name.startswith("float8_"):
        raise InputError(
            f"numbers are not rounded to {kind.element}; expected zeros, random(SEED) or @FILE"
        )
    items = [_number(item, kind) for item in re.split(r"[\s,]+", value.strip("[] "))]
    count = math.prod(shape)
    if len(items) not in (1, count):
        raise InputError(f"expected 1 or {count} numbers for {kind} but got {len(items)}")
    array = np.array(items).astype(dtype)
    return np.full(shape, array[0]) if len(items) == 1 else array.reshape(shape)


def _number(text: str, kind: ValueType) -> int | float:
    is_integer = kind.element in SCALARS and SCALARS[kind.element] > 0
    try:
        return signless(int(text, 0), kind.element) if is_integer else float(text)
    except OverflowError as error:
        raise InputError(str(error)) from error
    except ValueError as error:
        raise InputError(
            f"expected zeros, random(SEED), @FILE or a number ({kind.element}) but got '{text}'"
        ) from error


def random_value(kind: ValueType, seed: int) -> Any:
    """A random value: the same for the same seed.

    8-bit floats are uniform over their finite codes, E8M0 scales over 2^-4 to 2^4, other floats
    normally distributed, i8 uniform over the bytes that are no NaN as E4M3 or E8M0, other integers
    over -100 to 100.
    """
    generator = np.random.default_rng(seed)
    if kind.shape is None:
        is_float = SCALARS.get(kind.element) == 0
        return float(generator.normal()) if is_float else int(generator.integers(0, 2))
    dtype, shape = _dtype_of(kind), _static(kind)
    _byte_count(shape, dtype)
    if dtype.name == "float8_e8m0fnu":
        low, high = _SCALE_BYTES
        return generator.integers(low, high + 1, shape, np.uint8).view(dtype)
    if dtype.name.startswith("float8_"):
        codes = np.arange(256, dtype=np.uint8)
        finite = codes[np.isfinite(codes.view(dtype).astype(np.float32))]
        return generator.choice(finite, shape).view(dtype)
    if dtype == np.int8:
        codes = np.array([code for code in range(256) if code not in (0x7F, 0xFF)], np.uint8)
        return generator.choice(codes, shape).view(np.int8)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind == "i":
        return generator.integers(-100, 101, shape, dtype)
    return generator.standard_normal(shape, np.float32).astype(dtype)


def _read_file(text: str, expected: ValueType) -> AnyArray:
    """``file.npy``, ``file.npy:TYPE`` or ``file:SHAPExTYPE``."""
    path, colon, declared = text.rpartition(":")
    if not colon or not _TYPE.match(declared):
        path, declared = text, ""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {path}: {reason}") from error
    if content.startswith(_NPY_MAGIC):
        if declared:
            kind = parse_type(declared)
            return _parse_npy(path, content, _dtype_of(kind), kind.shape)
        return _parse_npy(path, content, expected.dtype, None)
    if path.endswith(".npy"):
        raise InputError(f"{path} is no .npy file: it starts with {content[:6]!r}")
    if not declared:
        raise InputError(f"expected a type for the raw bytes of {path}: @{path}:SHAPExTYPE")
    kind = parse_type(declared)
    dtype, shape = _dtype_of(kind), _static(kind)
    size = _byte_count(shape, dtype)
    if size != len(content):
        raise InputError(
            f"expected {size} bytes for {shape_text(shape, kind.element)} "
            f"but {path} has {len(content)}"
        )
    return np.frombuffer(content, dtype).reshape(shape)


def _parse_npy(
    path: str, content: bytes, wanted: np.dtype[Any] | None, shape: tuple[int | None, ...] | None
) -> AnyArray:
    """An array of a .npy file; elements that NumPy has no name for are taken by their bytes.

    NumPy writes ml_dtypes arrays as ``V1``, ``V2`` or ``f1``, which lose the type and partly do not
    load again. Those, and unsigned integers, are viewed as ``wanted`` where the size is the same.
    """
    try:
        start, descr, order, found = _npy_header(content)
        opaque = re.fullmatch(r"[<>|=]?(?:V([12])|f(1))", descr)
        stored = np.dtype(f"<u{opaque[1] or opaque[2]}" if opaque else descr)
    except (ValueError, KeyError, TypeError, SyntaxError, struct.error, IndexError) as error:
        raise InputError(f"{path} is damaged: its .npy header cannot be read") from error
    if stored.hasobject or stored.kind not in "biufc":
        raise InputError(f"{path} holds elements of type '{descr}'; expected numbers")
    if _byte_count(found, stored) != len(content) - start:
        raise InputError(
            f"{path} is cut off or damaged: expected {_byte_count(found, stored)} bytes of data "
            f"but got {len(content) - start}"
        )
    if shape is not None and found != shape:
        raise InputError(f"expected the shape {shape} but {path} has {found}")
    array = np.frombuffer(content, stored, offset=start).reshape(found, order=order)
    if wanted is not None and stored.kind in "ui" and wanted.kind not in "iub":
        return _view(path, array, wanted)
    if opaque and wanted is None:
        raise InputError(f"the elements of {path} have no name; give their type: @{path}:TYPE")
    return array


def _view(path: str, array: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    if array.dtype.itemsize != wanted.itemsize:
        raise InputError(
            f"expected elements of {wanted.itemsize} bytes ({wanted.name}) "
            f"but {path} has {array.dtype.itemsize}"
        )
    return np.asarray(array, order="C").view(wanted)


def _npy_header(content: bytes) -> tuple[int, str, Literal["C", "F"], tuple[int, ...]]:
    """Where the data starts, and the element type, order and shape of the header (NEP 1)."""
    form, start = ("<H", 10) if content[6] == 1 else ("<I", 12)
    (size,) = struct.unpack_from(form, content, 8)
    if start + size > len(content):
        raise ValueError("the header is cut off")
    header = ast.literal_eval(content[start : start + size].decode("latin1"))
    shape = tuple(int(item) for item in header["shape"])
    descr = header["descr"]
    if not isinstance(descr, str) or any(item < 0 for item in shape):
        raise ValueError("not a plain array")
    return start + size, descr, "F" if header["fortran_order"] else "C", shape


def _dtype_of(kind: ValueType) -> np.dtype[Any]:
    if kind.dtype is None:
        raise InputError(f"a tensor of {kind.element} cannot be made here; give --input=@FILE")
    return kind.dtype


def _static(kind: ValueType) -> tuple[int, ...]:
    return tuple(size for size in kind.shape or () if size is not None)


def _byte_count(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_BYTES:
        raise InputError(f"{size} bytes for one tensor are too many")
    return size


def describe_result(result: Any, full: bool) -> str:
    """A result as text: its type, then its head or all of it. E8M0 scales are shown as bytes."""
    if not isinstance(result, np.ndarray):
        return f"{type(result).__name__}: {result}"
    names: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}
    element = names.get(result.dtype) or result.dtype.name
    shown = result.view(np.uint8) if element == "f8E8M0FNU" else result
    note = " (bytes)" if element == "f8E8M0FNU" else ""
    if shown.dtype.kind not in "biufc" or shown.dtype.name.startswith(("float8", "bfloat")):
        shown = shown.astype(np.float32)
    limit = shown.size + 1 if full else 64
    text = np.array2string(shown, threshold=limit, edgeitems=3, max_line_width=100, precision=6)
    return f"{shape_text(result.shape, element)}{note}\n{text}"


def encode_result(result: Any, path: str) -> bytes:
    """The bytes of a ``.npy`` file, or raw bytes for any other name.

    Elements that NumPy has no name for (8-bit floats, bf16) are written as unsigned integers of the
    same bits, which everything reads; give the type when reading: ``@y.npy:bf16``.
    """
    array = np.asarray(result)
    if array.dtype.kind not in "biufc" or array.dtype.name.startswith(("float8", "bfloat")):
        array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if not path.endswith(".npy"):
        return array.tobytes()
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
