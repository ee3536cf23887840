# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether a module can run here: the runtime's version, the devices, the CPU's features."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from block32.runtime.machine import Machine
from block32.runtime.vmfb import Vmfb

#: The driver that runs each format of executable on a GPU.
GPU_DRIVERS: Final[dict[str, str]] = {
    "rocm-hsaco-fb": "hip",
    "cuda-nvptx-fb": "cuda",
    "metal-msl-fb": "metal",
    "vulkan-spirv-fb": "vulkan",
}
#: Drivers that run CPU code.
CPU_DRIVERS: Final = ("local-task", "local-sync")
#: Releases by the version of their hal module, read off iree-base-runtime wheels from PyPI
#: (3.1, 3.4, 3.6, 3.8, 3.9, 3.10, 3.11, 3.12, 3.13).
_RELEASES: Final[dict[int, str]] = {5: "IREE 3.1", 6: "IREE 3.4 to 3.11", 7: "IREE 3.12 or 3.13"}
#: What people call the machines that have a chip.
_MACHINES: Final[dict[str, str]] = {
    "gfx942": "AMD MI300",
    "gfx950": "AMD MI350",
    "sm_80": "NVIDIA A100 or later",
    "sm_89": "NVIDIA L40, RTX 40 or later",
}


@dataclass(frozen=True)
class Requirement:
    """One kind of device that a module has code for.

    Attributes:
        format: The format of its executables.
        chip: The GPU that they were compiled for; empty on CPUs or where it is not known.
        cpu_features: LLVM's names of the CPU features that the code was compiled with.
    """

    format: str
    chip: str = ""
    cpu_features: frozenset[str] = frozenset()

    @property
    def drivers(self) -> tuple[str, ...]:
        """The runtime's drivers that can run it."""
        return (GPU_DRIVERS[self.format],) if self.format in GPU_DRIVERS else CPU_DRIVERS

    def describe(self) -> str:
        """What it needs: ``gfx950 (AMD MI350)``, ``an x86_64 CPU``."""
        if self.format in GPU_DRIVERS:
            known = _MACHINES.get(self.chip, GPU_DRIVERS[self.format])
            return f"{self.chip} ({known})" if self.chip else f"a {known} device"
        if self.format == "vmvx-bytecode-fb":
            return "any CPU"
        return f"an {self._architecture} CPU" if self._architecture[:1] in "xa" else self.format

    @property
    def _architecture(self) -> str:
        return re.sub(r"^(embedded|system)-[a-z]+-", "", self.format)

    def why_not(self, machine: Machine) -> str | None:
        """What the machine lacks to run it, or None if nothing is known to be missing."""
        if self.format in GPU_DRIVERS:
            return self._why_not_gpu(machine)
        if self.format == "vmvx-bytecode-fb":
            return None
        if self._architecture != machine.architecture:
            return f"needs {self.describe()}; this one is {machine.architecture}"
        missing = sorted(n for n in self.cpu_features if machine.cpu_features.get(n) is False)
        if missing:
            return f"needs the CPU features {', '.join(missing)}, which this CPU lacks"
        return None

    def _why_not_gpu(self, machine: Machine) -> str | None:
        device = machine.device(GPU_DRIVERS[self.format])
        if device.problem:
            return f"needs {self.describe()}; device {device.driver}: {device.problem}"
        if self.chip and device.chips and not any(_runs(self.chip, c) for c in device.chips):
            return (
                f"needs {self.describe()}; this machine has {', '.join(sorted(set(device.chips)))}"
            )
        return None


def _runs(code: str, chip: str) -> bool:
    """Whether ``chip`` runs code for the chip ``code``.

    PTX is compiled for the GPU when it is loaded, and runs on later ones too (CUDA programming
    guide, "PTX compatibility"); AMD's machine code runs on its own chip alone.
    """
    if code.startswith("sm_") and chip.startswith("sm_"):
        return int(chip[3:]) >= int(code[3:])
    return code == chip


def requirements(vmfb: Vmfb) -> tuple[Requirement, ...]:
    """The kinds of device that a module has code for, in the module's order.

    The chip comes from the code itself where it says so, else from the compiler's description of
    the device. Code for several CPUs of one architecture is one kind, with the features that all
    of them have.
    """
    found: dict[tuple[str, str], Requirement] = {}
    for executable in vmfb.executables:
        declared = [t for t in vmfb.targets if t.format == executable.format]
        names_chips = executable.format in ("rocm-hsaco-fb", "cuda-nvptx-fb")
        chip = executable.chip or (declared[0].chip if names_chips and declared else "")
        features = [target.cpu_features for target in declared]
        common = frozenset.intersection(*features) if features else frozenset()
        key = (executable.format, chip)
        found.setdefault(key, Requirement(executable.format, chip, common))
    return tuple(found.values())


def version_problem(vmfb: Vmfb, machine_hal: int, runtime_version: str) -> str | None:
    """Why this runtime cannot load the module for its version, or None.

    The module states the version of the ``hal`` module that it was compiled for. The runtime
    refuses newer ones by that number; older ones fail later, at the first import whose signature
    has changed. A module that only makes empty results asks for version 0, which all have.
    """
    compiled_for = vmfb.dependencies.get("hal", machine_hal) or machine_hal
    if compiled_for == machine_hal:
        return None
    return (
        f"the module was compiled for hal version {compiled_for}{_release(compiled_for)}; "
        f"the runtime is IREE {runtime_version} with hal version {machine_hal}"
    )


def _release(hal: int) -> str:
    return f" ({_RELEASES[hal]})" if hal in _RELEASES else ""


def version_cure(runtime_version: str) -> str:
    """What to do about a module for another runtime."""
    release = re.match(r"[\d.]*\d", runtime_version)
    number = release[0] if release else runtime_version
    return f"compile the model again with iree-base-compiler=={number}"


def what_would_work(needs: tuple[Requirement, ...], architecture: str) -> str:
    """A cure for a module that has no code for this machine, an ``architecture`` one."""
    compile_here = "compile the model for this machine with 'block32 compile --target=cpu'"
    for need in needs:
        if need.format in GPU_DRIVERS:
            where = f"on a machine with {need.describe()}"
            return f"run it with --device={need.drivers[0]} {where}, or {compile_here}"
        if architecture not in need.format:
            return f"run it on {need.describe()}, or {compile_here}"
    return compile_here
