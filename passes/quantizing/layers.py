# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The linear layers of a model: matmuls by a constant or a parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass

from iree.compiler import ir

from block32.passes.raising.contraction import ACTIVATION_TYPES, Operand
from block32.passes.raising.dequantized_matmul import OP_NAMES, operands_of
from block32.passes.raising.views import through_views
from block32.passes.symbols import LOAD_NAME, global_of, symbol_of, value_of_global
from block32.passes.walk import operations_named, producer

_PARAMETER = re.compile(r'#flow\.parameter\.named<(?:"([^"]*)"::)?"([^"]*)">')


@dataclass(frozen=True)
class Source:
    """Where a weight is.

    Attributes:
        symbol: The global that holds it, or None for a constant in a function.
        scope: The parameter's scope, where it is one.
        key: The parameter's name, where it is one.
        value: The constant, where it is in the module.
    """

    symbol: str | None
    scope: str | None = None
    key: str | None = None
    value: ir.Attribute | None = None


@dataclass(frozen=True)
class Layer:
    """A matmul by a weight.

    Attributes:
        op: The matmul.
        name: The layer's name: the parameter's, the global's, or ``constant_N``.
        source: The weight.
        shape: The weight's shape as it is stored.
        element: Its element type by MLIR name.
        is_transposed: It is stored ``[K, N]``, not ``[N, K]``.
    """

    op: ir.Operation
    name: str
    source: Source
    shape: tuple[int, int]
    element: str
    is_transposed: bool

    @property
    def lhs(self) -> ir.Value:
        """The activation as it is now, ``[M, K]`` or ``[batches, M, K]``."""
        return self.op.operands[0]

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.shape[1] if self.is_transposed else self.shape[0]

    @property
    def k(self) -> int:
        """The reduction."""
        return self.shape[0] if self.is_transposed else self.shape[1]


def find_layers(module: ir.Module) -> list[Layer]:
    """The linear layers of a program in order."""
    symbols = ir.SymbolTable(module.operation)
    found: list[Layer] = []
    constants = 0
    for op in operations_named(module, *OP_NAMES):
        layer = _read(op, symbols, f"constant_{constants}")
        if layer is not None:
            constants += layer.source.symbol is None
            found.append(layer)
    return found


def _read(op: ir.Operation, symbols: ir.SymbolTable, constant_name: str) -> Layer | None:
    lhs, rhs, result = operands_of(op)
    dims = [ir.AffineDimExpr(e).position for e in result.results]
    n = dims[-1]
    rows = dims[:-1]
    lhs_dims = [ir.AffineDimExpr(e).position for e in lhs.map.results]
    k = lhs_dims[-1]
    if lhs_dims[:-1] != rows or lhs.element not in ACTIVATION_TYPES:
        return None
    weight = through_views(rhs)
    is_transposed = _order(weight, n, k)
    weight_type = ir.RankedTensorType(weight.value.type)
    if is_transposed is None or not weight_type.has_static_shape or 0 in weight_type.shape:
        return None
    source = _source(weight.value, symbols)
    if source is None or weight.element not in ACTIVATION_TYPES:
        return None
    name = source.key or source.symbol or constant_name
    shape = (weight_type.shape[0], weight_type.shape[1])
    return Layer(op, name, source, shape, weight.element, is_transposed)


def _order(weight: Operand, n: int, k: int) -> bool | None:
    """Whether the weight is read as [K, N]; None where it has other dimensions."""
    dims = [ir.AffineDimExpr(e).position for e in weight.map.results]
    return {(n, k): False, (k, n): True}.get((dims[0], dims[1])) if len(dims) == 2 else None


def _source(value: ir.Value, symbols: ir.SymbolTable) -> Source | None:
    """The constant or the immutable global that a value is."""
    op = producer(value)
    if op is None:
        return None
    if op.name == "arith.constant":
        return Source(None, value=op.attributes["value"])
    if op.name != LOAD_NAME:
        return None
    symbol = global_of(op)
    initial = value_of_global(symbols[symbol].operation)
    if initial is None:
        return None
    parameter = _parameter(initial)
    return Source(symbol, *parameter) if parameter else Source(symbol, value=initial)


def _parameter(initial: ir.Attribute) -> tuple[str, str] | None:
    """Scope and key of the parameter that a global's initial value is."""
    # A constant's text may be as large as the weight.
    if isinstance(initial, ir.DenseElementsAttr | ir.DenseResourceElementsAttr):
        return None
    parameter = _PARAMETER.search(str(initial))
    return (parameter[1] or "", parameter[2]) if parameter else None


def parameters_of(module: ir.Module) -> dict[str, tuple[ir.Operation, ir.Type]]:
    """The globals of a module whose values are in a parameter file, by key, with their types."""
    found: dict[str, tuple[ir.Operation, ir.Type]] = {}
    for op in operations_named(module, "util.global"):
        if "initial_value" not in op.attributes:
            continue
        parameter = _parameter(op.attributes["initial_value"])
        if parameter:
            found[parameter[1]] = op, ir.TypeAttr(op.attributes["type"]).value
    return found


def globals_of_parameter(module: ir.Module, scope: str, key: str) -> set[str]:
    """The symbols of the globals that hold a parameter."""
    return {
        symbol_of(op)
        for op in operations_named(module, "util.global")
        if "initial_value" in op.attributes
        and _parameter(op.attributes["initial_value"]) == (scope, key)
    }
