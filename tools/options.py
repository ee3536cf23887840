# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compile is asked for: target, CPU and IREE's flags, and which of them fit together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, describe_location
from block32.lowering.targets import TARGETS, target_named
from block32.passes.base import Remark
from block32.passes.pipeline import PipelinePass

CPU_FLAG: Final = "--iree-llvmcpu-target-cpu"
#: What IREE's flags call the kinds of device, by the names of its code generators.
_DEVICE_OF_BACKEND: Final = {
    "rocm": "hip",
    "metal-spirv": "metal",
    "vulkan-spirv": "vulkan",
    "webgpu-spirv": "webgpu",
}
_OWN_BACKEND: Final = re.compile(r'#hal\.executable\.target<"([^"]+)"')


@dataclass
class CompileOptions:
    """How to compile.

    Attributes:
        target: A name of ``lowering.targets``, or None to follow IREE's own target flags.
        cpu: The CPU to compile for, as LLVM names it; None for this machine's.
        flags: Flags for ``iree-compile``, ``--flag=value`` each.
        on_remark: Called with each remark and warning after the passes, also if they failed.
        on_phase: Called with the name of each phase as it begins.
        after_pass: Called with each pass and the module after it.
    """

    target: str | None = None
    cpu: str | None = None
    flags: tuple[str, ...] = ()
    on_remark: Callable[[Remark], None] = lambda _remark: None
    on_phase: Callable[[str], None] = lambda _name: None
    after_pass: Callable[[PipelinePass, ir.Module], None] = lambda _pass, _module: None

    def __post_init__(self) -> None:
        """IREE takes ``-flag`` for ``--flag``."""
        self.flags = tuple("--" + flag.lstrip("-") for flag in self.flags)

    def target_name(self) -> str:
        """The target asked for, or the one that IREE's flags imply."""
        return self.target if self.target is not None else _implied_target(self.flags)

    def target_flags(self) -> tuple[str, ...]:
        """All flags for ``iree-compile``: the target's, overridden by the user's own."""
        implied = list(target_named(self.target_name()).compile_flags())
        if self.cpu is not None:
            implied = [f for f in implied if not f.startswith(f"{CPU_FLAG}=")]
            implied.append(f"{CPU_FLAG}={self.cpu}")
        given = {flag.partition("=")[0] for flag in self.flags}
        kept = [flag for flag in implied if flag.partition("=")[0] not in given]
        return (*kept, *self.flags)


def _implied_target(flags: tuple[str, ...]) -> str:
    """The block32 target for IREE's own device flags; ``cpu`` where there are none.

    A module for several kinds of device gets ``portable``: a kernel is for one.
    """
    backends = _backends(flags)
    if backends in (set(), {"llvm-cpu"}):
        return "cpu"
    chip_flags = {"hip": "--iree-rocm-target=", "cuda": "--iree-cuda-target="}
    chips = [
        flag.partition("=")[2]
        for backend in backends
        for flag in flags
        if backend in chip_flags and flag.startswith(chip_flags[backend])
    ]
    return chips[0] if len(backends) == 1 and chips and chips[0] in TARGETS else "portable"


def _backends(flags: tuple[str, ...]) -> set[str]:
    """The kinds of device that IREE's flags ask for; the local device by its compiler backends."""

    def values(name: str) -> set[str]:
        given = [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}=")]
        return {item for value in given for item in value.split(",")}

    # A device may have a name before it and an ordinal after it: a=local[0].
    devices = {re.sub(r"^\w+=|\[\d+\]$", "", device) for device in values("iree-hal-target-device")}
    named = {_DEVICE_OF_BACKEND.get(b, b) for b in values("iree-hal-target-backends")}
    backends = devices - {"local"} | named
    if "local" in devices:
        backends |= values("iree-hal-local-target-device-backends") or {"llvm-cpu"}
    return backends


def check_options(options: CompileOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        DiagnosticError: ``--cpu`` with a target that is no CPU, or together with IREE's flag for
            the same; a named target, and IREE's flags for another device or chip.
    """
    _check_cpu(options)
    if options.target is None:
        return
    refusal = target_named(options.target).refused_flag(options.target_flags())
    if refusal is not None:
        raise DiagnosticError("block32", refusal)
    implied = target_named(options.target).compile_flags()
    expected, found = _backends(implied), _backends(options.target_flags())
    if expected and found != expected:
        # Kernels of one target compiled for another device make IREE's code generation abort.
        raise DiagnosticError(
            "block32",
            f"--target={options.target} is for {', '.join(expected)} but the flags for devices "
            f"ask for {', '.join(sorted(found))}",
            ("without --target, block32 follows those flags",),
        )
    for flag in options.flags:
        if flag.startswith("--iree-rocm-target=") and flag not in implied and "hip" in expected:
            raise DiagnosticError(
                "block32",
                f"--target={options.target} is not for the chip of {flag}",
                (f"leave out {flag}, or use --target=portable",),
            )


def _check_cpu(options: CompileOptions) -> None:
    if options.cpu is None:
        return
    if not options.cpu:
        raise DiagnosticError("--cpu", "expected the name of a CPU, such as znver4, or host")
    backends = _backends(options.target_flags())
    if backends and "llvm-cpu" not in backends:
        raise DiagnosticError(
            "block32",
            f"--cpu={options.cpu} names a CPU, but the target is {options.target_name()}, which "
            f"runs on {', '.join(sorted(backends))}",
            ("leave out --cpu; the CPU of the host does not matter there",),
        )
    given = [flag for flag in options.flags if flag.partition("=")[0] == CPU_FLAG]
    if given:
        raise DiagnosticError(
            "block32",
            f"--cpu={options.cpu} and {given[0]} both name the CPU",
            ("leave one of them out",),
        )


def own_devices(module: ir.Module) -> str:
    """What a module says of the devices that it is for, as text; empty where it says nothing.

    IREE follows it, and not its own flags for devices.
    """
    found = [
        str(attribute)
        for name, attribute in module.operation.attributes.items()
        if name == "hal.device.targets"
    ]
    for op in module.body:
        attributes = op.operation.attributes
        if op.operation.name == "util.global" and str(attributes["type"]) == "!hal.device":
            found.append(str(attributes["initial_value"]) if "initial_value" in attributes else "")
    return " ".join(found)


def with_own_devices(module: ir.Module, name: str, options: CompileOptions) -> CompileOptions:
    """The options for a module that names its devices: where no target is named, one that fits.

    Args:
        module: The module.
        name: Its file name, for errors.
        options: What was asked for.

    Raises:
        DiagnosticError: The target was named, and the module is for other devices.
    """
    devices = own_devices(module)
    found = [match[1] for match in _OWN_BACKEND.finditer(devices)]
    backends = {_DEVICE_OF_BACKEND.get(backend, backend) for backend in found}
    expected = _backends(target_named(options.target_name()).compile_flags())
    if not devices or not expected or backends == expected:
        return options
    if options.target is None:
        return dataclasses.replace(options, target="portable")
    location = describe_location(module.operation.location)
    raise DiagnosticError(
        name if location == "<unknown>" else location,
        f"'builtin.module' op names devices of its own ({', '.join(sorted(backends)) or 'unknown'})"
        f"; expected {', '.join(expected)} for --target={options.target}",
        ("take hal.device.targets out of the module, or leave out --target",),
    )
