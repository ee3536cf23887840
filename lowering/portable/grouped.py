# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls in plain linalg: which weight a row has, and reading that weight.

The rows stay where they are. Each finds its group once, and the contraction then gathers the
codes and scales of that group's expert, so that no expert is multiplied with rows of another.
"""

from __future__ import annotations

from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.tensors import generic, loop_index
from block32.lowering.problem import ScaledMatmul

#: What a row has in place of an expert: a group without one, or no group.
NO_EXPERT: Final = -1
NO_GROUP: Final = -2


def row_experts(problem: ScaledMatmul, operands: dict[str, ir.Value]) -> ir.Value:
    """The expert of each row, ``[M]`` i32: a number below ``experts``, or one of the above.

    An id that is no expert counts as ``NO_EXPERT``.
    """
    assert problem.grouping is not None
    i32 = ir.IntegerType.get_signless(32)
    lhs, offsets = operands["lhs"], operands["offsets"]
    rows = tensor.dim(lhs, constant(0)) if problem.m is None else problem.m
    none = linalg.fill(arith.constant(i32, NO_GROUP), outs=[tensor.empty([rows], i32)])
    row, group = (ir.AffineExpr.get_dim(i) for i in range(2))
    maps = [ir.AffineMap.get(2, 0, [group]), ir.AffineMap.get(2, 0, [row])]
    op = generic([operands["expert_ids"]], [none], maps, ["parallel", "reduction"])
    body = op.regions[0].blocks[0]
    with ir.InsertionPoint(body):
        expert, found = body.arguments
        position = arith.index_cast(i32, loop_index(0))
        first = tensor.extract(offsets, [loop_index(1)])
        end = tensor.extract(offsets, [arith.addi(loop_index(1), constant(1))])
        is_after = arith.cmpi(arith.CmpIPredicate.sge, position, first)
        is_before = arith.cmpi(arith.CmpIPredicate.slt, position, end)
        experts = arith.constant(i32, problem.grouping.experts)
        is_expert = arith.cmpi(arith.CmpIPredicate.ult, expert, experts)
        known = arith.select(is_expert, expert, arith.constant(i32, NO_EXPERT))
        linalg.yield_([arith.select(arith.andi(is_after, is_before), known, found)])
    return op.results[0]


def stacked(value: ir.Value) -> ir.Value:
    """``[experts, rows, columns]`` as ``[experts * rows, columns]``."""
    value_type = ir.RankedTensorType(value.type)
    experts, rows, columns = value_type.shape
    flat = ir.RankedTensorType.get([experts * rows, columns], value_type.element_type)
    return tensor.collapse_shape(flat, value, [[0, 1], [2]])


def gather_weight(
    problem: ScaledMatmul, expert: ir.Value, codes: ir.Value, scales: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The code and scale byte of w at the loops (m, n, block, element) of a contraction's body.

    Args:
        problem: The matmul.
        expert: The row's, as ``row_experts`` gives it; expert 0 is read in place of none.
        codes: ``[experts * N, ceil(K/32), 32]`` i8.
        scales: ``[experts * ceil(N / rhs_block[0]), ceil(K/32)]`` i8.
    """
    zero = arith.constant(expert.type, 0)
    number = arith.index_cast(ir.IndexType.get(), arith.maxsi(expert, zero))
    column, block, element = (loop_index(axis) for axis in (1, 2, 3))
    row = arith.addi(arith.muli(number, constant(problem.n)), column)
    scale_rows = constant(problem.rhs_scale_shape[0])
    scale_column = arith.divui(column, constant(problem.rhs_block[0]))
    scale_row = arith.addi(arith.muli(number, scale_rows), scale_column)
    return tensor.extract(codes, [row, block, element]), tensor.extract(scales, [scale_row, block])


def choose_row(expert: ir.Value, product: ir.Value, init: ir.Value) -> ir.Value:
    """An element of y: the product, zero without an expert, or ``init`` without a group."""
    is_without_group = _equals(expert, NO_GROUP)
    is_without_expert = _equals(expert, NO_EXPERT)
    zero = arith.constant(product.type, 0.0)
    return arith.select(is_without_group, init, arith.select(is_without_expert, zero, product))


def _equals(value: ir.Value, number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, value, arith.constant(value.type, number))
