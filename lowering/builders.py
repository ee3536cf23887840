# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block-scaled linear layers for people who build MLIR in Python.

Every function builds at the current insertion point, inside a function of a module::

    with ir.InsertionPoint(op), op.location:
        weight, scales = weight_constant(codes, scale_bytes)
        y = scaled_linear(x, weight, scales, bias=bias, activation="relu", quantize="rceil")

What is built is a call of a composite: a private function of the same module whose body is the
meaning in plain linalg. ``block32-inline-composites`` makes plain linalg of the calls, for an
``iree-compile`` without block32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from iree.compiler import ir
from iree.compiler.dialects import arith, tensor

from block32.dialects.block_scale import SCALE_RULES
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.common.epilogue import ACTIVATIONS
from block32.lowering.common.index import constant
from block32.lowering.common.tensors import bitcast
from block32.lowering.composites import Composites
from block32.lowering.host import operand_types
from block32.lowering.problem import (
    BLOCK_K,
    RESULT_TYPES,
    SCALE_TYPE,
    VALUE_TYPES,
    Epilogue,
    ScaledMatmul,
    ceil_div,
)


@dataclass(frozen=True)
class _Weight:
    """A weight as a kernel takes it.

    Attributes:
        value: ``[N, K]`` codes, or ``[N, K/2]`` packed bytes.
        scales: E8M0, ``[ceil(N / block[0]), ceil(K / 32)]``.
        element: The codes' type.
        n: Rows.
        block: Elements that share a scale.
    """

    value: ir.Value
    scales: ir.Value
    element: str
    n: int
    block: tuple[int, int]


def weight_constant(codes: npt.NDArray[Any], scales: npt.NDArray[Any]) -> tuple[ir.Value, ir.Value]:
    """Constants for ``scaled_linear``; large models keep weights in parameters instead.

    Args:
        codes: Bytes ``[N, K]`` of e4m3, or of another one-byte type; for MXFP4 ``[N, K/2]``.
        scales: E8M0 bytes, ``[ceil(N/32), ceil(K/32)]`` or ``[N, ceil(K/32)]``.

    Returns:
        Two tensors of i8, as ``scaled_linear`` takes them.

    Raises:
        BadAttributeError: An array that is no matrix of bytes.
    """
    values: list[ir.Value] = []
    for name, array in (("codes", codes), ("scales", scales)):
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.itemsize != 1:
            is_array = isinstance(array, np.ndarray)
            got = f"{array.dtype} of {array.shape}" if is_array else type(array).__name__
            raise BadAttributeError(f"expected {name} to be a matrix of bytes but got {got}")
        content = np.ascontiguousarray(array).view(np.int8)
        i8 = ir.IntegerType.get_signless(8)
        attribute = ir.DenseElementsAttr.get(content, type=i8, shape=list(array.shape))
        tensor_type = ir.RankedTensorType.get(list(array.shape), i8)
        values.append(arith.ConstantOp(tensor_type, attribute).result)
    return values[0], values[1]


def quantize_rows(x: ir.Value, rule: str = "rceil") -> tuple[ir.Value, ir.Value]:
    """Quantise rows to MXFP8 at run time: layers that read one activation may share this.

    Args:
        x: ``[M, K]`` of f32, bf16 or f16, K static.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.

    Returns:
        Codes ``[M, K]`` of f8E4M3FN and scales ``[M, ceil(K/32)]`` of f8E8M0FNU.

    Raises:
        BadAttributeError: Another type, shape or rule.
    """
    x_type = _tensor_type("x", x)
    if x_type.rank != 2 or x_type.is_dynamic_dim(1):
        raise BadAttributeError(f"expected x to be a matrix with a static K but got {x_type}")
    _check_element("x", x_type, RESULT_TYPES)
    _check_rule(rule)
    return _composites().quantize(x, rule)


