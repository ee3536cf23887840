# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The host side of a matmul: a private function that records its dispatches.

Both ways into a program (the compile pipeline and a transform spec) call the same function, so
both end in the same kernels. It is inlined: IREE would do so late, and copy the operands of the
call before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, cf, scf, tensor

from block32.lowering.common.functions import (
    build_return,
    call,
    index_array,
    inline_call,
    private_function,
)
from block32.lowering.common.index import (
    Condition,
    Index,
    IndexValue,
    as_value,
    both,
    constant,
    either,
    less,
)
from block32.lowering.kernel_module import (
    KernelSpec,
    build_executable,
    emit_kernels,
    export_name,
    tiers_of,
)
from block32.lowering.problem import SCALE_TYPE, ScaledMatmul
from block32.lowering.target import RESULT, Launch

#: How the message of a check of rows begins.
CHECK_PREFIX = "expected x and its"

#: Operands that have a row for each row of x.
_OPERANDS_WITH_ROWS = {
    "lhs_scale": "scales",
    "row_scale": "row scales",
    "residual": "residual",
    "init": "initial value",
}


def operand_types(problem: ScaledMatmul) -> dict[str, ir.Type]:
    """The tensor type of each argument of the host function, by ABI name.

    MXFP4 weights are packed bytes, since IREE passes no 4-bit floats between functions.
    """
    dynamic = ir.ShapedType.get_dynamic_size()
    m = dynamic if problem.m is None else problem.m
    scale = ir.Type.parse(SCALE_TYPE)
    experts = [problem.grouping.experts] if problem.grouping else []
    types = {
        "lhs": _storage_type([m, problem.k], problem.lhs),
        "rhs": _storage_type([*experts, problem.n, problem.k], problem.rhs),
        "lhs_scale": ir.RankedTensorType.get([m, problem.k_blocks], scale),
        "rhs_scale": ir.RankedTensorType.get([*experts, *problem.rhs_scale_shape], scale),
        "init": result_type(problem),
    }
    if problem.grouping:
        i32 = ir.IntegerType.get_signless(32)
        types["offsets"] = ir.RankedTensorType.get([problem.grouping.groups + 1], i32)
        types["expert_ids"] = ir.RankedTensorType.get([problem.grouping.groups], i32)
    epilogue = problem.epilogue
    f32 = ir.F32Type.get()
    types["row_scale"] = ir.RankedTensorType.get([m], f32)
    types["scale"] = ir.RankedTensorType.get([1], f32)
    if epilogue.bias:
        types["bias"] = ir.RankedTensorType.get([problem.n], ir.Type.parse(epilogue.bias))
    if epilogue.residual:
        types["residual"] = ir.RankedTensorType.get(
            [m, problem.n], ir.Type.parse(epilogue.residual)
        )
    return {name: types[name] for name in problem.argument_names}


def result_type(problem: ScaledMatmul) -> ir.Type:
    """The tensor type of y."""
    m = ir.ShapedType.get_dynamic_size() if problem.m is None else problem.m
    return ir.RankedTensorType.get([m, problem.n], ir.Type.parse(problem.result))


