# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-quantize-weights``: linear layers of an f32, bf16 or f16 model get MX weights.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #y = affine_map<(m, n, k) -> (m, n)>
    util.global private @fc = #flow.parameter.named<"model"::"fc.weight"> : tensor<96x64xf32>
    util.func public @f(%x: tensor<4x64xf32>) -> tensor<4x96xf32> {
      %fc = util.global.load @fc : tensor<96x64xf32>
      %zero = arith.constant dense<0.0> : tensor<4x96xf32>
      %y = linalg.matmul indexing_maps = [#x, #w, #y]
          ins(%x, %fc : tensor<4x64xf32>, tensor<96x64xf32>)
          outs(%zero : tensor<4x96xf32>) -> tensor<4x96xf32>
      util.return %y : tensor<4x96xf32>
    }

After::

    util.global private @fc_mx =
        #flow.parameter.named<"model"::"fc.weight"> : tensor<96x64xi8>
    util.global private @fc_mx_scale =
        #flow.parameter.named<"model"::"fc.weight_scale"> : tensor<3x2xi8>
    util.func public @f(%arg0: tensor<4x64xf32>) -> tensor<4x96xf32> {
      %cst = ...
      %fc_mx = util.global.load @fc_mx : tensor<96x64xi8>
      %0 = flow.tensor.bitcast %fc_mx : tensor<96x64xi8> -> tensor<96x64xf8E4M3FN>
      %1 = linalg.matmul indexing_maps = [#map, #map1, #map2]
          {block32.lhs = {block = [1, 32], scale = "dynamic"},
           block32.rhs = {block = [32, 32], scale = @fc_mx_scale}}
          ins(%arg0, %0 : ...

A linear layer is a matmul, batched or not, whose right operand is a constant or a parameter of two
dimensions, read through transposes and broadcasts as importers write them. Weights that are in
the module are quantised there; of parameters only the types change, and ``layers`` says what the
parameter file must hold (``block32 quantize`` writes it).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.block_scale import SCALE_RULES
from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN
from block32.passes.base import Pass, Report
from block32.passes.quantizing.layers import find_layers
from block32.passes.quantizing.marked import replace_by_marked
from block32.passes.quantizing.patterns import names_matching, split_patterns
from block32.passes.quantizing.weights import QuantizedWeight, WeightStore
from block32.passes.raising.marked_matmul import is_marked
from block32.runtime.quantizer import FORMATS

BLOCKS = {"32x32": (32, 32), "1x32": (1, 32)}


@dataclass
class QuantizeWeightsPass(Pass):
    r"""Quantise the weights of linear layers.

    Attributes:
        block: Elements (N x K) that share a scale: ``32x32`` or ``1x32``.
        rule: How scales are chosen: ``rceil``, ``floor``, ``even`` or ``ceil``.
        format: ``mxfp8`` or ``mxfp4``.
        layout: The order of the codes (see ``lowering/common/weight_layout.py``), for weights of
            whole pieces; the others stay ``plain``.
        activations: ``mxfp8`` quantises them at run time, ``none`` takes them as they are.
        keep: Names of layers to leave alone, with ``*`` and ``?``, separated by commas; a comma in
            a name is written as ``\,``.
        weights: What was quantised, in program order; for the caller to read.
    """

    argument: ClassVar[str] = "block32-quantize-weights"
    summary: ClassVar[str] = "give the linear layers of a model MX weights"

    block: str = "32x32"
    rule: str = "rceil"
    format: str = "mxfp8"
    layout: str = PLAIN
    activations: str = "mxfp8"
    keep: str = ""
    weights: list[QuantizedWeight] = field(default_factory=list, repr=False, init=False)

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: There is nothing to quantise, a pattern matches no layer, or a weight
                in the module is not finite.
        """
        self._check_options()
        layers = [layer for layer in find_layers(module) if not is_marked(layer.op)]
        kept = names_matching(
            split_patterns(self.keep), [layer.name for layer in layers], "block32 quantize"
        )
        chosen = [layer for layer in layers if layer.name not in kept]
        if not chosen:
            raise DiagnosticError(
                "<module>",
                "nothing to quantise: expected a matmul whose right operand is a two-dimensional "
                f"f32, bf16 or f16 constant or parameter{' that is not kept' if kept else ''}",
            )
        store = WeightStore(module, self.rule, self.format, self.layout)
        for layer in chosen:
            weight = store.quantized(layer, BLOCKS[self.block])
            replace_by_marked(layer, weight, self.activations)
            report.remark(layer.op, f"{layer.name}: {self.format} {self.block} {self.rule}")
        for layer in chosen:
            layer.op.erase()
        store.remove_unused()
        self.weights.extend(store.weights)

    @classmethod
    def option_fields(cls) -> tuple[dataclasses.Field[object], ...]:
        """All fields but the result."""
        return tuple(f for f in dataclasses.fields(cls) if f.init)

    def _check_options(self) -> None:
        choices = {
            "block": tuple(BLOCKS),
            "rule": SCALE_RULES,
            "format": tuple(FORMATS),
            "layout": (PLAIN, *LAYOUTS),
            "activations": ("mxfp8", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise DiagnosticError(
                    "block32 quantize",
                    f"unknown {name} '{getattr(self, name)}'; expected {' or '.join(allowed)}",
                )
        if self.layout != PLAIN and FORMATS[self.format].bits != 8:
            raise DiagnosticError(
                "block32 quantize",
                f"the layout '{self.layout}' is for mxfp8 weights; expected '{PLAIN}'",
            )
