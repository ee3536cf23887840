# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""What the gfx950 executor refuses: one exception type, one kind a rule, one located line."""

from __future__ import annotations


class ExecutionError(Exception):
    """A kernel broke a rule of the machine; the message names the instruction.

    Attributes:
        kind: The rule, as a short stable name that tests can compare.
        location: Where it happened: kernel, workgroup, wave, byte offset and mnemonic.
    """

    kind = "execution error"

    def __init__(self, message: str):
        self.message = message
        self.location = ""
        super().__init__(message)

    def at(self, location: str) -> ExecutionError:
        """Attach the instruction's location, unless an inner frame has done so already."""
        if not self.location:
            self.location = location
        return self

    def __str__(self) -> str:
        prefix = f"{self.location}: " if self.location else ""
        return f"{prefix}error: {self.kind}: {self.message}"


class CodeObjectError(ExecutionError):
    """The bytes are not a gfx950 code object, or lack the kernel that was asked for."""

    kind = "code object"


class DamagedCodeError(CodeObjectError):
    """The bytes begin like a code object and are truncated or make no sense."""


class LaunchError(ExecutionError):
    """The launch does not fit the kernel's own description of its arguments."""

    kind = "launch"


class UnknownInstructionError(ExecutionError):
    """An encoding or a mode of an instruction that the executor has no meaning for."""

    kind = "unknown instruction"


class MissingWaitError(ExecutionError):
    """A register or LDS byte was touched while a memory operation on it was outstanding."""

    kind = "missing wait"


class OutOfBoundsError(ExecutionError):
    """Memory, LDS, scratch or a register outside of what the launch owns was touched."""

    kind = "out of bounds"


class UninitialisedError(ExecutionError):
    """An uninitialised value reached a store, an address or a branch."""

    kind = "uninitialised value"


class RaceError(ExecutionError):
    """Two waves touched one byte, one of them writing, with nothing ordering them."""

    kind = "race"


class StaleReadError(ExecutionError):
    """A load may return what a cache held before another workgroup's ordered store."""

    kind = "stale read"


class StuckError(ExecutionError):
    """A wave cannot make progress: a barrier not all waves reach, or an endless loop."""

    kind = "stuck"
