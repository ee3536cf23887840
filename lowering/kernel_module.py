# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The executable of one matmul: exports with their conditions and grids, kernels with bodies.

One ``hal.executable.source`` holds every kernel of a matmul: for each launch of the target's plan
one export a tier. The export of a tier that serves only small M has a condition and falls back to
the next tier's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from iree.compiler import ir
from iree.compiler.dialects import arith
from iree.compiler.passmanager import PassManager

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import IndexValue, as_value, constant
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import KernelPlan, Launch, Target


@dataclass(frozen=True)
class KernelSpec:
    """One matmul on one target: what an executable is made from, and what tells two apart."""

    problem: ScaledMatmul
    target: Target
    tiers: tuple[KernelTier, ...]

    def plan(self) -> KernelPlan:
        """The target's launches and buffers for these tiers."""
        return self.target.plan(self.problem, self.tiers)


#: Executables are named so; what follows tells two of one module apart.
EXECUTABLE_PREFIX = "block32_kernels"


def export_name(executable: str, launch: Launch, tier_index: int) -> str:
    """The symbol of a launch's kernel for one tier.

    IREE links the executables of a module into one library, so that the symbols of two must
    differ: they take over what follows ``EXECUTABLE_PREFIX`` in the executable's symbol.
    """
    return f"{launch.name}_tier{tier_index}{executable.removeprefix(EXECUTABLE_PREFIX)}"


def tiers_of(spec: KernelSpec, launch: Launch) -> list[int]:
    """The tiers that have a kernel for a launch, by number.

    All of them, where a launch of no workgroups is harmless. Elsewhere those that have workgroups:
    IREE crashes on an export that nothing dispatches. One row shows it, for every M.
    """
    return [
        index
        for index, tier in enumerate(spec.tiers)
        if spec.target.takes_empty_grids
        or spec.target.workgroups(spec.problem, tier, launch, 1)[0] != 0
    ]


def pipeline_layout(problem: ScaledMatmul, launch: Launch) -> ir.Attribute:
    """The ``#hal.pipeline.layout`` of a launch: M as a constant when dynamic, then the bindings."""
    read_only = "#hal.pipeline.binding<storage_buffer, ReadOnly>"
    writable = "#hal.pipeline.binding<storage_buffer>"
    bindings = [read_only] * len(launch.reads)
    bindings += [writable] * (len(launch.updates) + len(launch.writes))
    constants = "constants = 1, " if problem.m is None else ""
    return ir.Attribute.parse(
        f"#hal.pipeline.layout<{constants}bindings = [{', '.join(bindings)}]>"
    )


def build_executable(spec: KernelSpec, symbol: str) -> ir.Operation:
    """Build the executable at the insertion point; its kernels are declarations without bodies."""
    executable = ir.Operation.create(
        "hal.executable.source",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "sym_visibility": ir.StringAttr.get("private"),
        },
        regions=1,
    )
    body = executable.regions[0].blocks.append()
    with ir.InsertionPoint(body):
        ordinal = 0
        for launch in spec.plan().launches:
            tiers = tiers_of(spec, launch)
            for tier_index, following in zip_longest(tiers, tiers[1:]):
                _build_export(spec, symbol, launch, tier_index, following, ordinal)
                ordinal += 1
        kernels = ir.Operation.create("builtin.module", regions=1)
        kernels_block = kernels.regions[0].blocks.append()
        ir.Operation.create("hal.executable.source_end")
    with ir.InsertionPoint(kernels_block):
        for launch in spec.plan().launches:
            for tier_index in tiers_of(spec, launch):
                _declare_kernel(export_name(symbol, launch, tier_index))
    return executable


def _build_export(
    spec: KernelSpec,
    executable: str,
    launch: Launch,
    tier_index: int,
    following: int | None,
    ordinal: int,
) -> None:
    """One ``hal.executable.export``: its grid, and its condition unless no tier follows."""
    tier = spec.tiers[tier_index]
    attributes = {
        "sym_name": ir.StringAttr.get(export_name(executable, launch, tier_index)),
        "sym_visibility": ir.StringAttr.get("public"),
        "ordinal": ir.IntegerAttr.get(ir.IndexType.get(), ordinal),
        "layout": pipeline_layout(spec.problem, launch),
    }
    if following is not None:
        fallback = export_name(executable, launch, following)
        attributes["condition_fallback"] = ir.FlatSymbolRefAttr.get(fallback)
    memory = spec.target.workgroup_memory(spec.problem, tier, launch)
    if memory:
        attributes["workgroup_local_memory"] = ir.IntegerAttr.get(ir.IndexType.get(), memory)
    export = ir.Operation.create("hal.executable.export", attributes=attributes, regions=2)
    arguments = [ir.Type.parse("!hal.device"), ir.IndexType.get()]
    locations = [ir.Location.unknown()] * 2
    count, condition = export.regions
    if following is not None:
        assert tier.max_m is not None
        block = condition.blocks.append(*arguments, arg_locs=locations)
        with ir.InsertionPoint(block):
            fits = arith.cmpi(arith.CmpIPredicate.ule, block.arguments[1], constant(tier.max_m))
            ir.Operation.create("hal.return", operands=[fits])
    block = count.blocks.append(*arguments, arg_locs=locations)
    with ir.InsertionPoint(block):
        m = spec.problem.m if spec.problem.m is not None else IndexValue(block.arguments[1])
        grid = spec.target.workgroups(spec.problem, tier, launch, m)
        ir.Operation.create("hal.return", operands=[as_value(extent) for extent in grid])


def _declare_kernel(name: str) -> None:
    ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get(name),
            "sym_visibility": ir.StringAttr.get("private"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get([], [])),
        },
        regions=1,
    )


def emit_kernels(spec: KernelSpec, executable: ir.Operation) -> None:
    """Give every kernel of ``executable`` its body."""
    functions = list(kernel_declarations(executable).regions[0].blocks[0])
    kernels = [
        (launch, spec.tiers[index])
        for launch in spec.plan().launches
        for index in tiers_of(spec, launch)
    ]
    for function, (launch, tier) in zip(functions, kernels, strict=True):
        _emit_kernel(spec, launch, tier, function.operation)
    if spec.target.merges_equal_ops:
        PassManager.parse("builtin.module(func.func(cse))").run(kernel_declarations(executable))


def kernel_declarations(executable: ir.Operation) -> ir.Operation:
    """The ``builtin.module`` inside an executable, where its kernels are."""
    return next(
        op.operation
        for op in executable.regions[0].blocks[0]
        if op.operation.name == "builtin.module"
    )


def _emit_kernel(
    spec: KernelSpec, launch: Launch, tier: KernelTier, function: ir.Operation
) -> None:
    info = spec.target.translation_info(spec.problem, tier, launch)
    function.attributes["translation_info"] = ir.Attribute.parse(info)
    function.attributes["sym_visibility"] = ir.StringAttr.get("public")
    block = function.regions[0].blocks.append()
    with ir.InsertionPoint(block):
        layout = pipeline_layout(spec.problem, launch)
        context = KernelContext(spec.problem, layout, launch.bindings)
        spec.target.emit(spec.problem, tier, launch, context)
        ir.Operation.create("func.return")
