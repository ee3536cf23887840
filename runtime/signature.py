# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Types of a module's functions, from the declarations that IREE leaves in it.

``sync func @main(%input0: tensor<?x64xf8E4M3FN>, %input1: i32) -> (%output0: tensor<?x64xf32>)``
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

#: NumPy's type for each MLIR element type that a tensor can have.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "i1": np.bool_,
        "i8": np.int8,
        "i16": np.int16,
        "i32": np.int32,
        "i64": np.int64,
        "f8E4M3FN": ml_dtypes.float8_e4m3fn,
        "f8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "f8E5M2": ml_dtypes.float8_e5m2,
        "f8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
        "bf16": ml_dtypes.bfloat16,
        "f16": np.float16,
        "f32": np.float32,
        "f64": np.float64,
        "complex<f32>": np.complex64,
        "complex<f64>": np.complex128,
    }.items()
}
#: Types of scalar arguments that can be passed, with their bits (0 for floats).
SCALARS: Final[dict[str, int]] = {
    "i1": 1,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "index": 64,
    "f32": 0,
    "f64": 0,
}
#: The type of an argument that is not used, where the importer said no more of it.
ANY_BUFFER: Final = "!hal.buffer_view"
_DECLARATION: Final = re.compile(r"(?P<model>\w+) func @(?P<name>[^(]+)\((?P<rest>.*)\)$")
_TENSOR: Final = re.compile(r"tensor<(?P<shape>(?:(?:\d+|\?)x)*)(?P<element>[A-Za-z][\w<>]*)>$")


@dataclass(frozen=True)
class ValueType:
    """The type of an argument or a result.

    Attributes:
        element: The MLIR element type, or what the declaration says where it is neither a tensor
            nor a scalar.
        shape: A tensor's dimensions, None for dynamic ones; None for a scalar.
    """

    element: str
    shape: tuple[int | None, ...] | None

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """NumPy's type of the elements, None where it has none."""
        return DTYPES.get(self.element)

    def __str__(self) -> str:
        if self.shape is None:
            return self.element
        return f"tensor<{shape_text(self.shape, self.element)}>"


@dataclass(frozen=True)
class Signature:
    """The arguments and results of a function, and whether it can be called without fences."""

    name: str
    arguments: tuple[ValueType, ...]
    results: tuple[ValueType, ...]
    is_async: bool = False

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        return f"{self.name}({arguments}) -> ({', '.join(map(str, self.results))})"


def shape_text(shape: tuple[int | None, ...], element: str) -> str:
    """``4x?xf32`` for (4, None) and f32."""
    return "x".join(["?" if size is None else str(size) for size in shape] + [element])


def signless(number: int, element: str) -> int:
    """An integer as a signed one of the same bits: 255 and -1 are the same i8.

    Raises:
        OverflowError: It has more bits than the type.
    """
    bits = SCALARS[element]
    if not -(1 << (bits - 1)) <= number < (1 << bits):
        raise OverflowError(f"{number} does not fit into {element}")
    return number - (1 << bits) if bits > 1 and number >= 1 << (bits - 1) else number


def parse_value_type(text: str) -> ValueType:
    """A type as declarations write it; what is no tensor stays as it is."""
    match = _TENSOR.match(text)
    if not match:
        return ValueType(text, None)
    sizes = match["shape"].split("x")[:-1]
    shape = tuple(None if size == "?" else int(size) for size in sizes)
    return ValueType(match["element"], shape)


def parse_declaration(declaration: str) -> Signature | None:
    """The signature that a declaration states, or None for text of another form."""
    match = _DECLARATION.match(declaration)
    if not match:
        return None
    arguments, arrow, results = match["rest"].partition(") -> (")
    if not arrow:
        # A function without results ends with "-> ()", and its arguments may hold no arrow.
        return None
    return Signature(
        name=match["name"],
        arguments=tuple(map(parse_value_type, _types(arguments))),
        results=tuple(map(parse_value_type, _types(results))),
        is_async=match["model"] != "sync",
    )


def _types(values: str) -> list[str]:
    """The types in ``%a: type {attributes}, %b: type``: commas inside brackets part nothing."""
    types: list[str] = []
    depth, start = 0, 0
    for position, character in enumerate(values + ","):
        depth += (character in "<{([") - (character in ">})]")
        if character == "," and depth == 0:
            value = values[start:position].strip()
            start = position + 1
            if value:
                types.append(re.sub(r"^%[^:]*: ", "", value).partition(" {")[0].strip())
    return types
