# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading a vmfb: what a compiled module exports, needs and holds, without running it.

A vmfb is a size-prefixed FlatBuffer with the identifier ``IREE``, at the start of the file or in
the first, uncompressed entry of a zip; data that the module refers to follows it, aligned to 64
bytes. Field numbers are those of ``bytecode_module_def.fbs`` of IREE 3.13.

The file is mapped, not read: a module with gigabytes of weights costs no memory here. Nothing in
the file is trusted; what is damaged raises ``VmfbError``.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from block32.runtime.errors import LoadError, VmfbError
from block32.runtime.flatbuffer import FlatBufferError, Table

#: What bytecode of MLIR begins with.
MLIR_BYTECODE: Final = b"ML\xefR"
_ALIGNMENT: Final = 64
_ZIP_ENTRY: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_SIZE: Final = 22

#: How the executables of each format begin; IREE puts a 64-byte header before GPU executables.
_MAGIC: Final[dict[bytes, str]] = {
    b"HIP1": "rocm-hsaco-fb",
    b"CDA1": "cuda-nvptx-fb",
    b"MTL1": "metal-msl-fb",
    b"VKE1": "vulkan-spirv-fb",
}
#: ELF's numbers of machines (e_machine) as IREE's format names spell them.
_ELF_MACHINES: Final[dict[int, str]] = {
    3: "x86_32",
    40: "arm_32",
    62: "x86_64",
    183: "arm_64",
    243: "riscv_64",
}
#: Where the executable's own bytes say which chip they are for.
_CHIP: Final[dict[str, re.Pattern[bytes]]] = {
    "rocm-hsaco-fb": re.compile(rb"-amdhsa-(?:unknown)?-(gfx[0-9a-f]+)"),
    "cuda-nvptx-fb": re.compile(rb"\.target\s+(sm_\d+)"),
}
# The compiler leaves each device's description in the message of the check that finds the device.
_TARGET: Final = re.compile(
    rb'#hal\.executable\.target<"(?P<backend>[^"]+)", "(?P<format>[^"]+)"'
    rb"(?P<rest>.*?)(?=#hal\.executable\.target<|[^\x09-\x7e])",
    re.DOTALL,
)
_FEATURES: Final = re.compile(rb'\bcpu_features = "([^"]*)"')
_CPU: Final = re.compile(rb'\bcpu = "([^"]*)"')
_ARCH: Final = re.compile(rb'#iree_gpu\.target<arch = "([^"]*)"')


@dataclass(frozen=True)
class Executable:
    """The kernels of one or several dispatches, compiled for one kind of device.

    Attributes:
        format: As the runtime names it: ``embedded-elf-x86_64``, ``rocm-hsaco-fb``, ...
        chip: What its own bytes say it was compiled for: ``gfx950``, ``sm_89``, or empty.
        offset: Where its bytes start in the file.
        data: Its bytes, in place. For a GPU: a 64-byte header, then a FlatBuffer.
    """

    format: str
    chip: str
    offset: int
    data: memoryview


@dataclass(frozen=True)
class DeclaredTarget:
    """What the compiler was told of a device, as far as the module still says so.

    Attributes:
        backend: ``llvm-cpu``, ``rocm``, ``cuda``, ``metal-spirv``, ...
        format: The format of executables for it.
        chip: The GPU's architecture, or the CPU's name; may be empty.
        cpu_features: LLVM's names of the CPU features that are on.
    """

    backend: str
    format: str
    chip: str
    cpu_features: frozenset[str]


@dataclass(frozen=True)
class Vmfb:
    """What a vmfb says of itself.

    Attributes:
        source: The file's name, or ``<vmfb>``: for errors.
        name: The module's name.
        bytecode_version: (major, minor) of the VM's instructions.
        dependencies: Modules that it needs, with the least version of each: ``{"hal": 7}``.
        declarations: Each exported function's ABI declaration; empty where it has none.
        executables: Its kernels.
        targets: The devices that it was compiled for.
    """

    source: str
    name: str
    bytecode_version: tuple[int, int]
    dependencies: dict[str, int]
    declarations: dict[str, str]
    executables: tuple[Executable, ...]
    targets: tuple[DeclaredTarget, ...]


def read_vmfb(vmfb: bytes | bytearray | memoryview | str | os.PathLike[str]) -> Vmfb:
    """Read a vmfb from its bytes or from a file.

    Raises:
        LoadError: The file cannot be read.
        VmfbError: It is empty, cut off, damaged, or something else.
    """
    if isinstance(vmfb, bytes | bytearray | memoryview):
        source, content = "<vmfb>", memoryview(vmfb).cast("B")
    else:
        source, content = os.fspath(vmfb), _map(vmfb)
    if not content:
        raise VmfbError(source, "expected an IREE module but the file is empty")
    try:
        return _parse(source, content)
    except FlatBufferError as error:
        raise VmfbError(source, f"the module is damaged: {error}") from error


def _map(path: str | os.PathLike[str]) -> memoryview:
    try:
        with Path(path).open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(os.fspath(path), f"cannot read the module: {reason.lower()}") from error


