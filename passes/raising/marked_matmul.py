# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A matmul with ``block32.lhs`` and ``block32.rhs``.

A raw fp8 operand has its scales named by the attribute. An operand of a wider type is one that
the program dequantises (the attribute has no scale), or an activation that is quantised at run
time (``scale = "dynamic"``) or, without the attribute, taken as it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.block_scale import LHS_ATTRIBUTE, RHS_ATTRIBUTE, BlockScale
from block32.dialects.composite import ATTRIBUTE as COMPOSITE_ATTRIBUTE
from block32.dialects.diagnostics import BadAttributeError
from block32.dialects.kernel import ATTRIBUTE as KERNEL_ATTRIBUTE
from block32.dialects.layout import ATTRIBUTE as LAYOUT_ATTRIBUTE
from block32.lowering.common.tensors import bitcast
from block32.lowering.problem import BLOCK_K, SCALE_TYPE, ceil_div
from block32.passes.raising import dequantized, dequantized_matmul
from block32.passes.raising.contraction import (
    ACTIVATION_TYPES,
    NotServedError,
    Operand,
    ScaledContraction,
    check_value_type,
    is_on_tensors,
)
from block32.passes.raising.views import through_views
from block32.passes.symbols import load_global

#: Attributes of ours that stay on ops.
_OTHER_ATTRIBUTES: Final = (KERNEL_ATTRIBUTE, COMPOSITE_ATTRIBUTE)

#: All that a matmul may have.
_ATTRIBUTES: Final = (LHS_ATTRIBUTE, RHS_ATTRIBUTE, KERNEL_ATTRIBUTE)

OP_NAMES = dequantized_matmul.OP_NAMES

#: What may say in which order the bytes of a weight are.
_WITH_LAYOUT: Final = ("util.global", "flow.tensor.bitcast")


def is_marked(op: ir.Operation) -> bool:
    """Whether ``op`` carries an attribute of ours that only raising takes away.

    A misspelled one is among them: an op that keeps it loses the scales that it speaks of.
    """
    others = _OTHER_ATTRIBUTES
    if op.name in _WITH_LAYOUT:
        others = (*others, LAYOUT_ATTRIBUTE)
    return any(
        name.startswith("block32.") and name not in others for name, _ in op.attributes.items()
    )


def match(op: ir.Operation, symbols: ir.SymbolTable) -> ScaledContraction | None:
    """Read a marked matmul, building the loads of its scales before it.

    Args:
        op: Any op; None is returned unless it is a marked matmul, batched or not.
        symbols: The module's symbols, where the scales' globals are.

    Raises:
        NotServedError: A malformed attribute, scales whose type or shape does not fit, or an
            operand that is not dequantised as the attribute says.
    """
    if not is_marked(op):
        return None
    if op.name not in OP_NAMES:
        expected = " or ".join(OP_NAMES)
        raise NotServedError(f"expected block32.lhs and block32.rhs on {expected} only")
    for name, _ in op.attributes.items():
        if name.startswith("block32.") and name not in _ATTRIBUTES:
            raise NotServedError(
                f"unknown attribute '{name}'; expected one of {', '.join(_ATTRIBUTES)}"
            )
    if not is_on_tensors(op):
        raise NotServedError("expected operands and result to be tensors")
    lhs, rhs, result = dequantized_matmul.operands_of(op)
    if lhs.element in ACTIVATION_TYPES:
        weight = _Marked(op, rhs, RHS_ATTRIBUTE, result, symbols).read()
        contraction = _with_activation(op, lhs, weight, result, symbols)
    else:
        activation = _Marked(op, lhs, LHS_ATTRIBUTE, result, symbols).read()
        weight = _Marked(op, rhs, RHS_ATTRIBUTE, result, symbols).read()
        contraction = ScaledContraction(*activation, *weight, result)
    is_dequantized = weight[0].element != rhs.element
    return dataclasses.replace(
        contraction, from_producers=contraction.from_producers or is_dequantized
    )


def _with_activation(
    op: ir.Operation,
    lhs: Operand,
    weight: tuple[Operand, Operand],
    result: ir.AffineMap,
    symbols: ir.SymbolTable,
) -> ScaledContraction:
    """A bf16, f16 or f32 activation: dequantised by the program, to be quantised, or as it is."""
    attribute = _parse(op, LHS_ATTRIBUTE) if LHS_ATTRIBUTE in op.attributes else None
    if attribute is not None and attribute.block != (1, BLOCK_K):
        raise NotServedError("expected 1x32 scales on the left operand but got 32x32")
    if attribute is not None and attribute.scale == "dynamic":
        return ScaledContraction(lhs, None, *weight, result, rule=attribute.rule)
    if attribute is not None and attribute.scale is not None:
        raise NotServedError(
            f"'{LHS_ATTRIBUTE}' names scales of an {lhs.element} operand; expected "
            'scale = "dynamic" to quantise it, or raw fp8 values'
        )
    is_dequantized = attribute is not None
    activation = dequantized.read(lhs, symbols) if is_dequantized else None
    if activation is None:
        return ScaledContraction(lhs, None, *weight, result)
    return ScaledContraction(*activation, *weight, result, from_producers=True)


