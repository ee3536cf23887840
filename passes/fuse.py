# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-fuse``: elementwise consumers join their matmul, and equal quantisations become one.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
    #y = affine_map<(m, n, k) -> (m, n)>
    #mn = affine_map<(m, n) -> (m, n)>
    #n = affine_map<(m, n) -> (n)>
    func.func @f(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
                 %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>,
                 %bias: tensor<32xf32>) -> tensor<4x32xf32> {
      %zero = arith.constant dense<0.0> : tensor<4x32xf32>
      %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
          ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
                                 tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      %out = tensor.empty() : tensor<4x32xf32>
      %z = linalg.generic {indexing_maps = [#mn, #n, #mn],
                           iterator_types = ["parallel", "parallel"]}
          ins(%y, %bias : tensor<4x32xf32>, tensor<32xf32>) outs(%out : tensor<4x32xf32>) {
      ^bb0(%a: f32, %b: f32, %o: f32):
        %sum = arith.addf %a, %b : f32
        linalg.yield %sum : f32
      } -> tensor<4x32xf32>
      return %z : tensor<4x32xf32>
    }

After::

    util.func private @block32_scaled_matmul_4x32x64_e4m3_e4m3_32x32_f32(...) -> tensor<4x32xf32>
        attributes {block32.composite = {kind = "scaled_matmul",
            problem = {epilogue = {bias = "f32"}, ...}},
                    inlining_policy = #util.inline.never} {
      ...
    func.func @f(...) -> tensor<4x32xf32> {
      ...
      %1 = util.call @block32_scaled_matmul_...(%arg0, %arg2, %arg1, %arg3, %arg4) : ...
      return %1 : tensor<4x32xf32>

The epilogues are a closed list, in this order: a scale for each row, a scale for the tensor, a
bias for each column, a residual, one activation (relu, gelu, gelu_tanh, silu, tanh), a cast to
bf16 or f16. They are applied to the f32 sums, which are rounded once. A consumer is left as it is
where the target has no kernel for it, where the matmul's result has other users, or where it is
anything else. A grouped matmul takes none: they also read its rows of no group.

Then matmuls of one block that quantise the same activation share its codes. A ``quantize`` that is
left with one matmul as its only reader becomes a part of that matmul (``matmul_dynamic``) where the
target has a kernel which quantises what it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.lowering.composites import Composites
from block32.lowering.target import DeviceFacts, Target
from block32.passes import canonical
from block32.passes.base import Report
from block32.passes.fusing.chain import Chain
from block32.passes.fusing.quantisations import share_quantisations
from block32.passes.fusing.quantised_matmul import fuse_quantisation
from block32.passes.target_options import TargetPass


@dataclass
class FusePass(TargetPass):
    """Note consumers as epilogues, share quantisations, and give lone ones to their matmuls."""

    argument: ClassVar[str] = "block32-fuse"
    summary: ClassVar[str] = "fuse elementwise consumers into matmuls, and share quantisations"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: An unknown target, or a malformed composite.
        """
        del report
        target, facts = self.chosen_target(), self.device_facts()
        composites = Composites(ir.SymbolTable(module.operation))
        for matmul in canonical.matmuls_of(module):
            _fuse(matmul, composites, target, facts)
        share_quantisations(module)
        known = canonical.composites_of(module)
        for matmul in canonical.matmuls_of(module):
            fuse_quantisation(matmul, known, composites, target, facts)


def _fuse(
    matmul: canonical.CanonicalMatmul, composites: Composites, target: Target, facts: DeviceFacts
) -> None:
    """Fuse as many consumers, one after the other, as the target has kernels for."""
    chain = Chain.of(matmul)
    while True:
        longer = chain.extended()
        if longer is None:
            break
        if target.select(longer.problem, facts).config is None:
            break
        chain = longer
    chain.build(composites)
