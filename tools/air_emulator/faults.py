# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel can do wrong. Each is an error here, whether or not a GPU would notice."""

from __future__ import annotations


class AirFault(RuntimeError):
    """A kernel did something that is undefined or outside its contract."""


class OutOfBoundsFault(AirFault):
    """A load or store outside the buffer that the address was made from."""


class PoisonFault(AirFault):
    """A load of bytes that nobody has written, or a use of an undefined value."""


class ReadOnlyFault(AirFault):
    """A store to a buffer that the kernel may only read."""


class RaceFault(AirFault):
    """Two threads touch the same bytes, at least one of them writing."""


class DivergenceFault(AirFault):
    """Lanes of a simdgroup do not reach the same simdgroup function together."""


class AlignmentFault(AirFault):
    """An address that is not aligned as the instruction says."""


class UnsupportedFault(AirFault):
    """An instruction or function that the emulator does not know, or an endless loop."""


class AbiFault(AirFault):
    """The bindings, constants or grid do not fit the kernel's metadata."""
