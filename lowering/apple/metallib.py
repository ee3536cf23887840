# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading and writing metallib files, the container in which Metal takes compiled kernels.

The layout was read off files that Apple's toolchain built for macOS 13 to 26: a file of that
kind comes back from ``read`` and ``to_bytes`` byte for byte. All integers are little endian.

    header (88 bytes)   magic, versions, file size, (offset, size) of the four sections
    function list       u32 count, one tag group a function
    extension           tags without a group size: [HDYN] [RLST] [UUID] ENDT
    public metadata     one empty tag group a function
    private metadata    one empty tag group a function
    modules             LLVM bitcode with Apple's wrapper, one module a function
    HDYN section        the library's own name, in a tag group without a size (optional)
    RLST section        u32 count, one reflection record a function (optional)

A tag is four characters, a u16 length and a payload; "ENDT" alone closes a group. A group that
has a size starts with it, as a u32 that counts itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"MTLB"
HEADER_SIZE = 88
MACOS_MAJOR_FLAG = 0x8000
MACOS_PLATFORM = 0x81
END_TAG = b"ENDT"
EMPTY_GROUP = struct.pack("<I", 8) + END_TAG


class MetallibError(ValueError):
    """The bytes are no metallib, or one with a feature that this reader does not know."""


class FunctionKind(IntEnum):
    """Stage of an entry point, as the TYPE tag spells it. Only kernels are written."""

    VERTEX = 0
    FRAGMENT = 1
    KERNEL = 2


