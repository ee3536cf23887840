# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-expand-portable``: matmuls without a kernel become plain linalg.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
    #y = affine_map<(m, n, k) -> (m, n)>
    func.func @f(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
                 %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
      %zero = arith.constant dense<0.0> : tensor<4x32xf32>
      %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
          {block32.kernel = {target = "portable", tiers = [{form = "portable"}]}}
          ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
                                 tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      return %y : tensor<4x32xf32>
    }

After::

    ... = linalg.generic {indexing_maps = [#map1, #map2, #map3, #map4, #map5, #map5],
                          iterator_types = ["parallel", "parallel", "reduction", "reduction"]}
        ins(%expanded, %1, %expanded_0, %5 : tensor<4x2x32xi8>, tensor<4x2xi8>,
            tensor<32x2x32xi8>, tensor<32x2xi8>) outs(...) {
      ...
    } -> (tensor<4x32xf32>, tensor<4x32xf32>)

The loops are (M, N, K/32, 32), over integer codes, with two sums (see ``lowering/portable``).
IREE's own code generation handles that on every device, and it is right for every scale byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.kernel import ATTRIBUTE, KernelConfig
from block32.lowering.portable.expand import expand
from block32.passes import canonical
from block32.passes.base import Pass, Report
from block32.passes.weight_sources import check_layout


@dataclass
class ExpandPortablePass(Pass):
    """Rewrite every canonical op whose form is ``portable``, or that has no kernel at all."""

    argument: ClassVar[str] = "block32-expand-portable"
    summary: ClassVar[str] = "rewrite matmuls without a kernel as plain linalg"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A weight's bytes are in another order than the plain one.
        """
        del report
        symbols = ir.SymbolTable(module.operation)
        for matmul in canonical.matmuls_of(module):
            op = matmul.op
            if _is_portable(op):
                check_layout(matmul, symbols)
                with ir.InsertionPoint(op), op.location:
                    value = expand(matmul.problem, matmul.host_operands())
                op.results[0].replace_all_uses_with(value)
                op.erase()


def _is_portable(op: ir.Operation) -> bool:
    if ATTRIBUTE not in op.attributes:
        return True
    config = KernelConfig.parse(op.attributes[ATTRIBUTE])
    return all(tier.form == "portable" for tier in config.tiers)
