# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling a module: IREE's phases with block32's passes between two of them.

``iree-compile --compile-to=abi`` brings any input to linalg on tensors, the passes run over that,
and ``iree-compile --compile-from=abi`` makes the vmfb.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, describe_location
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import TARGETS, target_named
from block32.passes.base import Remark, Report
from block32.passes.pipeline import PassFailedError, PipelinePass, run_pipeline
from block32.passes.registry import standard_pipeline
from block32.tools.iree_compile import IreeCompileError, device_facts, read_input, run_iree_compile

#: IREE phases up to the one where block32's passes run, and those after it.
EARLY_PHASES = ("start", "input", "abi")


@dataclass
class CompileOptions:
    """How to compile.

    Attributes:
        target: A name of ``lowering.targets``, or None to follow IREE's own target flags.
        cpu: The CPU to compile for, as LLVM names it; None for this machine's.
        flags: Flags for ``iree-compile``, ``--flag=value`` each.
        on_phase: Called with the name of each phase as it begins.
        after_pass: Called with each pass and the module after it.
    """

    target: str | None = None
    cpu: str | None = None
    flags: tuple[str, ...] = ()
    on_phase: Callable[[str], None] = lambda _name: None
    after_pass: Callable[[PipelinePass, ir.Module], None] = lambda _pass, _module: None

    def target_name(self) -> str:
        """The target asked for, or the one that IREE's flags imply."""
        return self.target if self.target is not None else _implied_target(self.flags)

    def target_flags(self) -> tuple[str, ...]:
        """All flags for ``iree-compile``: the target's, overridden by the user's own."""
        implied = list(target_named(self.target_name()).compile_flags())
        if self.cpu is not None:
            implied = [f for f in implied if not f.startswith("--iree-llvmcpu-target-cpu=")]
            implied.append(f"--iree-llvmcpu-target-cpu={self.cpu}")
        given = {flag.partition("=")[0] for flag in self.flags}
        kept = [flag for flag in implied if flag.partition("=")[0] not in given]
        return (*kept, *self.flags)


def _implied_target(flags: tuple[str, ...]) -> str:
    """The block32 target for IREE's own device flags; ``cpu`` where there are none."""
    values: dict[str, str] = {}
    for flag in flags:
        name, _, value = flag.lstrip("-").partition("=")
        values[name] = value
    device = values.get("iree-hal-target-device", values.get("iree-hal-target-backends", "local"))
    if device in ("local", "llvm-cpu"):
        return "cpu"
    chip = values.get("iree-rocm-target", values.get("iree-cuda-target", ""))
    return chip if chip in TARGETS else "portable"


@dataclass
class CompileResult:
    """What a compile gives.

    Attributes:
        output: The vmfb, or the text of the phase that ``--compile-to`` names.
        remarks: Which kernel each matmul got, and warnings.
    """

    output: bytes
    remarks: list[Remark] = field(default_factory=list)


def compile_source(
    source: bytes, name: str, options: CompileOptions, report: Report | None = None
) -> CompileResult:
    """Compile the bytes of an MLIR module, text or bytecode.

    Args:
        source: The module.
        name: Its file name, for errors.
        options: How to compile.
        report: Takes the passes' remarks and warnings, also where IREE fails after the passes.

    Raises:
        DiagnosticError: The module or the options are wrong; located where it can be.
        PassFailedError: A pass failed.
    """
    module, facts = import_source(source, name, options)
    options.on_phase("passes")
    report = Report() if report is None else report
    passes = standard_pipeline(options.target_name(), facts)
    run_pipeline(module, passes, report, options.after_pass)
    options.on_phase("kernels and code")
    return CompileResult(finish_module(module, name, options), report.remarks)


def import_source(
    source: bytes, name: str, options: CompileOptions
) -> tuple[ir.Module, DeviceFacts]:
    """The module at the phase where block32's passes run, and the machine that it is for.

    Args:
        source: The module, text or bytecode.
        name: Its file name, for errors.
        options: How to compile.

    Raises:
        DiagnosticError: The module or the options are wrong; located where it can be.
    """
    early, _ = _split_phase_flags(options.target_flags(), name)
    options.on_phase("import")
    imported = _import(source, name, early)
    return parse_module(imported, name), _device_facts(options)


def _device_facts(options: CompileOptions) -> DeviceFacts:
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
    """``--compile-to`` a phase before block32's passes: plain IREE."""
    return run_iree_compile(["-", *options.target_flags()], stdin=source, input_name=name)


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
    common = [flag for flag in flags if not flag.startswith("--compile-")]
    end = [flag for flag in flags if flag.startswith("--compile-to=")]
    return [*start, *common], [*end, *common]


def _import(source: bytes, name: str, flags: list[str]) -> bytes:
    """The module at phase ``abi``, as bytecode: that keeps locations and large constants cheap."""
    arguments = [path_of(source, name), "--compile-to=abi", "--emit-mlir-bytecode", *flags]
    return run_iree_compile(arguments, stdin=source, input_name=name)


def path_of(source: bytes, name: str) -> str:
    """The file that ``source`` came from, or ``-`` for standard input.

    Locations carry the name that ``iree-compile`` was given, so the file itself is passed on.
    """
    path = Path(name)
    return name if path.is_file() and path.read_bytes() == source else "-"


def parse_module(source: bytes, name: str) -> ir.Module:
    """Parse MLIR text or bytecode.

    Raises:
        DiagnosticError: It does not parse or verify.
    """
    context = ir.Context()
    path = path_of(source, name)
    try:
        if path != "-":
            return ir.Module.parseFile(path, context)
        return ir.Module.parse(source, context)
    except ir.MLIRError as error:
        first = error.error_diagnostics[0] if error.error_diagnostics else None
        if first is None:
            raise DiagnosticError(name, "cannot parse the module") from error
        location = describe_location(first.location).replace("-:", f"{name}:", 1)
        raise DiagnosticError(location, first.message) from error


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
        return run_iree_compile([str(path), f"--compile-from={phase}", *flags], input_name=name)


def reproduce_command(error: PassFailedError, path: str, options: CompileOptions) -> str:
    """A shell command that runs the failing pass again on the user's input."""
    flags = shlex.join(options.target_flags())
    pipeline = f"builtin.module({','.join(error.pipeline_through)})"
    quoted = shlex.quote(path if path != "-" else "INPUT")
    return (
        f"iree-compile {quoted} --compile-to=abi --mlir-print-debuginfo {flags} | "
        f"block32-opt - --pass-pipeline={shlex.quote(pipeline)}"
    )


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all: to a neighbour first, which then takes its name.

    Raises:
        DiagnosticError: It cannot be written; nothing is left behind.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        # A device or a pipe: there is nothing to replace.
        target.write_bytes(content)
        return
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as stream:
            temporary = Path(stream.name)
            stream.write(content)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DiagnosticError(str(path), f"cannot write the output: {reason}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    options = CompileOptions(target=target, cpu=cpu, flags=tuple(flags))
    result = compile_source(source, name, options)
    for remark in result.remarks:
        on_remark(remark)
    return result.output


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
            return read_input(path), path


__all__ = ["CompileOptions", "CompileResult", "compile", "compile_source"]
