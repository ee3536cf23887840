# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-declare-functions``: functions of PyTorch and ONNX models say their types.

IREE writes the types of a function's arguments and results into the vmfb, but not for those that
were imported from PyTorch or ONNX. ``block32.load`` and ``block32 run`` read them there.

Before::

    util.func public @f$async(%x: !hal.buffer_view, %wait: !hal.fence, %signal: !hal.fence)
        -> !hal.buffer_view attributes {iree.abi.model = "coarse-fences", iree.abi.stub} {
      %0 = hal.tensor.import wait(%wait) => %x : !hal.buffer_view -> tensor<4xf32>
      %1 = hal.tensor.barrier join(%0 : tensor<4xf32>) => %signal : !hal.fence
      %2 = hal.tensor.export %1 : tensor<4xf32> -> !hal.buffer_view
      util.return %2 : !hal.buffer_view
    }
    util.func public @f(%x: !hal.buffer_view) -> !hal.buffer_view attributes {iree.abi.stub} {
      %fence = util.null : !hal.fence
      %0 = util.call @f$async(%x, %fence, %fence)
          : (!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view
      util.return %0 : !hal.buffer_view
    }

After::

    util.func public @f(...) -> !hal.buffer_view attributes {iree.abi.stub, iree.reflection =
        {iree.abi.declaration = "sync func @f(%input0: tensor<4xf32>) -> (...

An argument that the function does not use has the type ``!hal.buffer_view``: anything will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.passes.base import Pass, Report
from block32.passes.symbols import symbol_of

_REFLECTION = "iree.reflection"
_FENCE = "!hal.fence"


@dataclass
class DeclareFunctionsPass(Pass):
    """Write the declarations that IREE's importers leave out."""

    argument: ClassVar[str] = "block32-declare-functions"
    summary: ClassVar[str] = "let functions of PyTorch and ONNX models say their types"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring."""
        del report
        functions = {
            symbol_of(op): op.operation
            for op in module.body
            if op.operation.name == "util.func" and "iree.abi.stub" in op.operation.attributes
        }
        for name, function in functions.items():
            implementation = functions.get(f"{name}$async")
            if implementation is None or _REFLECTION in function.attributes:
                continue
            text = ir.StringAttr.get(_declaration(name, implementation))
            function.attributes[_REFLECTION] = ir.DictAttr.get({"iree.abi.declaration": text})


def _declaration(name: str, implementation: ir.Operation) -> str:
    """The declaration, from the tensors that buffers are imported to and exported from."""
    body = implementation.regions[0].blocks[0]
    imported: dict[ir.Value, ir.Type] = {}
    exported: dict[ir.Value, ir.Type] = {}
    results: list[ir.Value] = []
    for block in implementation.regions[0]:
        for op in block:
            operation = op.operation
            if operation.name == "hal.tensor.import":
                imported[operation.operands[0]] = operation.results[0].type
            elif operation.name == "hal.tensor.export":
                exported[operation.results[0]] = operation.operands[0].type
            elif operation.name == "util.return":
                results = list(operation.operands)
    arguments = [value for value in body.arguments if str(value.type) != _FENCE]
    inputs = _values("input", [imported.get(value, value.type) for value in arguments])
    outputs = _values("output", [exported.get(value, value.type) for value in results])
    return f"sync func @{name}({inputs}) -> ({outputs})"


def _values(kind: str, types: list[ir.Type]) -> str:
    return ", ".join(f"%{kind}{number}: {value}" for number, value in enumerate(types))
