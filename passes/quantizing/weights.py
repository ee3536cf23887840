# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The MX weights of a module: new globals, and what a parameter file must hold for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree.compiler import ir

from block32.dialects import layout as layout_attribute
from block32.dialects.diagnostics import error_at
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN
from block32.lowering.problem import ceil_div
from block32.passes.constants import read_floats
from block32.passes.quantizing.layers import Layer, Source, find_layers, globals_of_parameter
from block32.passes.raising.marked_matmul import is_marked
from block32.passes.symbols import LOAD_NAME, global_of
from block32.passes.walk import operations_named
from block32.runtime.quantizer import FORMATS, Loss, quantize_slabs, slab_rows

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
}


@dataclass
class QuantizedWeight:
    """A weight that was quantised, or is to be in the parameter file.

    Attributes:
        name: The layer's name.
        scope: The parameter's scope; None for a weight in the module.
        key: The parameter's name before and after; None for a weight in the module.
        shape: The shape as stored before.
        element: The element type before.
        is_transposed: It was stored ``[K, N]``; it is ``[N, K]`` after.
        block: (rows, K) elements that share a scale.
        rule: How scales are chosen.
        format: ``mxfp8`` or ``mxfp4``.
        symbol: The global of the codes.
        keeps_original: The original is still read elsewhere, so that it stays, too.
        is_second: Another matmul reads it in the other transpose, and has codes of its own.
        layout: The order in which the codes are stored.
        loss: What was lost, once it is known.
        layers: How many matmuls read it.
    """

    name: str
    scope: str | None
    key: str | None
    shape: tuple[int, int]
    element: str
    is_transposed: bool
    block: tuple[int, int]
    rule: str
    format: str
    symbol: str
    keeps_original: bool = False
    is_second: bool = False
    layout: str = PLAIN
    loss: Loss = field(default_factory=Loss)
    layers: int = 0

    @property
    def n(self) -> int:
        """Rows of the weight, columns of the result."""
        return self.shape[1] if self.is_transposed else self.shape[0]

    @property
    def k(self) -> int:
        """The reduction."""
        return self.shape[0] if self.is_transposed else self.shape[1]

    @property
    def scale_symbol(self) -> str:
        """The global of the scales."""
        return f"{self.symbol}_scale"

    @property
    def code_key(self) -> str:
        """The name of the codes in the parameter file."""
        return f"{self._new_key}_mx" if self.keeps_original else self._new_key

    @property
    def scale_key(self) -> str:
        """The name of the scales in the parameter file."""
        return f"{self._new_key}_scale"

    @property
    def _new_key(self) -> str:
        return f"{self.key}_transposed" if self.is_second else str(self.key)

    @property
    def code_shape(self) -> tuple[int, int]:
        """Bytes: ``[N, K]``, or ``[N, ceil(K/2)]`` for 4-bit codes."""
        return self.n, ceil_div(self.k * FORMATS[self.format].bits, 8)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Bytes: one a block."""
        return ceil_div(self.n, self.block[0]), ceil_div(self.k, self.block[1])

    @property
    def bytes_before(self) -> int:
        """Bytes of the weight."""
        return self.n * self.k * np.dtype(DTYPES[self.element]).itemsize

    @property
    def bytes_after(self) -> int:
        """Bytes of codes and scales."""
        return int(np.prod(self.code_shape) + np.prod(self.scale_shape))

    def quantize(
        self, stored: npt.NDArray[Any]
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Codes and scales, a slab of rows at a time; counts the loss.

        Args:
            stored: The weight as stored before.

        Raises:
            ValueError: It holds a NaN or an infinity.
        """
        w = stored.T if self.is_transposed else stored
        rows = slab_rows(self.k)
        slabs = (w[start : start + rows] for start in range(0, self.n, rows))
        self.loss = Loss()
        for codes, scales, loss in quantize_slabs(
            slabs, self.block[0], self.rule, FORMATS[self.format]
        ):
            self.loss = self.loss + loss
            yield (codes if self.layout == PLAIN else LAYOUTS[self.layout].pack(codes)), scales