def _storage_type(shape: list[int], element: str) -> ir.Type:
    if element == "f4E2M1FN":
        return ir.RankedTensorType.get([*shape[:-1], (shape[-1] + 1) // 2], _i8())
    return ir.RankedTensorType.get(shape, ir.Type.parse(element))


def _i8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def build_host_function(spec: KernelSpec, symbol: str, executable: str) -> ir.Operation:
    """Build ``util.func private @symbol(operands) -> y`` at the insertion point."""
    types = operand_types(spec.problem)
    result = result_type(spec.problem)
    function, block = private_function(symbol, list(types.values()), [result])
    with ir.InsertionPoint(block):
        operands = dict(zip(types, block.arguments, strict=True))
        m = _rows(spec.problem, operands["lhs"])
        _check_rows(operands, m)
        y = _guarded_dispatches(spec, executable, operands, m)
        build_return([y])
    return function


def _rows(problem: ScaledMatmul, lhs: ir.Value) -> Index:
    if problem.m is not None:
        return problem.m
    return IndexValue(tensor.dim(lhs, constant(0)))


def _check_rows(operands: dict[str, ir.Value], m: Index) -> None:
    """Fail at run time where operands of x's rows have another number of them.

    A kernel would read past their end. IREE removes the check where both come from one value.
    """
    if isinstance(m, int):
        return
    for name, description in _OPERANDS_WITH_ROWS.items():
        if name in operands:
            rows = tensor.dim(operands[name], constant(0))
            is_equal = arith.cmpi(arith.CmpIPredicate.eq, rows, m.value)
            cf.assert_(is_equal, f"{CHECK_PREFIX} {description} to have the same number of rows")


def _guarded_dispatches(
    spec: KernelSpec, executable: str, operands: dict[str, ir.Value], m: Index
) -> ir.Value:
    """The dispatches, behind a branch for M = 0 where the device needs one."""
    grouping = spec.problem.grouping
    if grouping and (grouping.groups == 0 or spec.problem.m == 0):
        return operands["init"]
    dispatches = _Dispatches(spec, executable, m)
    if not spec.target.guards_empty or isinstance(m, int):
        return dispatches.build(operands)
    is_empty = arith.cmpi(arith.CmpIPredicate.eq, m.value, constant(0))
    branch = scf.IfOp(is_empty, [result_type(spec.problem)], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        if spec.problem.grouping:
            scf.yield_([operands["init"]])
        else:
            element = ir.Type.parse(spec.problem.result)
            scf.yield_([tensor.empty([m.value, spec.problem.n], element)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([dispatches.build(operands)])
    return branch.results[0]


@dataclass(frozen=True)
class _Dispatches:
    """Builds a plan's launches as ``flow.dispatch`` ops for one call."""

    spec: KernelSpec
    executable: str
    m: Index

    def build(self, operands: dict[str, ir.Value]) -> ir.Value:
        """The result of all launches, without those that M has no kernels for."""
        values = dict(operands)
        if self.spec.problem.grouping:
            launches = self.spec.plan().launches
            assert all(RESULT not in launch.writes for launch in launches), (
                "a launch of a grouped matmul updates the result"
            )
            values[RESULT] = values.pop("init")
        for name, buffer in self.spec.plan().buffers.items():
            if buffer.zeroed:
                values[name] = self._zeros(name)
        for launch in self.spec.plan().launches:
            values.update(self._launch(launch, values))
        return values[RESULT]

    def _launch(self, launch: Launch, values: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """What a launch leaves: behind a branch where there are M that it has no kernel for.

        The branch is around this launch alone. Two dispatches of one executable, one in each
        branch, share blocks in IREE, and on their way through these M was lost (IREE 3.13, cuda).
        """
        tiers = tiers_of(self.spec, launch)
        if not tiers:
            return {}
        if len(tiers) == len(self.spec.tiers):
            return self._dispatch(launch, values)
        outputs = launch.updates + launch.writes
        types = [self._buffer_type(name) for name in outputs]
        branch = scf.IfOp(self._has_kernel(tiers), types, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            results = self._dispatch(launch, values)
            scf.yield_([results[name] for name in outputs])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([values.get(name) or self._anything(name) for name in outputs])
        return dict(zip(outputs, branch.results, strict=True))

    def _has_kernel(self, tiers: list[int]) -> ir.Value:
        """Whether M is one that a tier among ``tiers`` serves."""
        assert not isinstance(self.m, int), "a known M has one tier"
        condition: Condition = False
        for index in tiers:
            above = self.spec.tiers[index - 1].max_m if index else None
            limit = self.spec.tiers[index].max_m
            is_served = both(
                less(above, self.m) if above is not None else True,
                less(self.m, limit + 1) if limit is not None else True,
            )
            condition = either(condition, is_served)
        assert isinstance(condition, ir.Value)
        return condition

    def _anything(self, name: str) -> ir.Value:
        buffer_type = self._buffer_type(name)
        return ir.Operation.create(
            "flow.tensor.empty", results=[buffer_type], operands=self._dynamic_sizes(name)
        ).result

    def _buffer_type(self, name: str) -> ir.Type:
        if name == RESULT:
            return result_type(self.spec.problem)
        buffer = self.spec.plan().buffers[name]
        size = buffer.size(self.m)
        extent = size if isinstance(size, int) else ir.ShapedType.get_dynamic_size()
        return ir.RankedTensorType.get([extent], ir.Type.parse(buffer.element))

    def _dynamic_sizes(self, name: str) -> list[ir.Value]:
        """The sizes that ``flow.dispatch`` needs for a tensor of this name."""
        if name in self.spec.plan().buffers:
            size = self.spec.plan().buffers[name].size(self.m)
            return [] if isinstance(size, int) else [size.value]
        has_rows = name in ("lhs", RESULT, *_OPERANDS_WITH_ROWS)
        return [self.m.value] if has_rows and not isinstance(self.m, int) else []

    def _zeros(self, name: str) -> ir.Value:
        buffer_type = self._buffer_type(name)
        element = ir.RankedTensorType(buffer_type).element_type
        zero = arith.constant(element, 0)
        splat = ir.Operation.create(
            "flow.tensor.splat", results=[buffer_type], operands=[zero, *self._dynamic_sizes(name)]
        )
        return splat.result

    def _dispatch(self, launch: Launch, values: dict[str, ir.Value]) -> dict[str, ir.Value]:
        workload = [as_value(self.m)]
        arguments = [] if isinstance(self.m, int) else [self._m_as_i32()]
        arguments += [values[name] for name in launch.reads + launch.updates]
        argument_sizes = [
            size for name in launch.reads + launch.updates for size in self._dynamic_sizes(name)
        ]
        outputs = launch.updates + launch.writes
        output_sizes = [size for name in outputs for size in self._dynamic_sizes(name)]
        first_update = len(arguments) - len(launch.updates)
        tied = [first_update + i for i in range(len(launch.updates))] + [-1] * len(launch.writes)
        first = tiers_of(self.spec, launch)[0]
        entry = ir.SymbolRefAttr.get([self.executable, export_name(self.executable, launch, first)])
        segments = [len(workload), len(arguments), len(argument_sizes), len(output_sizes)]
        dispatch = ir.Operation.create(
            "flow.dispatch",
            results=[self._buffer_type(name) for name in outputs],
            operands=[*workload, *arguments, *argument_sizes, *output_sizes],
            attributes={
                "entry_points": ir.ArrayAttr.get([entry]),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get(segments),
                "tied_operands": index_array(tied),
            },
        )
        return dict(zip(outputs, dispatch.results, strict=True))

    def _m_as_i32(self) -> ir.Value:
        return arith.index_cast(ir.IntegerType.get_signless(32), as_value(self.m))


class StandaloneModule:
    """A module with the kernels of one matmul and functions that call them.

    Needs an open context and location. Calls become dispatches in ``finish``, as in a program that
    is compiled: IREE would inline late, and copy what a call is given.

    Attributes:
        module: The module; whole once ``finish`` ran.
    """

    def __init__(self, spec: KernelSpec):
        """Begin a module for ``spec``."""
        self.module = ir.Module.create()
        self._spec = spec
        self._calls: list[ir.Operation] = []
        with ir.InsertionPoint(self.module.body):
            self._executable = build_executable(spec, "block32_kernels")
            self._host = build_host_function(spec, "block32_matmul", "block32_kernels")

    def add_function(
        self, name: str, arguments: Sequence[ir.Type], results: Sequence[ir.Type]
    ) -> ir.Block:
        """Add a public ``func.func``; its entry block, without ops."""
        signature = ir.FunctionType.get(list(arguments), list(results))
        with ir.InsertionPoint(self.module.body):
            function = ir.Operation.create(
                "func.func",
                attributes={
                    "sym_name": ir.StringAttr.get(name),
                    "function_type": ir.TypeAttr.get(signature),
                },
                regions=1,
            )
        locations = [ir.Location.unknown()] * len(arguments)
        return function.regions[0].blocks.append(*arguments, arg_locs=locations)

    def call(self, operands: Sequence[ir.Value]) -> ir.Value:
        """Compute y at the insertion point; ``operands`` as ``operand_types`` orders them."""
        y = build_call("block32_matmul", list(operands), result_type(self._spec.problem))
        self._calls.append(y.owner)
        return y

    def finish(self) -> ir.Module:
        """Turn calls into dispatches and write the kernels; the module."""
        for call_op in self._calls:
            inline_call(call_op, self._host)
        self._host.erase()
        emit_kernels(self._spec, self._executable)
        return self.module


def build_standalone_module(spec: KernelSpec, function: str = "main") -> ir.Module:
    """A module with one public function that computes ``spec``: for tools, tests and benchmarks.

    Needs an open context and location. The function takes the operands of
    ``spec.problem.argument_names`` and returns y.
    """
    standalone = StandaloneModule(spec)
    types = list(operand_types(spec.problem).values())
    block = standalone.add_function(function, types, [result_type(spec.problem)])
    with ir.InsertionPoint(block):
        y = standalone.call(list(block.arguments))
        ir.Operation.create("func.return", operands=[y])
    return standalone.finish()


def build_call(callee: str, operands: list[ir.Value], result: ir.Type) -> ir.Value:
    """``util.call @callee(operands) -> result``."""
    return call(callee, operands, [result]).result
