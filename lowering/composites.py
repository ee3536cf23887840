# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Building composites and calls of them, for passes and for people who have a graph.

```python
composites = Composites(module)
with ir.InsertionPoint(op), op.location:
    codes, scales = composites.quantize(x, rule="rceil")
```
"""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir

from block32.dialects import composite as composite_attribute
from block32.dialects.composite import Composite, Quantize
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.common.functions import build_return, call, private_function
from block32.lowering.portable.quantize import quantize
from block32.lowering.problem import BLOCK_K, SHORT_NAMES, ceil_div


def build_quantize_function(
    symbol: str, x_type: ir.RankedTensorType, rule: str = "rceil", element: str = "f8E4M3FN"
) -> ir.Operation:
    """Build the ``quantize`` composite for one type of x at the insertion point.

    Args:
        symbol: The function's name; nothing depends on it.
        x_type: ``[M, K]`` of f32, bf16 or f16; M may be dynamic.
        rule: How scales are chosen: ``rceil``, ``floor``, ``ceil`` or ``even``.
        element: The type of the codes, ``f8E4M3FN`` or ``f8E5M2``.

    Raises:
        BadAttributeError: Another type, rule or element.
    """
    composite = Quantize.from_fields({"rule": rule, "element": element})
    if x_type.rank != 2 or x_type.is_dynamic_dim(1):
        raise BadAttributeError(f"expected a matrix with a static K but got {x_type}")
    rows, k = x_type.shape
    results = [
        ir.RankedTensorType.get([rows, k], ir.Type.parse(element)),
        ir.RankedTensorType.get([rows, ceil_div(k, BLOCK_K)], ir.Type.parse("f8E8M0FNU")),
    ]
    composite.check_signature(ir.FunctionType.get([x_type], results))
    function, block = private_function(symbol, [x_type], results)
    _mark(function, composite)
    with ir.InsertionPoint(block):
        build_return(quantize(block.arguments[0], rule, element))
    return function


def _mark(function: ir.Operation, composite: Composite) -> None:
    """Make a function a composite: never inlined before kernels are chosen."""
    function.attributes["inlining_policy"] = ir.Attribute.parse("#util.inline.never")
    function.attributes[composite_attribute.ATTRIBUTE] = composite.build()


class Composites:
    """The composites of one module: each is defined once for a type, at the module's start."""

    def __init__(self, module: ir.Module):
        """``module`` is where definitions go; an open context and location are needed later."""
        self._module = module
        self._symbols: dict[tuple[Composite, str], str] = {}

    def quantize(
        self, x: ir.Value, rule: str = "rceil", element: str = "f8E4M3FN"
    ) -> tuple[ir.Value, ir.Value]:
        """Call ``quantize`` on x ``[M, K]`` at the insertion point: codes and scales."""
        x_type = ir.RankedTensorType(x.type)
        name = f"block32_quantize_{_dimensions(x_type)}_{SHORT_NAMES[element]}_{rule}"
        function = self._definition(
            (Quantize(rule, element), str(x_type)),
            name,
            lambda symbol: build_quantize_function(symbol, x_type, rule, element),
        )
        codes, scales = call(function[0], [x], function[1]).results
        return codes, scales

    def _definition(
        self,
        key: tuple[Composite, str],
        name: str,
        build: Callable[[str], ir.Operation],
    ) -> tuple[str, list[ir.Type]]:
        """The symbol and the result types of a composite, built where it is first asked for."""
        table = ir.SymbolTable(self._module.operation)
        if key not in self._symbols:
            symbol = _unused(name, table)
            with ir.InsertionPoint.at_block_begin(self._module.body), ir.Location.unknown():
                build(symbol)
            self._symbols[key] = symbol
            table = ir.SymbolTable(self._module.operation)
        function = table[self._symbols[key]].operation
        signature = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        return self._symbols[key], list(signature.results)


def _dimensions(tensor_type: ir.RankedTensorType) -> str:
    """``MxKxf32`` for a symbol: a dynamic dimension is M."""
    sizes = [
        "M" if tensor_type.is_dynamic_dim(axis) else str(tensor_type.shape[axis])
        for axis in range(tensor_type.rank)
    ]
    return "x".join([*sizes, str(tensor_type.element_type)])


def _unused(name: str, table: ir.SymbolTable) -> str:
    """``name``, with a number where a symbol of the program has it already."""
    symbol, count = name, 0
    while symbol in table:
        count += 1
        symbol = f"{name}_{count}"
    return symbol
