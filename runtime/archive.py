# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parameter files: reading ``.irpa`` and ``.safetensors`` entry by entry, writing ``.irpa``.

IREE's own bindings build an archive from parameters that are all in memory or mapped; here one
tensor at a time is. The layout of an archive is that of IREE's parameter_archive.h, version 0.0;
``runtime/safetensors.py`` reads the other kind. Nothing in a file is trusted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from block32.runtime.entry import ArchiveError, Entry, opened
from block32.runtime.safetensors import read_tensors
from block32.runtime.strict_json import shown

_MAGIC: Final = b"IRPA"
_ENTRY_SPLAT: Final = 1
_ENTRY_DATA: Final = 2
_DATA_ALIGNMENT: Final = 64
_FILE_ALIGNMENT: Final = 4096
#: magic, major, minor, header size, next header, flags, entries, then (offset, length) of the
#: entry table, the names and the data.
_HEADER: Final = struct.Struct("<4sHHQQQQ" + "QQ" * 3)
#: size, type, flags, then (offset, length) of name and metadata, alignment; at its type's data:
_ENTRY: Final = struct.Struct("<QIQ" + "QQ" * 2 + "Q")
#: offset and length in the data.
_DATA: Final = struct.Struct("<QQ")
#: length, pattern, pattern length.
_SPLAT: Final = struct.Struct("<Q16sB")
_SIZE: Final = struct.Struct("<Q")
_ENTRY_ALIGNMENT: Final = 16
#: Sizes that a splat's pattern may have.
_PATTERN_SIZES: Final = (1, 2, 4, 8, 16)


def read_index(path: Path) -> dict[str, Entry]:
    """The parameters of a file by name.

    Args:
        path: An ``.irpa`` or ``.safetensors`` file.

    Raises:
        ArchiveError: It is neither, damaged, or cannot be read.
    """
    with opened(path) as (stream, size):
        if stream.read(len(_MAGIC)) == _MAGIC:
            try:
                return _Reader(path, stream, size).entries()
            except _DamagedError as error:
                raise ArchiveError(os.fspath(path), str(error)) from error
    if path.suffix == ".safetensors":
        return {name: tensor.entry for name, tensor in read_tensors(path).items()}
    raise ArchiveError(os.fspath(path), "expected an .irpa or .safetensors file")


class _DamagedError(ValueError):
    """What is wrong with an archive."""


class _Reader:
    """Follows the headers of an archive, each of which may point to another."""

    def __init__(self, path: Path, stream: BinaryIO, size: int):
        self.path = path
        self.stream = stream
        self.size = size
        self.found: dict[str, Entry] = {}

    def entries(self) -> dict[str, Entry]:
        """All parameters.

        Raises:
            _DamagedError: A size or an offset leads out of the file, or a name comes twice.
        """
        base = 0
        while True:
            following = self._segment(base)
            if not following:
                return self.found
            base += following

    def _segment(self, base: int) -> int:
        """Read the parameters of the header at ``base``; the distance to the next, or 0."""
        header = _HEADER.unpack(self._read(base, 0, _HEADER.size, self.size, "a header"))
        magic, major, _, _, following, _, count, *ranges = header
        table, table_size, names, names_size, data, _ = ranges
        if magic != _MAGIC or major != 0:
            raise _DamagedError("expected an archive of version 0")
        # Tables lie between their header and the next, so that no byte is read twice, however
        # many headers there are.
        end = base + following if following else self.size
        entry_bytes = self._read(base, table, table_size, end, "the table of parameters")
        name_bytes = self._read(base, names, names_size, end, "the names of the parameters")
        at, named = 0, 0
        for _ in range(count):
            named += self._entry(entry_bytes, at, name_bytes, base + data)
            if named > names_size:  # overlapping names could be far larger than the file
                raise _DamagedError("the names of the parameters overlap")
            (size,) = _unpack(_SIZE, entry_bytes, at)
            if size < _ENTRY.size:
                raise _DamagedError(f"an entry of {size} bytes; expected {_ENTRY.size} or more")
            at += _align(size, _ENTRY_ALIGNMENT)
        return following

    def _read(self, base: int, offset: int, length: int, end: int, what: str) -> bytes:
        if base + offset + length > min(end, self.size):
            raise _DamagedError(f"the archive is cut off or damaged: {what} is out of its place")
        self.stream.seek(base + offset)
        return self.stream.read(length)

    def _entry(self, table: bytes, at: int, names: bytes, data: int) -> int:
        """Read the entry at ``at``; the length of its name."""
        _, kind, _, name, name_size, *_ = _unpack(_ENTRY, table, at)
        if name + name_size > len(names):
            raise _DamagedError("the name of a parameter is out of its place")
        try:
            key = names[name : name + name_size].decode()
        except UnicodeDecodeError as error:
            raise _DamagedError("the name of a parameter is no UTF-8") from error
        if kind == _ENTRY_DATA:
            offset, length = _unpack(_DATA, table, at + _ENTRY.size)
            if data + offset + length > self.size:
                raise _DamagedError(f"the archive is cut off: '{shown(key)}' ends behind it")
            self._add(key, Entry(self.path, data + offset, length))
        elif kind == _ENTRY_SPLAT:
            length, pattern, size = _unpack(_SPLAT, table, at + _ENTRY.size)
            if size not in _PATTERN_SIZES:
                raise _DamagedError(f"'{shown(key)}' repeats a pattern of {size} bytes")
            self._add(key, Entry(self.path, 0, length, pattern[:size]))
        return name_size

    def _add(self, key: str, entry: Entry) -> None:
        if key in self.found:
            raise _DamagedError(f"the archive has '{shown(key)}' twice")
        self.found[key] = entry


