# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 doctor``: what is installed, what this machine can run, and whether a vmfb fits it."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import block32
from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import TARGETS, target_named
from block32.runtime.fit import (
    GPU_DRIVERS,
    Requirement,
    requirements,
    version_cure,
    version_problem,
    what_would_work,
)
from block32.runtime.load import load
from block32.runtime.machine import Machine, this_machine
from block32.runtime.vmfb import Vmfb, read_vmfb
from block32.tools.compiler import options_facts
from block32.tools.extras import installed_version, packages_by_extra, requirements_of_block32
from block32.tools.iree_compile import device_facts, find_iree_compile
from block32.tools.options import CompileOptions, check_options
from block32.tools.run import parse_parameters

_EXAMPLES = """examples:
  block32 doctor                      versions, CPU, devices, extras
  block32 doctor model.vmfb           ... and whether the module runs here
  block32 doctor model.vmfb --parameters=model=model.irpa
                                      ... and whether its parameters are in the file
  block32 doctor --target=gfx950      ... whether this machine runs what is compiled for gfx950
  block32 doctor --target=cpu --cpu=znver4 --iree-llvmcpu-target-cpu=host
                                      ... and whether the flags of a compile go together
  block32 doctor model.vmfb --json

Exits with 0 when all fits, with 1 when something does not (a line marked "no"), and with 2 for a
wrong command line. Other flags are those of iree-compile; give values as --flag=value.
"""
Status = Literal["ok", "note", "bad"]
_MARKS: Final[dict[str, str]] = {"ok": "[green]ok[/]", "note": "[yellow]-[/]", "bad": "[red]no[/]"}
_HOST_FLAGS: Final = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        found: What there is.
        status: ``ok``; ``note`` for what is missing but not needed; ``bad`` for what does not fit.
        cure: What to do about it, or empty.
    """

    subject: str
    found: str
    status: Status = "ok"
    cure: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``doctor`` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation, this machine, and whether a vmfb fits",
        description="Say which versions are installed, what this machine can run, and whether a "
        "vmfb, its parameters and the flags of a compile fit; name a cure for what does not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("module", nargs="?", metavar="FILE", help="a vmfb to check")
    parser.add_argument(
        "--target", metavar="NAME", help=f"check for this target: {', '.join(TARGETS)}"
    )
    parser.add_argument("--cpu", metavar="NAME", help="check the --cpu of a compile")
    parser.add_argument(
        "--parameters",
        action="append",
        default=[],
        metavar="[SCOPE=]FILE",
        help="check that the vmfb's parameters are in these files",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(handler=run, takes_iree_flags=True, iree_flags=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if something does not fit.

    Raises:
        DiagnosticError: The vmfb cannot be read, or there is no such target.
    """
    path, flags = _split(arguments)
    contents = read_vmfb(path) if path else None
    needs = target_requirement(arguments.target) if arguments.target else None
    extra = target_named(arguments.target).extra if arguments.target else ""
    parameters = parse_parameters(arguments.parameters)
    machine = this_machine()
    compiler = installed_version("iree-base-compiler")
    findings = [
        *check_versions(compiler, installed_version("iree-base-runtime")),
        *check_old_packages(installed_version),
        *check_path(compiler, _output),
        *check_cpu(machine),
        *check_devices(machine),
        *check_extras(requirements_of_block32(), installed_version, extra),
        *check_flags(CompileOptions(arguments.target, arguments.cpu, tuple(flags))),
    ]
    if arguments.target:
        findings += check_target(arguments.target, needs, machine)
    if contents is not None:
        module = check_module(contents, machine)
        fits = all(finding.status != "bad" for finding in module)
        findings += module + (check_parameters(path, contents, parameters) if fits else [])
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(report(findings))
    return 1 if any(finding.status == "bad" for finding in findings) else 0


