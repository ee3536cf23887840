# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading HSACO files that are damaged, or made to stand for far more than they hold."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.tools.gfx950_executor import msgpack
from block32.tools.gfx950_executor.code_object import (
    hsaco_from_vmfb,
    hsacos_from_vmfb,
    parse_code_object,
)
from block32.tools.gfx950_executor.errors import CodeObjectError, DamagedCodeError
from tests.fuzz import check_reader, damaged
from tests.modules import GFX950, ONE, compiled

#: The image of a small code object may have 64 MiB of zeros, and is copied once.
MOST_BYTES = 160 << 20
HEADER_BYTES, SECTION_BYTES, SEGMENT_BYTES = 64, 64, 56


@pytest.fixture(scope="module")
def elf() -> bytes:
    return hsaco_from_vmfb(compiled(ONE, GFX950))


@settings(max_examples=300)
@given(draw=st.data())
def test_damaged_code_objects(draw: st.DataObject) -> None:
    content = hsaco_from_vmfb(compiled(ONE, GFX950))
    check_reader(parse_code_object, draw.draw(damaged(content)), CodeObjectError, MOST_BYTES)


@settings(max_examples=150)
@given(draw=st.data())
def test_damaged_modules(draw: st.DataObject) -> None:
    data = draw.draw(damaged(compiled(ONE, GFX950)))
    check_reader(hsacos_from_vmfb, data, CodeObjectError, 1 << 20)


def refused(elf: bytes) -> str:
    with pytest.raises(DamagedCodeError) as caught:
        parse_code_object(elf)
    return caught.value.message


def test_sections_that_share_bytes(elf: bytes) -> None:
    """The same table of symbols 60000 times would be read as often."""
    table, count = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<H", elf, 60)[0]
    sections = elf[table : table + count * SECTION_BYTES]
    changed = bytearray(elf + sections * (60000 // count))
    struct.pack_into("<Q", changed, 40, len(elf))
    struct.pack_into("<H", changed, 60, 60000 // count * count)
    assert "its sections overlap" in refused(bytes(changed))


@pytest.mark.parametrize("size", [1 << 28, 1 << 40, (1 << 64) - 1])
def test_a_segment_of_absurd_size_allocates_nothing(elf: bytes, size: int) -> None:
    changed = bytearray(elf)
    headers, count = struct.unpack_from("<Q", elf, 32)[0], struct.unpack_from("<H", elf, 56)[0]
    load = next(
        at
        for at in range(headers, headers + count * SEGMENT_BYTES, SEGMENT_BYTES)
        if struct.unpack_from("<I", elf, at)[0] == 1
    )
    struct.pack_into("<Q", changed, load + 40, size)
    check_reader(parse_code_object, bytes(changed), DamagedCodeError, 1 << 20)
    assert "a segment lies outside of the file" in refused(bytes(changed))


def test_a_header_without_sections_is_passed() -> None:
    """A size of 0 would have the search find the same header for ever."""
    header = bytearray(HEADER_BYTES)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, 224)
    assert hsacos_from_vmfb(bytes(header) * 3) == [bytes(header)] * 3


def test_metadata_that_are_no_map(elf: bytes) -> None:
    at = elf.index(b"amdhsa.kernels") - 2
    changed = bytearray(elf)
    changed[at] = 0x07  # the number 7 where the map begins
    assert "its metadata are no map" in refused(bytes(changed))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xa5abc", "a MessagePack string ends early"),
        (b"\xdb\xff\xff\xff\xffabc", "a MessagePack string ends early"),
        (b"\xc1", "unsupported MessagePack marker 0xc1"),
    ],
)
def test_damaged_messagepack(data: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        msgpack.decode(data)


def test_an_array_that_is_not_there_allocates_nothing() -> None:
    check_reader(msgpack.decode, b"\xdd\xff\xff\xff\xff\x01", IndexError, 1 << 16)
