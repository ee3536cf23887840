# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-mark-weights``: linear layers read MX weights that a checkpoint has already.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #y = affine_map<(m, n, k) -> (m, n)>
    util.global private @fc = #flow.parameter.named<"model"::"fc.weight"> : tensor<96x64xbf16>
    util.func public @f(%x: tensor<4x64xbf16>) -> tensor<4x96xbf16> {
      %fc = util.global.load @fc : tensor<96x64xbf16>
      %zero = arith.constant dense<0.0> : tensor<4x96xbf16>
      %y = linalg.matmul indexing_maps = [#x, #w, #y]
          ins(%x, %fc : tensor<4x64xbf16>, tensor<96x64xbf16>)
          outs(%zero : tensor<4x96xbf16>) -> tensor<4x96xbf16>
      util.return %y : tensor<4x96xbf16>
    }

After, with ``{weights=fc.weight:96x64:1x32}``::

    util.global private @fc_mx =
        #flow.parameter.named<"model"::"fc.weight"> : tensor<96x64xi8>
    util.global private @fc_mx_scale =
        #flow.parameter.named<"model"::"fc.weight_scale"> : tensor<96x2xi8>
    util.func public @f(%arg0: tensor<4x64xbf16>) -> tensor<4x96xbf16> {
      %cst = ...
      %fc_mx = util.global.load @fc_mx : tensor<96x64xi8>
      %0 = flow.tensor.bitcast %fc_mx : tensor<96x64xi8> -> tensor<96x64xf8E4M3FN>
      %1 = linalg.matmul indexing_maps = [#map, #map1, #map2]
          {block32.lhs = {block = [1, 32], scale = "dynamic"},
           block32.rhs = {block = [1, 32], scale = @fc_mx_scale}}
          ins(%arg0, %0 : ...

The model was exported with its weights in f32, bf16 or f16; the parameters that ``weights`` names
hold e4m3 codes and, under the same name with ``_scale``, E8M0 scales. ``block32 import checkpoint
--model`` writes them. Layers are found as ``block32-quantize-weights`` finds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, error_at
from block32.lowering.problem import BLOCK_K
from block32.passes.base import Pass, Report
from block32.passes.quantizing.layers import Layer, find_layers
from block32.passes.quantizing.marked import replace_by_marked
from block32.passes.quantizing.weights import WeightStore
from block32.passes.raising.marked_matmul import is_marked

_WEIGHT = re.compile(r"(?P<key>.+?):(?P<n>\d+)x(?P<k>\d+):(?P<rows>1|32)x32(?:,|$)")


@dataclass(frozen=True)
class _Weight:
    """A parameter that holds codes: its shape, and the rows that share a scale."""

    shape: tuple[int, int]
    block_rows: int


@dataclass
class MarkWeightsPass(Pass):
    """Type and mark the linear layers whose parameters hold MX codes.

    Attributes:
        weights: ``KEY:NxK:1x32`` or ``KEY:NxK:32x32`` for each parameter, separated by commas.
        activations: ``mxfp8`` quantises them at run time, ``none`` takes them as they are.
    """

    argument: ClassVar[str] = "block32-mark-weights"
    summary: ClassVar[str] = "let linear layers read the MX weights of a checkpoint"

    weights: str = ""
    activations: str = "mxfp8"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: No layer reads any of the parameters, one reads it in another shape,
                or something else reads it.
        """
        weights = self._parse()
        layers = [
            layer
            for layer in find_layers(module)
            if layer.source.key in weights and not is_marked(layer.op)
        ]
        if not layers:
            raise DiagnosticError(
                "<module>",
                "no linear layer of the model reads a block-scaled weight of the checkpoint; "
                f"expected parameters of its names, such as '{next(iter(weights))}'",
            )
        store = WeightStore(module, "rceil", "mxfp8")
        for layer in layers:
            weight = weights[str(layer.source.key)]
            _check(layer, weight)
            stored = store.quantized(layer, (weight.block_rows, BLOCK_K))
            if stored.keeps_original:
                raise error_at(
                    layer.op,
                    f"is not all that reads the parameter '{layer.name}', of which the checkpoint "
                    "has codes and no values",
                )
            replace_by_marked(layer, stored, self.activations)
            report.remark(layer.op, f"{layer.name}: mxfp8 {weight.block_rows}x32")
        for layer in layers:
            layer.op.erase()
        store.remove_unused()

    def _parse(self) -> dict[str, _Weight]:
        found: dict[str, _Weight] = {}
        end = 0
        for match in _WEIGHT.finditer(self.weights):
            shape = (int(match["n"]), int(match["k"]))
            found[match["key"]] = _Weight(shape, int(match["rows"]))
            end = match.end()
        if not found or end != len(self.weights):
            raise DiagnosticError(
                "<pipeline>",
                f"option 'weights' of pass '{self.argument}' needs KEY:NxK:1x32 or KEY:NxK:32x32 "
                f"for each parameter but got '{self.weights}'",
            )
        return found


def _check(layer: Layer, weight: _Weight) -> None:
    if layer.is_transposed:
        raise error_at(
            layer.op, f"reads the parameter '{layer.name}' as [K, N]; a checkpoint has [N, K]"
        )
    if layer.shape != weight.shape:
        model, checkpoint = (f"{n}x{k}" for n, k in (layer.shape, weight.shape))
        raise error_at(
            layer.op,
            f"reads the parameter '{layer.name}' as {model}; the checkpoint has {checkpoint}",
        )
