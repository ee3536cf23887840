# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-emit``: the kernels of every outlined executable get their bodies.

Before::

    #pack = #hal.pipeline.layout<bindings = [
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer>,
        #hal.pipeline.binding<storage_buffer>]>
    #gemm = #hal.pipeline.layout<bindings = [
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer, ReadOnly>,
        #hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer>]>
    hal.executable.source private @kernels {
      hal.executable.export public @pack ordinal(0) layout(#pack) count(%device: !hal.device) ->
          (index, index, index) {
        %c1 = arith.constant 1 : index
        hal.return %c1, %c1, %c1 : index, index, index
      }
      hal.executable.export public @gemm ordinal(1) layout(#gemm) count(%device: !hal.device) ->
          (index, index, index) {
        %c1 = arith.constant 1 : index
        hal.return %c1, %c1, %c1 : index, index, index
      }
      builtin.module attributes {
          block32.kernel = {target = "cpu", tiers = [
            {form = "stream", isa = "generic", mma = [4, 1, 32], tile = [4, 128, 32]}]},
          block32.problem = {m = 4, n = 32, k = 64, lhs = "f8E4M3FN", rhs = "f8E4M3FN",
                             rhs_block = [32, 32], result = "f32", lhs_scaled = true}} {
        func.func private @pack()
        func.func private @gemm()
      }
    }

After::

    builtin.module {
      func.func public @pack() attributes {translation_info = #translation} {
        ...
      func.func public @gemm() attributes {translation_info = #translation} {
        ...
        %... = hal.interface.binding.subspan layout(#pipeline_layout1) binding(...) ...
        scf.for
        ...

The bodies hold vector, memref, scf and the target's intrinsics; ``#iree_codegen.no_pipeline`` makes
IREE leave them as they are.
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