class WeightStore:
    """Makes the globals of a module's weights, one for each weight however often it is read."""

    def __init__(self, module: ir.Module, rule: str, form: str, layout: str = PLAIN):
        """The module, how its weights are quantised, and the order of codes where that fits."""
        self._module = module
        self._symbols = ir.SymbolTable(module.operation)
        self._rule = rule
        self._format = form
        self._layout = layout
        self._made: dict[object, QuantizedWeight] = {}
        self._replaced: set[str] = set()
        self._read_elsewhere = _read_by_others(module)

    @property
    def weights(self) -> list[QuantizedWeight]:
        """All of them, in program order."""
        return list(self._made.values())

    def quantized(self, layer: Layer, block: tuple[int, int]) -> QuantizedWeight:
        """The MX weight of a layer.

        Args:
            layer: The layer.
            block: (rows, K) elements that share a scale.

        Raises:
            DiagnosticError: A weight in the module is not finite.
        """
        source = layer.source
        # Several globals may hold one parameter.
        stored = (source.scope, source.key) if source.key else source.symbol or source.value
        key = (stored, layer.is_transposed)
        if key not in self._made:
            self._made[key] = self._make(layer, block)
            self._made[key].is_second = (stored, not layer.is_transposed) in self._made
            self._define(layer, self._made[key])
        if source.symbol:
            self._replaced.add(source.symbol)
        self._made[key].layers += 1
        return self._made[key]

    def _make(self, layer: Layer, block: tuple[int, int]) -> QuantizedWeight:
        source = layer.source
        symbol = f"{source.symbol or layer.name}_mx"
        while symbol in self._symbols:
            symbol += "_"
        weight = QuantizedWeight(
            name=layer.name,
            scope=source.scope,
            key=source.key,
            shape=layer.shape,
            element=layer.element,
            is_transposed=layer.is_transposed,
            block=block,
            rule=self._rule,
            format=self._format,
            symbol=symbol,
            keeps_original=source.symbol is not None and self._is_read_elsewhere(source),
        )
        if self._layout != PLAIN and LAYOUTS[self._layout].fits(weight.code_shape):
            weight.layout = self._layout
        return weight

    def _define(self, layer: Layer, weight: QuantizedWeight) -> None:
        """Define the globals of codes and scales."""
        if layer.source.value is None:
            with ir.InsertionPoint.at_block_begin(self._module.body), layer.op.location:
                for definition in define_parameters(weight):
                    self._symbols.insert(definition)
        else:
            self._define_constants(layer, weight, _array(layer))
        if weight.layout != PLAIN:
            codes = self._symbols[weight.symbol].operation
            with codes.context:
                codes.attributes[layout_attribute.ATTRIBUTE] = layout_attribute.build(weight.layout)

    def _is_read_elsewhere(self, source: Source) -> bool:
        """Whether anything but linear layers, as their weight, reads the global or parameter."""
        symbols = {source.symbol}
        if source.key is not None:
            symbols |= globals_of_parameter(self._module, source.scope or "", source.key)
        return bool(symbols & self._read_elsewhere)

    def _define_constants(
        self, layer: Layer, weight: QuantizedWeight, stored: npt.NDArray[Any]
    ) -> None:
        try:
            slabs = list(weight.quantize(stored))
        except ValueError as error:
            raise error_at(layer.op, f"has a weight, '{layer.name}', that holds {error}") from error
        for symbol, parts in zip(
            (weight.symbol, weight.scale_symbol), zip(*slabs, strict=True), strict=True
        ):
            array = np.concatenate(parts).view(np.int8)
            with ir.InsertionPoint.at_block_begin(self._module.body), layer.op.location:
                initial = ir.DenseElementsAttr.get(array)
                self._symbols.insert(define_global(symbol, initial.type, initial))

    def remove_unused(self) -> None:
        """Drop what only the replaced matmuls read: views, loads, and the globals themselves."""
        is_read: set[str] = set()
        for op in reversed(_pure_ops(self._module)):
            if not any(list(result.uses) for result in op.results):
                op.erase()
            elif op.name == LOAD_NAME:
                is_read.add(global_of(op))
        for symbol in self._replaced - is_read:
            self._symbols.erase(self._symbols[symbol])


