# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""The part of MessagePack that code object metadata uses (no floats, no extensions)."""

from __future__ import annotations

import struct
from typing import Any

_FIXED = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i"}
_FIXED[0xD3] = ">q"
_LENGTHS = {
    # marker: (kind, format of the length)
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xC4: ("bin", ">B"),
    0xC5: ("bin", ">H"),
    0xC6: ("bin", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


def decode(data: bytes) -> Any:
    """Decode one MessagePack value; ValueError on a marker outside of the supported part."""
    return _value(data, 0)[0]


def _value(data: bytes, at: int) -> tuple[Any, int]:
    marker = data[at]
    at += 1
    if marker < 0x80:
        return marker, at
    if marker >= 0xE0:
        return marker - 256, at
    if marker in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[marker], at
    if marker in _FIXED:
        form = _FIXED[marker]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if marker in _LENGTHS:
        kind, form = _LENGTHS[marker]
        length = struct.unpack_from(form, data, at)[0]
        return _sequence(data, at + struct.calcsize(form), kind, length)
    if marker < 0x90:
        return _sequence(data, at, "map", marker & 0xF)
    if marker < 0xA0:
        return _sequence(data, at, "array", marker & 0xF)
    if marker < 0xC0:
        return _sequence(data, at, "str", marker & 0x1F)
    raise ValueError(f"unsupported MessagePack marker {marker:#x}")


def _sequence(data: bytes, at: int, kind: str, length: int) -> tuple[Any, int]:
    if kind in ("str", "bin"):
        raw = data[at : at + length]
        if len(raw) != length:
            raise ValueError("a MessagePack string ends early")
        return (raw.decode() if kind == "str" else raw), at + length
    items: list[Any] = []
    for _ in range(length * 2 if kind == "map" else length):
        item, at = _value(data, at)
        items.append(item)
    if kind == "map":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return items, at
