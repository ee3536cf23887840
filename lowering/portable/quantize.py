# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising an activation as plain linalg: the body of the ``quantize`` composite.

Scale bytes and codes are made by integer arithmetic (see ``common.quantization``), so that
every device gives the same bits.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.quantization import quantized_code, scale_byte
from block32.lowering.common.tensors import bitcast, blocked, generic
from block32.lowering.problem import BLOCK_K, SCALE_TYPE

_MAGNITUDE = 0x7FFFFFFF
_F32_INFINITY = 0x7F800000


def quantize(x: ir.Value, rule: str, element: str) -> tuple[ir.Value, ir.Value]:
    """Build the quantisation at the insertion point.

    Args:
        x: ``[M, K]`` of f32, bf16 or f16; K static.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.
        element: ``f8E4M3FN`` or ``f8E5M2``.

    Returns:
        Codes ``[M, K]`` of ``element`` and scales ``[M, ceil(K/32)]`` of f8E8M0FNU.
    """
    k = ir.RankedTensorType(x.type).shape[1]
    blocks = blocked(x)
    scales = _scale_bytes(_largest_magnitudes(blocks), rule, element)
    codes = _unblocked(_codes(blocks, scales, element), k)
    return _as_type(codes, element), _as_type(scales, SCALE_TYPE)


def _largest_magnitudes(blocks: ir.Value) -> ir.Value:
    """The bits of the largest ``|x|`` of each block, ``[M, K/32]`` i32; NaNs are passed over.

    Magnitudes order as their bits do, so that an integer maximum finds it.
    """
    i32 = ir.IntegerType.get_signless(32)
    zeros = linalg.fill(arith.constant(i32, 0), outs=[_empty_like(blocks, 2, i32)])
    maps = [ir.AffineMap.get_identity(3), _outer_map()]
    op = generic([blocks], [zeros], maps, ["parallel", "parallel", "reduction"])
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        value, largest = op.regions[0].blocks[0].arguments
        bits = arith.andi(arith.bitcast(i32, _as_f32(value)), arith.constant(i32, _MAGNITUDE))
        infinity = arith.constant(i32, _F32_INFINITY)
        is_nan = arith.cmpi(arith.CmpIPredicate.ugt, bits, infinity)
        bits = arith.select(is_nan, arith.constant(i32, 0), bits)
        linalg.yield_([arith.maxui(largest, bits)])
    return op.results[0]


def _scale_bytes(largest: ir.Value, rule: str, element: str) -> ir.Value:
    """The E8M0 byte of each block, ``[M, K/32]`` i8."""
    i8 = ir.IntegerType.get_signless(8)
    empty = _empty_like(largest, 2, i8)
    op = generic([largest], [empty], [ir.AffineMap.get_identity(2)] * 2, ["parallel"] * 2)
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        amax = arith.bitcast(ir.F32Type.get(), op.regions[0].blocks[0].arguments[0])
        linalg.yield_([arith.trunci(i8, scale_byte(amax, rule, element))])
    return op.results[0]


def _codes(blocks: ir.Value, scales: ir.Value, element: str) -> ir.Value:
    """The code of each value, ``[M, K/32, 32]`` i8."""
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    empty = _empty_like(blocks, 3, i8)
    maps = [ir.AffineMap.get_identity(3), _outer_map(), ir.AffineMap.get_identity(3)]
    op = generic([blocks, scales], [empty], maps, ["parallel"] * 3)
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        value, scale, _ = op.regions[0].blocks[0].arguments
        code = quantized_code(_as_f32(value), arith.extui(i32, scale), element)
        linalg.yield_([arith.trunci(i8, code)])
    return op.results[0]


def _as_f32(value: ir.Value) -> ir.Value:
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def _outer_map() -> ir.AffineMap:
    """``(row, block, element) -> (row, block)``."""
    return ir.AffineMap.get(3, 0, [ir.AffineExpr.get_dim(i) for i in range(2)])


def _empty_like(value: ir.Value, rank: int, element: ir.Type) -> ir.Value:
    """An empty tensor of the first ``rank`` dimensions of ``value``; only rows may be dynamic."""
    value_type = ir.RankedTensorType(value.type)
    sizes: list[int | ir.Value] = list(value_type.shape[:rank])
    if value_type.is_dynamic_dim(0):
        sizes[0] = tensor.dim(value, constant(0))
    return tensor.empty(sizes, element)


def _unblocked(codes: ir.Value, k: int) -> ir.Value:
    """``[M, ceil(K/32), 32]`` as ``[M, K]``: what lies past K is cut off."""
    codes_type = ir.RankedTensorType(codes.type)
    rows, blocks, _ = codes_type.shape
    flat = ir.RankedTensorType.get([rows, blocks * BLOCK_K], codes_type.element_type)
    collapsed = tensor.collapse_shape(flat, codes, [[0], [1, 2]])
    if blocks * BLOCK_K == k:
        return collapsed
    if rows == 0:  # MLIR takes an offset of 0 to be past the end
        return tensor.empty([0, k], codes_type.element_type)
    sizes = [tensor.dim(collapsed, constant(0))] if codes_type.is_dynamic_dim(0) else []
    cut = ir.RankedTensorType.get([rows, k], codes_type.element_type)
    return tensor.extract_slice(cut, collapsed, [], sizes, [], [0, 0], [rows, k], [1, 1])


def _as_type(value: ir.Value, element: str) -> ir.Value:
    shape = ir.RankedTensorType(value.type).shape
    return bitcast(value, ir.RankedTensorType.get(shape, ir.Type.parse(element)))
