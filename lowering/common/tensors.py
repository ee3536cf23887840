# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Small builders of tensor ops that IREE's bindings make long."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import linalg, tensor

from block32.lowering.common.index import constant


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


def loop_index(axis: int) -> ir.Value:
    """The iteration index of a loop, inside a ``linalg.generic`` body."""
    return linalg.IndexOp(axis).result
