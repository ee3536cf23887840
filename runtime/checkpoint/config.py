# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a checkpoint's configuration says of its quantisation.

Two files may say it: ``quantization_config`` in ``config.json``, with ``quant_method`` and
``weight_block_size`` (DeepSeek and those who follow it), and ``quantization`` in
``hf_quant_config.json``, with ``quant_algo`` and ``group_size``. It is a hint: where the shapes of
the tensors say otherwise, the shapes are right.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.entry import opened
from block32.runtime.strict_json import MOST_BYTES, JsonError, parse_json, shown

#: The files, and the field of each that speaks of quantisation.
_SOURCES: Final = (
    ("config.json", "quantization_config"),
    ("hf_quant_config.json", "quantization"),
)


@dataclass(frozen=True)
class Declared:
    """What the configuration says.

    Attributes:
        path: The file that says it.
        method: ``quant_method`` or ``quant_algo``, such as ``fp8`` or ``MXFP8``; may be empty.
        block: Rows and columns of a weight that share a scale, where it says so.
    """

    path: Path
    method: str
    block: tuple[int, int] | None


def read_declared(folder: Path) -> Declared | None:
    """The configuration beside a checkpoint's files; None where there is none.

    Raises:
        DiagnosticError: A file is no JSON, or a field is not of the kind that it has to be.
    """
    for name, field in _SOURCES:
        path = folder / name
        if path.exists():
            fields = read_json(path).get(field)
            if fields is not None:
                return _parse(path, field, fields)
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        DiagnosticError: It cannot be read, is too large, or is no JSON object.
    """
    with opened(path) as (stream, size):
        if size > MOST_BYTES:
            raise DiagnosticError(os.fspath(path), f"the file has {size} bytes; no JSON is as long")
        content = stream.read(size)
    try:
        return parse_json(content, "the file")
    except JsonError as error:
        raise DiagnosticError(os.fspath(path), str(error)) from error


def _parse(path: Path, field: str, fields: Any) -> Declared:
    if not isinstance(fields, dict):
        raise DiagnosticError(os.fspath(path), f"expected an object as '{field}'")
    method = fields.get("quant_method") or fields.get("quant_algo") or ""
    if not isinstance(method, str):
        raise DiagnosticError(os.fspath(path), f"expected a name as the method in '{field}'")
    if fields.get("weight_block_size") is not None:
        return Declared(path, shown(method), _block(path, fields["weight_block_size"]))
    if method.upper() == "MXFP8" and fields.get("group_size") is not None:
        return Declared(path, shown(method), _block(path, [1, fields["group_size"]]))
    return Declared(path, shown(method), None)


def _block(path: Path, value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and columns % 32 == 0:
            return rows, columns
    raise DiagnosticError(
        os.fspath(path),
        f"unsupported weight block {shown(str(value))}; expected rows and columns, with columns a "
        "multiple of 32",
    )
