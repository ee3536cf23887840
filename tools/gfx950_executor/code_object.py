# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""AMDGPU code objects: the ELF file, kernel descriptors and metadata of an HSACO.

The layouts are those of LLVM's "User Guide for AMDGPU Backend" (code object v4 to v6).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from block32.tools.gfx950_executor import msgpack
from block32.tools.gfx950_executor.errors import CodeObjectError, DamagedCodeError

_MACHINE_AMDGPU = 224
_MACH_MASK = 0xFF
_MACH_GFX950 = 0x4F
_ELF_HEADER_BYTES = 64
_SECTION_SYMTAB = 2
_SECTION_NOTE = 7
_SECTION_NOBITS = 8
_SECTION_DYNSYM = 11
_NOTE_METADATA = 32
_SEGMENT_LOAD = 1

#: What reading a damaged file may raise.
_DAMAGE = (struct.error, ValueError, LookupError, TypeError, OverflowError, RecursionError)

#: Zeros in a loaded image that the file does not hold: more are taken for a damaged header.
_MOST_ZERO_BYTES = 1 << 26
#: Longer names are taken for damage: they would be copied for each symbol.
_LONGEST_NAME = 1 << 16


@dataclass(frozen=True)
class Argument:
    """One kernel argument: byte offset and size in the kernarg segment, and its kind."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Kernel:
    """A kernel of a code object: descriptor fields (bytes, counts) and metadata.

    ``entry`` is the address where a wave starts (after the compatibility prologue when the
    kernel has preloaded arguments); ``user_sgprs`` lists the enabled user SGPR groups in order;
    ``clamps_overflow`` is the mode bit FP16_OVFL that conversions to 8-bit floats start with.
    """

    name: str
    entry: int
    end: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    user_sgprs: tuple[str, ...]
    user_sgpr_count: int
    preload_first_dword: int
    preload_dwords: int
    workgroup_ids: tuple[bool, bool, bool]
    workgroup_info: bool
    vgprs: int
    agprs: int
    denormals_f32: bool
    denormals_f16_f64: bool
    clamps_overflow: bool
    arguments: tuple[Argument, ...]
    workgroup_size: tuple[int, int, int] | None
    max_workgroup_size: int
    metadata: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class CodeObject:
    """A parsed HSACO: the loaded image (address 0 based) and its kernels by name."""

    image: bytes
    kernels: dict[str, Kernel]


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    address: int
    offset: int
    size: int
    link: int


def _sections(elf: bytes) -> list[_Section]:
    section_offset = struct.unpack_from("<Q", elf, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    raw = [
        struct.unpack_from("<IIQQQQIIQQ", elf, section_offset + i * entry_size)
        for i in range(count)
    ]
    # In a sound file no two sections share bytes, so that reading them all reads it once.
    if sum(r[5] for r in raw if r[1] != _SECTION_NOBITS) > len(elf):
        raise ValueError("its sections overlap")
    names = elf[raw[names_index][4] : raw[names_index][4] + raw[names_index][5]]
    return [
        _Section(_text(names, r[0]), r[1], address=r[3], offset=r[4], size=r[5], link=r[6])
        for r in raw
    ]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset, offset + _LONGEST_NAME)].decode()


def _image(elf: bytes) -> bytes:
    """Lay the loadable segments out at their addresses."""
    offset = struct.unpack_from("<Q", elf, 32)[0]
    entry_size, count = struct.unpack_from("<HH", elf, 54)
    headers = (struct.unpack_from("<IIQQQQQQ", elf, offset + i * entry_size) for i in range(count))
    loaded = [header[2:7] for header in headers if header[0] == _SEGMENT_LOAD]
    if sum(size for _, _, _, size, _ in loaded) > len(elf) + _MOST_ZERO_BYTES:
        raise ValueError("its segments overlap")
    end = max((address + max(size, memory) for _, address, _, size, memory in loaded), default=0)
    if end > len(elf) + _MOST_ZERO_BYTES:
        raise ValueError("a segment lies outside of the file")
    image = bytearray(end)
    for start, address, _, size, _ in loaded:
        if start + size > len(elf):
            raise ValueError("a segment lies outside of the file")
        image[address : address + size] = elf[start : start + size]
    return bytes(image)


def _symbols(elf: bytes, sections: list[_Section]) -> dict[str, tuple[int, int]]:
    """Symbol name to (address, size)."""
    found: dict[str, tuple[int, int]] = {}
    for section in sections:
        if section.type not in (_SECTION_SYMTAB, _SECTION_DYNSYM):
            continue
        strings = sections[section.link]
        table = elf[strings.offset : strings.offset + strings.size]
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", elf, at)
            if name:
                found[_text(table, name)] = (value, size)
    return found


def _metadata(elf: bytes, sections: list[_Section]) -> dict[str, Any]:
    for section in sections:
        if section.type != _SECTION_NOTE:
            continue
        at, end = section.offset, section.offset + section.size
        while at < end:
            name_size, size, kind = struct.unpack_from("<III", elf, at)
            start = at + 12 + (name_size + 3) // 4 * 4
            if kind == _NOTE_METADATA:
                return _as_map(msgpack.decode(elf[start : start + size]))
            at = start + (size + 3) // 4 * 4
    raise CodeObjectError("the ELF file has no AMDGPU metadata note")


def _as_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("its metadata are no map")
    return value


_USER_SGPRS = (
    # (bit of kernel_code_properties, name, number of SGPRs), in the order of the registers
    (0, "private_segment_buffer", 4),
    (1, "dispatch_ptr", 2),
    (2, "queue_ptr", 2),
    (3, "kernarg_segment_ptr", 2),
    (4, "dispatch_id", 2),
    (5, "flat_scratch_init", 2),
    (6, "private_segment_size", 1),
)
USER_SGPR_SIZES = {name: size for _, name, size in _USER_SGPRS}


def _kernel(image: bytes, symbols: dict[str, tuple[int, int]], metadata: dict[str, Any]) -> Kernel:
    name = metadata[".name"]
    descriptor, _ = symbols[metadata.get(".symbol", name + ".kd")]
    lds, scratch, kernarg = struct.unpack_from("<III", image, descriptor)
    entry = descriptor + struct.unpack_from("<q", image, descriptor + 16)[0]
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", image, descriptor + 44)
    properties, preload = struct.unpack_from("<HH", image, descriptor + 56)
    if properties >> 10 & 1:
        raise CodeObjectError(f"kernel '{name}' is wave32; gfx950 has wave64 only")
    preload_dwords = preload & 0x7F
    accum_offset = ((rsrc3 & 0x3F) + 1) * 4
    total_vgprs = ((rsrc1 & 0x3F) + 1) * 8
    arguments = tuple(
        Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in metadata.get(".args", [])
    )
    required = metadata.get(".reqd_workgroup_size")
    return Kernel(
        name=name,
        # Hardware with preload skips the prologue that loads the arguments for older firmware.
        entry=entry + (256 if preload_dwords else 0),
        end=entry + symbols.get(name, (entry, len(image)))[1],
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=kernarg,
        user_sgprs=tuple(n for bit, n, _ in _USER_SGPRS if properties >> bit & 1),
        user_sgpr_count=rsrc2 >> 1 & 0x1F,
        preload_first_dword=preload >> 7 & 0x1FF,
        preload_dwords=preload_dwords,
        workgroup_ids=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        workgroup_info=bool(rsrc2 >> 10 & 1),
        vgprs=min(total_vgprs, accum_offset),
        agprs=max(0, total_vgprs - accum_offset),
        denormals_f32=(rsrc1 >> 16 & 3) == 3,
        denormals_f16_f64=(rsrc1 >> 18 & 3) == 3,
        clamps_overflow=bool(rsrc1 >> 26 & 1),
        arguments=tuple(sorted(arguments, key=lambda a: a.offset)),
        workgroup_size=tuple(required) if required else None,
        max_workgroup_size=metadata.get(".max_flat_workgroup_size", 1024),
        metadata=metadata,
    )


def parse_code_object(elf: bytes) -> CodeObject:
    """Parse an HSACO.

    Args:
        elf: The bytes of one 64-bit little-endian ELF file for gfx950.

    Raises:
        CodeObjectError: The bytes are no such file.
        DamagedCodeError: They begin like one, and are truncated or damaged.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise CodeObjectError("not a 64-bit AMDGPU ELF file")
    try:
        return _parse(elf)
    except _DAMAGE as error:
        raise DamagedCodeError(f"the code object is truncated or damaged ({error})") from error


