# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Errors that name a place in the source, in MLIR's style."""

from __future__ import annotations

from iree.compiler import ir


class BadAttributeError(ValueError):
    """An attribute that is not of the form its view expects; the caller adds the location."""


class DiagnosticError(Exception):
    """One located error and its notes; tools print it as a line each and exit non-zero.

    Attributes:
        location: Where in the user's source, ``file:line:col`` or ``<unknown>``.
        message: What is wrong and what would be right, lower case, without a period.
        notes: Cures or related facts, one line each.
    """

    def __init__(self, location: str, message: str, notes: tuple[str, ...] = ()):
        """See the class's attributes."""
        super().__init__(message)
        self.location = location
        self.message = message
        self.notes = notes

    def render(self) -> str:
        """The text that a user sees: ``file:line:col: error: ...`` and ``note:`` lines."""
        lines = [f"{self.location}: error: {self.message}"]
        lines += [f"{self.location}: note: {note}" for note in self.notes]
        return "\n".join(lines)


def error_at(op: ir.Operation | ir.OpView, message: str, *notes: str) -> DiagnosticError:
    """A ``DiagnosticError`` about ``op``: ``'linalg.matmul' op <message>``."""
    operation = op.operation
    return DiagnosticError(
        describe_location(operation.location), f"'{operation.name}' op {message}", notes
    )


def from_mlir(error: ir.MLIRError, unknown: str) -> DiagnosticError:
    """The first error of MLIR's own as one of ours.

    Args:
        error: What the bindings raised.
        unknown: The location where the error has none.
    """
    if not error.error_diagnostics:
        return DiagnosticError(unknown, str(error).splitlines()[0])
    first = error.error_diagnostics[0]
    # The location of a diagnostic is of no derived class, which alone says file and line.
    location = ir.Location.from_attr(first.location.attr, first.location.context)
    place = describe_location(location)
    message = first.message.splitlines()[0]
    return DiagnosticError(unknown if place == "<unknown>" else place, message)


def describe_location(location: ir.Location) -> str:
    """``file:line:col`` of the innermost source position.

    Inlining wraps locations as call sites, fusion as lists: the position that the user wrote is
    the callee of the one and the first of the other.
    """
    match location:
        case ir.FileLineColLoc():
            return f"{location.filename}:{location.start_line}:{location.start_col}"
        case ir.CallSiteLoc():
            return describe_location(location.callee)
        case ir.NameLoc():
            # ONNX nodes have names and no files.
            child = describe_location(location.child_loc)
            return location.name_str if child == "<unknown>" and location.name_str else child
        case ir.FusedLoc() if location.locations:
            return describe_location(location.locations[0])
    return "<unknown>"