def _parse(source: str, content: memoryview) -> Vmfb:
    start = _flatbuffer_start(source, content)
    if start + 12 > len(content) or content[start + 8 : start + 12] != b"IREE":
        raise VmfbError(source, f"expected an IREE module but got {_describe(content)}")
    (size,) = struct.unpack_from("<I", content, start)
    if start + 4 + size > len(content):
        raise VmfbError(
            source,
            f"the module is cut off: it says {size} bytes but {len(content) - start - 4} are there",
        )
    root = Table.root(content[start + 4 : start + 4 + size])
    external = start + -(-(4 + size) // _ALIGNMENT) * _ALIGNMENT
    version = root.uint32(13)
    segments = tuple(_rodata(source, root, content, start, external))
    return Vmfb(
        source=source,
        name=root.string(0),
        bytecode_version=(version >> 16, version & 0xFFFF),
        dependencies={table.string(0): table.uint32(1) for table in root.tables(5)},
        declarations=_declarations(root),
        executables=tuple(_executables(segments)),
        targets=tuple(_targets(root)),
    )


def _flatbuffer_start(source: str, content: memoryview) -> int:
    """Where the size prefix of the module's FlatBuffer is."""
    if content[:4] != _ZIP_ENTRY:
        return 0
    if len(content) < 30:
        raise VmfbError(source, "the module is cut off in its zip header")
    (method,) = struct.unpack_from("<H", content, 8)
    name_size, extra_size = struct.unpack_from("<HH", content, 26)
    if method != 0:
        raise VmfbError(source, "expected an IREE module but got a compressed zip archive")
    # The archive's directory comes last: without it, the end of the file is missing.
    if not _ends_as_zip(content):
        raise VmfbError(source, "the module is cut off: the end of its zip archive is missing")
    return 30 + name_size + extra_size


def _ends_as_zip(content: memoryview) -> bool:
    """Whether the file ends with a zip's last record, which may end with a comment."""
    tail = bytes(content[-_ZIP_END_SIZE - 0xFFFF :])
    record = tail.rfind(_ZIP_END)
    if record < 0 or record + _ZIP_END_SIZE > len(tail):
        return False
    (comment,) = struct.unpack_from("<H", tail, record + _ZIP_END_SIZE - 2)
    return record + _ZIP_END_SIZE + comment == len(tail)


def _describe(content: memoryview) -> str:
    """What a file that is no module seems to be."""
    head = bytes(content[:4096])
    if head.startswith(_ZIP_ENTRY):
        return "another zip archive"
    if head.startswith(MLIR_BYTECODE):
        return "MLIR bytecode; compile it with 'block32 compile'"
    if head.startswith(b"\x7fELF"):
        return "an ELF file"
    if re.search(rb"\b(module|func\.func|util\.func)\b", head) and b"\0" not in head:
        return "MLIR text; compile it with 'block32 compile'"
    return f"bytes that start with {head[:8].hex(' ')}"


def _rodata(
    source: str, root: Table, content: memoryview, start: int, external: int
) -> Iterator[tuple[int, memoryview]]:
    """Each read-only segment with its offset in the file."""
    left = len(content)
    for number, segment in enumerate(root.tables(9)):
        embedded = segment.bytes(2)
        offset, size = external + segment.uint64(3), segment.uint64(4)
        left -= size if embedded is None else len(embedded)
        if left < 0 and offset + size <= len(content):
            raise FlatBufferError("its segments overlap")
        if embedded is not None:
            yield start, embedded
            continue
        if offset + size > len(content):
            raise VmfbError(
                source,
                f"the module is cut off: segment {number} ends at byte {offset + size} "
                f"but the file has {len(content)}",
            )
        yield offset, content[offset : offset + size]


def _declarations(root: Table) -> dict[str, str]:
    signatures = list(root.tables(8))
    found: dict[str, str] = {}
    for export in root.tables(7):
        ordinal = export.int32(1)
        if not 0 <= ordinal < len(signatures):
            raise FlatBufferError(f"function {ordinal} is not among {len(signatures)}")
        attributes = {table.string(0): table.string(1) for table in signatures[ordinal].tables(1)}
        found[export.string(0)] = attributes.get("iree.abi.declaration", "")
    return found


def _executables(segments: tuple[tuple[int, memoryview], ...]) -> Iterator[Executable]:
    system = any(bytes(data[:11]) == b"system-elf-" for _, data in segments)
    for offset, data in segments:
        form = _format_of(data, system)
        if form:
            pattern = _CHIP.get(form)
            chip = pattern.search(data) if pattern else None
            yield Executable(form, chip[1].decode() if chip else "", offset, data)


def _format_of(data: memoryview, system: bool) -> str:
    """The format of an executable by how it begins; empty for other data."""
    head = bytes(data[: _ALIGNMENT + 4])
    if head[:4] in _MAGIC:
        return _MAGIC[head[:4]]
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        (machine,) = struct.unpack_from("<H", head, 18)
        family = "system" if system else "embedded"
        return f"{family}-elf-{_ELF_MACHINES.get(machine, f'machine{machine}')}"
    # Bytecode for the VM that interprets kernels is a vmfb itself.
    nested = head.startswith(_ZIP_ENTRY) and b"module.fb" in head
    return "vmvx-bytecode-fb" if nested or head[8:12] == b"IREE" else ""


def _targets(root: Table) -> Iterator[DeclaredTarget]:
    code = root.bytes(14)
    seen: set[DeclaredTarget] = set()
    for match in _TARGET.finditer(code) if code is not None else ():
        chip = _ARCH.search(match["rest"]) or _CPU.search(match["rest"])
        features = _FEATURES.search(match["rest"])
        target = DeclaredTarget(
            backend=match["backend"].decode("ascii", "replace"),
            format=match["format"].decode("ascii", "replace"),
            chip=chip[1].decode("ascii", "replace") if chip else "",
            cpu_features=_enabled(features[1].decode("ascii", "replace") if features else ""),
        )
        if target not in seen:
            seen.add(target)
            yield target


def _enabled(features: str) -> frozenset[str]:
    """The names that are on in ``+avx2,-avx512f``; the last word on a feature counts."""
    last = {item[1:]: item[0] for item in features.split(",") if item[:1] in ("+", "-")}
    return frozenset(name for name, sign in last.items() if sign == "+")
