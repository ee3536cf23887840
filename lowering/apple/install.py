# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Getting AIR into a module that IREE compiles.

IREE compiles a kernel's body to Metal source, and nothing but the final binary can be replaced
(replacing the variant earlier crashes the compiler of 3.13). So the body is a stub, the compiled
kernels ride along in an attribute of the module, and at phase hal they take the stub's place:

    module attributes {block32.air = {block32_kernels_0 = [
        {name = "gemm_tier0", bitcode = dense<...> : tensor<...xi8>, constants = 1 : i32, ...}]}} {

The stub's function carries the hash of its bitcode: IREE merges executables that look alike, and
stubs would all look alike.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from iree.compiler import ir

from block32.lowering.apple import executable
from block32.lowering.apple.executable import ExecutableError, Pipeline
from block32.lowering.apple.library import CompiledKernel, build_metallib
from block32.lowering.apple.signature import BufferParameter, KernelSignature

ATTRIBUTE = "block32.air"
HASH_ATTRIBUTE = "block32.air_sha256"


def attach(function: ir.Operation, kernel: CompiledKernel) -> None:
    """Records a compiled kernel for the stub ``function`` of a ``hal.executable.source``."""
    digest = hashlib.sha256(kernel.bitcode).hexdigest()
    function.attributes[HASH_ATTRIBUTE] = ir.StringAttr.get(digest)
    source = _enclosing(function, "hal.executable.source")
    symbol = ir.StringAttr(source.attributes["sym_name"]).value
    module = _outermost(function)
    recorded = _recorded(module)
    recorded.setdefault(symbol, []).append(_to_attribute(kernel))
    module.attributes[ATTRIBUTE] = ir.DictAttr.get(
        {name: ir.ArrayAttr.get(kernels) for name, kernels in recorded.items()}
    )


def install(module: ir.Operation) -> int:
    """At phase hal: replaces every stub's binary by the kernels recorded for it.

    Args:
        module: the module; its record is removed.

    Returns:
        How many executables got kernels.

    Raises:
        ExecutableError: a binary is not in Metal's format.
    """
    recorded = _recorded(module)
    installed = 0
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name != "hal.executable":
            continue
        symbol = ir.StringAttr(op.operation.attributes["sym_name"]).value
        if symbol not in recorded:
            continue
        kernels = [_from_attribute(ir.DictAttr(kernel)) for kernel in recorded[symbol]]
        for inner in op.operation.regions[0].blocks[0].operations:
            if inner.operation.name == "hal.executable.binary":
                _replace(inner.operation, kernels)
                installed += 1
    if ATTRIBUTE in module.attributes:
        del module.attributes[ATTRIBUTE]
    return installed


def _replace(binary: ir.Operation, kernels: list[CompiledKernel]) -> None:
    form = ir.StringAttr(binary.attributes["format"]).value
    if form != executable.FORMAT:
        raise ExecutableError(
            f"executable has format '{form}'; kernels of this target need '{executable.FORMAT}'"
        )
    stub = executable.read(_bytes_of(binary.attributes["data"]))
    by_name = {kernel.signature.name: kernel for kernel in kernels}
    missing = [p.name for p in stub.pipelines if p.name not in by_name]
    if missing:
        raise ExecutableError(f"no kernel was recorded for the export '{missing[0]}'")
    ordered = [by_name[pipeline.name] for pipeline in stub.pipelines]
    pipelines = [Pipeline.of(kernel.signature) for kernel in ordered]
    data = executable.build(build_metallib(ordered), pipelines)
    binary.attributes["data"] = _to_dense(data)


def _recorded(module: ir.Operation) -> dict[str, list[ir.Attribute]]:
    if ATTRIBUTE not in module.attributes:
        return {}
    record = ir.DictAttr(module.attributes[ATTRIBUTE])
    return {entry.name: list(ir.ArrayAttr(entry.attr)) for entry in _entries(record)}


def _entries(record: ir.DictAttr) -> list[Any]:
    return [record[index] for index in range(len(record))]


def _to_attribute(kernel: CompiledKernel) -> ir.Attribute:
    signature = kernel.signature
    pipeline = Pipeline.of(signature)
    i32 = ir.IntegerType.get_signless(32)
    return ir.DictAttr.get(
        {
            "name": ir.StringAttr.get(signature.name),
            "bitcode": _to_dense(kernel.bitcode),
            "threads": ir.DenseI32ArrayAttr.get(list(signature.threads)),
            "constants": ir.IntegerAttr.get(i32, signature.constants),
            "buffers": ir.ArrayAttr.get([ir.StringAttr.get(b.name) for b in signature.buffers]),
            "elements": ir.ArrayAttr.get([ir.StringAttr.get(b.element) for b in signature.buffers]),
            "bindings": ir.DenseI64ArrayAttr.get(list(pipeline.bindings)),
        }
    )


def _from_attribute(record: ir.DictAttr) -> CompiledKernel:
    buffers = tuple(
        BufferParameter(ir.StringAttr(name).value, ir.StringAttr(element).value, not read_only)
        for name, element, read_only in zip(
            ir.ArrayAttr(record["buffers"]),
            ir.ArrayAttr(record["elements"]),
            ir.DenseI64ArrayAttr(record["bindings"]),
            strict=True,
        )
    )
    x, y, z = ir.DenseI32ArrayAttr(record["threads"])
    signature = KernelSignature(
        name=ir.StringAttr(record["name"]).value,
        buffers=buffers,
        constants=ir.IntegerAttr(record["constants"]).value,
        threads=(x, y, z),
    )
    return CompiledKernel(signature, _bytes_of(record["bitcode"]))


def _to_dense(data: bytes) -> ir.Attribute:
    return ir.DenseElementsAttr.get(
        np.frombuffer(data, np.int8), type=ir.IntegerType.get_signless(8)
    )


def _bytes_of(attribute: ir.Attribute) -> bytes:
    return np.array(ir.DenseIntElementsAttr(attribute), np.int8).tobytes()


def _enclosing(op: ir.Operation, name: str) -> ir.Operation:
    while op.name != name:
        if op.parent is None:
            raise ExecutableError(f"kernel is not inside a {name}")
        op = op.parent.operation
    return op


def _outermost(op: ir.Operation) -> ir.Operation:
    while op.parent is not None:
        op = op.parent.operation
    return op
