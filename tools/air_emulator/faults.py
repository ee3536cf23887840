# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel can do wrong. Each is an error here, whether or not a GPU would notice."""

from __future__ import annotations


class AirError(RuntimeError):
    """A kernel did something that is undefined or outside its contract."""


class OutOfBoundsError(AirError):
    """A load or store outside the buffer that the address was made from."""


class PoisonError(AirError):
    """A load of bytes that nobody has written, or a use of an undefined value."""


class ReadOnlyError(AirError):
    """A store to a buffer that the kernel may only read."""


class RaceError(AirError):
    """Two threads touch the same bytes, at least one of them writing."""


class DivergenceError(AirError):
    """Lanes of a simdgroup do not reach the same simdgroup function together."""


class AlignmentError(AirError):
    """An address that is not aligned as the instruction says."""


class UnsupportedError(AirError):
    """An instruction or function that the emulator does not know, or an endless loop."""


class AbiError(AirError):
    """The bindings, constants or grid do not fit the kernel's metadata."""
