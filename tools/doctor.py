# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 doctor``: what is installed, what this machine can run, and whether a vmfb fits it."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
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
from block32.runtime.machine import Machine, this_machine
from block32.runtime.vmfb import Vmfb, read_vmfb
from block32.tools.iree_compile import device_facts

_EXAMPLES = """examples:
  block32 doctor                      versions, CPU, devices, extras
  block32 doctor model.vmfb           ... and whether the module runs here
  block32 doctor --target=gfx950      ... and whether this machine runs what is compiled for gfx950
  block32 doctor model.vmfb --json

Exits with 1 when something does not fit.
"""
Status = Literal["ok", "note", "bad"]
_MARKS: Final[dict[str, str]] = {"ok": "[green]ok[/]", "note": "[yellow]-[/]", "bad": "[red]no[/]"}
_HOST_FLAGS: Final = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
#: Extras that are for working on block32 itself.
_OWN_EXTRAS: Final = ("test", "lint")


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
        "vmfb fits both; name a cure for what does not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("module", nargs="?", metavar="FILE", help="a vmfb to check")
    parser.add_argument(
        "--target", metavar="NAME", help=f"check for this target: {', '.join(TARGETS)}"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if something does not fit.

    Raises:
        DiagnosticError: The vmfb cannot be read, or there is no such target.
    """
    contents = read_vmfb(arguments.module) if arguments.module else None
    needs = target_requirement(arguments.target) if arguments.target else None
    machine = this_machine()
    findings = [
        *check_versions(_installed("iree-base-compiler"), _installed("iree-base-runtime")),
        *check_cpu(machine),
        *check_devices(machine),
        *check_extras(_block32_requires(), _installed),
    ]
    if arguments.target:
        findings += check_target(arguments.target, needs, machine)
    if contents is not None:
        findings += check_module(contents, machine)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(report(findings))
    return 1 if any(finding.status == "bad" for finding in findings) else 0


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
    requires: Sequence[str] | None, installed: Callable[[str], str | None]
) -> list[Finding]:
    """The optional packages of each extra.

    Args:
        requires: The requirements in block32's own metadata, None where it is not installed.
        installed: The version of a package, or None.
    """
    if requires is None:
        cure = "pip install --editable . in the checkout"
        return [Finding("extras", "unknown: block32 is not installed as a package", "note", cure)]
    packages: dict[str, list[str]] = {}
    for requirement in requires:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", requirement)
        if name and extra and extra[1] not in _OWN_EXTRAS:
            packages.setdefault(extra[1], []).append(name[0])
    findings: list[Finding] = []
    for extra, names in packages.items():
        found = ", ".join(f"{name} {installed(name) or 'missing'}" for name in names)
        complete = all(installed(name) for name in names)
        cure = "" if complete else f"pip install 'block32[{extra}]'"
        findings.append(Finding(f"extra {extra}", found, "ok" if complete else "note", cure))
    return findings


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
    if "io_parameters" in contents.dependencies:
        cure = "give them with --parameters=[SCOPE=]FILE"
        findings.append(Finding("its parameters", "are in files of their own", "note", cure))
    return findings


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _block32_requires() -> list[str] | None:
    try:
        return metadata.requires("block32") or []
    except metadata.PackageNotFoundError:
        return None
