# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-select-kernel``: choose a kernel for every block-scaled matmul, and say why.

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
          ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
                                 tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      return %y : tensor<4x32xf32>
    }

After, with ``{target=portable}``::

    %0 = linalg.scaled_contract indexing_maps = [#map, #map1, #map2, #map3, #map4]
        {block32.kernel = {target = "portable", tiers = [{form = "portable"}]}} ins(...)

A ``block32.kernel`` that the user wrote for this target is verified and kept; one for another
target is ignored with a remark. A matmul that the target has no kernel for gets the form
``portable``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.diagnostics import BadAttributeError, error_at
from block32.dialects.kernel import ATTRIBUTE, KernelConfig, KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts, Selection, Target
from block32.passes import canonical
from block32.passes.base import Report
from block32.passes.target_options import TargetPass

#: The configuration of a matmul that the target has no kernel for.
PORTABLE = KernelConfig("portable", (KernelTier("portable"),))


@dataclass
class SelectKernelPass(TargetPass):
    """Write ``block32.kernel`` on every canonical op."""

    argument: ClassVar[str] = "block32-select-kernel"
    summary: ClassVar[str] = "choose a kernel for every block-scaled matmul"

    _chosen: dict[ScaledMatmul, Selection] = field(default_factory=dict, repr=False, init=False)
    _quantized: set[ScaledMatmul] = field(default_factory=set, repr=False, init=False)

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: An unknown target, or a kernel that the user asked for and that
                cannot compute its matmul.
        """
        target, facts = self.chosen_target(), self.device_facts()
        for matmul in canonical.matmuls_of(module):
            self._select(matmul, target, facts, report)

    def _select(
        self,
        matmul: canonical.CanonicalMatmul,
        target: Target,
        facts: DeviceFacts,
        report: Report,
    ) -> None:
        op, problem = matmul.op, matmul.problem
        if ATTRIBUTE in op.attributes:
            forced = kernel_of(op)
            if forced.target == target.name:
                _verify(op, problem, forced, target, facts)
                self._note(op, problem, forced, "asked for by block32.kernel", report)
                return
            report.remark(op, f"block32.kernel for {forced.target} ignored on {target.name}")
        if problem not in self._chosen:
            self._chosen[problem] = target.select(problem, facts)
        selection = self._chosen[problem]
        config = selection.config or PORTABLE
        op.attributes[ATTRIBUTE] = config.build()
        self._note(op, problem, config, selection.reason, report)

    def _note(
        self,
        op: ir.Operation,
        problem: ScaledMatmul,
        config: KernelConfig,
        reason: str,
        report: Report,
    ) -> None:
        """Say which kernel was chosen, and once for each problem where x is quantised."""
        message = _remark(problem, config, reason)
        if problem.lhs_quantize and config != PORTABLE and problem not in self._quantized:
            self._quantized.add(problem)
            message += f"; {_where_quantized(problem, config)}"
        report.remark(op, message)


def kernel_of(op: ir.Operation) -> KernelConfig:
    """Read an op's ``block32.kernel``.

    Raises:
        DiagnosticError: It is malformed.
    """
    try:
        return KernelConfig.parse(op.attributes[ATTRIBUTE])
    except BadAttributeError as error:
        raise error_at(op, f"has a malformed '{ATTRIBUTE}': {error}") from error


def _verify(
    op: ir.Operation,
    problem: ScaledMatmul,
    config: KernelConfig,
    target: Target,
    facts: DeviceFacts,
) -> None:
    for tier in config.tiers:
        reason = target.verify(problem, tier, facts)
        if reason:
            raise error_at(op, f"asks for a kernel that {target.name} cannot run: {reason}")


def _remark(problem: ScaledMatmul, config: KernelConfig, reason: str) -> str:
    steps = problem.epilogue.describe()
    fused = f" with {steps}" if steps else ""
    return f"{problem.describe()}{fused}: {config.target} {config.describe()} ({reason})"


def _where_quantized(problem: ScaledMatmul, config: KernelConfig) -> str:
    """What the first matmul of a problem says of its activation."""
    fused = [tier for tier in config.tiers if tier.quantize == "fused"]
    where = "by the kernel that multiplies it"
    if not fused:
        where = "by a launch of its own"
    elif len(fused) < len(config.tiers):
        limits = ", ".join(f"M <= {tier.max_m}" if tier.max_m else "larger M" for tier in fused)
        where += f" for {limits}, else by a launch of its own"
    return f"x is quantised ({problem.lhs_quantize}) {where}"
