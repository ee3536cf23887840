# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The numbers in constants, and E8M0 bytes from those that are powers of two."""

from __future__ import annotations

import re
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.tensors import bitcast
from block32.lowering.problem import SCALE_TYPE

#: NumPy's types of the floats that a scale may be stored in, by MLIR name.
FLOATS: Final[dict[str, Any]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}

#: How MLIR prints the bytes of a resource: a word that says its alignment, then the bytes.
_RESOURCE_BYTES: Final = re.compile(r'"0x[0-9A-Fa-f]{8}([0-9A-Fa-f]*)"')


def read_floats(attribute: ir.Attribute) -> npt.NDArray[Any] | None:
    """The values of an f32, f16 or bf16 constant; None where the bindings cannot say them."""
    shaped = ir.RankedTensorType(attribute.type) if hasattr(attribute, "type") else None
    if shaped is None or str(shaped.element_type) not in FLOATS:
        return None
    dtype = FLOATS[str(shaped.element_type)]
    if isinstance(attribute, ir.DenseElementsAttr):
        if attribute.is_splat:
            return np.full(shaped.shape, ir.FloatAttr(attribute.get_splat_value()).value, dtype)
        if dtype is ml_dtypes.bfloat16:
            return _printed_values(str(attribute), dtype, shaped.shape)
        return np.array(attribute).reshape(shaped.shape)
    content = resource_bytes(attribute)
    if content is None or len(content) != np.prod(shaped.shape) * np.dtype(dtype).itemsize:
        return None
    return np.frombuffer(content, dtype).reshape(shaped.shape)


def _printed_values(text: str, dtype: Any, shape: list[int]) -> npt.NDArray[Any] | None:
    """The values of ``dense<...>``: the bindings give no buffer of bf16."""
    content, _, _ = text.removeprefix("dense<").rpartition("> : ")
    if content.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(content[3:-1]), dtype).reshape(shape)
    numbers = re.findall(r"[^\s,\[\]]+", content)
    if any(number.startswith("0x") for number in numbers):  # a NaN or an infinity, by its bits
        return None
    return np.array([float(number) for number in numbers]).astype(dtype).reshape(shape)


def is_constant(attribute: ir.Attribute) -> bool:
    """Whether an attribute holds the elements of a tensor, and does not name a parameter."""
    # The bindings know dense_resource<...> by its text alone.
    return isinstance(attribute, ir.DenseElementsAttr) or _is_resource(attribute)


def _is_resource(attribute: ir.Attribute) -> bool:
    return str(attribute).startswith("dense_resource<")


def read_codes(attribute: ir.Attribute) -> npt.NDArray[np.int8] | None:
    """The bytes of a constant of an 8-bit float; None for one that is written as numbers."""
    shape = ir.RankedTensorType(attribute.type).shape if hasattr(attribute, "type") else []
    if isinstance(attribute, ir.DenseElementsAttr):
        content, _, _ = str(attribute).removeprefix("dense<").rpartition("> : ")
        found = bytes.fromhex(content[3:-1]) if content.startswith('"0x') else None
    else:
        found = resource_bytes(attribute)
    if found is None or len(found) != np.prod(shape):
        return None
    return np.frombuffer(found, np.int8).reshape(shape)


def resource_bytes(attribute: ir.Attribute) -> bytes | None:
    """The bytes behind ``dense_resource<name>``, which the bindings show in printed IR alone."""
    if not _is_resource(attribute):
        return None
    with attribute.context, ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["block32.value"] = attribute
        found = _RESOURCE_BYTES.search(module.operation.get_asm())
    return bytes.fromhex(found[1]) if found else None


def scale_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    """E8M0 bytes of the same values: exact, a NaN is 255; None where one is no power of two."""
    numbers = values.astype(np.float64)
    is_nan = np.isnan(numbers)
    mantissas, exponents = np.frexp(np.where(is_nan, 1.0, numbers))
    # frexp's mantissas are in [0.5, 1): byte b is 0.5 * 2^(b - 126).
    codes = exponents + 126
    if not np.all((mantissas == 0.5) & (codes >= 0) & (codes <= 254)):
        return None
    return np.where(is_nan, 255, codes).astype(np.uint8)


def first_other(values: npt.NDArray[Any]) -> str:
    """The first value that is no power of two, and its index, for an error."""
    for index in np.ndindex(values.shape):
        if scale_bytes(values[index]) is None:
            return f"{float(values[index]):g} at {list(index)}"
    return "none"


def build_scales(codes: npt.NDArray[np.uint8]) -> ir.Value:
    """A constant of f8E8M0FNU at the insertion point, from its bytes: never written as text."""
    shape = list(codes.shape)
    i8 = ir.IntegerType.get_signless(8)
    content = ir.DenseElementsAttr.get(
        np.ascontiguousarray(codes).view(np.int8), type=i8, shape=shape
    )
    constant = arith.ConstantOp(ir.RankedTensorType.get(shape, i8), content).result
    return bitcast(constant, ir.RankedTensorType.get(shape, ir.Type.parse(SCALE_TYPE)))