def _split(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The vmfb, or an empty string, and the flags that are iree-compile's."""
    rest: list[str] = arguments.iree_flags
    flags = [argument for argument in rest if argument.startswith("-")]
    if len(flags) != len(rest):
        others = ", ".join(argument for argument in rest if argument not in flags)
        raise DiagnosticError("block32 doctor", f"expected one vmfb at most but also got {others}")
    if arguments.parameters and not arguments.module:
        raise DiagnosticError("block32 doctor", "expected a vmfb to check with --parameters")
    return arguments.module or "", flags


def report(findings: Iterable[Finding]) -> Table:
    """The findings as a table."""
    table = Table("", "subject", "found")
    for finding in findings:
        text = escape(finding.found) + (
            f"\n[bold]{escape(finding.cure)}[/]" if finding.cure else ""
        )
        table.add_row(_MARKS[finding.status], escape(finding.subject), text)
    return table


def check_versions(compiler: str | None, runtime: str | None) -> list[Finding]:
    """Python, block32, and IREE's two halves, which have to be of one version."""
    python = sys.version_info[:2]
    supported = (3, 11) <= python <= (3, 13)
    findings = [
        Finding("block32", block32.__version__),
        Finding(
            "Python",
            platform.python_version(),
            "ok" if supported else "bad",
            "" if supported else "use Python 3.11 to 3.13",
        ),
    ]
    equal = compiler is not None and compiler == runtime
    wanted = compiler or runtime or "3.13.0"
    cure = f"pip install iree-base-compiler=={wanted} iree-base-runtime=={wanted}"
    for name, version in (("IREE compiler", compiler), ("IREE runtime", runtime)):
        findings.append(
            Finding(name, version or "missing", "ok" if equal else "bad", "" if equal else cure)
        )
    return findings


def check_cpu(machine: Machine) -> list[Finding]:
    """The CPU, and the instruction sets that kernels may use on it."""
    try:
        facts = device_facts(_HOST_FLAGS)
    except DiagnosticError as error:
        return [Finding("CPU", f"the compiler cannot name it: {error.message}", "bad")]
    vector = sorted(
        name
        for name in facts.cpu_features
        if re.match(r"(avx|amx|fma$|f16c$|neon|sve|dotprod|bf16|i8mm)", name)
    )
    return [
        Finding("CPU", f"{machine.architecture}: {', '.join(vector) or 'no vector features'}"),
        *kernel_forms(facts),
    ]


def kernel_forms(facts: DeviceFacts) -> list[Finding]:
    """Which of the CPU target's instruction sets these facts allow, best first."""
    from block32.lowering.cpu.isa import INSTRUCTION_SETS

    names = [isa.name for isa in INSTRUCTION_SETS if isa.is_on(facts)]
    missing = {
        isa.name: sorted(isa.features - facts.cpu_features)
        for isa in INSTRUCTION_SETS
        if isa.name not in names
        and (not isa.architectures or facts.architecture in isa.architectures)
    }
    lacks = "; ".join(f"{name} needs {', '.join(features)}" for name, features in missing.items())
    return [Finding("CPU kernels", ", ".join(names) + (f" ({lacks})" if lacks else ""))]


def check_devices(machine: Machine) -> list[Finding]:
    """Every driver of the runtime: its devices, or why it has none."""
    findings: list[Finding] = []
    for device in machine.devices:
        chips = f" ({', '.join(device.chips)})" if device.chips else ""
        found = device.problem or f"{', '.join(device.names)}{chips}"
        findings.append(
            Finding(f"device {device.driver}", found, "note" if device.problem else "ok")
        )
    return findings


def check_extras(
    requires: Sequence[str] | None, installed: Callable[[str], str | None], needed: str = ""
) -> list[Finding]:
    """The optional packages of each extra.

    Args:
        requires: The requirements in block32's own metadata, None where it is not installed.
        installed: The version of a package, or None.
        needed: The extra without which the target does not compile, or empty.
    """
    if requires is None:
        cure = "pip install --editable . in the checkout"
        return [Finding("extras", "unknown: block32 is not installed as a package", "note", cure)]
    findings: list[Finding] = []
    for extra, packages in packages_by_extra(requires, installed).items():
        complete = all(package.fits for package in packages)
        found = ", ".join(package.describe() for package in packages)
        status: Status = "ok" if complete else "bad" if extra == needed else "note"
        cure = "" if complete else f"pip install 'block32[{extra}]'"
        findings.append(Finding(f"extra {extra}", found, status, cure))
    return findings


def check_flags(options: CompileOptions) -> list[Finding]:
    """Whether the target, the CPU and IREE's flags go together, and IREE takes them."""
    asked = (options.target is not None, options.cpu is not None, bool(options.flags))
    if not any(asked):
        return []
    try:
        check_options(options)
        facts = options_facts(options)
    except DiagnosticError as error:
        return [Finding("flags", error.message, "bad", "; ".join(error.notes))]
    flags = " ".join(options.target_flags()) or "none"
    findings = [Finding("flags", f"target {options.target_name()}: {flags}")]
    return findings + (kernel_forms(facts) if options.target_name() == "cpu" else [])


def check_path(version: str | None, run: Callable[[Sequence[str]], str]) -> list[Finding]:
    """The ``iree-compile`` that a shell finds, which a spec is used with.

    Args:
        version: The version of the installed compiler package.
        run: Gives the output of a command.
    """
    program = shutil.which("iree-compile")
    if program is None or version is None:
        return []
    match = re.search(r"version (\d+\.\d+\.\d+)", run([program, "--version"]))
    found = match[1] if match else "unknown"
    if found == version:
        return [Finding("iree-compile on PATH", f"{program}: {found}")]
    try:
        cure = f"use specs with {find_iree_compile()}, or put it first on PATH"
    except DiagnosticError as error:
        cure = error.message
    return [Finding("iree-compile on PATH", f"{program}: {found}, not {version}", "note", cure)]


def check_old_packages(installed: Callable[[str], str | None]) -> list[Finding]:
    """Packages by the names that IREE had until 2024: they hold the same modules."""
    old = [name for name in ("iree-compiler", "iree-runtime") if installed(name)]
    if not old:
        return []
    names = " ".join(old)
    cure = f"pip uninstall {names}, then install block32 again"
    return [Finding("old IREE packages", f"{names} hide those that block32 uses", "bad", cure)]


def target_requirement(name: str) -> Requirement | None:
    """What a machine needs to run modules of a target; None where any will do.

    Raises:
        DiagnosticError: There is no such target.
    """
    split = [flag.lstrip("-").partition("=") for flag in target_named(name).compile_flags()]
    flags = {key: value for key, _, value in split}
    device = flags.get("iree-hal-target-device", "")
    formats = [form for form, driver in GPU_DRIVERS.items() if driver == device]
    if not formats:
        return None
    chip = flags.get("iree-rocm-target", flags.get("iree-cuda-target", ""))
    return Requirement(formats[0], chip)


def check_target(name: str, needs: Requirement | None, machine: Machine) -> list[Finding]:
    """Whether this machine runs what is compiled for a target. Compiling works anywhere."""
    problem = needs.why_not(machine) if needs else None
    if needs is None or problem is None:
        return [Finding(f"target {name}", "runs on this machine")]
    return [
        Finding(f"target {name}", problem, "bad", what_would_work((needs,), machine.architecture))
    ]


def check_module(contents: Vmfb, machine: Machine) -> list[Finding]:
    """Whether a module fits the runtime's version and this machine.

    A module with code for several kinds of device fits when one of them is here.
    """
    functions = ", ".join(name for name, text in contents.declarations.items() if text)
    findings = [
        Finding(contents.source, f"module '{contents.name}': {functions or 'no functions'}")
    ]
    problem = version_problem(contents, machine.hal_version, machine.runtime_version)
    cure = version_cure(machine.runtime_version) if problem else ""
    findings.append(
        Finding("its IREE version", problem or "fits the runtime", "bad" if problem else "ok", cure)
    )
    needs = requirements(contents)
    problems = {need: need.why_not(machine) for need in needs}
    fits = None in problems.values() or not needs
    for need, problem in problems.items():
        same = [e for e in contents.executables if e.format == need.format]
        size = sum(len(executable.data) for executable in same)
        code = f"{need.format}: executables: {len(same)}, {size} bytes"
        status: Status = "ok" if problem is None else "note" if fits else "bad"
        cure = "" if fits else what_would_work((need,), machine.architecture)
        verdict = problem or f"runs with --device={need.drivers[0]}"
        findings.append(Finding("its code", f"{code}; {verdict}", status, cure))
    return findings


def check_parameters(path: str, contents: Vmfb, files: Mapping[str, str]) -> list[Finding]:
    """Whether the parameters that a module needs are in the files: it is loaded with them."""
    needs = "io_parameters" in contents.dependencies
    if not needs and not files:
        return []
    if not needs:
        cure = "leave out --parameters"
        return [Finding("its parameters", "it has none, but files are given", "note", cure)]
    cure = "give them with --parameters=[SCOPE=]FILE"
    if not files:
        return [Finding("its parameters", "are in files of their own", "note", cure)]
    try:
        load(path, parameters=files)
    except DiagnosticError as error:
        found = f"{error.location}: {error.message}"
        return [Finding("its parameters", found, "bad", "; ".join(error.notes) or cure)]
    return [Finding("its parameters", f"all are in {', '.join(files.values())}")]


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
