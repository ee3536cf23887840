# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-isolate``: keep each distinct block-scaled matmul, in a function and with a matcher.

The first pass of ``block32 spec``.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #y = affine_map<(m, n, k) -> (m, n)>
    util.global private @xs = dense<127> : tensor<4x2xi8>
    util.global private @ws = dense<127> : tensor<1x2xi8>
    func.func @f(%x: tensor<4x64xf8E4M3FN>, %w: tensor<32x64xf8E4M3FN>) -> tensor<4x32xf32> {
      %zero = arith.constant dense<0.0> : tensor<4x32xf32>
      %y = linalg.matmul indexing_maps = [#x, #w, #y]
          {block32.lhs = {block = [1, 32], scale = @xs},
           block32.rhs = {block = [32, 32], scale = @ws}}
          ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<32x64xf8E4M3FN>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      return %y : tensor<4x32xf32>
    }

After::

    util.global private @xs : tensor<4x2xi8>
    util.global private @ws : tensor<1x2xi8>
    util.func private @block32_call_0(%arg0: tensor<4x64xf8E4M3FN>, %arg1: ...) -> ... {
      ...
      %4 = linalg.scaled_contract ...
      util.return %4 : tensor<4x32xf32>
    }
    transform.named_sequence @block32_match_0(...) -> (...) attributes {block32.matches = 1 : i64} {
      ... = transform.iree.match.cast_compatible_dag_from_root %arg0 {
      ^bb0(%arg1: tensor<4x64xf8E4M3FN>, %arg2: tensor<32x64xf8E4M3FN>):
        %cst = arith.constant dense<0.000000e+00> : tensor<4x32xf32>
        %0 = linalg.matmul ... {block32.lhs = {...}, block32.rhs = {...}} ins(%arg1, %arg2 : ...

The function holds the matmul as ``block32-raise`` leaves it. The matcher holds it as it stands in
the program, with the zero that it accumulates into where it is one. Matmuls that differ only in
their operands' values share both; ``block32.matches`` counts them. Everything else of the program
goes, but for declarations of the scales that are loaded.

A call of a composite that is a matmul is matched as a call. Its callee stays, under another name,
for the function to call; a declaration has the callee's name in the matcher.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Final

from iree.compiler import ir

from block32.dialects import layout
from block32.dialects.diagnostics import error_at
from block32.lowering.common.functions import declare_function
from block32.lowering.common.weight_layout import PLAIN
from block32.passes import canonical
from block32.passes.base import Pass, Report
from block32.passes.raise_ import candidates, leave_alone, match, raise_op
from block32.passes.raising.contraction import NotServedError
from block32.passes.symbols import LOAD_NAME, callee_of, global_of, symbol_of
from block32.passes.walk import operations_named

CALL_PREFIX: Final = "block32_call_"
MATCH_PREFIX: Final = "block32_match_"
MEANING_PREFIX: Final = "block32_meaning_"
#: On a matcher: how many ops of the program it stands for.
COUNT_ATTRIBUTE: Final = "block32.matches"

_MATCH_OP: Final = "transform.iree.match.cast_compatible_dag_from_root"


@dataclass
class IsolatePass(Pass):
    """Reduce a program to its distinct block-scaled matmuls."""

    argument: ClassVar[str] = "block32-isolate"
    summary: ClassVar[str] = "keep each distinct block-scaled matmul, with a matcher for a spec"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A marked matmul cannot be raised, or a weight's bytes are in another
                order than a spec's kernels read.
        """
        _refuse_layouts(module)
        program = [op.operation for op in module.body]
        symbols = ir.SymbolTable(module.operation)
        loaded: set[str] = set()
        called: set[str] = set()
        served = 0
        with ir.InsertionPoint(module.body):
            for group in _distinct(module, symbols, report):
                try:
                    function = _build_function(group.source, f"{CALL_PREFIX}{served}", symbols)
                    called.update(_callees(group.source.op))
                except NotServedError as reason:
                    leave_alone(group.source.op, reason, report)
                    continue
                loaded.update(_loaded_globals(function))
                _build_matcher(group, f"{MATCH_PREFIX}{served}")
                served += 1
        for op in program:
            if op.name == "util.global" and symbol_of(op) in loaded:
                _declare(op)
            elif symbol_of(op) in called:
                _rename_meaning(op, module)
            else:
                op.erase()
        module.operation.attributes["transform.with_named_sequence"] = ir.UnitAttr.get()


def _refuse_layouts(module: ir.Module) -> None:
    """A spec's kernels are given weights as they are, and cannot know in which order."""
    for op in operations_named(module, "util.global"):
        name = layout.of_global(op)
        if name != PLAIN:
            raise error_at(
                op, f"holds a weight that is stored as '{name}'; expected '{PLAIN}' for a spec"
            )


@dataclass(frozen=True)
class SourceOp:
    """A block-scaled matmul as it stands in the program.

    Attributes:
        op: The matmul; its last operand is what it accumulates into.
        zero: The ops that make that operand a zero, producers first; none for another init.
    """

    op: ir.Operation
    zero: tuple[ir.Operation, ...]

    @classmethod
    def of(cls, op: ir.Operation) -> SourceOp:
        """``op`` with the ops that make its init a zero."""
        if op.name == canonical.CALL_NAME:
            return cls(op, ())
        init = op.operands[len(op.operands) - 1]
        if not canonical.is_zero_fill(init):
            return cls(op, ())
        producer = init.owner.operation
        if producer.name == "linalg.fill":
            return cls(op, (producer.operands[0].owner.operation, producer))
        return cls(op, (producer,))

    def inputs(self) -> list[ir.Value]:
        """The values that ``rebuild`` needs in place of the program's."""
        operands = list(self.op.operands)
        match len(self.zero):
            case 0:
                return operands
            case 1:
                return operands[:-1]
            case _:
                return [*operands[:-1], self.zero[-1].operands[1]]

    def rebuild(self, arguments: list[ir.Value]) -> ir.Operation:
        """Build the matmul and its zero at the insertion point, over other inputs."""
        operands = list(arguments)
        if self.zero:
            zero = self.zero[0].clone()
            if len(self.zero) > 1:
                fill = self.zero[1].clone()
                fill.operands[0] = zero.results[0]
                fill.operands[1] = operands.pop()
                zero = fill
            operands.append(zero.results[0])
        op = self.op.clone()
        for position, operand in enumerate(operands):
            op.operands[position] = operand
        return op.operation

    def key(self) -> Hashable:
        """Equal for ops that one matcher finds."""
        return tuple(_structure(op) for op in (*self.zero, self.op))


@dataclass
class _Group:
    """The ops of one key: the first of them, and their number."""

    source: SourceOp
    count: int = 0


def _distinct(module: ir.Module, symbols: ir.SymbolTable, report: Report) -> list[_Group]:
    """The program's block-scaled matmuls by key, in program order."""
    groups: dict[Hashable, _Group] = {}
    for matmul in canonical.matmuls_of(module):
        if matmul.op.name == canonical.CALL_NAME:
            source = SourceOp.of(matmul.op)
            groups.setdefault(source.key(), _Group(source)).count += 1
    for op in candidates(module):
        try:
            contraction = match(op, symbols)
            if contraction is None:
                continue
            if contraction.from_producers:
                raise NotServedError("a spec matches single ops, and not what dequantises for them")
        except NotServedError as reason:
            leave_alone(op, reason, report)
            continue
        source = SourceOp.of(op)
        groups.setdefault(source.key(), _Group(source)).count += 1
    return list(groups.values())


def _structure(op: ir.Operation) -> Hashable:
    """What two ops have in common that differ only in their operands' values."""
    attributes = tuple(sorted(op.attributes.items(), key=lambda item: item[0]))
    types = tuple(value.type for value in (*op.operands, *op.results))
    return op.name, attributes, types, tuple(_body(region) for region in op.regions)


def _body(region: ir.Region) -> Hashable:
    """A region of one block without nested ones, its values numbered in order."""
    numbers: dict[ir.Value, int] = {}
    lines: list[Hashable] = []
    for block in region:
        for argument in block.arguments:
            numbers[argument] = len(numbers)
        for nested in block:
            op = nested.operation
            operands = tuple(numbers.get(operand, -1) for operand in op.operands)
            lines.append((_structure(op), operands))
            for result in op.results:
                numbers[result] = len(numbers)
    return tuple(lines)


def _build_function(source: SourceOp, symbol: str, symbols: ir.SymbolTable) -> ir.Operation:
    """Build ``util.func private @symbol(inputs) -> y`` around the matmul, and raise it there.

    Raises:
        NotServedError: It cannot be raised; nothing is left behind.
    """
    types = [value.type for value in source.inputs()]
    signature = ir.FunctionType.get(types, [source.op.results[0].type])
    with source.op.location:
        function = ir.Operation.create(
            "util.func",
            attributes={
                "sym_name": ir.StringAttr.get(symbol),
                "sym_visibility": ir.StringAttr.get("private"),
                "function_type": ir.TypeAttr.get(signature),
                "tied_operands": ir.ArrayAttr.get([ir.IntegerAttr.get(ir.IndexType.get(), -1)]),
            },
            regions=1,
        )
        block = function.regions[0].blocks.append(
            *types, arg_locs=[source.op.location] * len(types)
        )
        with ir.InsertionPoint(block):
            op = source.rebuild(list(block.arguments))
            ir.Operation.create("util.return", operands=list(op.results))
    if op.name == canonical.CALL_NAME:
        return function
    try:
        raise_op(op, symbols)
    except NotServedError:
        function.erase()
        raise
    return function


def _loaded_globals(function: ir.Operation) -> set[str]:
    return {global_of(op) for op in function.regions[0].blocks[0] if op.operation.name == LOAD_NAME}


def _callees(op: ir.Operation) -> list[str]:
    """The function that ``op`` calls, if it is a call."""
    if op.name != canonical.CALL_NAME:
        return []
    return [callee_of(op)]


def _rename_meaning(composite: ir.Operation, module: ir.Module) -> None:
    """Give a composite a name of ours, and declare the function that the program calls."""
    symbol = symbol_of(composite)
    signature = ir.FunctionType(ir.TypeAttr(composite.attributes["function_type"]).value)
    renamed = f"{MEANING_PREFIX}{symbol}"
    composite.attributes["sym_name"] = ir.StringAttr.get(renamed)
    for function in module.body:
        if symbol_of(function.operation).startswith(CALL_PREFIX):
            for op in function.operation.regions[0].blocks[0]:
                if symbol in _callees(op.operation):
                    op.operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(renamed)
    with ir.InsertionPoint(composite), composite.location:
        declare_function(symbol, signature.inputs, signature.results)


def _declare(definition: ir.Operation) -> None:
    """Leave of a global what names it: its value is the program's."""
    if "initial_value" in definition.attributes:
        del definition.attributes["initial_value"]
    definition.attributes["sym_visibility"] = ir.StringAttr.get("private")


def _build_matcher(group: _Group, symbol: str) -> None:
    """Build the named sequence that matches an op of the group, and gives its inputs and result."""
    any_op, any_value = (ir.Type.parse(f"!transform.{name}") for name in ("any_op", "any_value"))
    read_only = ir.DictAttr.get({"transform.readonly": ir.UnitAttr.get()})
    sequence = ir.Operation.create(
        "transform.named_sequence",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get([any_op], [any_value] * 2)),
            "arg_attrs": ir.ArrayAttr.get([read_only]),
            COUNT_ATTRIBUTE: ir.IntegerAttr.get(ir.IntegerType.get_signless(64), group.count),
        },
        regions=1,
        loc=group.source.op.location,
    )
    unknown = ir.Location.unknown()
    block = sequence.regions[0].blocks.append(any_op, arg_locs=[unknown])
    with ir.InsertionPoint(block):
        dag = ir.Operation.create(
            _MATCH_OP, results=[any_value] * 2, operands=[block.arguments[0]], regions=1
        )
        ir.Operation.create("transform.yield", operands=list(dag.results))
    types = [value.type for value in group.source.inputs()]
    body = dag.regions[0].blocks.append(*types, arg_locs=[unknown] * len(types))
    with ir.InsertionPoint(body):
        group.source.rebuild(list(body.arguments))
        ir.Operation.create("transform.yield")


def matched_op(matcher: ir.Operation) -> ir.Operation:
    """The matmul of a matcher: the last op before the terminator of what it compares with."""
    dag = matcher.regions[0].blocks[0].operations[0].operation
    operations = dag.regions[0].blocks[0].operations
    return operations[len(operations) - 2].operation
