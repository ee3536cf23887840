# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-inline-host``: calls of the functions that record dispatches become those dispatches.

Before::

    util.func private @block32_matmul_0_2x4x32(%x: tensor<2x32xf32>) -> tensor<2x4xf32> {
      %y = tensor.empty() : tensor<2x4xf32>
      util.return %y : tensor<2x4xf32>
    }
    func.func @f(%x: tensor<2x32xf32>) -> tensor<2x4xf32> {
      %y = util.call @block32_matmul_0_2x4x32(%x) : (tensor<2x32xf32>) -> tensor<2x4xf32>
      return %y : tensor<2x4xf32>
    }

After::

    module {
      func.func @f(%arg0: tensor<2x32xf32>) -> tensor<2x4xf32> {
        %0 = tensor.empty() : tensor<2x4xf32>
        return %0 : tensor<2x4xf32>
      }
    }

IREE inlines such a function itself, but after it has decided where tensors live: what a caller
passes, weights among it, would be copied into a buffer of the callee's on every call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from iree.compiler import ir

from block32.lowering.common.functions import inline_call
from block32.passes.base import Pass, Report
from block32.passes.outline import FUNCTION_PREFIX
from block32.passes.walk import operations_named

#: The symbols that ``block32-outline`` gives.
_SYMBOL: Final = re.compile(rf"{FUNCTION_PREFIX}_\d+_")


@dataclass
class InlineHostPass(Pass):
    """Inline every call of an outlined matmul, and drop the functions."""

    argument: ClassVar[str] = "block32-inline-host"
    summary: ClassVar[str] = "inline the functions that record dispatches"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring."""
        del report
        functions: dict[str, ir.Operation] = {}
        for function in operations_named(module, "util.func"):
            symbol = ir.StringAttr(function.attributes["sym_name"]).value
            if _SYMBOL.match(symbol):
                functions[symbol] = function
        for call in operations_named(module, "util.call"):
            callee = functions.get(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)
            if callee is not None:
                inline_call(call, callee)
        for function in functions.values():
            function.erase()
