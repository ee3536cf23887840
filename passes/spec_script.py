# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-spec-script``: write the transform script that puts the kernels into a program.

The last pass of ``block32 spec``, after ``block32-isolate`` and the passes of a compile.

Before::

    module attributes {transform.with_named_sequence} {
      util.func private @block32_matmul_0(%x: tensor<4x64xf32>) -> tensor<4x64xf32> {
        util.return %x : tensor<4x64xf32>
      }
      util.func private @block32_call_0(%x: tensor<4x64xf32>) -> tensor<4x64xf32> {
        %y = util.call @block32_matmul_0(%x) : (tensor<4x64xf32>) -> tensor<4x64xf32>
        util.return %y : tensor<4x64xf32>
      }
      transform.named_sequence @block32_match_0(%op: !transform.any_op {transform.readonly})
          -> (!transform.any_value, !transform.any_value) {
        %inputs, %results = transform.iree.match.cast_compatible_dag_from_root %op {
        ^bb0(%x: tensor<4x64xf32>):
          %y = math.exp %x {mine} : tensor<4x64xf32>
        } : (!transform.any_op) -> (!transform.any_value, !transform.any_value)
        transform.yield %inputs, %results : !transform.any_value, !transform.any_value
      }
    }

After::

    transform.named_sequence @block32_replace_0(%arg0: ..., %arg1: ...) {
      %0 = transform.get_defining_op %arg1 : ...
      %1 = transform.util.lookup_nearest_symbol_from_self @block32_call_0 : ...
      transform.util.cast_and_call inline_call %1(%arg0) -> %arg1 after %0 {
      } : ...
      %2 = transform.param.constant 0 : i64 -> !transform.param<i64>
      transform.annotate %0 "block32.replaced" = %2 : ...
      transform.yield
    }
    transform.named_sequence @__transform_main(%arg0: !transform.any_op) {
      %0 = transform.structured.match ops{["math.exp"]} attributes {...mine}
        filter_operand_types = [tensor<4x64xf32>] in %arg0 : ...
      %updated_root = transform.foreach_match restrict_root in %0
          @block32_match_0 -> @block32_replace_0 : ...
      %1 = transform.util.import_symbol @block32_matmul_0 into %arg0 if undefined : ...
      transform.yield
    }

A matcher is exact, and slow where it fails, for IREE writes a diagnostic each time. So ops are
first found by name, attributes and operand types, and each matcher sees only those that are its
own: a program of a thousand layers, each with its own scales, runs a thousand matchers and not a
million.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from iree.compiler import ir

from block32.passes.base import Pass, Report
from block32.passes.isolate import CALL_PREFIX, MATCH_PREFIX, matched_op
from block32.passes.symbols import symbol_of

REPLACE_PREFIX: Final = "block32_replace_"
#: On an op whose users were given to a kernel: the number of the matcher that found it.
REPLACED_ATTRIBUTE: Final = "block32.replaced"

_IMPORTED: Final = ("hal.executable.source", "util.func")


