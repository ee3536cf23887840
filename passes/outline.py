# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-outline``: every matmul with a kernel becomes a call that dispatches an executable.

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
          {block32.kernel = {target = "cpu", tiers = [
            {form = "stream", isa = "generic", mma = [4, 1, 32], tile = [4, 128, 32]}]}}
          ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
                                 tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      return %y : tensor<4x32xf32>
    }

After::

    hal.executable.source private @block32_kernels_0_4x32x64_e4m3_e4m3_32x32_f32 {
      hal.executable.export public @...
      builtin.module attributes {block32.kernel = {...}, block32.problem = {...}} {
        func.func private @...
    ...
    util.func private @block32_matmul_0_4x32x64_e4m3_e4m3_32x32_f32(...) -> tensor<4x32xf32>
        attributes {block32.host} {
      ...
      ... flow.dispatch @block32_kernels_0_4x32x64_e4m3_e4m3_32x32_f32::@gemm_tier0_0_4x32x64_...
    }
    func.func @f(...) -> tensor<4x32xf32> {
      ...
      %0 = util.call @block32_matmul_0_4x32x64_e4m3_e4m3_32x32_f32(%arg0, %arg2, %arg1, %arg3) : ...
      return %0 : tensor<4x32xf32>

Matmuls of one problem and kernel share an executable. The kernels are still declarations:
``block32-emit`` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects import problem as problem_attribute
from block32.dialects.kernel import ATTRIBUTE, KernelConfig
from block32.lowering.host import build_call, build_host_function, result_type
from block32.lowering.kernel_module import (
    EXECUTABLE_PREFIX,
    KernelSpec,
    build_executable,
    kernel_declarations,
)
from block32.lowering.problem import ScaledMatmul
from block32.lowering.targets import target_named
from block32.passes import canonical
from block32.passes.base import Pass, Report
from block32.passes.weight_sources import check_layout

FUNCTION_PREFIX = "block32_matmul"
#: On the functions that record dispatches: a program may have names like ours.
HOST_ATTRIBUTE = "block32.host"


@dataclass
class OutlinePass(Pass):
    """Turn selected matmuls into calls."""

    argument: ClassVar[str] = "block32-outline"
    summary: ClassVar[str] = "turn selected matmuls into dispatches of executables"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A weight's bytes are in another order than its kernel reads.
        """
        del report
        program = ir.SymbolTable(module.operation)
        functions: dict[tuple[ScaledMatmul, KernelConfig], str] = {}
        for matmul in canonical.matmuls_of(module):
            check_layout(matmul, program)
            if ATTRIBUTE not in matmul.op.attributes:
                continue
            config = KernelConfig.parse(matmul.op.attributes[ATTRIBUTE])
            if all(tier.form == "portable" for tier in config.tiers):
                continue
            problem = matmul.problem
            if (problem, config) not in functions:
                suffix = _free_suffix(program, len(functions), problem)
                functions[problem, config] = _outline(module, suffix, problem, config)
            _call(matmul, functions[problem, config])


def _free_suffix(program: ir.SymbolTable, index: int, problem: ScaledMatmul) -> str:
    """What symbols of the problem end with, so that the program has none of the same name."""
    suffix = f"_{index}_{problem.describe()}"
    while any(prefix + suffix in program for prefix in (EXECUTABLE_PREFIX, FUNCTION_PREFIX)):
        suffix += "_"
    return suffix


def _outline(module: ir.Module, suffix: str, problem: ScaledMatmul, config: KernelConfig) -> str:
    """Build the executable and the function of one problem; returns the function's symbol."""
    executable_symbol = EXECUTABLE_PREFIX + suffix
    function_symbol = FUNCTION_PREFIX + suffix
    spec = KernelSpec(problem, target_named(config.target), config.tiers)
    with ir.InsertionPoint.at_block_begin(module.body):
        executable = build_executable(spec, executable_symbol)
        function = build_host_function(spec, function_symbol, executable_symbol)
        function.attributes[HOST_ATTRIBUTE] = ir.UnitAttr.get()
    declarations = kernel_declarations(executable)
    declarations.attributes[problem_attribute.ATTRIBUTE] = problem_attribute.build(problem)
    declarations.attributes[ATTRIBUTE] = config.build()
    return function_symbol


def _call(matmul: canonical.CanonicalMatmul, function: str) -> None:
    op, problem = matmul.op, matmul.problem
    with ir.InsertionPoint(op), op.location:
        operands = matmul.host_operands()
        arguments = [operands[name] for name in problem.argument_names]
        y = build_call(function, arguments, result_type(problem))
    op.results[0].replace_all_uses_with(y)
    op.erase()
