# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A program whose functions are single kernels: for checks on a device, tests and benchmarks.

It reaches what no block-scaled matmul in a model asks for: weights without scales, transposed
operands, the grouped form. Each function takes the kernel's buffers in binding order, fp8 operands
and scales as bytes, and returns y. The grouped form updates its last operand in place, since rows
of no group keep what they held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, tensor

from block32.lowering.apple import dense, gemv, grouped, install
from block32.lowering.apple.dense import next_power_of_two
from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import KernelSignature
from block32.lowering.common.index import Index, IndexValue, as_value, ceil_div, constant
from block32.lowering.problem import Grouping

#: The pipeline that IREE runs over the stubs, which have nothing to lower.
_STUB_PIPELINE = "#iree_gpu.spirv_pipeline<BaseLowering>"


def stub_translation_info(threads: tuple[int, int, int]) -> str:
    """The ``#iree_codegen.translation_info`` of a stub, as text."""
    size = ", ".join(map(str, threads))
    return f"#iree_codegen.translation_info<pipeline = {_STUB_PIPELINE} workgroup_size = [{size}]>"


@dataclass(frozen=True)
class Entry:
    """One function of a program.

    Attributes:
        matmul: What it computes; M comes at run time.
        form: ``tiled``, ``gemv`` (M = 1) or ``grouped``.
    """

    matmul: Matmul
    form: str


def build_program(entries: Mapping[str, Entry]) -> ir.Module:
    """A module with one public function an entry, kernels attached.

    Raises:
        KernelError: A form cannot compute its matmul.
        LlvmError: The package llvmlite is missing or of the wrong version.
    """
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            for name, entry in entries.items():
                _build_entry(name, entry)
        module.operation.verify()
        return module


def _build_entry(name: str, entry: Entry) -> None:
    kernel = compile_matmul(entry.matmul, entry.form, f"{name}_kernel")
    signature = kernel.signature
    executable = _operation(
        "hal.executable.source", {"sym_name": _string(f"{name}_executable")}, private=True
    )
    with ir.InsertionPoint(executable.regions[0].blocks.append()):
        _build_export(entry, signature)
        kernels = ir.Operation.create("builtin.module", regions=1)
        ir.Operation.create("hal.executable.source_end")
    with ir.InsertionPoint(kernels.regions[0].blocks.append()):
        info = ir.Attribute.parse(stub_translation_info(signature.threads))
        stub_type = ir.TypeAttr.get(ir.FunctionType.get([], []))
        attributes = {"sym_name": _string(signature.name), "function_type": stub_type}
        stub = _operation("func.func", {**attributes, "translation_info": info})
        with ir.InsertionPoint(stub.regions[0].blocks.append()):
            ir.Operation.create("func.return")
    install.attach(stub, kernel)
    _build_function(name, entry, signature)


def _operation(
    name: str, attributes: dict[str, ir.Attribute], regions: int = 1, private: bool = False
) -> ir.Operation:
    if private:
        attributes = {**attributes, "sym_visibility": _string("private")}
    return ir.Operation.create(name, attributes=attributes, regions=regions)


def _string(text: str) -> ir.Attribute:
    return ir.StringAttr.get(text)


def _layout(signature: KernelSignature) -> ir.Attribute:
    bindings = ", ".join(
        "#hal.pipeline.binding<storage_buffer>"
        if buffer.writable
        else "#hal.pipeline.binding<storage_buffer, ReadOnly>"
        for buffer in signature.buffers
    )
    constants = f"constants = {signature.constants}, " if signature.constants else ""
    return ir.Attribute.parse(f"#hal.pipeline.layout<{constants}bindings = [{bindings}]>")


def _build_export(entry: Entry, signature: KernelSignature) -> None:
    """The export; its workload is the number of rows."""
    index = ir.IndexType.get()
    attributes = {
        "sym_name": _string(signature.name),
        "sym_visibility": _string("public"),
        "ordinal": ir.IntegerAttr.get(index, 0),
        "layout": _layout(signature),
    }
    export = _operation("hal.executable.export", attributes, regions=2)
    kinds = [ir.Type.parse("!hal.device"), index]
    locations = [ir.Location.unknown()] * len(kinds)
    block = export.regions[0].blocks.append(*kinds, arg_locs=locations)
    with ir.InsertionPoint(block):
        extents = _grid(entry, IndexValue(block.arguments[1]))
        ir.Operation.create("hal.return", operands=[as_value(extent) for extent in extents])


