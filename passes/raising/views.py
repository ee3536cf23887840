# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views of tensors: where an element comes from, with its index as affine in the loops of a matmul.

A view is a transpose, a broadcast, a reshape, a cast, or a ``linalg.generic`` that yields its one
input as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir

from block32.passes.raising.contraction import Operand

#: Ops that are followed back before giving up.
MOST_STEPS = 64


def through_views(operand: Operand) -> Operand:
    """The same elements read before transposes, broadcasts, reshapes and casts of the tensor.

    Reading stops where the index would be no plain loop in each dimension.
    """
    value, indices, n_dims = operand.value, list(operand.map.results), operand.map.n_dims
    found = operand
    for _ in range(MOST_STEPS):
        source = source_of_view(value, indices, n_dims)
        if source is None:
            break
        value, indices = source
        source_map = ir.AffineMap.get(n_dims, 0, indices)
        if all(isinstance(index, ir.AffineDimExpr) for index in source_map.results):
            found = Operand(value, source_map)
    return found


def loop_indices(op: ir.Operation, indices: list[ir.AffineExpr]) -> list[ir.AffineExpr] | None:
    """The loops of an elementwise ``linalg.generic`` at the element ``indices`` of its result."""
    iterators = ir.ArrayAttr(op.attributes["iterator_types"])
    if len(op.results) != 1 or any("parallel" not in str(kind) for kind in iterators):
        return None
    maps = _maps(op)
    loops: list[ir.AffineExpr | None] = [None] * len(iterators)
    for expr, index in zip(maps[-1].results, indices, strict=True):
        if not isinstance(expr, ir.AffineDimExpr):
            return None
        loops[expr.position] = index
    found = [loop for loop in loops if loop is not None]
    return found if len(found) == len(loops) else None


def operand_indices(
    op: ir.Operation, position: int, loops: list[ir.AffineExpr], n_dims: int
) -> list[ir.AffineExpr]:
    """Where the body of an elementwise op reads an operand, at the loops' values."""
    return [_substitute(expr, loops, n_dims) for expr in _maps(op)[position].results]


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _substitute(expr: ir.AffineExpr, loops: list[ir.AffineExpr], n_dims: int) -> ir.AffineExpr:
    composed = expr.compose(ir.AffineMap.get(n_dims, 0, loops))
    return ir.AffineExpr.simplify_affine_expr(composed, n_dims, 0)


View = tuple[ir.Value, list[ir.AffineExpr]]


def source_of_view(value: ir.Value, indices: list[ir.AffineExpr], n_dims: int) -> View | None:
    """Where an element of a view comes from; None unless ``value`` is a view."""
    if isinstance(value.owner, ir.Block):
        return None
    op = value.owner.operation
    if op.name == "linalg.generic":
        return _source_of_copy(op, indices, n_dims)
    reader = _VIEWS.get(op.name)
    return None if reader is None else reader(op, indices, n_dims)


def _source_of_copy(op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int) -> View | None:
    """A ``linalg.generic`` that yields its one input as it is: a broadcast or transpose."""
    body = op.regions[0].blocks[0]
    if len(op.operands) != 2 or len(body.operations) != 1:
        return None
    yielded = body.operations[0].operation.operands[0]
    loops = loop_indices(op, indices)
    if loops is None or yielded != body.arguments[0]:
        return None
    return op.operands[0], operand_indices(op, 0, loops, n_dims)


def _source_of_transpose(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> View:
    permutation = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    source = list(indices)
    for position, axis in enumerate(permutation):
        source[axis] = indices[position]
    return op.operands[0], source


def _source_of_broadcast(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> View:
    added = set(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    return op.operands[0], [index for axis, index in enumerate(indices) if axis not in added]


def _source_of_cast(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> View:
    return op.operands[0], indices


def source_of_slice(value: ir.Value, indices: list[ir.AffineExpr]) -> View | None:
    """The first elements of each dimension have the same indices. The source is larger."""
    if isinstance(value.owner, ir.Block) or value.owner.operation.name != "tensor.extract_slice":
        return None
    op = value.owner.operation
    offsets, strides = (
        list(ir.DenseI64ArrayAttr(op.attributes[name]))
        for name in ("static_offsets", "static_strides")
    )
    source, result = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
    if any(offsets) or any(stride != 1 for stride in strides) or source.rank != result.rank:
        return None
    return op.operands[0], indices


def _groups(op: ir.Operation) -> list[list[int]]:
    return [
        [ir.IntegerAttr(axis).value for axis in ir.ArrayAttr(group)]
        for group in ir.ArrayAttr(op.attributes["reassociation"])
    ]


def _source_of_expand(op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int) -> View | None:
    """``[A * B]`` as ``[A, B]``: index ``a * B + b``; dimensions of 1 add nothing."""
    expanded = ir.RankedTensorType(op.results[0].type)
    source = []
    for group in _groups(op):
        total: ir.AffineExpr = ir.AffineExpr.get_constant(0)
        kept = [axis for axis in group if expanded.is_dynamic_dim(axis) or expanded.shape[axis] > 1]
        for axis in kept:
            if axis != kept[0] and expanded.is_dynamic_dim(axis):
                return None
            size = 1 if axis == kept[0] else expanded.shape[axis]
            total = ir.AffineExpr.get_add(ir.AffineExpr.get_mul(total, size), indices[axis])
        source.append(ir.AffineExpr.simplify_affine_expr(total, n_dims, 0))
    return op.operands[0], source


def _source_of_collapse(op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int) -> View | None:
    """``[A, B]`` as ``[A * B]``: index ``(i floordiv B, i mod B)``."""
    source_type = ir.RankedTensorType(op.operands[0].type)
    source: list[ir.AffineExpr] = []
    for group, index in zip(_groups(op), indices, strict=True):
        kept = [a for a in group if source_type.is_dynamic_dim(a) or source_type.shape[a] > 1]
        exprs = {axis: ir.AffineExpr.get_constant(0) for axis in group}
        remaining = index
        for axis in reversed(kept):
            if axis == kept[0]:
                exprs[axis] = remaining
                break
            if source_type.is_dynamic_dim(axis):
                return None
            size = source_type.shape[axis]
            exprs[axis] = ir.AffineExpr.get_mod(remaining, size)
            remaining = ir.AffineExpr.get_floor_div(remaining, size)
        source += [ir.AffineExpr.simplify_affine_expr(exprs[a], n_dims, 0) for a in group]
    return op.operands[0], source


_VIEWS: dict[str, Callable[[ir.Operation, list[ir.AffineExpr], int], View | None]] = {
    "linalg.transpose": _source_of_transpose,
    "linalg.broadcast": _source_of_broadcast,
    "tensor.cast": _source_of_cast,
    "tensor.expand_shape": _source_of_expand,
    "tensor.collapse_shape": _source_of_collapse,
}
