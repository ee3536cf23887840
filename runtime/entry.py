# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A range of bytes in a parameter file, read a piece at a time."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from block32.runtime.errors import LoadError

_CHUNK: Final = 1 << 24


class ArchiveError(LoadError):
    """A file that is no parameter file, is damaged, or cannot be read. The location is the file."""


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file to read from, and its size in bytes.

    Raises:
        ArchiveError: It cannot be read, or is a folder, a pipe or a device.
    """
    try:
        # Asked before opening it: opening a pipe waits for its other end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArchiveError(os.fspath(path), "expected a file")
        with path.open("rb") as stream:
            yield stream, os.fstat(stream.fileno()).st_size
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArchiveError(os.fspath(path), f"cannot read the parameters: {reason}") from error


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

    def part(self, start: int, length: int) -> Entry:
        """Some of its bytes."""
        assert self.pattern is None and 0 <= start <= start + length <= self.length
        return dataclasses.replace(self, offset=self.offset + start, length=length)

    def read(self) -> bytes:
        """All bytes of the parameter.

        Raises:
            ArchiveError: The file ends before, or cannot be read.
        """
        return b"".join(self.chunks())

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        """The bytes in pieces of ``size`` bytes, the last one shorter.

        Raises:
            ArchiveError: The file ends before, or cannot be read.
        """
        if self.pattern is not None:
            repeats = max(min(size, self.length) // len(self.pattern), 1)
            for start in range(0, self.length, repeats * len(self.pattern)):
                yield (self.pattern * repeats)[: self.length - start]
            return
        with opened(self.path) as (stream, _):
            stream.seek(self.offset)
            for start in range(0, self.length, size):
                wanted = min(size, self.length - start)
                data = stream.read(wanted)
                if len(data) != wanted:
                    raise ArchiveError(os.fspath(self.path), "the file ends within a parameter")
                yield data