def scaled_linear(
    x: ir.Value,
    weight: ir.Value,
    scales: ir.Value,
    *,
    x_scales: ir.Value | None = None,
    quantize: str | None = None,
    element: str = "f8E4M3FN",
    row_scale: ir.Value | None = None,
    scale: ir.Value | None = None,
    bias: ir.Value | None = None,
    residual: ir.Value | None = None,
    activation: str | None = None,
    result: str | None = None,
) -> ir.Value:
    """``activation(x @ weight^T * row_scale * scale + bias + residual)`` at the insertion point.

    Sums and all that follows them are f32; the result is rounded once.

    Args:
        x: ``[..., M, K]``, K static: f32, bf16 or f16, or codes with ``x_scales``.
        weight: ``[N, K]``, static: f8E4M3FN or f8E5M2, or bytes (i8) of ``element``. MXFP4 is
            bytes, ``[N, K/2]``, the low nibble first.
        scales: f8E8M0FNU or i8 bytes, ``[ceil(N/32), ceil(K/32)]`` or ``[N, ceil(K/32)]``.
        x_scales: f8E8M0FNU or i8 bytes, ``[..., M, ceil(K/32)]``, of an x of codes.
        quantize: The rule by which a wide x is quantised first; None multiplies it as it is.
        element: What the bytes of an i8 weight are.
        row_scale: f32 ``[M]``, for an x of two dimensions.
        scale: f32 ``[1]``.
        bias: f32, bf16 or f16, ``[N]``.
        residual: f32, bf16 or f16, of the result's shape.
        activation: ``relu``, ``gelu``, ``gelu_tanh``, ``silu`` or ``tanh``.
        result: ``f32``, ``bf16`` or ``f16``; x's type by default, f32 for an x of codes.

    Returns:
        ``[..., M, N]``.

    Raises:
        BadAttributeError: A type or shape that does not fit; the message says which would.
    """
    x_type = _tensor_type("x", x)
    if x_type.rank < 2 or x_type.is_dynamic_dim(x_type.rank - 1) or x_type.shape[-1] < 1:
        raise BadAttributeError(f"expected x to be [..., M, K] with a static K but got {x_type}")
    k = x_type.shape[-1]
    operand = _weight(weight, scales, k, element)
    is_wide = str(x_type.element_type) in RESULT_TYPES
    _check_element("x", x_type, (*RESULT_TYPES, *VALUE_TYPES[:2]))
    _check_quantisation(is_wide, x_scales, quantize)
    result = result or (str(x_type.element_type) if is_wide else "f32")
    _check_choice("result", result, RESULT_TYPES)
    if activation is not None:
        _check_choice("activation", activation, tuple(ACTIVATIONS))
    rows = _as_matrix(x)
    rows_scales = None
    if x_scales is not None:
        x_scales = _as_scales("x_scales", x_scales)
        rows_scales = _as_rows_of(x_type, ceil_div(k, BLOCK_K), "x_scales", x_scales)
    if quantize is not None:
        rows, rows_scales = _composites().quantize(rows, quantize)
    rows_type = ir.RankedTensorType(rows.type)
    problem = ScaledMatmul(
        m=None if rows_type.is_dynamic_dim(0) else rows_type.shape[0],
        n=operand.n,
        k=k,
        lhs=str(rows_type.element_type),
        rhs=operand.element,
        rhs_block=operand.block,
        result=result,
        lhs_scaled=rows_scales is not None,
        epilogue=Epilogue(
            row_scale=row_scale is not None,
            scale=scale is not None,
            bias=_element_of("bias", bias),
            residual=_element_of("residual", residual),
            activation=activation,
        ),
    )
    if residual is not None:
        residual = _as_rows_of(x_type, operand.n, "residual", residual)
    operands = {
        "lhs": rows,
        "lhs_scale": rows_scales,
        "rhs": operand.value,
        "rhs_scale": operand.scales,
        "row_scale": row_scale,
        "scale": scale,
        "bias": bias,
        "residual": residual,
    }
    present = {name: value for name, value in operands.items() if value is not None}
    _check_operands(problem, present)
    return _as_shape_of(x, _composites().matmul(problem, present))


#: The arguments of ``scaled_linear`` by the names that kernels have for them.
_ARGUMENTS: Final = {
    "lhs": "x",
    "lhs_scale": "x_scales",
    "rhs": "weight",
    "rhs_scale": "scales",
}


def _check_operands(problem: ScaledMatmul, operands: Mapping[str, ir.Value]) -> None:
    """Refuse operands of other types than the problem's."""
    for name, wanted in operand_types(problem).items():
        argument = _ARGUMENTS.get(name, name)
        found = _tensor_type(argument, operands[name])
        if found != wanted:
            raise BadAttributeError(f"expected {argument} of {wanted} but got {found}")


def _composites() -> Composites:
    """Of the module around the insertion point."""
    op = ir.InsertionPoint.current.block.owner
    while op.operation.parent is not None:
        op = op.operation.parent
    return Composites(ir.SymbolTable(op.operation))