def _grid(entry: Entry, rows: Index) -> tuple[Index, Index, Index]:
    columns = entry.matmul.n
    if entry.form == "gemv":
        return ceil_div(columns, gemv.COLUMNS) * rows, 1, 1
    if entry.form == "grouped":
        return grouped.grid(entry.matmul, rows)
    tiles_m, tiles_n = ceil_div(rows, dense.TILE), ceil_div(columns, dense.TILE)
    return next_power_of_two(tiles_m) * next_power_of_two(tiles_n), 1, 1


def _tensor_types(matmul: Matmul, signature: KernelSignature) -> list[ir.Type]:
    """The tensor of each buffer, the result last."""
    dynamic = ir.ShapedType.get_dynamic_size()
    n, k, blocks = matmul.n, matmul.k, matmul.k_blocks
    grouping = matmul.grouping or Grouping(0, 0)
    experts = [grouping.experts] if matmul.grouping else []
    shapes = {
        "lhs": [k, dynamic] if matmul.lhs_transposed else [dynamic, k],
        "rhs": [*experts, *([k, n] if matmul.rhs_transposed else [n, k])],
        "lhs_scale": [dynamic, blocks],
        "rhs_scale": [*experts, matmul.rhs_scale_rows, blocks],
        "offsets": [grouping.groups + 1],
        "expert_ids": [grouping.groups],
        "expert_scale": [grouping.experts],
        "row_scale": [dynamic],
        "scale": [1],
        "bias": [n],
        "residual": [dynamic, n],
        "result": [dynamic, n],
    }
    return [
        ir.RankedTensorType.get(shapes[buffer.name], ir.Type.parse(buffer.element))
        for buffer in signature.buffers
    ]


def _build_function(name: str, entry: Entry, signature: KernelSignature) -> None:
    types = _tensor_types(entry.matmul, signature)
    result = types[-1]
    inputs = types if entry.matmul.grouping else types[:-1]
    function = _operation(
        "func.func",
        {
            "sym_name": _string(name),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, [result])),
        },
    )
    locations = [ir.Location.unknown()] * len(inputs)
    block = function.regions[0].blocks.append(*inputs, arg_locs=locations)
    with ir.InsertionPoint(block):
        y = _dispatch(name, entry, signature, list(block.arguments), result)
        ir.Operation.create("func.return", operands=[y])


def _dispatch(
    name: str,
    entry: Entry,
    signature: KernelSignature,
    operands: list[ir.Value],
    result: ir.Type,
) -> ir.Value:
    index, matmul = ir.IndexType.get(), entry.matmul
    row_axis = 1 if matmul.lhs_transposed else 0
    rows = tensor.dim(operands[0], constant(row_axis))
    arguments = [arith.index_cast(ir.IntegerType.get_signless(32), rows), *operands]
    argument_sizes: list[ir.Value] = []
    for operand in operands:
        kind = ir.RankedTensorType(operand.type)
        argument_sizes += [
            tensor.dim(operand, constant(axis))
            for axis in range(kind.rank)
            if kind.is_dynamic_dim(axis)
        ]
    entry_point = ir.SymbolRefAttr.get([f"{name}_executable", signature.name])
    tied = len(arguments) - 1 if matmul.grouping else -1
    segments = [1, len(arguments), len(argument_sizes), 1]
    dispatch = ir.Operation.create(
        "flow.dispatch",
        results=[result],
        operands=[rows, *arguments, *argument_sizes, rows],
        attributes={
            "entry_points": ir.ArrayAttr.get([entry_point]),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get(segments),
            "tied_operands": ir.ArrayAttr.get([ir.IntegerAttr.get(index, tied)]),
        },
    )
    return dispatch.result
