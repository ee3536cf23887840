# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writing a transform spec: a model's kernels for people who keep their own ``iree-compile``.

The spec is made from the model at the phase where ``block32 compile`` would rewrite it, with the
same passes, and tried on the model before anybody gets it.
"""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from iree.compiler import ir

from block32.dialects.composite import is_composite
from block32.dialects.diagnostics import DiagnosticError, describe_location, error_at
from block32.lowering.targets import target_named
from block32.passes.isolate import COUNT_ATTRIBUTE, MATCH_PREFIX, matched_op
from block32.passes.registry import input_pipeline, spec_pipeline
from block32.passes.spec_script import REPLACED_ATTRIBUTE
from block32.passes.symbols import symbol_of
from block32.passes.walk import operations_where
from block32.tools.compiler import CompileOptions, import_source, parse_module, path_of, run_passes
from block32.tools.iree_compile import run_iree_compile
from block32.tools.options import CPU_FLAG

SPEC_FLAG: Final = "--iree-preprocessing-transform-spec-filename"

#: The CPU whose features every CPU of its architecture has.
_BASELINE_CPU: Final = "generic"
_REFUSED_FLAGS: Final = {
    "--compile-to": "a spec is made from a whole model",
    "--compile-from": "a spec is made from a whole model",
    SPEC_FLAG: "iree-compile takes one spec",
}


@dataclass
class SpecResult:
    """A spec and what is to be said of it.

    Attributes:
        text: The spec, an MLIR module with comments above it.
        needed_flags: Flags without which the spec's kernels do not compile.
    """

    text: str
    needed_flags: tuple[str, ...]


def make_spec(
    source: bytes, name: str, options: CompileOptions, *, output_name: str, check: bool = True
) -> SpecResult:
    """Write the spec of a model.

    Args:
        source: The model, MLIR text or bytecode.
        name: Its file name, for errors and for the command line in the spec's comment.
        options: How the model is going to be compiled. Kernels of the ``cpu`` target use features
            beyond the architecture's baseline only where a CPU is named.
        output_name: The spec's file name, for its comment.
        check: Apply the spec to the model once, and see that no matmul is missed.

    Raises:
        DiagnosticError: The model or the options are wrong, there is nothing to write, or the
            spec would miss a matmul.
        PassFailedError: A pass failed.
    """
    _check_flags(options.flags)
    _check_target(options.target_name())
    _check_input(source, name)
    options = with_baseline_cpu(options)
    module, facts, options = import_source(source, name, options)
    program = {
        symbol_of(op.operation): op.operation.location
        for op in module.body
        if not is_composite(op)  # the spec declares those that it calls
    }
    run_passes(module, spec_pipeline(options.target_name(), facts), options)
    _check_symbols(module, program)
    matchers = [m.operation for m in module.body if symbol_of(m.operation).startswith(MATCH_PREFIX)]
    if not matchers:
        raise DiagnosticError(name, "holds no block-scaled matmul; a spec would do nothing")
    text = f"{_header(name, output_name, options, matchers)}{module}\n"
    if check:
        options.on_phase("check")
        _check_nothing_is_missed(source, name, options, text, matchers)
    return SpecResult(text, _needed_flags(options))


def with_baseline_cpu(options: CompileOptions) -> CompileOptions:
    """The options of a spec: whoever uses it may have another machine than this one."""
    is_named = any(flag.startswith(CPU_FLAG) for flag in options.flags)
    if options.cpu is not None or is_named or options.target_name() != "cpu":
        return options
    return dataclasses.replace(options, cpu=_BASELINE_CPU)


def _check_flags(flags: tuple[str, ...]) -> None:
    for flag in flags:
        name = "--" + flag.lstrip("-").partition("=")[0]
        if name in _REFUSED_FLAGS:
            raise DiagnosticError("block32 spec", f"expected no {name}: {_REFUSED_FLAGS[name]}")


def _check_target(target: str) -> None:
    """A spec holds what IREE compiles, and no binaries that take the place of IREE's own."""
    if target_named(target).finishes_binaries:
        raise DiagnosticError(
            "block32 spec",
            f"expected a target whose kernels IREE compiles but got {target}",
            ("block32 compile puts this target's binaries into the vmfb",),
        )


