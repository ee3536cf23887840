# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A metallib as IREE's Metal runtime takes it: a header and a flatbuffer with the file in it.

Layout of IREE 3.13, ``runtime/src/iree/schemas/metal_executable_def.fbs``: 64 bytes of header, then
``ExecutableDef {pipelines, libraries}``. A pipeline names its entry point and threadgroup size; the
library holds the metallib in place of source text.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from block32.lowering.apple.metallib import Metallib, MetallibError
from block32.lowering.apple.metallib import read as read_metallib
from block32.lowering.apple.signature import MAX_BINDINGS, KernelSignature

FORMAT = "metal-msl-fb"

_IDENTIFIER = b"MTL1"
_HEADER_SIZE = 64

#: Field numbers of the flatbuffer's tables.
_EXECUTABLE_PIPELINES, _EXECUTABLE_LIBRARIES = 0, 1
_LIBRARY_METALLIB = 1
_ENTRY_POINT, _THREADGROUP_SIZE, _CONSTANT_COUNT, _BINDING_FLAGS, _NAME = 1, 3, 5, 6, 8
_PIPELINE_FIELDS = 9

#: More entry points than any program has kernels: a table may be named many times for free.
_MAX_TABLES = 4096
_MAX_NAME = 4096

#: Bit of a binding's flags: the kernel does not write it (iree/hal/executable.h).
_READ_ONLY = 1


class ExecutableError(ValueError):
    """The bytes are no Metal executable of this IREE, or a part of it is missing."""


@dataclass(frozen=True)
class Pipeline:
    """One entry point of an executable.

    Attributes:
        name: Symbol of the export, and name of the function in the library.
        threads: Threads in a threadgroup.
        constants: Number of push constants.
        bindings: Flags of each binding.
    """

    name: str
    threads: tuple[int, int, int]
    constants: int
    bindings: tuple[int, ...]

    @classmethod
    def of(cls, signature: KernelSignature) -> Pipeline:
        """The pipeline of a kernel."""
        flags = tuple(0 if buffer.writable else _READ_ONLY for buffer in signature.buffers)
        return cls(signature.name, signature.threads, signature.constants, flags)


def _flatbuffers() -> Any:
    try:
        return importlib.import_module("flatbuffers")
    except ImportError:
        raise ExecutableError(
            "Metal executables need the package flatbuffers: pip install 'block32[apple]'"
        ) from None


def build(metallib: bytes, pipelines: Sequence[Pipeline]) -> bytes:
    """The data of a ``hal.executable.binary`` of format ``metal-msl-fb``.

    Args:
        metallib: The library.
        pipelines: The exports, in the order of their ordinals.

    Raises:
        ExecutableError: The package flatbuffers is missing.
    """
    builder = _flatbuffers().Builder(len(metallib) + 1024)
    library_bytes = builder.CreateString(metallib)
    builder.StartObject(_LIBRARY_METALLIB + 1)
    builder.PrependUOffsetTRelativeSlot(_LIBRARY_METALLIB, library_bytes, 0)
    libraries = _vector(builder, [builder.EndObject()])
    tables = _vector(builder, [_build_pipeline(builder, pipeline) for pipeline in pipelines])
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(_EXECUTABLE_PIPELINES, tables, 0)
    builder.PrependUOffsetTRelativeSlot(_EXECUTABLE_LIBRARIES, libraries, 0)
    builder.Finish(builder.EndObject(), file_identifier=_IDENTIFIER)
    content = bytes(builder.Output())
    header = struct.pack("<4sIQ", _IDENTIFIER, 0, len(content)).ljust(_HEADER_SIZE, b"\0")
    return header + content


