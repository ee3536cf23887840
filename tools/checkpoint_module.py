# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The module of ``block32 import checkpoint``: a function for each linear layer of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith, func, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.tensors import dynamic_sizes, generic
from block32.lowering.problem import BLOCK_K, SCALE_TYPE, ceil_div
from block32.passes.canonical import MatmulOperands, build
from block32.passes.quantizing.marked import (
    load_codes,
    load_scales,
    marked_matmul,
)
from block32.passes.quantizing.weights import (
    QuantizedWeight,
    define_parameter,
    define_parameters,
)
from block32.passes.symbols import load_global
from block32.runtime.checkpoint.convert import ImportedWeight

#: What a function takes: an activation that is quantised at run time, one that is multiplied as it
#: is, or codes and scales.
ACTIVATIONS: Final = ("mxfp8", "none", "given")
_BIAS_TYPES: Final = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


def build_module(
    weights: Iterable[ImportedWeight], activations: str, element: str, scope: str
) -> bytes:
    """The text of a module with the function ``y = layer(x)`` for each weight.

    Args:
        weights: The weights; their codes and scales are parameters of the module.
        activations: One of ``ACTIVATIONS``.
        element: The type of y, and of x where it is no codes: ``f32``, ``bf16`` or ``f16``.
        scope: The scope of the parameters.

    Returns:
        MLIR. A function takes ``x [M, K]``, or codes ``[M, K]`` and scales ``[M, ceil(K/32)]``,
        with M known at run time only, and gives ``y [M, N]``. It has the layer's name.
    """
    listed = list(weights)
    names = _function_names(listed)
    taken = set(names)
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            for weight, name in zip(listed, names, strict=True):
                _Layer(weight, name, taken, scope).define(activations, ir.Type.parse(element))
        return module.operation.get_asm().encode()


def _function_names(weights: list[ImportedWeight]) -> list[str]:
    """The layers' names; the weight's own where that is another layer's, too.

    Weights have different names, so that theirs are free once no layer takes a weight's name.
    """
    own = {weight.source.name for weight in weights}
    layers = Counter(weight.source.layer for weight in weights)
    names: list[str] = []
    for weight in weights:
        name, layer = weight.source.name, weight.source.layer
        is_free = layers[layer] == 1 and (layer not in own or layer == name)
        names.append(layer if is_free else name)
    return names


class _Layer:
    """Defines the globals and the function of one layer at the insertion point."""

    def __init__(self, weight: ImportedWeight, name: str, taken: set[str], scope: str):
        symbol = f"{name}_mx"
        while taken & {symbol, f"{symbol}_scale", f"{symbol}_bias"}:
            symbol += "_"
        taken |= {symbol, f"{symbol}_scale", f"{symbol}_bias"}
        self.name = name
        self.imported = weight
        self.bias_symbol = f"{symbol}_bias"
        self.scope = scope
        self.weight = QuantizedWeight(
            name=name,
            scope=scope,
            key=weight.code_key,
            shape=(weight.n, weight.k),
            element="f32",
            is_transposed=False,
            block=(weight.block_rows, BLOCK_K),
            rule="rceil",
            format="mxfp8",
            symbol=symbol,
        )

    def define(self, activations: str, element: ir.Type) -> None:
        """The globals and the function."""
        define_parameters(self.weight)
        bias_type = self._define_bias()
        rows = ir.ShapedType.get_dynamic_size()
        k, n = self.imported.k, self.imported.n
        if activations == "given":
            codes = ir.Type.parse("f8E4M3FN")
            scales = [rows, ceil_div(k, BLOCK_K)]
            inputs = [
                ir.RankedTensorType.get([rows, k], codes),
                ir.RankedTensorType.get(scales, ir.Type.parse(SCALE_TYPE)),
            ]
        else:
            inputs = [ir.RankedTensorType.get([rows, k], element)]
        result = ir.RankedTensorType.get([rows, n], element)
        function = func.FuncOp(self.name, (inputs, [result]))
        with ir.InsertionPoint(function.add_entry_block()):
            # Sums are f32; where a bias follows, they are rounded after it.
            sums = element if bias_type is None else ir.F32Type.get()
            product = self._product(list(function.arguments), activations, sums)
            if bias_type is not None:
                product = _add_bias(product, load_global(self.bias_symbol, bias_type), element)
            func.ReturnOp([product])

    def _define_bias(self) -> ir.Type | None:
        key, bias = self.imported.bias_key, self.imported.source.bias
        if key is None or bias is None:
            return None
        element = ir.Type.parse(_BIAS_TYPES[bias.dtype])
        bias_type = ir.RankedTensorType.get([self.imported.n], element)
        define_parameter(self.bias_symbol, bias_type, self.scope, key)
        return bias_type

    def _product(self, inputs: list[ir.Value], activations: str, element: ir.Type) -> ir.Value:
        """``x @ w^T``."""
        w = load_codes(self.weight, self.imported.k)
        if activations == "given":
            scales = load_scales(self.weight)
            operands = MatmulOperands(inputs[0], inputs[1], w, scales, self.imported.block_rows)
            return build(operands, element)
        rows = tensor.dim(inputs[0], constant(0))
        empty = tensor.empty([rows, self.imported.n], element)
        init = linalg.fill(arith.constant(element, 0.0), outs=[empty])
        return marked_matmul(inputs[0], w, init, self.weight, activations)


def _add_bias(sums: ir.Value, bias: ir.Value, element: ir.Type) -> ir.Value:
    """The bias of each column added to f32 sums, rounded once to ``element``."""
    f32 = ir.F32Type.get()
    shape = ir.RankedTensorType(sums.type).shape
    empty = tensor.empty([*dynamic_sizes(sums), shape[1]], element)
    m, n = (ir.AffineExpr.get_dim(i) for i in range(2))
    identity, column = ir.AffineMap.get(2, 0, [m, n]), ir.AffineMap.get(2, 0, [n])
    op = generic([sums, bias], [empty], [identity, column, identity], ["parallel", "parallel"])
    block = op.regions[0].blocks[0]
    with ir.InsertionPoint(block):
        product, added, _ = block.arguments
        if added.type != f32:
            added = arith.extf(f32, added)
        total: ir.Value = arith.addf(product, added)
        linalg.yield_([total if element == f32 else arith.truncf(element, total)])
    return op.results[0]
