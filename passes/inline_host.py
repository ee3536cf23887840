# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-inline-host``: calls of the functions that record dispatches become those dispatches.

Before::

    util.func private @block32_matmul_0_2x4x32(%x: tensor<2x32xf32>) -> tensor<2x4xf32>
        attributes {block32.host} {
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

A check that two arguments have the same number of rows moves to the start of the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith, cf, tensor

from block32.lowering.common.functions import inline_call
from block32.lowering.common.index import constant
from block32.lowering.host import CHECK_PREFIX
from block32.passes.base import Pass, Report
from block32.passes.outline import HOST_ATTRIBUTE
from block32.passes.symbols import callee_of, symbol_of
from block32.passes.walk import operations_named, producer


@dataclass
class InlineHostPass(Pass):
    """Inline every call of an outlined matmul, and drop the functions."""

    argument: ClassVar[str] = "block32-inline-host"
    summary: ClassVar[str] = "inline the functions that record dispatches"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring."""
        del report
        functions = {
            symbol_of(function): function
            for function in operations_named(module, "util.func")
            if HOST_ATTRIBUTE in function.attributes
        }
        for call in operations_named(module, "util.call"):
            callee = functions.get(callee_of(call))
            if callee is not None:
                inline_call(call, callee)
        for function in functions.values():
            function.erase()
        for check in operations_named(module, "cf.assert"):
            _hoist(check)


def _hoist(check: ir.Operation) -> None:
    """Move a check of two arguments' rows to where both are known.

    Between two dispatches it would part them into two submissions.
    """
    message = ir.StringAttr(check.attributes["msg"]).value
    sources = _checked(check)
    if not message.startswith(CHECK_PREFIX) or len(sources) != 2:
        return
    first, second = sources
    last = second if first.is_before_in_block(second) else first
    with ir.InsertionPoint.after(last), check.location:
        rows = [tensor.dim(source.results[0], constant(0)) for source in sources]
        cf.assert_(arith.cmpi(arith.CmpIPredicate.eq, *rows), message)
    check.erase()


def _checked(check: ir.Operation) -> list[ir.Operation]:
    """The imports of two arguments whose rows are compared; none where they are something else."""
    comparison = _producer(check.operands[0], "arith.cmpi")
    rows = [] if comparison is None else [_producer(v, "tensor.dim") for v in comparison.operands]
    found = [_producer(dim.operands[0], "hal.tensor.import") for dim in rows if dim is not None]
    imports = [op for op in found if op is not None]
    return imports if all(op.block == check.block for op in imports) else []


def _producer(value: ir.Value, name: str) -> ir.Operation | None:
    op = producer(value)
    return op if op is not None and op.name == name else None
