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
from block32.dialects import problem as problem_attribute
from block32.dialects.composite import Composite, Matmul, Quantize
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.common.functions import build_return, call, private_function
from block32.lowering.common.tensors import bitcast
from block32.lowering.host import operand_types, result_type
from block32.lowering.portable.expand import expand
from block32.lowering.portable.quantize import quantize
from block32.lowering.problem import (
    BLOCK_K,
    SCALE_TYPE,
    SHORT_NAMES,
    Grouping,
    ScaledMatmul,
    ceil_div,
)


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
        ir.RankedTensorType.get([rows, ceil_div(k, BLOCK_K)], ir.Type.parse(SCALE_TYPE)),
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


def build_matmul_function(symbol: str, problem: ScaledMatmul) -> ir.Operation:
    """Build the composite of a matmul at the insertion point.

    Args:
        symbol: The function's name; nothing depends on it.
        problem: The matmul, one that ``dialects.composite.Matmul`` is for.

    Raises:
        BadAttributeError: Fields of the problem that do not go together.
    """
    problem_attribute.check(problem)
    types = operand_types(problem)
    function, block = private_function(symbol, list(types.values()), [result_type(problem)])
    _mark(function, Matmul(problem))
    with ir.InsertionPoint(block):
        operands = dict(zip(types, block.arguments, strict=True))
        build_return([expand(problem, operands)])
    return function


class Composites:
    """Calls composites in one module, defining each for a type where it is first called."""

    def __init__(self, module: ir.Module | ir.SymbolTable):
        """The module, or its symbols: definitions are added to them."""
        is_module = isinstance(module, ir.Module)
        self._symbols = ir.SymbolTable(module.operation) if is_module else module

    def quantize(
        self, x: ir.Value, rule: str = "rceil", element: str = "f8E4M3FN"
    ) -> tuple[ir.Value, ir.Value]:
        """Call ``quantize`` on x ``[M, K]`` at the insertion point: codes and scales."""
        x_type = ir.RankedTensorType(x.type)
        codes, scales = self._call(
            f"block32_quantize_{_dimensions(x_type)}_{SHORT_NAMES[element]}_{rule}",
            [x],
            Quantize(rule, element),
            lambda symbol: build_quantize_function(symbol, x_type, rule, element),
        ).results
        return codes, scales

    def matmul(self, problem: ScaledMatmul, operands: dict[str, ir.Value]) -> ir.Value:
        """Call the composite of ``problem`` at the insertion point: y ``[M, N]``.

        Args:
            problem: A matmul that ``dialects.composite.Matmul`` is for.
            operands: By ABI name, with the types of ``host.operand_types``.

        Raises:
            BadAttributeError: Fields of the problem that do not go together.
        """
        composite = Matmul(problem)
        return self._call(
            f"block32_{composite.kind}_{problem.describe()}",
            [operands[name] for name in problem.argument_names],
            composite,
            lambda symbol: build_matmul_function(symbol, problem),
        ).result

    def grouped_matmul(
        self,
        operands: dict[str, ir.Value],
        rhs_block: tuple[int, int] = (32, 32),
        lhs_quantize: str = "",
    ) -> ir.Value:
        """Call a grouped matmul (mixture of experts) at the insertion point: y ``[M, N]``.

        Args:
            operands: By name: ``lhs`` [M, K]; ``lhs_scale`` [M, ceil(K/32)] for an fp8 lhs;
                ``rhs`` [experts, N, K] of a small float type, not packed; ``rhs_scale``
                [experts, ceil(N/rhs_block[0]), ceil(K/32)]; ``offsets`` [groups + 1] and
                ``expert_ids`` [groups] of i32; ``init`` [M, N], which gives the result's type
                and its rows of no group. Scales are of f8E8M0FNU. Only M may be dynamic.
            rhs_block: Rows and K of w that share a scale, (1, 32) or (32, 32).
            lhs_quantize: The rule by which an lhs of f32, bf16 or f16 is quantised first.

        Raises:
            BadAttributeError: An operand is missing or of another type.
        """
        problem = _grouped_problem(operands, rhs_block, lhs_quantize)
        problem_attribute.check(problem)
        types = operand_types(problem)
        stored = dict(operands)
        if problem.rhs == "f4E2M1FN":
            stored["rhs"] = bitcast(operands["rhs"], types["rhs"])
        for name, wanted in types.items():
            if name not in stored or stored[name].type != wanted:
                got = stored[name].type if name in stored else "none"
                raise BadAttributeError(f"expected {name} of type {wanted} but got {got}")
        return self.matmul(problem, stored)

    def _call(
        self,
        name: str,
        operands: list[ir.Value],
        composite: Composite,
        build: Callable[[str], ir.Operation],
    ) -> ir.Operation:
        """Call the composite of this name, or of the name and a number where that is another."""
        inputs = [operand.type for operand in operands]
        symbol, count = name, 0
        while symbol in self._symbols and not self._is(symbol, composite, inputs):
            count += 1
            symbol = f"{name}_{count}"
        if symbol not in self._symbols:
            module = _module_around(ir.InsertionPoint.current.block)
            with ir.InsertionPoint.at_block_begin(module), ir.Location.unknown():
                self._symbols.insert(build(symbol))
        return call(symbol, operands, list(_signature(self._symbols[symbol].operation).results))

    def _is(self, symbol: str, composite: Composite, inputs: list[ir.Type]) -> bool:
        """Whether the symbol is this composite for these operands."""
        found = self._symbols[symbol].operation
        if not composite_attribute.is_composite(found):
            return False
        is_same = found.attributes[composite_attribute.ATTRIBUTE] == composite.build()
        return is_same and list(_signature(found).inputs) == inputs