def _parse(elf: bytes) -> CodeObject:
    """Parse an ELF file; what is damaged raises whatever reading it raises."""
    if struct.unpack_from("<H", elf, 18)[0] != _MACHINE_AMDGPU:
        raise CodeObjectError("not a 64-bit AMDGPU ELF file")
    sections = _sections(elf)
    metadata = _metadata(elf, sections)
    if struct.unpack_from("<I", elf, 48)[0] & _MACH_MASK != _MACH_GFX950:
        chip = str(metadata.get("amdhsa.target", "another target")).rpartition("-")[2]
        raise CodeObjectError(f"the code object is for {chip}; compile for gfx950")
    image = _image(elf)
    symbols = _symbols(elf, sections)
    kernels = [_kernel(image, symbols, _as_map(m)) for m in metadata["amdhsa.kernels"]]
    return CodeObject(image, {k.name: k for k in kernels})


def _elf_size(data: bytes, at: int) -> int:
    """Size of the ELF file at an offset: the farthest end of its section table and sections.

    Past the data's end where the file is cut off before its section table ends.
    """
    if at + _ELF_HEADER_BYTES > len(data):
        return _ELF_HEADER_BYTES
    table = struct.unpack_from("<Q", data, at + 40)[0]
    entry_size, count = struct.unpack_from("<HH", data, at + 58)
    end = table + entry_size * count
    if at + end > len(data):
        return end
    for i in range(count):
        header = struct.unpack_from("<IIQQQQ", data, at + table + i * entry_size)
        if header[1] != _SECTION_NOBITS:  # takes no bytes of the file
            end = max(end, header[4] + header[5])
    return end


