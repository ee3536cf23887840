# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parameter files: reading ``.irpa`` and ``.safetensors`` entry by entry, writing ``.irpa``.

IREE's own bindings build an archive from parameters that are all in memory or mapped; here one
tensor at a time is. The layout of an archive is that of IREE's parameter_archive.h, version 0.0;
that of safetensors is its documentation's: a length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

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
_ENTRY_ALIGNMENT: Final = 16
_CHUNK: Final = 1 << 24


class ArchiveError(Exception):
    """A file that is no parameter file, or is damaged."""


@dataclass(frozen=True)
class Entry:
    """A parameter in a file.

    Attributes:
        path: The file.
        offset: Where its bytes begin.
        length: How many they are.
        pattern: What its bytes repeat, where the file does not hold them.
    """

    path: Path
    offset: int
    length: int
    pattern: bytes | None = None

    def read(self) -> bytes:
        """All bytes of the parameter.

        Raises:
            ArchiveError: The file ends before.
        """
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces of a few MiB.

        Raises:
            ArchiveError: The file ends before.
        """
        if self.pattern is not None:
            repeats = max(_CHUNK // len(self.pattern), 1)
            for start in range(0, self.length, repeats * len(self.pattern)):
                yield (self.pattern * repeats)[: self.length - start]
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            for start in range(0, self.length, _CHUNK):
                wanted = min(_CHUNK, self.length - start)
                data = stream.read(wanted)
                if len(data) != wanted:
                    raise ArchiveError("the file ends within a parameter")
                yield data


def read_index(path: Path) -> dict[str, Entry]:
    """The parameters of a file by name.

    Args:
        path: An ``.irpa`` or ``.safetensors`` file.

    Raises:
        ArchiveError: It is neither, or damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) == _MAGIC:
            return _read_archive(path, stream)
        if path.suffix == ".safetensors":
            return _read_safetensors(path, stream)
    raise ArchiveError("expected an .irpa or .safetensors file")


def _read_archive(path: Path, stream: BinaryIO) -> dict[str, Entry]:
    """Follow the headers of an archive, each of which may point to another."""
    entries: dict[str, Entry] = {}
    base = 0
    while True:
        stream.seek(base)
        header = _unpack(_HEADER, stream.read(_HEADER.size), 0)
        magic, major, _, _, following, _, count, table, table_size, names, names_size, data, _ = (
            header
        )
        if magic != _MAGIC or major != 0:
            raise ArchiveError("expected an archive of version 0")
        stream.seek(base + table)
        entry_bytes = stream.read(table_size)
        stream.seek(base + names)
        name_bytes = stream.read(names_size)
        at = 0
        for _ in range(count):
            size = _unpack(struct.Struct("<Q"), entry_bytes, at)[0]
            found = _read_entry(entry_bytes, at, name_bytes, path, base + data)
            if found is not None:
                entries[found[0]] = found[1]
            at += -(-size // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT
        if not following:
            return entries
        base += following


def _read_entry(
    table: bytes, at: int, names: bytes, path: Path, data: int
) -> tuple[str, Entry] | None:
    _, kind, _, name, name_size, *_ = _unpack(_ENTRY, table, at)
    key = names[name : name + name_size].decode()
    if kind == _ENTRY_DATA:
        offset, length = _unpack(_DATA, table, at + _ENTRY.size)
        return key, Entry(path, data + offset, length)
    if kind == _ENTRY_SPLAT:
        length, pattern, size = _unpack(_SPLAT, table, at + _ENTRY.size)
        return key, Entry(path, 0, length, pattern[:size])
    return None


def _unpack(layout: struct.Struct, data: bytes, at: int) -> tuple[Any, ...]:
    if len(data) < at + layout.size:
        raise ArchiveError("the archive is cut off")
    return layout.unpack_from(data, at)


def _read_safetensors(path: Path, stream: BinaryIO) -> dict[str, Entry]:
    stream.seek(0)
    (size,) = _unpack(struct.Struct("<Q"), stream.read(8), 0)
    try:
        header = json.loads(stream.read(size))
    except ValueError as error:
        raise ArchiveError("the header is no JSON") from error
    entries: dict[str, Entry] = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            entries[name] = Entry(path, 8 + size + start, end - start)
    return entries


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
