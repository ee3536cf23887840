# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-emit``: the kernels of every outlined executable get their bodies.

Before::

    builtin.module attributes {block32.kernel = {...}, block32.problem = {...}} {
      func.func private @gemm_tier0()
    }

After::

    builtin.module {
      func.func public @gemm_tier0() attributes {translation_info = #iree_codegen.translation_info<
          pipeline = #iree_codegen.no_pipeline>} {
        ... vector, memref, scf and the target's intrinsics ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects import problem as problem_attribute
from block32.dialects.diagnostics import BadAttributeError, error_at
from block32.dialects.kernel import ATTRIBUTE, KernelConfig
from block32.lowering.kernel_module import KernelSpec, emit_kernels, kernel_declarations
from block32.lowering.targets import target_named
from block32.passes.base import Pass, Report


@dataclass
class EmitPass(Pass):
    """Write the bodies of kernel declarations."""

    argument: ClassVar[str] = "block32-emit"
    summary: ClassVar[str] = "write the bodies of outlined kernels"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: The attributes that describe an executable are malformed.
        """
        del report
        for op in list(module.body):
            if op.operation.name == "hal.executable.source":
                _emit(op.operation)


def _emit(executable: ir.Operation) -> None:
    declarations = kernel_declarations(executable)
    if problem_attribute.ATTRIBUTE not in declarations.attributes:
        return
    try:
        problem = problem_attribute.parse(declarations.attributes[problem_attribute.ATTRIBUTE])
        config = KernelConfig.parse(declarations.attributes[ATTRIBUTE])
    except BadAttributeError as error:
        raise error_at(executable, str(error)) from error
    emit_kernels(KernelSpec(problem, target_named(config.target), config.tiers), executable)
    del declarations.attributes[problem_attribute.ATTRIBUTE]
    del declarations.attributes[ATTRIBUTE]
