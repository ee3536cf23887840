# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The metallib reader and writer: files of Apple's own byte for byte, damage refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block32.lowering.apple.library import build_metallib, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.metallib import (
    HEADER_SIZE,
    Function,
    FunctionKind,
    Metallib,
    MetallibError,
    Version,
    read,
)

#: A folder of .metallib files that Apple's toolchain built; they are not part of this project.
FIXTURES = os.environ.get("BLOCK32_METALLIB_FIXTURES", "")


def _library(count: int = 2, reflection: bool = False) -> Metallib:
    functions = tuple(
        Function(
            name=f"kernel{i}",
            bitcode=bytes([i + 1]) * (64 + 16 * i),
            air_version=Version(2, 8),
            language_version=Version(4, 0),
            reflection=b"RBUF" + bytes(7 + i) + b"ENDT" if reflection else None,
        )
        for i in range(count)
    )
    return Metallib(functions, os_version=Version(26, 0))


def _fixtures() -> list[Path]:
    return sorted(Path(FIXTURES).glob("*.metallib")) if FIXTURES else []


@pytest.mark.skipif(
    not _fixtures(), reason="BLOCK32_METALLIB_FIXTURES names no folder with Apple's own metallibs"
)
@pytest.mark.parametrize("path", _fixtures(), ids=lambda path: path.name)
def test_apples_own_files_come_back_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    library = read(data)
    assert library.to_bytes() == data
    assert all(f.bitcode[:4] == bytes.fromhex("dec0170b") for f in library.functions)


@pytest.mark.parametrize("library", [_library(1), _library(3), _library(2, reflection=True)])
@pytest.mark.parametrize("extras", [{}, {"dynamic_name": "x.metallib"}, {"uuid": bytes(range(16))}])
def test_what_is_written_is_read(library: Metallib, extras: dict) -> None:
    library = Metallib(library.functions, library.os_version, **extras)
    assert read(library.to_bytes()) == library


def test_layout_of_the_header_and_the_function_list() -> None:
    """Offsets by hand, so that reader and writer cannot be wrong in the same way."""
    data = _library(1).to_bytes()
    assert data[:24].hex(" ") == (
        "4d 54 4c 42 01 80 02 00 09 00 00 81 1a 00 00 00 "
        + len(data).to_bytes(8, "little").hex(" ")
    )
    assert int.from_bytes(data[24:32], "little") == HEADER_SIZE == 88
    assert data[88:92] == (1).to_bytes(4, "little")
    assert data[96:106] == b"NAME\x08\x00kern"
    module_at = int.from_bytes(data[72:80], "little")
    assert data[module_at : module_at + 64] == bytes([1]) * 64


def test_every_truncation_is_refused() -> None:
    data = _library(2, reflection=True).to_bytes()
    for size in range(len(data)):
        with pytest.raises(MetallibError):
            read(data[:size])


@given(st.data())
def test_damage_is_refused_or_shows(draw: st.DataObject) -> None:
    """One flipped bit anywhere: an error, or a library that differs. Never another exception."""
    library = _library(2, reflection=True)
    data = bytearray(library.to_bytes())
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= 1 << draw.draw(st.integers(0, 7))
    with contextlib.suppress(MetallibError):
        assert read(bytes(data)) != library


def test_a_changed_module_is_refused_by_its_hash() -> None:
    data = bytearray(_library(1).to_bytes())
    data[-1] ^= 1
    with pytest.raises(MetallibError, match="module of function 'kernel0' does not have the hash"):
        read(bytes(data))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"MTLX", "not a metallib: expected the magic 'MTLB' but got b'MTLX'"),
        (11, b"\x82", "metallib is for platform 0x82; only macOS"),
        (10, b"\x02", "metallib has file type 2; only executable libraries"),
        (16, b"\x00", "metallib is followed by foreign bytes"),
        (96, b"NAMX", "function 0 at offset 96 has an unknown tag b'NAMX'"),
    ],
)
def test_foreign_files_are_named(at: int, value: bytes, message: str) -> None:
    data = bytearray(_library(1).to_bytes())
    data[at : at + len(value)] = value
    with pytest.raises(MetallibError, match=message.replace("(", r"\(")):
        read(bytes(data))