#: Ops between a weight and its matmul.
_VIEWS = (
    LOAD_NAME,
    "arith.constant",
    "tensor.empty",
    "linalg.transpose",
    "linalg.broadcast",
    "linalg.generic",
    "tensor.cast",
    "tensor.expand_shape",
    "tensor.collapse_shape",
)


def _pure_ops(module: ir.Module) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _VIEWS:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _read_by_others(module: ir.Module) -> set[str]:
    """The globals that anything but linear layers, as their weight, reads."""
    layers = {layer.op for layer in find_layers(module) if not is_marked(layer.op)}
    return {
        global_of(load)
        for load in operations_named(module, LOAD_NAME)
        if not _feeds_only(layers, load.results[0])
    }


def _feeds_only(layers: set[ir.Operation], value: ir.Value) -> bool:
    """Whether ``layers`` alone read a value, through views, and as their weight."""
    for use in value.uses:
        user = use.owner.operation
        if user.name in _VIEWS and len(user.results) == 1:
            if not _feeds_only(layers, user.results[0]):
                return False
        elif use.operand_number != 1 or user not in layers:
            return False
    return True


def define_parameters(weight: QuantizedWeight) -> list[ir.Operation]:
    """The globals of codes and scales at the insertion point, for parameters in a file."""
    i8 = ir.IntegerType.get_signless(8)
    named = (
        (weight.symbol, weight.code_shape, weight.code_key),
        (weight.scale_symbol, weight.scale_shape, weight.scale_key),
    )
    return [
        define_parameter(symbol, ir.RankedTensorType.get(list(shape), i8), weight.scope, key)
        for symbol, shape, key in named
    ]


def define_parameter(symbol: str, type_: ir.Type, scope: str | None, key: str) -> ir.Operation:
    """``util.global private @symbol = #flow.parameter.named<scope::key>``."""
    prefix = f"{_quoted(scope)}::" if scope else ""
    text = f"#flow.parameter.named<{prefix}{_quoted(key)}> : {type_}"
    return define_global(symbol, type_, ir.Attribute.parse(text))


def _quoted(text: str) -> str:
    """A string as MLIR reads it: other letters as they are, not as JSON escapes them."""
    return json.dumps(text, ensure_ascii=False)


def define_global(symbol: str, type_: ir.Type, initial: ir.Attribute) -> ir.Operation:
    """``util.global private @symbol = initial`` at the insertion point."""
    return ir.Operation.create(
        "util.global",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "sym_visibility": ir.StringAttr.get("private"),
            "type": ir.TypeAttr.get(type_),
            "initial_value": initial,
        },
    )


def _array(layer: Layer) -> npt.NDArray[Any]:
    """The values of a weight in the module."""
    value = layer.source.value
    assert value is not None
    dtype = DTYPES[layer.element]
    if isinstance(value, ir.DenseElementsAttr):
        if value.is_splat:
            splat = ir.FloatAttr(value.get_splat_value()).value
            return np.full(layer.shape, splat, dtype)
        if layer.element == "bf16":
            listed = [ir.FloatAttr(v).value for v in value]  # the bindings give no bf16 buffer
            return np.array(listed, np.float32).reshape(layer.shape)
        return np.array(value).reshape(layer.shape)
    values = read_floats(value)
    if values is None:
        raise error_at(
            layer.op,
            f"has a weight, '{layer.name}', whose elements are not in the module; expected a dense "
            "constant, a resource with its bytes, or a parameter",
        )
    return values
