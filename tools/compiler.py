# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling a module: IREE's phases with block32's passes between two of them.

``iree-compile --compile-to=abi`` brings any input to linalg on tensors, the passes run over that,
and ``iree-compile --compile-from=abi`` makes the vmfb.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, from_mlir
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.passes.base import Remark, Report
from block32.passes.pipeline import PassFailedError, PipelinePass, run_pipeline
from block32.passes.registry import input_pipeline, standard_pipeline
from block32.runtime.vmfb import MLIR_BYTECODE
from block32.tools.iree_compile import (
    FileContent,
    IreeCompileError,
    device_facts,
    facts_of,
    run_iree_compile,
)
from block32.tools.onnx_model import read_model, to_bytecode
from block32.tools.options import CompileOptions, check_options, own_devices, with_own_devices
from block32.tools.parameter_names import check_parameter_names

#: IREE phases up to the one where block32's passes run, and those after it.
EARLY_PHASES = ("start", "input", "abi")


def compile_source(source: bytes, name: str, options: CompileOptions) -> bytes:
    """Compile the bytes of an MLIR module, text or bytecode.

    Args:
        source: The module.
        name: Its file name, for errors.
        options: How to compile.

    Returns:
        The vmfb, or the text of the phase that ``--compile-to`` names.

    Raises:
        DiagnosticError: The module or the options are wrong; located where it can be.
        PassFailedError: A pass failed.
    """
    module, facts, options = import_source(source, name, options)
    run_passes(module, standard_pipeline(options.target_name(), facts), options)
    options.on_phase("kernels and code")
    return finish_module(module, name, options)


def run_passes(module: ir.Module, passes: list[PipelinePass], options: CompileOptions) -> None:
    """Run block32's passes, and pass on what they say, also where one fails.

    Raises:
        PassFailedError: A pass failed.
    """
    options.on_phase("passes")
    report = Report()
    try:
        run_pipeline(module, passes, report, options.after_pass)
    finally:
        for remark in report.remarks:
            options.on_remark(remark)


def import_source(
    source: bytes, name: str, options: CompileOptions
) -> tuple[ir.Module, DeviceFacts, CompileOptions]:
    """The module at the phase where block32's passes run, and the machine that it is for.

    The options come back with the target of a module that names its own devices.

    Args:
        source: The module, text or bytecode.
        name: Its file name, for errors.
        options: How to compile.

    Raises:
        DiagnosticError: The module or the options are wrong; located where it can be.
    """
    check_options(options)
    early, _ = _split_phase_flags(options.target_flags(), name)
    options.on_phase("import")
    imported = _import(lower_input(source, name, options), name, early)
    module = parse_module(imported, name)
    options = with_own_devices(module, name, options)
    devices = own_devices(module)
    return module, facts_of(devices) if devices else options_facts(options), options


def lower_input(source: bytes, name: str, options: CompileOptions) -> bytes:
    """The module without the operators of importers that IREE does not lower.

    Args:
        source: The module, text or bytecode; most come back as they are.
        name: Its file name, for errors.
        options: Take what the passes say.

    Raises:
        DiagnosticError: The module does not parse.
        PassFailedError: A pass failed.
    """
    passes = input_pipeline(source)
    if not passes:
        return source
    module = parse_module(source, name)
    run_passes(module, passes, options)
    return to_bytecode(module)


def options_facts(options: CompileOptions) -> DeviceFacts:
    """The machine that the flags are for.

    Raises:
        DiagnosticError: IREE does not take them, or knows no such CPU.
    """
    try:
        return device_facts(tuple(f for f in options.target_flags() if "--compile-" not in f))
    except IreeCompileError as error:
        if options.cpu is None or "CPU" not in error.message:
            raise
        raise DiagnosticError(
            "block32",
            f"unknown CPU '{options.cpu}'; expected a name that LLVM knows, such as "
            "x86-64-v3, znver4, sapphirerapids or neoverse-n1",
        ) from error


def compile_early_phase(source: bytes, name: str, options: CompileOptions) -> bytes:
    """``--compile-to`` a phase before block32's passes: plain IREE, after importers' operators."""
    arguments = ["-", *options.target_flags()]
    lowered = lower_input(source, name, options)
    return run_iree_compile(arguments, stdin=lowered, input_name=name, shows_messages=True)


def requested_phase(flags: Sequence[str]) -> str | None:
    """The value of ``--compile-to`` among ``flags``."""
    phases = [flag.partition("=")[2] for flag in flags if flag.startswith("--compile-to=")]
    return phases[-1] if phases else None


def _split_phase_flags(flags: tuple[str, ...], name: str) -> tuple[list[str], list[str]]:
    """Flags for the run up to ``abi`` and for the run from there."""
    start = [flag for flag in flags if flag.startswith("--compile-from=")]
    for flag in start:
        if flag.partition("=")[2] not in EARLY_PHASES:
            raise DiagnosticError(
                name,
                f"{flag} starts after block32's passes; expected one of {', '.join(EARLY_PHASES)}",
            )
    for flag in flags:
        if flag.startswith("--compile-mode=") and flag != "--compile-mode=std":
            raise DiagnosticError(name, f"{flag} leaves out block32's passes; use iree-compile")
    common = [flag for flag in flags if not flag.startswith("--compile-")]
    end = [flag for flag in flags if flag.startswith("--compile-to=")]
    return [*start, *common], [*end, *common]