@dataclass(frozen=True, order=True)
class Version:
    """A major and minor number, as the VERS tag and the header carry them."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class Function:
    """One entry point: its name, and the module that defines it.

    Attributes:
        name: The entry point's name.
        bitcode: LLVM bitcode with Apple's wrapper; its SHA-256 goes into the file.
        air_version: Version of AIR, 2.8 for macOS 26.
        language_version: Version of the Metal language, 4.0 for macOS 26.
        kind: The stage.
        reflection: The function's record of the RLST section without its size, or None.
    """

    name: str
    bitcode: bytes
    air_version: Version
    language_version: Version
    kind: FunctionKind = FunctionKind.KERNEL
    reflection: bytes | None = None

    @property
    def sha256(self) -> bytes:
        """The digest that the HASH tag carries."""
        return hashlib.sha256(self.bitcode).digest()


@dataclass(frozen=True)
class Metallib:
    """A metallib for macOS.

    Attributes:
        functions: The entry points, in file order.
        os_version: The oldest macOS that loads the file.
        os_patch: Third number of that version.
        format_version: Version of the container (major without the platform flag, minor).
        format_patch: Third number of the container's version.
        dynamic_name: The library's own name in the HDYN section, or None.
        uuid: Sixteen bytes, or None.
    """

    functions: tuple[Function, ...]
    os_version: Version
    os_patch: int = 0
    format_version: Version = Version(1, 2)
    format_patch: int = 9
    dynamic_name: str | None = None
    uuid: bytes | None = None

    def to_bytes(self) -> bytes:
        """Encodes the file.

        Raises:
            MetallibError: Two functions share a name, or only some have reflection records.
        """
        return _Writer(self).encode()

    def function(self, name: str) -> Function:
        """The function called ``name``.

        Raises:
            MetallibError: There is none.
        """
        for function in self.functions:
            if function.name == name:
                return function
        known = ", ".join(function.name for function in self.functions) or "none"
        raise MetallibError(f"metallib has no function '{name}'; it has: {known}")


def read(data: bytes) -> Metallib:
    """Decodes a metallib.

    Raises:
        MetallibError: ``data`` is truncated, foreign, damaged, or uses what is not supported;
            the message says which, and where.
    """
    return _Reader(data).decode()


def _tag(name: bytes, payload: bytes) -> bytes:
    return name + struct.pack("<H", len(payload)) + payload


def _group(tags: bytes) -> bytes:
    return struct.pack("<I", len(tags) + 8) + tags + END_TAG


class _Writer:
    """Lays out the sections of one library."""

    def __init__(self, library: Metallib):
        names = [function.name for function in library.functions]
        for name, count in Counter(names).items():
            if count > 1:
                raise MetallibError(f"metallib would hold two functions called '{name}'")
        reflections = [function.reflection for function in library.functions]
        present = [record for record in reflections if record is not None]
        if present and len(present) != len(reflections):
            raise MetallibError("either all functions of a metallib have reflection or none has")
        self.library = library
        self.reflections = present

    def encode(self) -> bytes:
        library = self.library
        functions = self._function_list()
        metadata = EMPTY_GROUP * len(library.functions)
        modules = b"".join(function.bitcode for function in library.functions)
        dynamic = b""
        if library.dynamic_name is not None:
            dynamic = _tag(b"NAME", library.dynamic_name.encode() + b"\0") + END_TAG

        reflection = self._reflection_list()
        extension_size = len(self._extension(0, dynamic, 0, reflection))

        public = HEADER_SIZE + 4 + len(functions) + extension_size
        private = public + len(metadata)
        bitcode = private + len(metadata)
        dynamic_at = bitcode + len(modules)
        reflection_at = dynamic_at + len(dynamic)
        size = reflection_at + len(reflection)

        header = struct.pack(
            "<4sHHHBBHBBQ",
            MAGIC,
            library.format_version.major | MACOS_MAJOR_FLAG,
            library.format_version.minor,
            library.format_patch,
            0,
            MACOS_PLATFORM,
            library.os_version.major,
            library.os_version.minor,
            library.os_patch,
            size,
        ) + struct.pack(
            "<8Q",
            *(HEADER_SIZE, len(functions)),
            *(public, len(metadata)),
            *(private, len(metadata)),
            *(bitcode, len(modules)),
        )
        count = struct.pack("<I", len(library.functions))
        extension = self._extension(dynamic_at, dynamic, reflection_at, reflection)
        return b"".join(
            [header, count, functions, extension, metadata, metadata, modules, dynamic, reflection]
        )

    def _function_list(self) -> bytes:
        groups: list[bytes] = []
        module_offset, reflection_offset = 0, 4
        for index, function in enumerate(self.library.functions):
            metadata_offset = index * len(EMPTY_GROUP)
            air, language = function.air_version, function.language_version
            versions = (air.major, air.minor, language.major, language.minor)
            tags = [
                _tag(b"NAME", function.name.encode() + b"\0"),
                _tag(b"TYPE", bytes([function.kind])),
                _tag(b"HASH", function.sha256),
                _tag(b"OFFT", struct.pack("<3Q", metadata_offset, metadata_offset, module_offset)),
                _tag(b"VERS", struct.pack("<4H", *versions)),
                _tag(b"MDSZ", struct.pack("<Q", len(function.bitcode))),
            ]
            if function.reflection is not None:
                tags.append(_tag(b"RFLT", struct.pack("<Q", reflection_offset)))
                reflection_offset += 4 + len(function.reflection)
            groups.append(_group(b"".join(tags)))
            module_offset += len(function.bitcode)
        return b"".join(groups)

    def _reflection_list(self) -> bytes:
        if not self.reflections:
            return b""
        records = (struct.pack("<I", len(record) + 4) + record for record in self.reflections)
        return struct.pack("<I", len(self.reflections)) + b"".join(records)

    def _extension(
        self, dynamic_at: int, dynamic: bytes, reflection_at: int, reflection: bytes
    ) -> bytes:
        tags = b""
        if dynamic:
            tags += _tag(b"HDYN", struct.pack("<QQ", dynamic_at, len(dynamic)))
        if reflection:
            tags += _tag(b"RLST", struct.pack("<QQ", reflection_at, len(reflection)))
        if self.library.uuid is not None:
            tags += _tag(b"UUID", self.library.uuid)
        return tags + END_TAG


_FUNCTION_TAGS = {b"NAME", b"TYPE", b"HASH", b"OFFT", b"VERS", b"MDSZ", b"RFLT"}
_EXTENSION_TAGS = {b"HDYN", b"RLST", b"UUID"}


class _Reader:
    """Decodes one file, and refuses by name what it does not understand."""

    def __init__(self, data: bytes):
        self.data = data

    def decode(self) -> Metallib:
        data = self.data
        if data[:4] != MAGIC:
            raise MetallibError(
                f"not a metallib: expected the magic 'MTLB' but got {bytes(data[:4])!r}"
            )
        fields = self._unpack("<4sHHHBBHBBQ", 0, "header")
        _, major, minor, patch, file_type, platform, os_major, os_minor, os_patch, size = fields
        if not major & MACOS_MAJOR_FLAG or platform != MACOS_PLATFORM:
            raise MetallibError(
                f"metallib is for platform 0x{platform:02x}; "
                f"only macOS (0x{MACOS_PLATFORM:02x}) is supported"
            )
        if file_type != 0:
            raise MetallibError(
                f"metallib has file type {file_type}; only executable libraries (0) are supported"
            )
        if size != len(data):
            kind = "truncated" if size > len(data) else "followed by foreign bytes"
            raise MetallibError(f"metallib is {kind}: expected {size} bytes but got {len(data)}")

        sections = self._unpack("<8Q", 24, "section table")
        list_at, list_size, public_at, public_size, private_at, private_size, *modules = sections
        groups, extension_at = self._function_groups(list_at, list_size)
        extension, _ = self._tags(extension_at, len(data), _EXTENSION_TAGS, "header extension")
        for at, length, what in (
            (public_at, public_size, "public"),
            (private_at, private_size, "private"),
        ):
            if self._bytes(at, length, f"{what} metadata") != EMPTY_GROUP * len(groups):
                raise MetallibError(f"metallib has {what} metadata, which is not supported")

        reflection_at = self._extension_range(extension, b"RLST")
        functions = self._functions(groups, modules, reflection_at)
        library = Metallib(
            functions=functions,
            os_version=Version(os_major, os_minor),
            os_patch=os_patch,
            format_version=Version(major & ~MACOS_MAJOR_FLAG, minor),
            format_patch=patch,
            dynamic_name=self._dynamic_name(extension),
            uuid=extension.get(b"UUID"),
        )
        # What is kept has to be all there was: a file that would come back changed is refused.
        if library.to_bytes() != data:
            raise MetallibError("metallib has sections in an order or of a kind not supported")
        return library

    def _bytes(self, at: int, size: int, what: str) -> bytes:
        if at + size > len(self.data):
            raise MetallibError(
                f"metallib is truncated: {what} at offset {at} needs {size} bytes "
                f"but the file ends at {len(self.data)}"
            )
        return self.data[at : at + size]

    def _unpack(self, layout: str, at: int, what: str) -> tuple:
        return struct.unpack(layout, self._bytes(at, struct.calcsize(layout), what))

    def _tags(
        self, at: int, end: int, known: set[bytes], what: str
    ) -> tuple[dict[bytes, bytes], int]:
        """Reads tags up to "ENDT"; returns them and the offset behind it."""
        tags: dict[bytes, bytes] = {}
        while at + 4 <= end:
            name = self._bytes(at, 4, what)
            if name == END_TAG:
                return tags, at + 4
            if name not in known:
                raise MetallibError(f"{what} at offset {at} has an unknown tag {name!r}")
            (length,) = self._unpack("<H", at + 4, what)
            tags[name] = self._bytes(at + 6, length, what)
            at += 6 + length
        raise MetallibError(f"{what} has no end tag before offset {end}")

    def _function_groups(self, at: int, size: int) -> tuple[list[dict[bytes, bytes]], int]:
        (count,) = self._unpack("<I", at, "function list")
        at, end = at + 4, at + 4 + size
        groups: list[dict[bytes, bytes]] = []
        for index in range(count):
            what = f"function {index}"
            (group_size,) = self._unpack("<I", at, what)
            tags, behind = self._tags(at + 4, min(at + group_size, end), _FUNCTION_TAGS, what)
            missing = _FUNCTION_TAGS - {b"RFLT"} - tags.keys()
            if missing:
                names = ", ".join(sorted(tag.decode() for tag in missing))
                raise MetallibError(f"{what} lacks the tags {names}")
            groups.append(tags)
            at = behind
        if at != end:
            raise MetallibError(f"function list ends at offset {at}; its size says {end}")
        return groups, at

    def _extension_range(
        self, extension: dict[bytes, bytes], name: bytes
    ) -> tuple[int, int] | None:
        if name not in extension:
            return None
        if len(extension[name]) != 16:
            raise MetallibError(f"tag {name!r} of the header extension needs 16 bytes")
        at, size = struct.unpack("<QQ", extension[name])
        self._bytes(at, size, f"section {name.decode()}")
        return at, size

    def _dynamic_name(self, extension: dict[bytes, bytes]) -> str | None:
        section = self._extension_range(extension, b"HDYN")
        if section is None:
            return None
        tags, _ = self._tags(section[0], sum(section), {b"NAME"}, "section HDYN")
        try:
            return tags.get(b"NAME", b"").rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise MetallibError(f"the name in section HDYN is no UTF-8: {error}") from None

    def _functions(
        self,
        groups: list[dict[bytes, bytes]],
        modules: list[int],
        reflection: tuple[int, int] | None,
    ) -> tuple[Function, ...]:
        """The functions, whose modules and records lie one behind the other.

        Were they allowed to share bytes, a small file could make a large library.
        """
        functions: list[Function] = []
        module_offset, record_offset = 0, 4
        for group in groups:
            function = self._function(group, modules, reflection, module_offset, record_offset)
            functions.append(function)
            module_offset += len(function.bitcode)
            record_offset += 4 + len(function.reflection or b"")
        return tuple(functions)

    def _function(
        self,
        tags: dict[bytes, bytes],
        modules: list[int],
        reflection: tuple[int, int] | None,
        module_at: int,
        record_at: int,
    ) -> Function:
        name = tags[b"NAME"].rstrip(b"\0").decode("utf-8", "backslashreplace")
        try:
            kind = FunctionKind(tags[b"TYPE"][0])
            *_, module_offset = struct.unpack("<3Q", tags[b"OFFT"])
            versions = struct.unpack("<4H", tags[b"VERS"])
            (module_size,) = struct.unpack("<Q", tags[b"MDSZ"])
        except (struct.error, ValueError, IndexError) as error:
            raise MetallibError(f"function '{name}' has a malformed tag: {error}") from None
        if module_offset != module_at:
            raise MetallibError(
                f"module of function '{name}' is at {module_offset} of its section; "
                f"expected {module_at}, behind the one before"
            )
        if module_offset + module_size > modules[1]:
            raise MetallibError(f"module of function '{name}' lies outside the module section")
        bitcode = self._bytes(modules[0] + module_offset, module_size, f"module of '{name}'")
        function = Function(
            name=name,
            bitcode=bitcode,
            air_version=Version(*versions[:2]),
            language_version=Version(*versions[2:]),
            kind=kind,
            reflection=self._reflection(name, tags, reflection, record_at),
        )
        if function.sha256 != tags[b"HASH"]:
            raise MetallibError(f"module of function '{name}' does not have the hash of its tag")
        return function

    def _reflection(
        self, name: str, tags: dict[bytes, bytes], section: tuple[int, int] | None, expected: int
    ) -> bytes | None:
        if b"RFLT" not in tags:
            return None
        if section is None or len(tags[b"RFLT"]) != 8:
            raise MetallibError(f"function '{name}' refers to a reflection list that is not there")
        (offset,) = struct.unpack("<Q", tags[b"RFLT"])
        if offset != expected:
            raise MetallibError(f"reflection of function '{name}' is not behind the one before")
        at, what = section[0] + offset, f"reflection of '{name}'"
        (size,) = self._unpack("<I", at, what)
        return self._bytes(at + 4, max(size - 4, 0), what)