def test_a_library_name_that_is_no_text_is_refused() -> None:
    data = dataclasses.replace(_library(1), dynamic_name="x.metallib").to_bytes()
    with pytest.raises(MetallibError, match="the name in section HDYN is no UTF-8"):
        read(data.replace(b"x.metallib", b"\x80.metallib"))


@settings(max_examples=300)
@given(st.data())
def test_any_damage_gives_a_library_or_a_named_error(draw: st.DataObject) -> None:
    """Words overwritten by extreme ones, bytes lost and put in, in a file with every section."""
    data = bytearray(
        dataclasses.replace(
            _library(2, reflection=True), dynamic_name="x.metallib", uuid=bytes(range(16))
        ).to_bytes()
    )
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data) - 1))
        size = draw.draw(st.sampled_from([0, 1, 4, 8]))
        word = draw.draw(st.sampled_from([0, 0x80, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        data[at : at + size] = word.to_bytes(8, "little")[: draw.draw(st.sampled_from([0, 4, 8]))]
    with contextlib.suppress(MetallibError):
        assert read(bytes(data)).to_bytes() == bytes(data)


def test_functions_that_share_a_module_are_refused_before_it_is_copied() -> None:
    """2000 functions over one module of 1 MB would be a library of 2 GB."""
    module = bytes(2**20)
    small = Metallib(
        tuple(
            Function(f"f{i:04}", module if i == 0 else b"", Version(2, 8), Version(4, 0))
            for i in range(2000)
        ),
        Version(26, 0),
    )
    first = small.functions[0]
    shared = small.to_bytes()
    for tag, size in ((b"HASH", 32), (b"MDSZ", 8), (b"OFFT", 24)):
        at = shared.index(tag) + 6
        empty = shared.index(tag, at) + 6
        shared = shared.replace(
            tag + shared[empty - 2 : empty + size], tag + shared[at - 2 : at + size]
        )
    tracemalloc.start()
    with pytest.raises(MetallibError, match="'f0001' is at 0 of its section; expected 1048576"):
        read(shared)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(first.bitcode) < peak < 8 * len(shared)


@pytest.fixture(scope="module")
def generated() -> bytes:
    """A library as this project writes it, with kernels of two forms."""
    return build_metallib(
        [
            compile_matmul(Matmul(n=64, k=64), "tiled", "tiled"),
            compile_matmul(Matmul(n=64, k=64, rhs_block=(32, 32)), "gemv", "vector"),
        ]
    )


def test_our_own_libraries_come_back_byte_for_byte(generated: bytes) -> None:
    library = read(generated)
    assert library.to_bytes() == generated
    assert [f.name for f in library.functions] == ["tiled", "vector"]
    assert {(f.air_version, f.language_version) for f in library.functions} == {
        (Version(2, 8), Version(4, 0))
    }


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_to_our_own_libraries_is_named(generated: bytes, draw: st.DataObject) -> None:
    """Any bytes anywhere outside the modules, and lost and added ends."""
    data = bytearray(generated)
    at = draw.draw(st.one_of(st.integers(0, 600), st.integers(0, len(data) - 1)))
    data[at : at + draw.draw(st.integers(0, 16))] = draw.draw(st.binary(max_size=16))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(0, len(data))) :]
    if bytes(data) == generated:
        return
    try:
        found = read(bytes(data))
    except MetallibError as error:
        assert str(error)
    else:
        assert found.to_bytes() == bytes(data) and found != read(generated)


def test_other_files_are_no_metallibs() -> None:
    for data in (b"", b"MT", b"\x7fELF" + bytes(200)):
        with pytest.raises(MetallibError):
            read(data)


def test_two_functions_of_one_name_are_refused() -> None:
    function = _library(1).functions[0]
    with pytest.raises(MetallibError, match="two functions called 'kernel0'"):
        Metallib((function, function), Version(26, 0)).to_bytes()


def test_reflection_of_only_some_functions_is_refused() -> None:
    functions = (_library(1).functions[0], _library(2, reflection=True).functions[1])
    with pytest.raises(MetallibError, match="either all functions"):
        Metallib(functions, Version(26, 0)).to_bytes()


def test_a_function_that_is_not_there_is_named_with_those_that_are() -> None:
    library = _library(2)
    assert library.function("kernel1").kind is FunctionKind.KERNEL
    with pytest.raises(MetallibError, match="no function 'gemm'; it has: kernel0, kernel1"):
        library.function("gemm")
