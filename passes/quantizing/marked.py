# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Marked matmuls: what stands for a linear layer whose weight is in an MX format."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.dialects.block_scale import LHS_ATTRIBUTE, RHS_ATTRIBUTE, BlockScale
from block32.lowering.common.index import constant
from block32.lowering.common.tensors import bitcast, dynamic_sizes
from block32.lowering.problem import SCALE_TYPE
from block32.passes.canonical import is_zero_fill
from block32.passes.quantizing.layers import Layer
from block32.passes.quantizing.weights import QuantizedWeight
from block32.passes.symbols import load_global
from block32.runtime.quantizer import FORMATS


def replace_by_marked(layer: Layer, weight: QuantizedWeight, activations: str) -> None:
    """Build the marked matmul of rows that stands for a layer's, batched or not.

    The layer's own op is left without users, for the caller to erase.

    Args:
        layer: The layer.
        weight: Its weight.
        activations: ``mxfp8`` quantises them at run time, ``none`` takes them as they are.
    """
    op = layer.op
    with ir.InsertionPoint(op), op.location:
        x = _collapsed(layer.lhs)
        w = load_codes(weight, layer.k)
        init = _collapsed_init(op.operands[2], x)
        y = marked_matmul(x, w, init, weight, activations)
        result = _restored(y, op.operands[2])
    op.results[0].replace_all_uses_with(result)


def load_codes(weight: QuantizedWeight, k: int) -> ir.Value:
    """Load the codes of a weight at the insertion point, as ``[N, K]`` of its format's type."""
    element = ir.Type.parse(FORMATS[weight.format].name)
    stored = _load_bytes(weight.symbol, weight.code_shape)
    return bitcast(stored, ir.RankedTensorType.get([weight.n, k], element))


def load_scales(weight: QuantizedWeight) -> ir.Value:
    """Load the scales of a weight at the insertion point, as f8E8M0FNU."""
    stored = _load_bytes(weight.scale_symbol, weight.scale_shape)
    element = ir.Type.parse(SCALE_TYPE)
    return bitcast(stored, ir.RankedTensorType.get(list(weight.scale_shape), element))


def _load_bytes(symbol: str, shape: tuple[int, int]) -> ir.Value:
    i8 = ir.IntegerType.get_signless(8)
    return load_global(symbol, ir.RankedTensorType.get(list(shape), i8))


def marked_matmul(
    x: ir.Value, w: ir.Value, init: ir.Value, weight: QuantizedWeight, activations: str
) -> ir.Value:
    """``init + x @ w^T`` with the attributes that name the scales.

    Args:
        x: ``[M, K]`` of f32, bf16 or f16.
        w: The codes of ``weight``, ``[N, K]``.
        init: ``[M, N]``.
        weight: Names the scales.
        activations: As for ``replace_by_marked``.

    Returns:
        ``[M, N]``.
    """
    m, n, k = (ir.AffineExpr.get_dim(i) for i in range(3))
    maps = [ir.AffineMap.get(3, 0, exprs) for exprs in ([m, k], [n, k], [m, n])]
    op = linalg.MatmulOp(
        [init.type],
        [x, w],
        [init],
        indexing_maps=ir.ArrayAttr.get([ir.AffineMapAttr.get(map_) for map_ in maps]),
    )
    linalg.fill_builtin_region(op.operation)  # pyright: ignore[reportAttributeAccessIssue]
    if activations != "none":
        dynamic = BlockScale((1, 32), "dynamic", weight.rule)
        op.operation.attributes[LHS_ATTRIBUTE] = dynamic.build()
    scale = ir.FlatSymbolRefAttr.get(weight.scale_symbol)
    op.operation.attributes[RHS_ATTRIBUTE] = BlockScale(weight.block, scale).build()
    return op.operation.results[0]


def _collapsed(value: ir.Value) -> ir.Value:
    """``[batches, M, K]`` as ``[batches * M, K]``."""
    value_type = ir.RankedTensorType(value.type)
    if value_type.rank == 2:
        return value
    sizes = value_type.shape[:-1]
    dynamic = ir.ShapedType.get_dynamic_size()
    rows = dynamic if dynamic in sizes else sizes[0] * sizes[1]
    collapsed = ir.RankedTensorType.get([rows, value_type.shape[-1]], value_type.element_type)
    return tensor.collapse_shape(collapsed, value, [[0, 1], [2]])


def _collapsed_init(init: ir.Value, x: ir.Value) -> ir.Value:
    """The init as a matrix; zeros are made anew, so that they are seen to be zeros."""
    init_type = ir.RankedTensorType(init.type)
    if init_type.rank == 2 or not is_zero_fill(init):
        return _collapsed(init)
    x_type = ir.RankedTensorType(x.type)
    rows = tensor.dim(x, constant(0)) if x_type.is_dynamic_dim(0) else x_type.shape[0]
    empty = tensor.empty([rows, init_type.shape[-1]], init_type.element_type)
    return linalg.fill(arith.constant(init_type.element_type, 0.0), outs=[empty])


def _restored(y: ir.Value, init: ir.Value) -> ir.Value:
    """``[batches * M, N]`` in the shape of the init."""
    init_type = ir.RankedTensorType(init.type)
    if init_type.rank == 2:
        return y
    return tensor.expand_shape(
        init_type, y, [[0, 1], [2]], dynamic_sizes(init), list(init_type.shape)
    )