@dataclass(frozen=True)
class _Marked:
    """An operand of a marked matmul and the attribute that speaks of it."""

    op: ir.Operation
    operand: Operand
    name: str
    result: ir.AffineMap
    symbols: ir.SymbolTable

    def read(self) -> tuple[Operand, Operand]:
        """The operand's codes and scales."""
        scale = _parse(self.op, self.name)
        if self.operand.element in ACTIVATION_TYPES:
            return self._dequantized(scale)
        check_value_type(self.operand.element)
        operand = through_views(self.operand)
        return operand, _scale_operand(self, operand, scale)

    def _dequantized(self, scale: BlockScale) -> tuple[Operand, Operand]:
        """Check the claim of an attribute without scale against the operand's producers."""
        if scale.scale is not None:
            raise NotServedError(
                f"'{self.name}' names scales of an {self.operand.element} operand; expected raw "
                "fp8 values, or no scale for values that the program dequantises"
            )
        found = dequantized.read(self.operand, self.symbols)
        if found is None:
            raise NotServedError(
                f"'{self.name}' has no scale, and its operand is no product of fp8 values and "
                f"{SCALE_TYPE} scales; expected one, or raw fp8 values with a scale"
            )
        return found


def _parse(op: ir.Operation, name: str) -> BlockScale:
    if name not in op.attributes:
        raise NotServedError(f"missing '{name}'; expected {{block = [1, 32], scale = ...}}")
    try:
        return BlockScale.parse(op.attributes[name])
    except BadAttributeError as error:
        raise NotServedError(f"malformed '{name}': {error}") from error


def _scale_operand(marked: _Marked, operand: Operand, scale: BlockScale) -> Operand:
    """The scales as a value, with the map that their block implies."""
    loops = [ir.AffineDimExpr(e).position for e in operand.map.results]
    # In the result batches come first, however the operand is stored.
    in_result = [ir.AffineDimExpr(e).position for e in marked.result.results]
    rows = [loop for loop in in_result if loop in loops]
    columns = [loop for loop in loops if loop not in rows]
    if len(columns) != 1 or not rows:
        raise NotServedError(f"expected a matmul operand of rows and K but got {operand.map}")
    sizes = dict(zip(loops, ir.RankedTensorType(operand.value.type).shape, strict=True))
    value = _scale_value(marked.op, marked.name, scale, marked.symbols)
    value_type = ir.RankedTensorType(value.type)
    dynamic = ir.ShapedType.get_dynamic_size()
    *batches, row = rows
    wanted = [sizes[loop] for loop in batches]
    wanted.append(sizes[row] if sizes[row] == dynamic else ceil_div(sizes[row], scale.block[0]))
    wanted.append(ceil_div(sizes[columns[0]], scale.block[1]))
    unbatched = wanted[len(batches) :] if all(size == 1 for size in wanted[:-2]) else wanted
    if value_type.shape in (unbatched, [*unbatched, 1]):
        batches = batches if unbatched == wanted else []
    elif value_type.shape not in (wanted, [*wanted, 1]):
        raise NotServedError(
            f"expected '{marked.name}' scales of shape {_by(unbatched)} for a "
            f"{_by(ir.RankedTensorType(operand.value.type).shape)} operand but got "
            f"{_by(value_type.shape)}"
        )
    exprs = [ir.AffineExpr.get_dim(loop) for loop in (*batches, row)]
    if scale.block[0] > 1:
        exprs[-1] = ir.AffineExpr.get_floor_div(exprs[-1], scale.block[0])
    exprs.append(ir.AffineExpr.get_floor_div(ir.AffineExpr.get_dim(columns[0]), BLOCK_K))
    if value_type.rank > len(exprs):
        exprs.append(ir.AffineExpr.get_constant(0))
    return Operand(value, ir.AffineMap.get(operand.map.n_dims, 0, exprs))


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
                _check_scale_type(scale.scale.type, name)
                value = arith.ConstantOp(scale.scale.type, scale.scale).result
            case _:
                raise NotServedError(
                    f"'{name}' of a raw fp8 operand needs a scale; expected a symbol or a constant"
                )
        return _as_scales(value)


def _load_global(name: str, symbol: str, symbols: ir.SymbolTable) -> ir.Value:
    if symbol not in symbols:
        raise NotServedError(f"'{name}' names an unknown symbol @{symbol}; expected a util.global")
    definition = symbols[symbol].operation
    if definition.name != "util.global":
        raise NotServedError(f"expected @{symbol} to be a util.global but got {definition.name}")
    global_type = ir.TypeAttr(definition.attributes["type"]).value
    _check_scale_type(global_type, name)
    return load_global(symbol, global_type)


def _check_scale_type(found: ir.Type, name: str) -> None:
    if not isinstance(found, ir.RankedTensorType):
        raise NotServedError(f"expected '{name}' scales in a tensor but got {found}")
    if str(found.element_type) not in (SCALE_TYPE, "i8"):
        raise NotServedError(
            f"expected '{name}' scales of {SCALE_TYPE} or i8 but got {found.element_type}"
        )


def _as_scales(value: ir.Value) -> ir.Value:
    value_type = ir.RankedTensorType(value.type)
    if str(value_type.element_type) == SCALE_TYPE:
        return value
    scales = ir.RankedTensorType.get(value_type.shape, ir.Type.parse(SCALE_TYPE))
    return bitcast(value, scales)