def _check_input(source: bytes, name: str) -> None:
    """A spec works after IREE's input phase, which fails on these operators."""
    passes = ",".join(p.describe() for p in input_pipeline(source))
    if passes:
        raise DiagnosticError(
            name,
            "holds operators that an iree-compile without block32 does not lower",
            (f"lower them: block32-opt {name} --pass-pipeline='builtin.module({passes})' -o FILE",),
        )


def _check_symbols(spec: ir.Module, program: dict[str, ir.Location]) -> None:
    """A symbol of the program would be taken for the spec's of the same name.

    Globals are declared in the spec to mean the program's.
    """
    for op in spec.body:
        symbol = symbol_of(op.operation)
        if symbol in program and op.operation.name != "util.global":
            raise DiagnosticError(
                describe_location(program[symbol]),
                f"defines @{symbol}, and so does the spec; expected another name",
            )


def _needed_flags(options: CompileOptions) -> tuple[str, ...]:
    """The flags that say which CPU the kernels are for."""
    if options.cpu == _BASELINE_CPU:
        return ()
    flags = options.target_flags()
    return tuple(flag for flag in flags if flag.startswith("--iree-llvmcpu-target"))


def _header(
    name: str, output_name: str, options: CompileOptions, matchers: list[ir.Operation]
) -> str:
    """The comment that says what the spec is for and how it is used."""
    stem = Path(name).stem if Path(name).suffix else "model"
    command = [
        "iree-compile",
        name,
        *options.target_flags(),
        f"{SPEC_FLAG}={output_name}",
        "-o",
        f"{stem}.vmfb",
    ]
    total = sum(_count(matcher) for matcher in matchers)
    lines = [
        f"Written by block32 for target {options.target_name()}. Use it with iree-compile "
        f"{version('iree-base-compiler')}:",
        f"  {shlex.join(command)}",
        f"Block-scaled matmuls: {total} (distinct: {len(matchers)}). Made for this model alone.",
    ]
    needed = _needed_flags(options)
    if needed:
        lines.append(
            f"Its kernels need {shlex.join(needed)}: with another CPU the compiler aborts."
        )
    elif options.target_name() == "cpu":
        lines.append(f"Its kernels run on every CPU of the architecture; any {CPU_FLAG} will do.")
    return "".join(f"// {line}\n" for line in lines) + "\n"


def _count(matcher: ir.Operation) -> int:
    return ir.IntegerAttr(matcher.attributes[COUNT_ATTRIBUTE]).value


def _check_nothing_is_missed(
    source: bytes, name: str, options: CompileOptions, spec: str, matchers: list[ir.Operation]
) -> None:
    """Apply the spec and count what it replaces, for IREE may have changed a matmul before it.

    Raises:
        DiagnosticError: Fewer matmuls were replaced than the spec was made for.
    """
    with tempfile.TemporaryDirectory(prefix="block32-") as folder:
        path = Path(folder) / "spec.mlir"
        path.write_text(spec)
        arguments = [path_of(source), *options.target_flags(), f"{SPEC_FLAG}={path}"]
        arguments += ["--compile-to=preprocessing", "--emit-mlir-bytecode"]
        applied = parse_module(run_iree_compile(arguments, stdin=source, input_name=name), name)
    replaced_by = Counter(
        ir.IntegerAttr(op.attributes[REPLACED_ATTRIBUTE]).value
        for op in operations_where(applied, lambda op: REPLACED_ATTRIBUTE in op.attributes)
    )
    for index, matcher in enumerate(matchers):
        expected, replaced = _count(matcher), replaced_by[index]
        if replaced != expected:
            raise error_at(
                matched_op(matcher),
                f"would be missed by the spec: expected it to replace {expected} such ops but it "
                f"replaces {replaced}",
                "flags that rewrite the model before the spec does, such as "
                "--iree-preprocessing-pass-pipeline, need block32 compile instead",
            )