def _vector(builder: Any, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def _build_pipeline(builder: Any, pipeline: Pipeline) -> int:
    name = builder.CreateString(pipeline.name)
    builder.StartVector(8, len(pipeline.bindings), 8)
    for flags in reversed(pipeline.bindings):
        builder.PrependUint64(flags)
    bindings = builder.EndVector()
    builder.StartObject(_PIPELINE_FIELDS)
    builder.PrependUOffsetTRelativeSlot(_NAME, name, 0)
    builder.PrependUOffsetTRelativeSlot(_ENTRY_POINT, name, 0)
    builder.PrependUOffsetTRelativeSlot(_BINDING_FLAGS, bindings, 0)
    builder.PrependUint32Slot(_CONSTANT_COUNT, pipeline.constants, 0)
    builder.Prep(4, 12)
    for extent in reversed(pipeline.threads):
        builder.PrependUint32(extent)
    builder.PrependStructSlot(_THREADGROUP_SIZE, builder.Offset(), 0)
    return builder.EndObject()


@dataclass(frozen=True)
class MetalExecutable:
    """A Metal executable taken apart.

    Attributes:
        pipelines: Its entry points.
        metallib: The library, or None where the executable holds Metal source (IREE's own).
    """

    pipelines: tuple[Pipeline, ...]
    metallib: Metallib | None

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline called ``name``.

        Raises:
            ExecutableError: There is none.
        """
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        known = ", ".join(pipeline.name for pipeline in self.pipelines)
        raise ExecutableError(f"executable has no pipeline '{name}'; it has: {known}")


def read(data: bytes | memoryview) -> MetalExecutable:
    """Decodes the data of a ``hal.executable.binary``.

    Raises:
        ExecutableError: The bytes are no such data, or are damaged.
        MetallibError: The library in it is damaged.
    """
    pipelines, libraries = _read_parts(data)
    if len(libraries) > 1:
        raise ExecutableError(f"Metal executable has {len(libraries)} libraries; expected one")
    return MetalExecutable(pipelines, read_metallib(bytes(libraries[0])) if libraries else None)


def read_pipelines(data: bytes) -> tuple[Pipeline, ...]:
    """The entry points alone: a library in it may be of any kind, as IREE makes them on a Mac.

    Raises:
        ExecutableError: The bytes are no data of a ``hal.executable.binary``, or are damaged.
    """
    return _read_parts(data)[0]


def _read_parts(data: bytes | memoryview) -> tuple[tuple[Pipeline, ...], list[memoryview]]:
    """The entry points and the libraries that are not Metal source."""
    content = _content(memoryview(data))
    try:
        root = _Table(content, struct.unpack_from("<I", content)[0])
        pipelines = tuple(_read_pipeline(table) for table in root.tables(_EXECUTABLE_PIPELINES))
        tables = root.tables(_EXECUTABLE_LIBRARIES)
        libraries = [library for table in tables if (library := table.span(_LIBRARY_METALLIB))]
    except (struct.error, UnicodeDecodeError) as error:
        raise ExecutableError(f"Metal executable is damaged: {error}") from None
    return pipelines, libraries


def _content(data: memoryview) -> memoryview:
    """The flatbuffer behind the header."""
    if data[:4] != _IDENTIFIER or len(data) < _HEADER_SIZE + 8:
        raise ExecutableError(
            f"not a Metal executable: expected 'MTL1' but got {bytes(data[:4])!r}"
        )
    _, version, size = struct.unpack_from("<4sIQ", data)
    content = data[_HEADER_SIZE : _HEADER_SIZE + size]
    if version != 0 or len(content) != size or content[4:8] != _IDENTIFIER:
        raise ExecutableError("Metal executable is truncated or of another version")
    return content


def find_all(vmfb: bytes) -> Iterator[MetalExecutable]:
    """Every Metal executable in a vmfb, in file order.

    Raises:
        ExecutableError: The library of one is damaged.
    """
    view, at = memoryview(vmfb), vmfb.find(_IDENTIFIER)
    while at >= 0:
        try:
            yield read(view[at:])
        except ExecutableError:
            pass  # four letters that happen to be there, such as the flatbuffer's own identifier
        except MetallibError as error:
            raise ExecutableError(f"Metal executable at offset {at}: {error}") from error
        at = vmfb.find(_IDENTIFIER, at + 4)


class _Table:
    """A flatbuffer table: fields by number, all relative to its vtable."""

    def __init__(self, data: memoryview, position: int):
        self.data = data
        self.position = position
        (back,) = struct.unpack_from("<i", data, position)
        self.vtable = position - back

    def field(self, number: int) -> int | None:
        """Position of a field, or None where it has its default."""
        (size,) = struct.unpack_from("<H", self.data, self.vtable)
        if 4 + 2 * number >= size:
            return None
        (offset,) = struct.unpack_from("<H", self.data, self.vtable + 4 + 2 * number)
        return self.position + offset if offset else None

    def _target(self, number: int) -> int | None:
        at = self.field(number)
        return None if at is None else at + struct.unpack_from("<I", self.data, at)[0]

    def tables(self, number: int) -> list[_Table]:
        """The tables of a vector."""
        at = self._target(number)
        if at is None:
            return []
        (count,) = struct.unpack_from("<I", self.data, at)
        if count > _MAX_TABLES:
            raise ExecutableError(f"{count} tables in a vector; expected at most {_MAX_TABLES}")
        places = range(at + 4, at + 4 + 4 * count, 4)
        return [
            _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0])
            for place in places
        ]

    def span(self, number: int) -> memoryview:
        """The bytes of a string, not copied."""
        at = self._target(number)
        if at is None:
            return self.data[:0]
        (count,) = struct.unpack_from("<I", self.data, at)
        found = self.data[at + 4 : at + 4 + count]
        if len(found) != count:
            raise ExecutableError(f"a string of {count} bytes reaches beyond the executable")
        return found

    def text(self, number: int) -> str:
        """A string that is a name."""
        found = self.span(number)
        if len(found) > _MAX_NAME:
            raise ExecutableError(f"a name of {len(found)} bytes; expected at most {_MAX_NAME}")
        return bytes(found).decode()

    def integers(self, number: int) -> tuple[int, ...]:
        """The u64 elements of a vector."""
        at = self._target(number)
        if at is None:
            return ()
        (count,) = struct.unpack_from("<I", self.data, at)
        if count > MAX_BINDINGS:
            raise ExecutableError(f"{count} bindings; expected at most {MAX_BINDINGS}")
        return struct.unpack_from(f"<{count}Q", self.data, at + 4)


def _read_pipeline(table: _Table) -> Pipeline:
    constants, threads = table.field(_CONSTANT_COUNT), table.field(_THREADGROUP_SIZE)
    if threads is None:
        raise ExecutableError("a pipeline has no threadgroup size")
    x, y, z = struct.unpack_from("<3I", table.data, threads)
    return Pipeline(
        name=table.text(_ENTRY_POINT),
        threads=(x, y, z),
        constants=0 if constants is None else struct.unpack_from("<I", table.data, constants)[0],
        bindings=table.integers(_BINDING_FLAGS),
    )
