# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Small builders of tensor ops that IREE's bindings make long."""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.problem import BLOCK_K, ceil_div


def dynamic_sizes(value: ir.Value) -> list[ir.Value]:
    """A ``tensor.dim`` for every dynamic dimension of ``value``."""
    tensor_type = ir.RankedTensorType(value.type)
    return [
        tensor.dim(value, constant(axis))
        for axis in range(tensor_type.rank)
        if tensor_type.is_dynamic_dim(axis)
    ]


def bitcast(value: ir.Value, result_type: ir.Type) -> ir.Value:
    """``flow.tensor.bitcast``: the same bytes as another element type or shape.

    The dynamic dimensions of both types must agree in number and order.
    """
    if value.type == result_type:
        return value
    sizes = dynamic_sizes(value)
    op = ir.Operation.create(
        "flow.tensor.bitcast",
        results=[result_type],
        operands=[value, *sizes, *sizes],
        attributes={"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(sizes), len(sizes)])},
    )
    return op.result


def cast(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """``tensor.cast`` where the type says more or less than ``shape``, which has MLIR's -1s."""
    source = ir.RankedTensorType(value.type)
    if source.shape == list(shape):
        return value
    return tensor.cast(ir.RankedTensorType.get(list(shape), source.element_type), value)


def loop_index(axis: int) -> ir.Value:
    """The iteration index of a loop, inside a ``linalg.generic`` body."""
    return linalg.IndexOp(axis).result


def generic(
    inputs: list[ir.Value], inits: list[ir.Value], maps: list[ir.AffineMap], iterators: list[str]
) -> linalg.GenericOp:
    """A ``linalg.generic`` with an empty body block."""
    op = linalg.GenericOp(
        [init.type for init in inits],
        inputs,
        inits,
        ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{i}>") for i in iterators]),
    )
    elements = [ir.RankedTensorType(v.type).element_type for v in [*inputs, *inits]]
    op.regions[0].blocks.append(*elements, arg_locs=[ir.Location.unknown()] * len(elements))
    return op


def blocked(values: ir.Value) -> ir.Value:
    """``[rows, K]`` as ``[rows, ceil(K/32), 32]``, padded with zeros."""
    values_type = ir.RankedTensorType(values.type)
    blocks = ceil_div(values_type.shape[1], BLOCK_K)
    missing = blocks * BLOCK_K - values_type.shape[1]
    if missing:
        values = _pad_columns(values, missing)
    is_dynamic = values_type.is_dynamic_dim(0)
    rows = [tensor.dim(values, constant(0))] if is_dynamic else []
    shape = [values_type.shape[0], blocks, BLOCK_K]
    expanded = ir.RankedTensorType.get(shape, values_type.element_type)
    return tensor.expand_shape(expanded, values, [[0], [1, 2]], rows, shape)


def _pad_columns(values: ir.Value, missing: int) -> ir.Value:
    """Zeros after each row: a zero byte is the value 0 in every small float format."""
    values_type = ir.RankedTensorType(values.type)
    padded = ir.RankedTensorType.get(
        [values_type.shape[0], values_type.shape[1] + missing], values_type.element_type
    )
    op = tensor.PadOp(padded, values, [], [], [0, 0], [0, missing])
    index = ir.IndexType.get()
    block = op.regions[0].blocks.append(index, index, arg_locs=[ir.Location.unknown()] * 2)
    with ir.InsertionPoint(block):
        zero = 0 if isinstance(values_type.element_type, ir.IntegerType) else 0.0
        tensor.yield_(arith.constant(values_type.element_type, zero))
    return op.results[0]
