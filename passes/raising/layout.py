# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors of a contraction in another layout: dimensions collapsed, reordered, repeated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.tensors import generic, loop_index
from block32.passes.raising.contraction import NotServedError, Operand


def arranged(value: ir.Value, dims: list[int], groups: Sequence[tuple[int, ...]]) -> ir.Value:
    """The tensor with one dimension for each group of loops, in the order of the groups.

    Args:
        value: A tensor.
        dims: The loop that indexes each of its dimensions.
        groups: The same loops, divided; the loops of a group are neighbours in the tensor.

    Raises:
        NotServedError: They are not neighbours, or in another order.
    """
    if set(dims) == {loop for group in groups for loop in group}:
        order = sorted(range(len(groups)), key=lambda i: dims.index(groups[i][0]))
        if dims == [loop for i in order for loop in groups[i]]:
            value = collapse(value, [len(groups[i]) for i in order])
            return transpose(value, [order.index(i) for i in range(len(groups))])
    raise NotServedError("expected the loops of batches, rows, N and K to be neighbours in memory")


def without_unit_loop(operand: Operand, loop: int) -> Operand:
    """The operand without its dimension of size 1 that ``loop`` indexes, if it has one."""
    exprs = list(operand.map.results)
    axes = [
        i for i, e in enumerate(exprs) if isinstance(e, ir.AffineDimExpr) and e.position == loop
    ]
    shape = ir.RankedTensorType(operand.value.type).shape
    if len(axes) != 1 or shape[axes[0]] != 1 or len(exprs) < 2:
        return operand
    (axis,) = axes
    kept = exprs[:axis] + exprs[axis + 1 :]
    first = min(axis, len(exprs) - 2)
    sizes = [1] * (len(exprs) - 1)
    sizes[first] = 2
    value = collapse(operand.value, sizes)
    return Operand(value, ir.AffineMap.get(operand.map.n_dims, 0, kept))


def without_constant_indices(scale: Operand) -> ir.Value:
    """The scales without the dimensions of size 1 that are always read at 0.

    Raises:
        NotServedError: One of those dimensions is longer.
    """
    exprs = list(scale.map.results)
    ones = [i for i, e in enumerate(exprs) if isinstance(e, ir.AffineConstantExpr)]
    shape = ir.RankedTensorType(scale.value.type).shape
    if any(shape[axis] != 1 for axis in ones):
        raise NotServedError(f"unsupported scale map {scale.map}")
    sizes: list[int] = []
    leading = 0
    for axis in range(len(exprs)):
        if axis not in ones:
            sizes.append(leading + 1)
            leading = 0
        elif sizes:
            sizes[-1] += 1
        else:
            leading += 1
    return collapse(scale.value, sizes)


def collapse(value: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """So many of the tensor's dimensions, in order, as one dimension each."""
    source = ir.RankedTensorType(value.type)
    if source.rank == len(sizes):
        return value
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    groups = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    shape = [
        ir.ShapedType.get_dynamic_size()
        if any(source.is_dynamic_dim(axis) for axis in group)
        else prod(source.shape[axis] for axis in group)
        for group in groups
    ]
    return tensor.collapse_shape(ir.RankedTensorType.get(shape, source.element_type), value, groups)


def transpose(value: ir.Value, permutation: list[int]) -> ir.Value:
    """``linalg.transpose``; IREE evaluates it at compile time for constants.

    Args:
        value: A tensor.
        permutation: The dimension of ``value`` that each dimension of the result is.
    """
    if permutation == sorted(permutation):
        return value
    source = ir.RankedTensorType(value.type)
    sizes: list[int | ir.Value] = [
        tensor.dim(value, constant(i)) if source.is_dynamic_dim(i) else source.shape[i]
        for i in permutation
    ]
    empty = tensor.empty(sizes, source.element_type)
    return linalg.transpose(value, outs=[empty], permutation=permutation).result[0]


def repeat_scales(scale: ir.Value, wanted: tuple[int, ...], repeats: tuple[int, ...]) -> ir.Value:
    """Repeat each scale of a coarser grid over the blocks that it covers: exact.

    Args:
        scale: E8M0 scales, ``[ceil(rows / block), ceil(K / block)]``, also for each of B weights.
        wanted: The shape of the finer grid.
        repeats: Fine blocks in a coarse block, along each dimension.
    """
    if all(repeat == 1 for repeat in repeats):
        return scale
    empty = tensor.empty(list(wanted), ir.RankedTensorType(scale.type).element_type)
    rank = len(wanted)
    op = generic([], [empty], [ir.AffineMap.get_identity(rank)], ["parallel"] * rank)
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        indices = [
            arith.divui(loop_index(axis), constant(repeat)) for axis, repeat in enumerate(repeats)
        ]
        linalg.yield_([tensor.extract(scale, indices)])
    return op.results[0]
