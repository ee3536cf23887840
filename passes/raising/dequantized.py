# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands that the program dequantises itself.

An element of a tensor is followed back through views and elementwise arithmetic to what is stored:
an fp8 code and the E8M0 scale that it is multiplied by, each with the index at which it is read.
The indices are affine in the loops of the matmul, so that they say which block shares a scale
whatever ops the importer wrote.

A scale may also be a constant of a wider float type, if all its values are powers of two; or
``2^(b - 127)`` of an unsigned byte b, which is E8M0 written out. (For b = 255 that is an infinity,
and in E8M0 a NaN.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from iree.compiler import ir

from block32.lowering.common.tensors import bitcast
from block32.lowering.problem import SCALE_TYPE, VALUE_TYPES, ceil_div
from block32.passes import constants
from block32.passes.raising.contraction import NotServedError, Operand
from block32.passes.raising.views import (
    MOST_STEPS,
    loop_indices,
    operand_indices,
    source_of_slice,
    source_of_view,
)
from block32.passes.symbols import LOAD_NAME, global_of, value_of_global

#: Elementwise ops that keep a product of a code and a scale what it is. Rounding an fp8 value
#: times a power of two to bf16 or f16 is exact, but where it leaves the range of f16.
_CONVERSIONS = ("arith.extf", "arith.truncf")
_PRODUCTS = ("arith.mulf", "arith.scaling_extf")
#: Conversions of a byte to a number, and those that take it as unsigned.
_WIDENINGS = ("arith.uitofp", "arith.sitofp", "arith.extui", "arith.extsi", "arith.extf")
_UNSIGNED = ("arith.uitofp", "arith.extui")
_BIAS = 127
BYTE = "i8"
#: What a scale of a wider float type comes from, if its values are known.
_CONSTANTS = ("arith.constant", LOAD_NAME)


class _OtherError(Exception):
    """The operand is something else than a dequantised one."""


@dataclass
class _Trace:
    """Leaves found so far, by kind."""

    codes: list[Operand] = field(default_factory=list)
    scales: list[Operand] = field(default_factory=list)
    biases: int = 0
    steps: int = 0

    def take_step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise _OtherError


def read(operand: Operand, symbols: ir.SymbolTable) -> tuple[Operand, Operand] | None:
    """The codes and the scales of an operand that is their product.

    Args:
        operand: A float tensor and the index at which the matmul reads it.
        symbols: The module's symbols, where constants in globals are.

    Returns:
        Two operands with maps over the same loops; None where the operand is something else.

    Raises:
        NotServedError: The scales are a constant, and not all of them are powers of two.
    """
    trace = _Trace()
    try:
        _follow(operand.value, list(operand.map.results), operand.map.n_dims, trace)
    except _OtherError:
        return None
    if len(trace.codes) != 1 or len(trace.scales) != 1:
        return None
    codes, scales = trace.codes[0], trace.scales[0]
    sizes = _loop_sizes(operand)
    if not _covers(codes, sizes) or not _covers(scales, sizes):
        return None
    if trace.biases != (1 if scales.element == BYTE else 0):
        return None
    if scales.element == BYTE:
        return codes, _bytes_as_scales(scales)
    if scales.element != SCALE_TYPE:
        converted = _constant_scales(scales, symbols)
        return None if converted is None else (codes, converted)
    return codes, scales


def _bytes_as_scales(scales: Operand) -> Operand:
    """Bytes as f8E8M0FNU, built where they are."""
    value = scales.value
    point = (
        ir.InsertionPoint.at_block_begin(value.owner)
        if isinstance(value.owner, ir.Block)
        else ir.InsertionPoint.after(value.owner)
    )
    shape = ir.RankedTensorType(value.type).shape
    with point, value.location:
        wanted = ir.RankedTensorType.get(shape, ir.Type.parse(SCALE_TYPE))
        return Operand(bitcast(value, wanted), scales.map)


def _loop_sizes(operand: Operand) -> dict[int, int]:
    """The number of iterations of the loops that index the operand, where it is known."""
    operand_type = ir.RankedTensorType(operand.value.type)
    return {
        ir.AffineDimExpr(expr).position: operand_type.shape[axis]
        for axis, expr in enumerate(operand.map.results)
        if not operand_type.is_dynamic_dim(axis)
    }


def _covers(leaf: Operand, sizes: dict[int, int]) -> bool:
    """Whether the loops read all of a leaf: none is a slice of a larger tensor.

    The scales of a short last block are cut off after they were repeated, so that a slice of them
    is no reason to give up.
    """
    leaf_type = ir.RankedTensorType(leaf.value.type)
    for axis, expr in enumerate(leaf.map.results):
        divisor = 1
        if isinstance(expr, ir.AffineFloorDivExpr) and isinstance(expr.rhs, ir.AffineConstantExpr):
            expr, divisor = expr.lhs, expr.rhs.value
        if not isinstance(expr, ir.AffineDimExpr) or leaf_type.is_dynamic_dim(axis):
            continue
        size = sizes.get(expr.position)
        if size is not None and leaf_type.shape[axis] != ceil_div(size, divisor):
            return False
    return True


def _constant_scales(scales: Operand, symbols: ir.SymbolTable) -> Operand | None:
    """f32, f16 or bf16 scales as E8M0 bytes, built where the constant is; None if it is none."""
    producer = scales.value.owner.operation
    attribute = _constant_of(producer, symbols)
    values = None if attribute is None else constants.read_floats(attribute)
    if values is None:
        return None
    codes = constants.scale_bytes(values)
    if codes is None:
        raise NotServedError(
            "expected scales that are powers of two but got a constant with "
            f"{constants.first_other(values)}"
        )
    with ir.InsertionPoint(producer), producer.location:
        return Operand(constants.build_scales(codes), scales.map)


def _constant_of(op: ir.Operation, symbols: ir.SymbolTable) -> ir.Attribute | None:
    """The value that an op gives on every run."""
    if op.name == "arith.constant":
        return op.attributes["value"]
    return value_of_global(symbols[global_of(op)].operation)


class _Part(Enum):
    """What a value is to the product: a factor of it, or an exponent of two."""

    FACTOR = auto()
    EXPONENT = auto()


def _follow(
    value: ir.Value,
    indices: list[ir.AffineExpr],
    n_dims: int,
    trace: _Trace,
    part: _Part = _Part.FACTOR,
) -> None:
    """Add to ``trace`` what ``value[indices]`` is a product of."""
    trace.take_step()
    source = source_of_view(value, indices, n_dims) or source_of_slice(value, indices)
    if source is not None:
        _follow(*source, n_dims, trace, part)
        return
    element = str(ir.RankedTensorType(value.type).element_type)
    leaf = Operand(value, ir.AffineMap.get(n_dims, 0, indices))
    if part is _Part.EXPONENT and element == BYTE:
        trace.scales.append(leaf)
        return
    if part is _Part.FACTOR and element in (*VALUE_TYPES, SCALE_TYPE):
        (trace.scales if element == SCALE_TYPE else trace.codes).append(leaf)
        return
    op = _producer(value)
    if op.name == "linalg.generic":
        _follow_generic(op, indices, n_dims, trace, part)
    elif op.name in _CONSTANTS and element in constants.FLOATS and len(indices) > 1:
        if part is not _Part.FACTOR:
            raise _OtherError
        trace.scales.append(leaf)
    else:
        for operand, operand_part in _operands(op, part, trace):
            _follow(operand, indices, n_dims, trace, operand_part)


def _producer(value: ir.Value) -> ir.Operation:
    if isinstance(value.owner, ir.Block):
        raise _OtherError
    return value.owner.operation


def _follow_generic(
    op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int, trace: _Trace, part: _Part
) -> None:
    """Follow the arithmetic in the body of an elementwise op to its operands."""
    loops = loop_indices(op, indices)
    if loops is None:
        raise _OtherError
    body = op.regions[0].blocks[0]
    terminator = body.operations[len(body.operations) - 1].operation

    def follow_scalar(value: ir.Value, part: _Part) -> None:
        trace.take_step()
        if isinstance(value, ir.BlockArgument) and value.owner == body:
            operand = op.operands[value.arg_number]
            source = operand_indices(op, value.arg_number, loops, n_dims)
            _follow(operand, source, n_dims, trace, part)
            return
        for operand, operand_part in _operands(_producer(value), part, trace):
            follow_scalar(operand, operand_part)

    follow_scalar(terminator.operands[0], part)


def _operands(op: ir.Operation, part: _Part, trace: _Trace) -> list[tuple[ir.Value, _Part]]:
    """The operands of an elementwise op that have to be followed, and what each is.

    Raises:
        _OtherError: The op is no part of a dequantisation.
    """
    operands = list(op.operands)
    if part is _Part.FACTOR:
        if op.name in (*_CONVERSIONS, *_PRODUCTS):
            return [(operand, _Part.FACTOR) for operand in operands]
        if op.name == "math.exp2":
            return [(operands[0], _Part.EXPONENT)]
        if op.name == "math.powf" and _number(operands[0]) == 2:
            return [(operands[1], _Part.EXPONENT)]
        raise _OtherError
    if op.name in _WIDENINGS:
        is_byte = str(element_type(operands[0])) == BYTE
        if is_byte and op.name not in _UNSIGNED:
            raise _OtherError
        return [(operands[0], part)]
    if op.name in ("arith.subf", "arith.subi") and _number(operands[1]) == _BIAS:
        trace.biases += 1
        return [(operands[0], part)]
    if op.name in ("arith.addf", "arith.addi") and _number(operands[1]) == -_BIAS:
        trace.biases += 1
        return [(operands[0], part)]
    raise _OtherError


def element_type(value: ir.Value) -> ir.Type:
    """The element type of a tensor, or the type of a scalar."""
    is_tensor = isinstance(value.type, ir.RankedTensorType)
    return ir.RankedTensorType(value.type).element_type if is_tensor else value.type


def _number(value: ir.Value) -> float | None:
    """The value of a scalar constant, or of a tensor that is one number."""
    if isinstance(value.owner, ir.Block) or value.owner.operation.name != "arith.constant":
        return None
    attribute = value.owner.operation.attributes["value"]
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        attribute = attribute.get_splat_value()
    is_number = isinstance(attribute, ir.FloatAttr | ir.IntegerAttr)
    return attribute.value if is_number else None
