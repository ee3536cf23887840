# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``linalg.matmul`` with ``block32.lhs`` and ``block32.rhs``: raw fp8 operands, scales by name."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.block_scale import LHS_ATTRIBUTE, RHS_ATTRIBUTE, BlockScale
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.common.tensors import bitcast
from block32.lowering.problem import BLOCK_K, ceil_div
from block32.passes.raising.contraction import (
    SCALE_TYPE,
    NotServedError,
    Operand,
    ScaledContraction,
    check_value_type,
)

OP_NAME = "linalg.matmul"


def is_marked(op: ir.Operation) -> bool:
    """Whether ``op`` carries one of our attributes: then it must be raised."""
    return LHS_ATTRIBUTE in op.attributes or RHS_ATTRIBUTE in op.attributes


def match(op: ir.Operation, symbols: ir.SymbolTable) -> ScaledContraction | None:
    """Read a marked matmul, building the loads of its scales before it.

    Args:
        op: Any op; None is returned unless it is a marked ``linalg.matmul``.
        symbols: The module's symbols, where the scales' globals are.

    Raises:
        NotServedError: A malformed attribute, or scales whose type or shape does not fit.
    """
    if not is_marked(op):
        return None
    if op.name != OP_NAME:
        raise NotServedError(f"expected block32.lhs and block32.rhs on {OP_NAME} only")
    maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
    lhs, rhs = (Operand(op.operands[position], maps[position]) for position in (0, 1))
    lhs_scale = _scales_of(op, lhs, maps[2], LHS_ATTRIBUTE, symbols)
    rhs_scale = _scales_of(op, rhs, maps[2], RHS_ATTRIBUTE, symbols)
    return ScaledContraction(lhs, lhs_scale, rhs, rhs_scale, maps[2])


def _scales_of(
    op: ir.Operation,
    operand: Operand,
    result_map: ir.AffineMap,
    attribute_name: str,
    symbols: ir.SymbolTable,
) -> Operand:
    """The scales that an attribute names, after checking that the operand can have any."""
    check_value_type(operand.element)
    scale = _parse(op, attribute_name)
    row_loop = _row_loop(operand.map, result_map)
    return _scale_operand(op, operand, row_loop, attribute_name, scale, symbols)


def _parse(op: ir.Operation, name: str) -> BlockScale:
    if name not in op.attributes:
        raise NotServedError(f"missing '{name}'; expected {{block = [1, 32], scale = ...}}")
    try:
        return BlockScale.parse(op.attributes[name])
    except BadAttributeError as error:
        raise NotServedError(f"malformed '{name}': {error}") from error


def _row_loop(operand_map: ir.AffineMap, result_map: ir.AffineMap) -> int:
    """The loop of the operand that the result has too."""
    result = {str(expr) for expr in result_map.results}
    rows = [expr for expr in operand_map.results if str(expr) in result]
    if len(rows) != 1 or len(operand_map.results) != 2:
        raise NotServedError(f"expected a matmul operand of two dimensions but got {operand_map}")
    return ir.AffineDimExpr(rows[0]).position


def _scale_operand(
    op: ir.Operation,
    operand: Operand,
    row_loop: int,
    name: str,
    scale: BlockScale,
    symbols: ir.SymbolTable,
) -> Operand:
    """The scales as a value, with the map that their block implies."""
    n_dims = operand.map.n_dims
    loops = [ir.AffineDimExpr(e).position for e in operand.map.results]
    k_loop = next(loop for loop in loops if loop != row_loop)
    sizes = dict(zip(loops, ir.RankedTensorType(operand.value.type).shape, strict=True))
    value = _scale_value(op, name, scale, symbols)
    value_type = ir.RankedTensorType(value.type)
    dynamic = ir.ShapedType.get_dynamic_size()
    rows = sizes[row_loop]
    wanted = [
        rows if rows == dynamic else ceil_div(rows, scale.block[0]),
        ceil_div(sizes[k_loop], scale.block[1]),
    ]
    if value_type.shape not in (wanted, [*wanted, 1]):
        raise NotServedError(
            f"expected '{name}' scales of shape {_by(wanted)} for a "
            f"{_by(ir.RankedTensorType(operand.value.type).shape)} operand but got "
            f"{_by(value_type.shape)}"
        )
    row = ir.AffineExpr.get_dim(row_loop)
    if scale.block[0] > 1:
        row = ir.AffineExpr.get_floor_div(row, scale.block[0])
    column = ir.AffineExpr.get_floor_div(ir.AffineExpr.get_dim(k_loop), BLOCK_K)
    trailing = [ir.AffineExpr.get_constant(0)] if value_type.rank == 3 else []
    return Operand(value, ir.AffineMap.get(n_dims, 0, [row, column, *trailing]))


def _by(shape: list[int]) -> str:
    dynamic = ir.ShapedType.get_dynamic_size()
    return "x".join("?" if size == dynamic else str(size) for size in shape)


def _scale_value(
    op: ir.Operation, name: str, scale: BlockScale, symbols: ir.SymbolTable
) -> ir.Value:
    """Load the global or build the constant; bytes become f8E8M0FNU."""
    with ir.InsertionPoint(op), op.location:
        match scale.scale:
            case ir.FlatSymbolRefAttr():
                value = _load_global(name, scale.scale.value, symbols)
            case ir.DenseElementsAttr() | ir.DenseResourceElementsAttr():
                value = arith.ConstantOp(scale.scale.type, scale.scale).result
            case _:
                raise NotServedError(
                    f"'{name}' of a raw fp8 operand needs a scale; expected a symbol or a constant"
                )
        return _as_scales(value, name)


def _load_global(name: str, symbol: str, symbols: ir.SymbolTable) -> ir.Value:
    if symbol not in symbols:
        raise NotServedError(f"'{name}' names an unknown symbol @{symbol}; expected a util.global")
    definition = symbols[symbol].operation
    if definition.name != "util.global":
        raise NotServedError(f"expected @{symbol} to be a util.global but got {definition.name}")
    global_type = ir.TypeAttr(definition.attributes["type"]).value
    if not isinstance(global_type, ir.RankedTensorType):
        raise NotServedError(f"expected @{symbol} to hold a tensor but got {global_type}")
    load = ir.Operation.create(
        "util.global.load",
        results=[global_type],
        attributes={"global": ir.FlatSymbolRefAttr.get(symbol)},
    )
    return load.result


def _as_scales(value: ir.Value, name: str) -> ir.Value:
    value_type = ir.RankedTensorType(value.type)
    element = str(value_type.element_type)
    if element == SCALE_TYPE:
        return value
    if element not in ("i8", "ui8"):
        raise NotServedError(f"expected '{name}' scales of {SCALE_TYPE} or i8 but got {element}")
    scales = ir.RankedTensorType.get(value_type.shape, ir.Type.parse(SCALE_TYPE))
    return bitcast(value, scales)