def hsacos_from_vmfb(module: bytes | str | Path) -> list[bytes]:
    """All AMDGPU code objects inside an IREE module, in file order.

    A vmfb keeps each executable's ELF file unchanged, so its own header finds and sizes it.

    Args:
        module: The module's bytes, or the path of the .vmfb file.

    Raises:
        CodeObjectError: There is none.
        DamagedCodeError: The module ends in the middle of one.
    """
    data = module if isinstance(module, bytes) else Path(module).read_bytes()
    found: list[bytes] = []
    at = data.find(b"\x7fELF\x02\x01")
    while at >= 0:
        step = 1
        if data[at + 18 : at + 20] == _MACHINE_AMDGPU.to_bytes(2, "little"):
            try:
                step = max(_elf_size(data, at), _ELF_HEADER_BYTES)
            except _DAMAGE as error:
                raise DamagedCodeError("a code object of the module is damaged") from error
            if at + step > len(data):
                raise DamagedCodeError("the module ends in the middle of a code object")
            found.append(data[at : at + step])
        at = data.find(b"\x7fELF\x02\x01", at + step)
    if not found:
        raise CodeObjectError(
            "the module holds no AMDGPU code object; compile it for --iree-rocm-target=gfx950"
        )
    return found


def hsaco_from_vmfb(module: bytes | str | Path) -> bytes:
    """The one AMDGPU code object of an IREE module.

    Raises:
        CodeObjectError: There is none, or several (use ``hsacos_from_vmfb``).
    """
    found = hsacos_from_vmfb(module)
    if len(found) > 1:
        raise CodeObjectError(f"the module holds {len(found)} code objects; choose one of them")
    return found[0]