def _import(source: bytes, name: str, flags: list[str]) -> bytes:
    """The module at phase ``abi``, as bytecode: that keeps locations and large constants cheap."""
    check_parameter_names(source, name)
    arguments = [path_of(source), "--compile-to=abi", "--emit-mlir-bytecode", *flags]
    imported = run_iree_compile(arguments, stdin=source, input_name=name, shows_messages=True)
    if not imported.startswith(MLIR_BYTECODE):
        printed = imported.decode(errors="replace").strip().partition("\n")[0]
        raise DiagnosticError(
            name,
            f"iree-compile printed '{printed[:60]}' instead of a module; expected flags to compile "
            "with",
            ("call iree-compile itself for --help, --version and the like",),
        )
    return imported


def path_of(source: bytes) -> str:
    """The file that ``source`` was read from, or ``-`` for standard input.

    Locations carry the name that ``iree-compile`` was given, so the file itself is passed on.
    """
    return source.path if isinstance(source, FileContent) else "-"


def parse_module(source: bytes, name: str) -> ir.Module:
    """Parse MLIR text or bytecode.

    Raises:
        DiagnosticError: It does not parse or verify.
    """
    context = ir.Context()
    path = path_of(source)
    try:
        if path != "-":
            return ir.Module.parseFile(path, context)
        return ir.Module.parse(source, context)
    except ir.MLIRError as error:
        found = from_mlir(error, name)
        location = re.sub(r"^-:", f"{name}:", found.location)
        raise DiagnosticError(location, found.message) from error


def finish_module(
    module: ir.Module, name: str, options: CompileOptions, phase: str = "abi"
) -> bytes:
    """Compile a module that has block32's kernels in it to the end.

    Args:
        module: The module after block32's passes.
        name: Names it in errors.
        options: How to compile; its target is the one whose kernels these are.
        phase: The IREE phase that the module is at.

    Raises:
        IreeCompileError: IREE refuses the module.
    """
    _, flags = _split_phase_flags(options.target_flags(), name)
    if _finishes_binaries(options):
        return _finish_binaries(module, name, flags, options, phase)
    return _finish(module, name, flags, phase)


#: IREE phases from the one on where binaries can be replaced.
_LATE_PHASES = ("hal", "vm", "end")


def _finishes_binaries(options: CompileOptions) -> bool:
    """Whether the target replaces binaries, and the run goes as far as that."""
    wanted = requested_phase(options.flags) or "end"
    return target_named(options.target_name()).finishes_binaries and wanted in _LATE_PHASES


def _finish_binaries(
    module: ir.Module, name: str, flags: list[str], options: CompileOptions, phase: str
) -> bytes:
    """Stop at phase hal, let the target replace the binaries, and go on."""
    common = [flag for flag in flags if not flag.startswith("--compile-to=")]
    early = ["--compile-to=hal", "--emit-mlir-bytecode", *common]
    lowered = parse_module(_finish(module, name, early, phase), name)
    target_named(options.target_name()).finish_binaries(lowered)
    if requested_phase(options.flags) == "hal":
        return lowered.operation.get_asm(enable_debug_info=True).encode()
    return _finish(lowered, name, flags, "hal")


def _finish(module: ir.Module, name: str, flags: list[str], phase: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="block32-") as folder:
        path = Path(folder) / "module.mlirbc"
        with path.open("wb") as stream:
            module.operation.write_bytecode(stream)
        arguments = [str(path), f"--compile-from={phase}", *flags]
        return run_iree_compile(arguments, input_name=name, shows_messages=True)


def reproduce_command(error: PassFailedError, path: str, options: CompileOptions) -> str:
    """A shell command that runs the failing pass again on the user's input."""
    flags = shlex.join(options.target_flags())
    pipeline = f"builtin.module({','.join(error.pipeline_through)})"
    quoted = shlex.quote(path if path != "-" else "INPUT")
    before = [] if path == "-" else input_pipeline(read_model(path))
    if not before:
        first = f"iree-compile {quoted}"
    elif error.failed.describe() in [p.describe() for p in before]:
        return f"block32-opt {quoted} --pass-pipeline={shlex.quote(pipeline)}"
    else:
        lowering = f"builtin.module({','.join(p.describe() for p in before)})"
        first = f"block32-opt {quoted} --pass-pipeline={shlex.quote(lowering)} "
        first += "--mlir-print-debuginfo | iree-compile -"
    return (
        f"{first} --compile-to=abi --mlir-print-debuginfo {flags} | "
        f"block32-opt - --pass-pipeline={shlex.quote(pipeline)}"
    )


def compile(
    module: ir.Module | str | bytes | os.PathLike[str],
    *,
    target: str = "cpu",
    cpu: str | None = None,
    flags: Sequence[str] = (),
    on_remark: Callable[[Remark], None] = lambda _remark: None,
) -> bytes:
    """Compile a model whose matmuls carry block scales into a vmfb.

    Args:
        module: An ``iree.compiler.ir.Module``, MLIR text, bytecode, or the path of a file.
        target: ``cpu``, ``gfx950``, ``portable``, ...: a name of ``lowering.targets``.
        cpu: The CPU to compile for, as LLVM names it; this machine's by default.
        flags: Further ``iree-compile`` flags.
        on_remark: Called with each remark and warning.

    Returns:
        The bytes of the vmfb.

    Raises:
        DiagnosticError: The module or an argument is wrong.
        PassFailedError: A pass failed.
    """
    source, name = _source_of(module)
    options = CompileOptions(target=target, cpu=cpu, flags=tuple(flags), on_remark=on_remark)
    return compile_source(source, name, options)


def _source_of(module: ir.Module | str | bytes | os.PathLike[str]) -> tuple[bytes, str]:
    match module:
        case ir.Module():
            return module.operation.get_asm(enable_debug_info=True).encode(), "<module>"
        case bytes():
            return module, "<bytes>"
        case str() if "\n" in module or "{" in module:
            return module.encode(), "<text>"
        case _:
            path = os.fspath(module)
            return read_model(path), path


__all__ = ["CompileOptions", "compile", "compile_source"]
