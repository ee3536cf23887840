# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading a FlatBuffer without trusting it: every offset is checked before it is followed.

The layout is that of https://flatbuffers.dev/internals: little endian; a table begins with the
signed distance back to its vtable, which holds two sizes and then one 16-bit offset a field, 0 for
a field that is not there.

Offsets may lead to one table from many places, so that a small buffer can stand for any number of
tables. Reading a buffer therefore has a budget.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass


class FlatBufferError(ValueError):
    """An offset or a size points out of the buffer."""


@dataclass
class Budget:
    """How much of a buffer may still be read: a table or 64 bytes of a string count as one.

    A table takes 8 bytes or more in the buffer, with its place in a vector: a budget of one for
    each byte leaves room for those that are read several times.
    """

    left: int

    def spend(self, size: int = 0) -> None:
        """Count a table, or a string of ``size`` bytes.

        Raises:
            FlatBufferError: Nothing is left.
        """
        self.left -= 1 + size // 64
        if self.left < 0:
            raise FlatBufferError("it stands for more tables than it holds")


@dataclass(frozen=True)
class Table:
    """A table at ``position`` of ``data``. Fields are named by their number in the schema."""

    data: memoryview
    position: int
    budget: Budget

    @classmethod
    def root(cls, data: memoryview) -> Table:
        """The root table of a buffer that starts with its offset.

        Raises:
            FlatBufferError: It is not in the buffer.
        """
        return cls(data, _unsigned(data, 0), Budget(len(data)))

    def _field(self, number: int) -> int | None:
        """Where the field's value is, or None for a field that is not there."""
        vtable = self.position - _read(self.data, "<i", self.position)
        entry = 4 + 2 * number
        if entry + 2 > _read(self.data, "<H", vtable):
            return None
        offset = _read(self.data, "<H", vtable + entry)
        return self.position + offset if offset else None

    def uint32(self, number: int) -> int:
        """An unsigned 32-bit field, 0 where it is not there."""
        field = self._field(number)
        return 0 if field is None else _unsigned(self.data, field)

    def int32(self, number: int) -> int:
        """A signed 32-bit field, 0 where it is not there."""
        field = self._field(number)
        return 0 if field is None else _read(self.data, "<i", field)

    def uint64(self, number: int) -> int:
        """An unsigned 64-bit field, 0 where it is not there."""
        field = self._field(number)
        return 0 if field is None else _read(self.data, "<Q", field)

    def bytes(self, number: int) -> memoryview | None:
        """A vector of bytes or a string, in place; None where it is not there."""
        field = self._field(number)
        if field is None:
            return None
        start, count = self._vector(field)
        return _slice(self.data, start, count)

    def string(self, number: int) -> str:
        """A string, empty where it is not there; bytes that are no UTF-8 are replaced."""
        content = self.bytes(number)
        self.budget.spend(0 if content is None else len(content))
        return "" if content is None else str(content, "utf-8", "replace")

    def tables(self, number: int) -> Iterator[Table]:
        """The tables of a vector, none where it is not there."""
        field = self._field(number)
        if field is None:
            return
        start, count = self._vector(field)
        _slice(self.data, start, 4 * count)
        for position in range(start, start + 4 * count, 4):
            self.budget.spend()
            yield Table(self.data, position + _unsigned(self.data, position), self.budget)

    def _vector(self, field: int) -> tuple[int, int]:
        """Where a vector's elements start, and how many there are."""
        start = field + _unsigned(self.data, field)
        return start + 4, _unsigned(self.data, start)


def _slice(data: memoryview, start: int, size: int) -> memoryview:
    if start < 0 or size < 0 or start + size > len(data):
        raise FlatBufferError(f"{size} bytes at {start} are not in a buffer of {len(data)}")
    return data[start : start + size]


def _read(data: memoryview, form: str, start: int) -> int:
    return struct.unpack(form, _slice(data, start, struct.calcsize(form)))[0]


def _unsigned(data: memoryview, start: int) -> int:
    return _read(data, "<I", start)
