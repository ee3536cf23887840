# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands that the program dequantises itself, and views of tensors.

An element of a tensor is followed back through transposes, broadcasts, reshapes and elementwise
arithmetic to what is stored: an fp8 code and the E8M0 scale that it is multiplied by, each with
the index at which it is read. A scale may also be a constant of a wider float type, if all its
values are powers of two. The indices are affine in the loops of the matmul, so that they say
which block shares a scale whatever ops the importer wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from iree.compiler import ir

from block32.lowering.problem import VALUE_TYPES, ceil_div
from block32.passes import constants
from block32.passes.raising.contraction import SCALE_TYPE, NotServedError, Operand

#: Elementwise ops that keep a product of a code and a scale what it is. Rounding an fp8 value
#: times a power of two to bf16 or f16 is exact, but where it leaves the range of f16.
_CONVERSIONS = ("arith.extf", "arith.truncf")
_PRODUCTS = ("arith.mulf", "arith.scaling_extf")
#: What a scale of a wider float type comes from, if its values are known.
_CONSTANTS = ("arith.constant", "util.global.load")
#: Ops that are followed back before giving up: longer chains are no dequantisation.
_MOST_STEPS = 64


class _OtherError(Exception):
    """The operand is something else than a dequantised one."""


@dataclass
class _Trace:
    """Leaves found so far, by kind."""

    codes: list[Operand] = field(default_factory=list)
    scales: list[Operand] = field(default_factory=list)
    steps: int = 0

    def take_step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
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
    if scales.element != SCALE_TYPE:
        converted = _constant_scales(scales, symbols)
        return None if converted is None else (codes, converted)
    return codes, scales


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
    definition = symbols[ir.FlatSymbolRefAttr(op.attributes["global"]).value].operation
    is_mutable = "is_mutable" in definition.attributes
    has_value = "initial_value" in definition.attributes
    return definition.attributes["initial_value"] if has_value and not is_mutable else None


def through_views(operand: Operand) -> Operand:
    """The same elements read before transposes, broadcasts, reshapes and casts of the tensor.

    Reading stops where the index would be no plain loop in each dimension.
    """
    value, indices, n_dims = operand.value, list(operand.map.results), operand.map.n_dims
    found = operand
    for _ in range(_MOST_STEPS):
        source = _source_of_view(value, indices, n_dims)
        if source is None:
            break
        value, indices = source
        source_map = ir.AffineMap.get(n_dims, 0, indices)
        if all(isinstance(index, ir.AffineDimExpr) for index in source_map.results):
            found = Operand(value, source_map)
    return found


def _follow(value: ir.Value, indices: list[ir.AffineExpr], n_dims: int, trace: _Trace) -> None:
    """Add to ``trace`` what ``value[indices]`` is a product of."""
    trace.take_step()
    source = _source_of_view(value, indices, n_dims) or _source_of_slice(value, indices)
    if source is not None:
        _follow(*source, n_dims, trace)
        return
    element = str(ir.RankedTensorType(value.type).element_type)
    if element in (*VALUE_TYPES, SCALE_TYPE):
        leaf = Operand(value, ir.AffineMap.get(n_dims, 0, indices))
        (trace.scales if element == SCALE_TYPE else trace.codes).append(leaf)
        return
    op = _producer(value)
    if op.name == "linalg.generic":
        _follow_generic(op, indices, n_dims, trace)
    elif op.name in (*_CONVERSIONS, *_PRODUCTS):
        for operand in op.operands:
            _follow(operand, indices, n_dims, trace)
    elif op.name in _CONSTANTS and element in constants.FLOATS and len(indices) > 1:
        trace.scales.append(Operand(value, ir.AffineMap.get(n_dims, 0, indices)))
    else:
        raise _OtherError


def _producer(value: ir.Value) -> ir.Operation:
    if isinstance(value.owner, ir.Block):
        raise _OtherError
    return value.owner.operation


def _follow_generic(
    op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int, trace: _Trace
) -> None:
    """Follow the factors in the body of an elementwise op to its operands."""
    loops = _loop_indices(op, indices)
    if loops is None:
        raise _OtherError
    body = op.regions[0].blocks[0]
    terminator = body.operations[len(body.operations) - 1].operation

    def follow_scalar(value: ir.Value) -> None:
        trace.take_step()
        if isinstance(value, ir.BlockArgument) and value.owner == body:
            operand = op.operands[value.arg_number]
            _follow(operand, _operand_indices(op, value.arg_number, loops, n_dims), n_dims, trace)
            return
        producer = _producer(value)
        if producer.name not in (*_CONVERSIONS, *_PRODUCTS):
            raise _OtherError
        for factor in producer.operands:
            follow_scalar(factor)

    follow_scalar(terminator.operands[0])


def _loop_indices(op: ir.Operation, indices: list[ir.AffineExpr]) -> list[ir.AffineExpr] | None:
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


def _operand_indices(
    op: ir.Operation, position: int, loops: list[ir.AffineExpr], n_dims: int
) -> list[ir.AffineExpr]:
    return [_substitute(expr, loops, n_dims) for expr in _maps(op)[position].results]


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _substitute(expr: ir.AffineExpr, loops: list[ir.AffineExpr], n_dims: int) -> ir.AffineExpr:
    composed = expr.compose(ir.AffineMap.get(n_dims, 0, loops))
    return ir.AffineExpr.simplify_affine_expr(composed, n_dims, 0)


_View = tuple[ir.Value, list[ir.AffineExpr]]


def _source_of_view(value: ir.Value, indices: list[ir.AffineExpr], n_dims: int) -> _View | None:
    """Where an element of a view comes from; None unless ``value`` is a view."""
    if isinstance(value.owner, ir.Block):
        return None
    op = value.owner.operation
    if op.name == "linalg.generic":
        return _source_of_copy(op, indices, n_dims)
    reader = _VIEWS.get(op.name)
    return None if reader is None else reader(op, indices, n_dims)


def _source_of_copy(op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int) -> _View | None:
    """A ``linalg.generic`` that yields its one input as it is: a broadcast or transpose."""
    body = op.regions[0].blocks[0]
    if len(op.operands) != 2 or len(body.operations) != 1:
        return None
    yielded = body.operations[0].operation.operands[0]
    loops = _loop_indices(op, indices)
    if loops is None or yielded != body.arguments[0]:
        return None
    return op.operands[0], _operand_indices(op, 0, loops, n_dims)


def _source_of_transpose(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> _View:
    permutation = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    source = list(indices)
    for position, axis in enumerate(permutation):
        source[axis] = indices[position]
    return op.operands[0], source


def _source_of_broadcast(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> _View:
    added = set(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    return op.operands[0], [index for axis, index in enumerate(indices) if axis not in added]


def _source_of_cast(op: ir.Operation, indices: list[ir.AffineExpr], _: int) -> _View:
    return op.operands[0], indices


def _source_of_slice(value: ir.Value, indices: list[ir.AffineExpr]) -> _View | None:
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


def _source_of_expand(op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int) -> _View | None:
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


def _source_of_collapse(
    op: ir.Operation, indices: list[ir.AffineExpr], n_dims: int
) -> _View | None:
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


_VIEWS: dict[str, Callable[[ir.Operation, list[ir.AffineExpr], int], _View | None]] = {
    "linalg.transpose": _source_of_transpose,
    "linalg.broadcast": _source_of_broadcast,
    "tensor.cast": _source_of_cast,
    "tensor.expand_shape": _source_of_expand,
    "tensor.collapse_shape": _source_of_collapse,
}
