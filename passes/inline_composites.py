# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-inline-composites``: calls of composites that no kernel took become their bodies.

Before::

    util.func private @q(%x: tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
        attributes {block32.composite = {kind = "quantize"},
                    inlining_policy = #util.inline.never} {
      %scales = arith.constant dense<1.0> : tensor<4x2xf8E8M0FNU>
      %codes = arith.truncf %x : tensor<4x64xf32> to tensor<4x64xf8E4M3FN>
      util.return %codes, %scales : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>
    }
    func.func @f(%x: tensor<4x64xf32>) -> tensor<4x64xf8E4M3FN> {
      %codes, %scales = util.call @q(%x)
          : (tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
      return %codes : tensor<4x64xf8E4M3FN>
    }

After::

    module {
      func.func @f(%arg0: tensor<4x64xf32>) -> tensor<4x64xf8E4M3FN> {
        %cst = arith.constant dense<1.000000e+00> : tensor<4x2xf8E8M0FNU>
        %0 = arith.truncf %arg0 : tensor<4x64xf32> to tensor<4x64xf8E4M3FN>
        return %0 : tensor<4x64xf8E4M3FN>
      }
    }

IREE compiles the bodies for the device, fused with what is around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects import composite
from block32.dialects.diagnostics import error_at
from block32.lowering.common.functions import inline_call
from block32.passes.base import Pass, Report
from block32.passes.canonical import CALL_NAME, matmuls_of
from block32.passes.symbols import callee_of, symbol_of
from block32.passes.walk import operations_named
from block32.passes.weight_sources import check_layout


@dataclass
class InlineCompositesPass(Pass):
    """Inline every call of a composite, and drop the definitions."""

    argument: ClassVar[str] = "block32-inline-composites"
    summary: ClassVar[str] = "inline the bodies of composites that no kernel took"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A composite is malformed, calls itself, is called and has no body of
                one block, or gets a weight whose bytes are in another order than the plain one.
        """
        del report
        symbols = ir.SymbolTable(module.operation)
        for matmul in matmuls_of(module):
            if matmul.op.name == CALL_NAME:
                check_layout(matmul, symbols)
        composites = {
            symbol_of(function): function
            for function in operations_named(module, "util.func")
            if composite.of_function(function) is not None
        }
        for call in operations_named(module, CALL_NAME):
            _inline(call, composites, ())
        for function in composites.values():
            function.erase()


def _inline(
    call: ir.Operation, composites: dict[str, ir.Operation], around: tuple[str, ...]
) -> None:
    """Inline a call of a composite, and before it those that its body makes.

    Args:
        call: Any call.
        composites: The composites by symbol.
        around: The composites whose bodies the call is in.
    """
    symbol = callee_of(call)
    callee = composites.get(symbol)
    if callee is None:
        return
    if symbol in around:
        raise error_at(callee, "is a composite that calls itself; expected a body of other ops")
    blocks = callee.regions[0].blocks
    if len(blocks) == 0:
        raise error_at(callee, "is a composite without a kernel; expected a body")
    if len(blocks) > 1:
        raise error_at(callee, f"is a composite of {len(blocks)} blocks; expected one")
    for inner in _calls_in(callee):
        _inline(inner, composites, (*around, symbol))
    inline_call(call, callee)


def _calls_in(function: ir.Operation) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == CALL_NAME:
            found.append(op)
        return ir.WalkResult.ADVANCE

    function.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
