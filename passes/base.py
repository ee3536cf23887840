# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a pass is, and what it may report."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, describe_location


@dataclass(frozen=True)
class Remark:
    """Something worth knowing about one op, and not an error.

    Attributes:
        location: Where in the user's source.
        message: What was decided, and why.
        severity: ``remark``, or ``warning`` where the user may have meant something else.
    """

    location: str
    message: str
    severity: str = "remark"

    def render(self) -> str:
        """The text that a user sees: ``file:line:col: remark: ...``."""
        return f"{self.location}: {self.severity}: {self.message}"


@dataclass
class Report:
    """What the passes of one run said: remarks and warnings, in order."""

    remarks: list[Remark] = field(default_factory=list)

    def remark(self, op: ir.Operation | ir.OpView, message: str) -> None:
        """Say what was decided about ``op``."""
        self.remarks.append(Remark(describe_location(op.operation.location), message))

    def warn(self, op: ir.Operation | ir.OpView, message: str) -> None:
        """Say that ``op`` was left alone although it looks like one of ours."""
        location = describe_location(op.operation.location)
        self.remarks.append(Remark(location, message, "warning"))


@dataclass
class Pass(ABC):
    """A pass over the module; its dataclass fields are its options.

    A subclass sets ``argument`` (its flag, ``block32-...``) and ``summary`` (one line), and its
    module's docstring shows IR before and after.
    """

    argument: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def run(self, module: ir.Module, report: Report) -> None:
        """Rewrite ``module`` in place.

        Raises:
            DiagnosticError: The module cannot be compiled as its author asked.
        """

    @classmethod
    def option_fields(cls) -> tuple[dataclasses.Field[object], ...]:
        """The options: the fields that a textual pipeline may set."""
        return tuple(f for f in dataclasses.fields(cls) if f.init)

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Pass:
        """A pass with options from a textual pipeline; dashes in names stand for underscores.

        Raises:
            DiagnosticError: An option that the pass does not have, or a value of the wrong kind.
        """
        known = {f.name.replace("_", "-"): f for f in cls.option_fields()}
        values: dict[str, object] = {}
        for name, text in options.items():
            if name not in known:
                expected = ", ".join(known) or "none"
                raise DiagnosticError(
                    "<pipeline>",
                    f"pass '{cls.argument}' has no option '{name}'; expected {expected}",
                )
            values[known[name].name] = _parse_option(cls.argument, known[name], text)
        return cls(**values)  # type: ignore[arg-type]

    def describe(self) -> str:
        """The pass as it stands in a textual pipeline, with the options that were changed."""
        changed = [
            f"{f.name.replace('_', '-')}={getattr(self, f.name)}"
            for f in self.option_fields()
            if getattr(self, f.name) != f.default
        ]
        return f"{self.argument}{{{' '.join(changed)}}}" if changed else self.argument


def _parse_option(argument: str, option: dataclasses.Field[object], text: str) -> object:
    match option.type:
        case "bool" if text in ("true", "false"):
            return text == "true"
        case "int" if text.lstrip("-").isdigit():
            return int(text)
        case "str":
            return text
    raise DiagnosticError(
        "<pipeline>",
        f"option '{option.name}' of pass '{argument}' needs a {option.type} but got '{text}'",
    )