@dataclass
class SpecScriptPass(Pass):
    """Write the replacing sequences and the main one."""

    argument: ClassVar[str] = "block32-spec-script"
    summary: ClassVar[str] = "write the transform script that puts the kernels into a program"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring."""
        del report
        definitions = [op.operation for op in module.body]
        matchers = [op for op in definitions if symbol_of(op).startswith(MATCH_PREFIX)]
        shared = [
            symbol_of(op)
            for op in definitions
            if op.name in _IMPORTED and not symbol_of(op).startswith(CALL_PREFIX)
        ]
        with ir.InsertionPoint(module.body):
            for index in range(len(matchers)):
                _build_replacement(index)
            _build_main(matchers, shared)


def _build_replacement(index: int) -> None:
    """A sequence that puts the function of one matcher in place of what it matched."""
    value = ir.Type.parse("!transform.any_value")
    block = _build_sequence(f"{REPLACE_PREFIX}{index}", [value, value], is_read_only=True)
    inputs, results = block.arguments
    with ir.InsertionPoint(block):
        op = _build_op("transform.get_defining_op", [results])
        function = _build_op(
            "transform.util.lookup_nearest_symbol_from_self",
            [],
            symbol=ir.FlatSymbolRefAttr.get(f"{CALL_PREFIX}{index}"),
        )
        call = ir.Operation.create(
            "transform.util.cast_and_call",
            operands=[op, inputs, results, function],
            attributes={
                # A transpose of a constant is evaluated at compile time, but not through a call.
                "inline_call": ir.UnitAttr.get(),
                "insert_after": ir.UnitAttr.get(),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1, 1, 1]),
            },
            regions=1,
        )
        call.regions[0].blocks.append()
        # The op stays, without users, for IREE to remove: no other matcher may find it.
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), index)
        parameter = ir.Operation.create(
            "transform.param.constant",
            results=[ir.Type.parse("!transform.param<i64>")],
            attributes={"value": number},
        )
        ir.Operation.create(
            "transform.annotate",
            operands=[op, parameter.result],
            attributes={"name": ir.StringAttr.get(REPLACED_ATTRIBUTE)},
        )
        ir.Operation.create("transform.yield")


def _build_main(matchers: list[ir.Operation], shared: list[str]) -> None:
    """The sequence that IREE runs on the program."""
    block = _build_sequence("__transform_main", [ir.Type.parse("!transform.any_op")])
    module = block.arguments[0]
    with ir.InsertionPoint(block):
        for index, matcher in enumerate(matchers):
            # One after the other, since foreach_match invalidates all handles to what it was given.
            _build_op(
                "transform.foreach_match",
                [_build_filter(module, matched_op(matcher))],
                matchers=_symbols(f"{MATCH_PREFIX}{index}"),
                actions=_symbols(f"{REPLACE_PREFIX}{index}"),
                restrict_root=ir.UnitAttr.get(),
            )
        # Last, so that no filter looks through kernels; backwards, since each is put first.
        for symbol in reversed(shared):
            _import(module, symbol)
        ir.Operation.create("transform.yield")


def _build_filter(module: ir.Value, root: ir.Operation) -> ir.Value:
    """The ops of the program that agree with ``root`` in name, attributes and operand types."""
    attributes = {n: a for n, a in root.attributes.items() if n != "operandSegmentSizes"}
    return _build_op(
        "transform.structured.match",
        [module],
        ops=ir.ArrayAttr.get([ir.StringAttr.get(root.name)]),
        op_attrs=ir.DictAttr.get(attributes),
        filter_operand_types=ir.ArrayAttr.get([ir.TypeAttr.get(v.type) for v in root.operands]),
    )


def _build_sequence(symbol: str, types: list[ir.Type], is_read_only: bool = False) -> ir.Block:
    """A ``transform.named_sequence`` without results; returns its empty block."""
    mark = ir.DictAttr.get({"transform.readonly": ir.UnitAttr.get()} if is_read_only else {})
    sequence = ir.Operation.create(
        "transform.named_sequence",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
            "arg_attrs": ir.ArrayAttr.get([mark] * len(types)),
        },
        regions=1,
    )
    return sequence.regions[0].blocks.append(*types, arg_locs=[ir.Location.unknown()] * len(types))


def _build_op(name: str, operands: list[ir.Value], **attributes: ir.Attribute) -> ir.Value:
    """A transform op whose result is a handle to ops."""
    handle = ir.Type.parse("!transform.any_op")
    op = ir.Operation.create(name, results=[handle], operands=operands, attributes=attributes)
    return op.result


def _import(module: ir.Value, symbol: str) -> ir.Value:
    return _build_op(
        "transform.util.import_symbol",
        [module],
        symbol=ir.FlatSymbolRefAttr.get(symbol),
        if_undefined=ir.UnitAttr.get(),
    )


def _symbols(symbol: str) -> ir.Attribute:
    return ir.ArrayAttr.get([ir.FlatSymbolRefAttr.get(symbol)])
