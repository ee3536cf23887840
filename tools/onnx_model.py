# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading ``.onnx`` files: what ``iree-import-onnx`` does, and E8M0 scales, which it does not take.

IREE 3.13's importer has no type for ``FLOAT8E8M0``. Constants of that type are written as f32
before it sees them: every byte is a power of two, or NaN, and has an exact f32 value.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError
from block32.tools.iree_compile import read_input

if TYPE_CHECKING:
    # The package is an extra that type checks go without.
    import onnx  # pyright: ignore[reportMissingImports]

SUFFIX = ".onnx"


def import_onnx(path: str) -> bytes:
    """The model as MLIR bytecode, as ``iree-compile`` takes it.

    Args:
        path: A model file; tensors that it keeps in files of their own are read from its folder.

    Raises:
        DiagnosticError: The package onnx is missing, the file is no valid model, or IREE's
            importer has no form for something in it.
    """
    return to_bytecode(_import(_load(path), path))


def read_model(path: str, stdin: bytes | None = None) -> bytes:
    """The bytes of a module: those of an MLIR file, ``stdin`` for ``-``, or an imported ``.onnx``.

    Raises:
        DiagnosticError: The file cannot be read, is empty, or cannot be imported.
    """
    return import_onnx(path) if Path(path).suffix == SUFFIX else read_input(path, stdin)


def read_argument(path: str) -> tuple[bytes, str]:
    """The module that a command line names, and its name for errors; ``-`` is standard input.

    Raises:
        DiagnosticError: As ``read_model``.
    """
    if path == "-":
        return read_model(path, sys.stdin.buffer.read()), "<stdin>"
    return read_model(path), path


def to_bytecode(module: ir.Module) -> bytes:
    """A module as MLIR bytecode, locations and resources with it."""
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()


def _load(path: str) -> onnx.ModelProto:
    """A checked model with the shapes of all its tensors."""
    try:
        import onnx  # pyright: ignore[reportMissingImports]
        from google.protobuf.message import DecodeError  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DiagnosticError(
            path, "reading ONNX models needs a package: pip install 'block32[onnx]'"
        ) from error
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DiagnosticError(path, f"cannot read the model: {reason}") from error
    except DecodeError as error:
        raise DiagnosticError(path, "expected an ONNX model, but the file is none") from error
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise DiagnosticError(path, f"the model is not valid: {_first_line(error)}") from error
    except ValueError as error:
        raise DiagnosticError(
            path,
            f"the model cannot be checked in memory: {_first_line(error)}",
            ("import it with iree-import-onnx --large-model --externalize-params",),
        ) from error
    for graph in _graphs(model.graph):
        for tensor in _constants(graph):
            _widen(tensor)
    return model


def _import(model: onnx.ModelProto, path: str) -> ir.Module:
    from iree.compiler.extras import onnx_importer

    info = onnx_importer.ModelInfo(model)
    try:
        module = info.create_module(context=ir.Context())
        onnx_importer.NodeImporter.define_function(info.main_graph, module.operation).import_all()
        module.operation.verify()
    except (onnx_importer.OnnxImportError, ir.MLIRError) as error:
        message = f"IREE's importer does not take the model: {_first_line(error)}"
        raise DiagnosticError(path, message) from error
    return module


def _graphs(graph: Any) -> list[Any]:
    """A graph and those of the branches and loops inside it."""
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found += _graphs(inner)
    return found


def _constants(graph: Any) -> list[Any]:
    """The tensors that a graph holds."""
    values = [
        attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.HasField("t")
    ]
    return [*graph.initializer, *values]


def _widen(tensor: Any) -> None:
    """Write a constant of E8M0 scales as f32."""
    import onnx  # pyright: ignore[reportMissingImports]

    if tensor.data_type != getattr(onnx.TensorProto, "FLOAT8E8M0", None):
        return
    codes = onnx.numpy_helper.to_array(tensor).view(np.uint8).astype(np.int32)
    values = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