def _unpack(layout: struct.Struct, data: bytes, at: int) -> tuple[Any, ...]:
    if len(data) < at + layout.size:
        raise _DamagedError("the archive is cut off: its table of parameters ends early")
    return layout.unpack_from(data, at)


@dataclass(frozen=True)
class NewEntry:
    """A parameter to write: its name, its size in bytes, and what gives its bytes in pieces."""

    name: str
    length: int
    chunks: Callable[[], Iterable[bytes]]


def write_archive(stream: BinaryIO, entries: list[NewEntry]) -> None:
    """Write an ``.irpa`` archive, one parameter after the other.

    Args:
        stream: Where to write.
        entries: The parameters; each gives its bytes when its turn comes.

    Raises:
        OSError: It cannot be written.
    """
    names = b"".join(entry.name.encode() for entry in entries)
    entry_size = _ENTRY.size + _DATA.size
    stride = _align(entry_size, _ENTRY_ALIGNMENT)
    table = _align(_HEADER.size, _ENTRY_ALIGNMENT)
    names_at = table + stride * len(entries)
    data = _align(names_at + len(names), _DATA_ALIGNMENT)
    offsets = _offsets(entries)
    length = offsets[-1] + entries[-1].length if entries else 0
    header = _HEADER.pack(
        *(_MAGIC, 0, 0, _HEADER.size, 0, 0, len(entries)),
        *(table, stride * len(entries), names_at, len(names), data, length),
    )
    _pad_to(stream, header, table)
    name_at = 0
    for entry, offset in zip(entries, offsets, strict=True):
        name_size = len(entry.name.encode())
        head = _ENTRY.pack(entry_size, _ENTRY_DATA, 0, name_at, name_size, 0, 0, _DATA_ALIGNMENT)
        _pad_to(stream, head + _DATA.pack(offset, entry.length), stride)
        name_at += name_size
    _pad_to(stream, names, data - names_at)
    for index, entry in enumerate(entries):
        written = 0
        for chunk in entry.chunks():
            stream.write(chunk)
            written += len(chunk)
        assert written == entry.length, f"{entry.name} has {written} bytes, not {entry.length}"
        end = offsets[index + 1] if index + 1 < len(entries) else None
        stop = _align(data + length, _FILE_ALIGNMENT) - data if end is None else end
        stream.write(bytes(stop - offsets[index] - written))


def _offsets(entries: list[NewEntry]) -> list[int]:
    """Where each parameter begins in the data."""
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at = _align(at + entry.length, _DATA_ALIGNMENT)
    return offsets


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _pad_to(stream: BinaryIO, data: bytes, size: int) -> None:
    stream.write(data + bytes(size - len(data)))