def _grouped_problem(
    operands: dict[str, ir.Value], rhs_block: tuple[int, int], lhs_quantize: str
) -> ScaledMatmul:
    """What the shapes and types of a grouped matmul's operands say."""
    types: dict[str, ir.RankedTensorType] = {}
    for name, rank in (("lhs", 2), ("rhs", 3), ("expert_ids", 1), ("init", 2)):
        if name not in operands:
            raise BadAttributeError(f"a grouped matmul needs the operand '{name}'")
        found = operands[name].type
        if not isinstance(found, ir.RankedTensorType) or ir.RankedTensorType(found).rank != rank:
            raise BadAttributeError(f"expected {name} to be a tensor of rank {rank}, got {found}")
        types[name] = ir.RankedTensorType(found)
    for name in ("rhs", "expert_ids"):
        if not types[name].has_static_shape:
            raise BadAttributeError(f"expected a static shape of {name} but got {types[name]}")
    lhs, rhs = types["lhs"], types["rhs"]
    experts, n, k = rhs.shape
    return ScaledMatmul(
        m=None if lhs.is_dynamic_dim(0) else lhs.shape[0],
        n=n,
        k=k,
        lhs=str(lhs.element_type),
        rhs=str(rhs.element_type),
        rhs_block=rhs_block,
        result=str(types["init"].element_type),
        lhs_scaled="lhs_scale" in operands,
        lhs_quantize=lhs_quantize,
        grouping=Grouping(experts, types["expert_ids"].shape[0]),
    )


def _signature(function: ir.Operation) -> ir.FunctionType:
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def _module_around(block: ir.Block) -> ir.Block:
    """The body of the outermost module around a block."""
    while True:
        parent = block.owner.operation
        if parent.parent is None:
            return block
        block = parent.operation.block


def _dimensions(tensor_type: ir.RankedTensorType) -> str:
    """``MxKxf32`` for a symbol: a dynamic dimension is M."""
    sizes = [
        "M" if tensor_type.is_dynamic_dim(axis) else str(tensor_type.shape[axis])
        for axis in range(tensor_type.rank)
    ]
    return "x".join([*sizes, str(tensor_type.element_type)])
