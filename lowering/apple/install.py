# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Getting AIR into a module that IREE compiles.

IREE compiles a kernel's body to Metal source, and nothing but the final binary can be replaced
(replacing the variant earlier crashes the compiler of 3.13). So the body is a stub, the compiled
kernels ride along in an attribute of the module, and at phase hal they take the stub's place:

    module attributes {block32.air = [
        {name = "block32_kernels_0_gemm_tier0", bitcode = dense<...> : tensor<...xi8>, ...}]} {

The stub's function carries the hash of its bitcode: IREE merges executables that look alike, and
stubs would all look alike.
"""

from __future__ import annotations

import hashlib

import numpy as np
from iree.compiler import ir

from block32.lowering.apple import executable
from block32.lowering.apple.architecture import ARCHITECTURES
from block32.lowering.apple.executable import ExecutableError, Pipeline
from block32.lowering.apple.library import CompiledKernel, build_metallib
from block32.lowering.apple.signature import BufferParameter, KernelSignature

ATTRIBUTE = "block32.air"
HASH_ATTRIBUTE = "block32.air_sha256"


def attach(function: ir.Operation, kernel: CompiledKernel) -> None:
    """Records a compiled kernel for the stub ``function``; kernels have names of their own."""
    digest = hashlib.sha256(kernel.bitcode).hexdigest()
    function.attributes[HASH_ATTRIBUTE] = ir.StringAttr.get(digest)
    module = _outermost(function)
    recorded = (
        list(ir.ArrayAttr(module.attributes[ATTRIBUTE])) if ATTRIBUTE in module.attributes else []
    )
    module.attributes[ATTRIBUTE] = ir.ArrayAttr.get([*recorded, _to_attribute(kernel)])


def install(module: ir.Operation) -> int:
    """At phase hal: replaces the binary of every stub by the kernels recorded for it.

    Args:
        module: The module; its record is removed.

    Returns:
        How many executables got kernels.

    Raises:
        ExecutableError: A binary is not in Metal's format, or exports a stub with no kernel.
    """
    if ATTRIBUTE not in module.attributes:
        return 0
    records = [ir.DictAttr(record) for record in ir.ArrayAttr(module.attributes[ATTRIBUTE])]
    kernels = {ir.StringAttr(record["name"]).value: record for record in records}
    installed = 0
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name != "hal.executable":
            continue
        for inner in op.operation.regions[0].blocks[0].operations:
            if inner.operation.name == "hal.executable.binary":
                installed += _replace(inner.operation, kernels)
    del module.attributes[ATTRIBUTE]
    return installed


def _replace(binary: ir.Operation, kernels: dict[str, ir.DictAttr]) -> bool:
    """Replaces one binary where it holds stubs; says whether it did."""
    form = ir.StringAttr(binary.attributes["format"]).value
    if form != executable.FORMAT:
        raise ExecutableError(
            f"an executable has format '{form}'; the kernels of this target need "
            f"'{executable.FORMAT}', IREE's Metal device alone"
        )
    stubs = executable.read_pipelines(_bytes_of(binary.attributes["data"]))
    found = [pipeline.name in kernels for pipeline in stubs]
    if not any(found):
        return False  # one of IREE's own
    if not all(found):
        missing = stubs[found.index(False)].name
        raise ExecutableError(f"no kernel was recorded for the export '{missing}'")
    ordered = [_from_attribute(kernels[pipeline.name]) for pipeline in stubs]
    pipelines = [Pipeline.of(kernel.signature) for kernel in ordered]
    data = executable.build(build_metallib(ordered), pipelines)
    binary.attributes["data"] = _to_dense(data)
    return True


def _to_attribute(kernel: CompiledKernel) -> ir.Attribute:
    signature = kernel.signature
    pipeline = Pipeline.of(signature)
    i32 = ir.IntegerType.get_signless(32)
    return ir.DictAttr.get(
        {
            "name": ir.StringAttr.get(signature.name),
            "bitcode": _to_dense(kernel.bitcode),
            "threads": ir.DenseI32ArrayAttr.get(list(signature.threads)),
            "architecture": ir.StringAttr.get(signature.architecture.name),
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
        architecture=ARCHITECTURES[ir.StringAttr(record["architecture"]).value],
    )
    return CompiledKernel(signature, _bytes_of(record["bitcode"]))


def _to_dense(data: bytes) -> ir.Attribute:
    return ir.DenseElementsAttr.get(
        np.frombuffer(data, np.int8), type=ir.IntegerType.get_signless(8)
    )


def _bytes_of(attribute: ir.Attribute) -> bytes:
    return np.array(ir.DenseIntElementsAttr(attribute), np.int8).tobytes()


def _outermost(op: ir.Operation) -> ir.Operation:
    while op.parent is not None:
        op = op.parent.operation
    return op
