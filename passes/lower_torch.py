# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-lower-torch``: the operator of ``block32.torch`` becomes a composite.

PyTorch's importers pass ``torch.ops.block32.quantize_mxfp8`` on by its name. This pass runs before
IREE's input phase.

Before::

    func.func @f(%x: !torch.vtensor<[?,64],f32>)
        -> (!torch.vtensor<[?,64],f8E4M3FN>, !torch.vtensor<[?,2],f8E8M0FNU>) {
      %rule = torch.constant.str "rceil"
      %q:2 = torch.operator "torch.block32.quantize_mxfp8"(%x, %rule)
          : (!torch.vtensor<[?,64],f32>, !torch.str)
          -> (!torch.vtensor<[?,64],f8E4M3FN>, !torch.vtensor<[?,2],f8E8M0FNU>)
      return %q#0, %q#1 : !torch.vtensor<[?,64],f8E4M3FN>, !torch.vtensor<[?,2],f8E8M0FNU>
    }

After::

    util.func private @block32_quantize_Mx64xf32_e4m3_rceil(%arg0: tensor<?x64xf32>)
        -> (tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>) attributes {block32.composite =
        {element = "f8E4M3FN", kind = "quantize", rule = "rceil"}, ...
    func.func @f...
      %0 = torch_c.to_builtin_tensor %arg0 : !torch.vtensor<[?,64],f32> -> tensor<?x64xf32>
      %1:2 = util.call @block32_quantize_Mx64xf32_e4m3_rceil(%0)
          : (tensor<?x64xf32>) -> (tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>)
      %2 = torch_c.from_builtin_tensor %1#0 : ...
      %3 = torch_c.from_builtin_tensor %1#1 : ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from iree.compiler import ir

from block32.dialects.diagnostics import BadAttributeError, error_at
from block32.lowering.composites import Composites
from block32.passes.base import Pass, Report
from block32.passes.torch_values import from_builtin, operator_name, tensor_type, to_builtin
from block32.passes.walk import operations_where

#: What the operator is called in the text or bytecode of a module that has one.
OPERATOR: Final = "torch.block32.quantize_mxfp8"


@dataclass
class LowerTorchPass(Pass):
    """Write the operator of ``block32.torch`` as a composite."""

    argument: ClassVar[str] = "block32-lower-torch"
    summary: ClassVar[str] = "write the operator of block32.torch as a composite"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: The operator has other operands than ``block32.torch`` gives it.
        """
        del report
        composites = Composites(module)
        for op in operations_where(module, lambda op: operator_name(op) == OPERATOR):
            _lower(op, composites)


def _lower(op: ir.Operation, composites: Composites) -> None:
    x_type = tensor_type(op.operands[0]) if len(op.operands) == 2 else None
    if x_type is None or x_type.rank != 2 or x_type.is_dynamic_dim(1):
        raise error_at(op, "expected a matrix with a static K, and the name of a rule")
    with ir.InsertionPoint(op), op.location:
        try:
            values = composites.quantize(to_builtin(op.operands[0]), _rule(op))
        except BadAttributeError as error:
            raise error_at(op, str(error)) from error
        results = [
            from_builtin(value, result.type)
            for value, result in zip(values, op.results, strict=True)
        ]
    for result, value in zip(op.results, results, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _rule(op: ir.Operation) -> str:
    owner = op.operands[1].owner
    if isinstance(owner, ir.Block) or owner.operation.name != "torch.constant.str":
        raise error_at(op, "expected the name of a rule to be a constant")
    return ir.StringAttr(owner.operation.attributes["value"]).value