def _weight(weight: ir.Value, scales: ir.Value, k: int, element: str) -> _Weight:
    """Check a weight against K, and find the block of its scales."""
    weight_type = _tensor_type("weight", weight)
    if weight_type.rank != 2 or not weight_type.has_static_shape or 0 in weight_type.shape:
        raise BadAttributeError(f"expected weight to be a static [N, K] but got {weight_type}")
    is_bytes = str(weight_type.element_type) == "i8"
    if is_bytes:
        _check_choice("element", element, VALUE_TYPES)
    else:
        _check_element("weight", weight_type, (*VALUE_TYPES[:2], "i8"))
    kind = element if is_bytes else str(weight_type.element_type)
    n, stored = weight_type.shape
    wanted = ceil_div(k, 2) if kind == "f4E2M1FN" else k
    if stored != wanted:
        raise BadAttributeError(
            f"expected weight of [N, {wanted}] for an x with K = {k} but got {weight_type}"
        )
    if is_bytes and kind != "f4E2M1FN":
        weight = bitcast(weight, ir.RankedTensorType.get([n, k], ir.Type.parse(kind)))
    scale_values = _as_scales("scales", scales)
    shape = ir.RankedTensorType(scale_values.type).shape
    for rows in (32, 1):
        if shape == [ceil_div(n, rows), ceil_div(k, BLOCK_K)]:
            return _Weight(weight, scale_values, kind, n, (rows, BLOCK_K))
    raise BadAttributeError(
        f"expected scales of [{ceil_div(n, 32)}, {ceil_div(k, 32)}] or [{n}, {ceil_div(k, 32)}] "
        f"for a weight of [{n}, {k}] but got {scales.type}"
    )


def _check_quantisation(is_wide: bool, x_scales: ir.Value | None, quantize: str | None) -> None:
    if is_wide and x_scales is not None:
        raise BadAttributeError("expected no x_scales: x is no tensor of codes")
    if not is_wide and x_scales is None:
        raise BadAttributeError("expected x_scales: x is a tensor of codes")
    if not is_wide and quantize is not None:
        raise BadAttributeError("expected no quantize: x is a tensor of codes already")
    if quantize is not None:
        _check_rule(quantize)


def _check_rule(rule: str) -> None:
    _check_choice("the rule", rule, SCALE_RULES)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadAttributeError(f"expected {name} to be {' or '.join(choices)} but got {value}")


def _check_element(name: str, value_type: ir.RankedTensorType, choices: tuple[str, ...]) -> None:
    _check_choice(f"the elements of {name}", str(value_type.element_type), choices)


def _tensor_type(name: str, value: ir.Value) -> ir.RankedTensorType:
    found = value.type if isinstance(value, ir.Value) else type(value).__name__
    if not isinstance(found, ir.RankedTensorType):
        raise BadAttributeError(f"expected {name} to be a ranked tensor but got {found}")
    return ir.RankedTensorType(found)


def _element_of(name: str, value: ir.Value | None) -> str | None:
    if value is None:
        return None
    value_type = _tensor_type(name, value)
    _check_element(name, value_type, RESULT_TYPES)
    return str(value_type.element_type)


def _as_scales(name: str, value: ir.Value) -> ir.Value:
    """Bytes as f8E8M0FNU."""
    value_type = _tensor_type(name, value)
    _check_element(name, value_type, (SCALE_TYPE, "i8"))
    return bitcast(value, ir.RankedTensorType.get(value_type.shape, ir.Type.parse(SCALE_TYPE)))


def _as_matrix(value: ir.Value) -> ir.Value:
    """``[..., M, K]`` as ``[rows, K]``."""
    value_type = ir.RankedTensorType(value.type)
    if value_type.rank == 2:
        return value
    lead = list(range(value_type.rank - 1))
    is_dynamic = any(value_type.is_dynamic_dim(axis) for axis in lead)
    rows = ir.ShapedType.get_dynamic_size() if is_dynamic else prod(value_type.shape[:-1])
    matrix = ir.RankedTensorType.get([rows, value_type.shape[-1]], value_type.element_type)
    return tensor.collapse_shape(matrix, value, [lead, [value_type.rank - 1]])


def _as_rows_of(x: ir.RankedTensorType, size: int, name: str, value: ir.Value) -> ir.Value:
    """``[..., M, size]`` as ``[rows, size]``, with the leading dimensions of x."""
    found = ir.RankedTensorType(value.type)
    wanted = ir.RankedTensorType.get([*x.shape[:-1], size], found.element_type)
    if found != wanted:
        raise BadAttributeError(f"expected {name} of {wanted} but got {found}")
    return _as_matrix(value)


def _as_shape_of(x: ir.Value, y: ir.Value) -> ir.Value:
    """``[rows, N]`` with the leading dimensions of x."""
    x_type, y_type = ir.RankedTensorType(x.type), ir.RankedTensorType(y.type)
    if x_type.rank == 2:
        return y
    shape = [*x_type.shape[:-1], y_type.shape[1]]
    lead = list(range(x_type.rank - 1))
    sizes = [tensor.dim(x, constant(axis)) for axis in lead if x_type.is_dynamic_dim(axis)]
    wanted = ir.RankedTensorType.get(shape, y_type.element_type)
    return tensor.expand_shape(wanted, y, [lead, [x_type.rank - 1]], sizes, shape)
