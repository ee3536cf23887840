# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Textual pipelines that mix block32's passes with those that the IREE wheel registers.

MLIR's own ``PassManager.parse`` knows no Python passes, so the text is taken apart here: runs of
registered passes go to MLIR, ours are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.passmanager import PassManager

from block32.dialects.diagnostics import DiagnosticError, from_mlir
from block32.passes.base import Pass, Report

_ANCHOR = "builtin.module"


@dataclass(frozen=True)
class RegisteredPass:
    """A pass that MLIR or IREE registers, kept as its pipeline text."""

    text: str

    def describe(self) -> str:
        """The pass as it stands in a textual pipeline."""
        return self.text

    def run(self, module: ir.Module, report: Report) -> None:
        """Run it through MLIR's pass manager.

        Raises:
            DiagnosticError: The text names no registered pass, or the pass failed.
        """
        del report
        try:
            manager = PassManager.parse(f"{_ANCHOR}({self.text})", module.context)
        except ValueError as error:
            raise DiagnosticError("<pipeline>", str(error).splitlines()[0]) from error
        try:
            manager.run(module.operation)
        except ir.MLIRError as error:
            raise from_mlir(error, "<pipeline>") from error


PipelinePass = Pass | RegisteredPass


class PassFailedError(Exception):
    """A pass failed: which one, why, and the IR before it.

    Attributes:
        failed: The pass.
        diagnostic: The located error, or None for an error of block32's own.
        ir_before: The module before the failing pass, with locations.
        pipeline_through: The passes up to and with the failing one, as pipeline text.
    """

    def __init__(
        self,
        failed: PipelinePass,
        diagnostic: DiagnosticError | None,
        ir_before: str,
        pipeline_through: tuple[str, ...],
    ):
        """See the class's attributes."""
        super().__init__(diagnostic.render() if diagnostic else f"'{failed.describe()}' failed")
        self.failed = failed
        self.diagnostic = diagnostic
        self.ir_before = ir_before
        self.pipeline_through = pipeline_through


def parse_pipeline(text: str, passes: tuple[type[Pass], ...]) -> list[PipelinePass]:
    """Parse ``builtin.module(a,b{x=y},util.func(c))`` or the list inside the parentheses.

    Args:
        text: The pipeline.
        passes: The Python passes that it may name.

    Raises:
        DiagnosticError: Unbalanced brackets, or a bad option of one of our passes.
    """
    text = text.strip()
    if text.startswith(f"{_ANCHOR}(") and text.endswith(")"):
        text = text[len(_ANCHOR) + 1 : -1]
    by_argument = {p.argument: p for p in passes}
    parsed: list[PipelinePass] = []
    for element in _split_top_level(text):
        name, _, options = element.partition("{")
        if name.strip() in by_argument:
            parsed.append(by_argument[name.strip()].from_options(_parse_options(options)))
        elif name.strip().startswith("block32-"):
            known = ", ".join(sorted(by_argument))
            raise DiagnosticError(
                "<pipeline>", f"unknown pass '{name.strip()}'; expected one of {known}"
            )
        else:
            parsed.append(RegisteredPass(element))
    return parsed


def _split_top_level(text: str) -> list[str]:
    """The elements between commas that stand outside all brackets."""
    elements, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and depth == 0:
            elements.append(current.strip())
            current = ""
        else:
            current += character
    if depth != 0:
        raise DiagnosticError("<pipeline>", f"unbalanced brackets in pass pipeline '{text}'")
    elements.append(current.strip())
    return [element for element in elements if element]


def _parse_options(text: str) -> dict[str, str]:
    """``a=1 b=2}`` to a dictionary; an option without a value is true."""
    options = {}
    for item in text.rstrip().removesuffix("}").split():
        name, equals, value = item.partition("=")
        options[name] = value if equals else "true"
    return options


def run_pipeline(
    module: ir.Module,
    passes: list[PipelinePass],
    report: Report,
    after_each: Callable[[PipelinePass, ir.Module], None] = lambda _pass, _module: None,
) -> None:
    """Run ``passes`` over ``module`` in place, verifying after each.

    Args:
        module: The module.
        passes: From ``parse_pipeline`` or ``registry``.
        report: Takes remarks and warnings.
        after_each: Called after every pass, for dumps.

    Raises:
        PassFailedError: A pass failed; it holds the IR before that pass.
    """
    for position, current in enumerate(passes):
        before = module.operation.clone()
        diagnostic: DiagnosticError | None = None
        try:
            with module.context, ir.Location.unknown():
                current.run(module, report)
                module.operation.verify()
        except Exception as error:
            if isinstance(error, DiagnosticError):
                diagnostic = error
            through = tuple(p.describe() for p in passes[: position + 1])
            raise PassFailedError(current, diagnostic, _print(before), through) from error
        before.erase()
        after_each(current, module)


def _print(operation: ir.OpView | ir.Operation) -> str:
    return operation.operation.get_asm(enable_debug_info=True)
