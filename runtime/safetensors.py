# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading a safetensors file without trusting it: what tensors it holds, and where.

The layout is that of the format's documentation: the header's length in 8 bytes, a JSON header,
the bytes of the tensors without gaps. The package ``safetensors`` is no help here: for NumPy it has
no 8-bit floats (they raise an AttributeError), it does not say where a tensor's bytes are, which
reading them in pieces needs, and of a tensor that is named twice it silently takes the last.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from block32.runtime.entry import ArchiveError, Entry, opened
from block32.runtime.strict_json import MOST_BYTES, JsonError, parse_json, shown

#: Bits of an element by the names of safetensors 0.8.
DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_LENGTH: Final = struct.Struct("<Q")
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_MOST: Final = 1 << 63
#: Dimensions of a NumPy array. Multiplying out the millions of sizes that a header has room for
#: would take hours.
_MOST_DIMENSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its element type as safetensors names it, such as ``F8_E4M3``.
        shape: Its sizes.
        entry: Its bytes, row-major and little endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry

    def describe(self) -> str:
        """Type and shape as errors show them: ``F8_E4M3 [96, 64]``."""
        return f"{self.dtype} {list(self.shape)}"


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, from its header alone.

    Raises:
        ArchiveError: It cannot be read, is cut off, or its header is wrong. Nothing larger than
            the header is read or allocated.
    """
    with opened(path) as (stream, size):
        content = stream.read(_LENGTH.size)
        if len(content) != _LENGTH.size:
            raise ArchiveError(os.fspath(path), f"expected a safetensors file but got {size} bytes")
        (length,) = _LENGTH.unpack(content)
        behind = size - _LENGTH.size
        if length > min(behind, MOST_BYTES):
            limit = f"{behind} follow" if length > behind else f"at most {MOST_BYTES} are read"
            raise ArchiveError(
                os.fspath(path),
                f"the header says that it has {length} bytes but {limit}: the file is cut off, or "
                "no safetensors file",
            )
        header = stream.read(length)
    try:
        tensors = _parse_header(header, path, _LENGTH.size + length)
        _check_ranges(tensors, size, _LENGTH.size + length)
    except JsonError as error:
        raise ArchiveError(os.fspath(path), str(error)) from error
    return {tensor.name: tensor for tensor in tensors}


def _parse_header(header: bytes, path: Path, data: int) -> list[StoredTensor]:
    """The tensors in the order of the header.

    Raises:
        JsonError: The header is not as it should be.
    """
    tensors: list[StoredTensor] = []
    for name, fields in parse_json(header, "the header").items():
        if name == "__metadata__":
            continue
        if not name.isprintable() or not name:
            raise JsonError(f"the tensor name '{shown(name)}' cannot be printed")
        if not isinstance(fields, dict) or set(fields) != _FIELDS:
            raise JsonError(
                f"expected dtype, shape and data_offsets, and nothing else, {_of(name)}"
            )
        tensors.append(_parse_tensor(name, fields, path, data))
    return tensors


def _parse_tensor(name: str, fields: dict[str, Any], path: Path, data: int) -> StoredTensor:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise JsonError(
            f"unknown dtype '{shown(str(dtype))}' {_of(name)}; expected one of "
            f"{', '.join(DTYPE_BITS)}"
        )
    if not _are_sizes(shape):
        raise JsonError(f"expected a shape of sizes from 0 on {_of(name)}")
    if len(shape) > _MOST_DIMENSIONS:
        raise JsonError(
            f"expected at most {_MOST_DIMENSIONS} dimensions but got {len(shape)} {_of(name)}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise JsonError(f"expected a start and an end from 0 on as data_offsets {_of(name)}")
    start, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - start):
        raise JsonError(
            f"expected {-(-bits // 8)} bytes for {dtype} {shown(str(shape))} but got {end - start} "
            f"{_of(name)}"
        )
    return StoredTensor(name, dtype, tuple(shape), Entry(path, data + start, end - start))


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of integers that a file's offsets can be."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _MOST for item in value
    )


def _check_ranges(tensors: list[StoredTensor], size: int, data: int) -> None:
    """The tensors cover all bytes behind the header once.

    Raises:
        JsonError: Two overlap, or bytes are missing, between two, or left over.
    """
    entries = sorted(tensors, key=lambda t: (t.entry.offset, t.entry.length))
    end = data
    for tensor in entries:
        end = max(end, tensor.entry.offset + tensor.entry.length)
    if end > size:
        raise JsonError(f"the file is cut off: its tensors end at byte {end} but it has {size}")
    if entries and entries[0].entry.offset != data:
        raise JsonError(f"expected the first tensor behind the header {_of(entries[0].name)}")
    for before, after in pairwise(entries):
        expected = before.entry.offset + before.entry.length
        if after.entry.offset != expected:
            how = "overlaps" if after.entry.offset < expected else "leaves a gap behind"
            raise JsonError(f"the tensor '{after.name}' {how} '{before.name}'")
    if end != size:
        raise JsonError(f"{size - end} bytes behind the tensors belong to none")


def _of(name: str) -> str:
    return f"of the tensor '{shown(name)}'"
