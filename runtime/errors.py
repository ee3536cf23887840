# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What loading and calling a compiled module can raise."""

from __future__ import annotations

from block32.dialects.diagnostics import DiagnosticError


class LoadError(DiagnosticError):
    """A module cannot be loaded here. The location is the file, or ``<vmfb>`` for bytes."""

    def __str__(self) -> str:
        return "\n".join([f"{self.location}: {self.message}", *self.notes])


class VmfbError(LoadError):
    """The bytes are no IREE module, or are cut off or damaged."""


class CallError(LoadError):
    """A function is unknown, or its arguments do not fit. The location is the function."""
