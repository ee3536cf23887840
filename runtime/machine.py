# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""This machine, as far as it decides which modules can run: CPU features, devices, chips."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import iree.runtime
from iree import _runtime_libs
from iree.runtime import version as iree_version

_ARCHITECTURES: Final[dict[str, str]] = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "aarch64": "arm_64",
    "arm64": "arm_64",
    "riscv64": "riscv_64",
}
_KFD_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")
# CUdevice_attribute of the CUDA driver API.
_CUDA_MAJOR: Final = 75
_CUDA_MINOR: Final = 76


#: What IREE's bindings raise for the statuses of its runtime (3.13: OUT_OF_RANGE is an IndexError).
RUNTIME_ERRORS: Final = (RuntimeError, ValueError, IndexError, OSError)


@dataclass(frozen=True)
class Device:
    """One driver of the runtime and what it sees.

    Attributes:
        driver: The first part of a device's URI: ``local-task``, ``hip``, ...
        names: Its devices.
        problem: Why it has none, or empty.
        chips: What its devices are to a compiler (``gfx950``, ``sm_90``), where it can be found.
    """

    driver: str
    names: tuple[str, ...] = ()
    problem: str = ""
    chips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What modules are checked against.

    Attributes:
        architecture: As IREE's format names spell it: ``x86_64``, ``arm_64``.
        system: ``Linux``, ``Darwin``, ``Windows``.
        cpu_features: Features by LLVM's names: whether the CPU has each. Not all are known.
        devices: The runtime's drivers.
        hal_version: The version of the runtime's hal module, which modules have to match.
        runtime_version: IREE's version.
    """

    architecture: str
    system: str
    cpu_features: dict[str, bool]
    devices: tuple[Device, ...]
    hal_version: int
    runtime_version: str = ""

    def device(self, driver: str) -> Device:
        """The driver of this name; with a problem where the runtime has none."""
        missing = Device(driver, problem="the runtime has no such driver")
        return next((d for d in self.devices if d.driver == driver), missing)


def architecture() -> str:
    """This machine's architecture, as IREE's format names spell it."""
    name = platform.machine().lower()
    return _ARCHITECTURES.get(name, name)


@lru_cache(maxsize=1)
def cpu_features() -> dict[str, bool]:
    """What the runtime's own ``iree-cpuinfo`` says; empty where it cannot be run."""
    tool = Path(next(iter(_runtime_libs.__path__))) / "iree-cpuinfo"
    try:
        done = subprocess.run([tool], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = re.findall(r"^(\S+)\s+([01])$", done.stdout, re.MULTILINE)
    return {name: value == "1" for name, value in lines}


@lru_cache(maxsize=1)
def hal_version() -> int:
    """The version of this runtime's hal module."""
    instance = iree.runtime.VmInstance()
    device = iree.runtime.get_device("local-sync")
    return iree.runtime.create_hal_module(instance, device).version


def runtime_version() -> str:
    """IREE's version, as its package states it."""
    try:
        return version("iree-base-runtime")
    except PackageNotFoundError:
        return iree_version.VERSION


def devices() -> tuple[Device, ...]:
    """Every driver of the runtime with its devices."""
    return tuple(_probe(driver) for driver in sorted(iree.runtime.query_available_drivers()))


def _probe(driver: str) -> Device:
    try:
        found = iree.runtime.get_driver(driver).query_available_devices()
    except RUNTIME_ERRORS as error:
        return Device(driver, problem=runtime_reason(error))
    names = tuple(str(device["name"]) for device in found)
    return Device(driver, names, "" if names else "no devices", _chips(driver))


def runtime_reason(error: Exception) -> str:
    """The reason in an error of the runtime, in one line without its source positions.

    ``Error creating driver: a/b.c:1: NOT_FOUND; no driver 'x' registered; ...`` gives
    ``no driver 'x' registered``.
    """
    text = " ".join(str(error).split())
    _, marker, reason = text.partition("; ")
    reason = reason if marker else text
    return re.split(r"; |: Tried|: please", reason)[0].strip()


def _chips(driver: str) -> tuple[str, ...]:
    if driver == "hip":
        return amd_chips(_KFD_NODES)
    return _cuda_chips() if driver == "cuda" else ()


def amd_chips(nodes: Path) -> tuple[str, ...]:
    """The GPUs that Linux's amdgpu driver lists, such as ``gfx950``.

    ``gfx_target_version`` is major * 10000 + minor * 100 + stepping, 0 for CPUs; a chip's name has
    minor and stepping as hexadecimal digits (90010 is gfx90a).
    """
    chips: list[str] = []
    for properties in sorted(nodes.glob("*/properties")):
        try:
            match = re.search(r"^gfx_target_version (\d+)$", properties.read_text(), re.MULTILINE)
        except OSError:
            continue
        number = int(match[1]) if match else 0
        if number:
            major, minor, step = number // 10000, number // 100 % 100, number % 100
            chips.append(f"gfx{major}{minor:x}{step:x}")
    return tuple(chips)


def _cuda_chips() -> tuple[str, ...]:
    """The compute capability of each GPU as ``sm_90``, from the CUDA driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    chips: list[str] = []
    for ordinal in range(count.value):
        parts: list[int] = []
        for attribute in (_CUDA_MAJOR, _CUDA_MINOR):
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal)
            parts.append(value.value)
        chips.append(f"sm_{parts[0]}{parts[1]}")
    return tuple(chips)


def this_machine() -> Machine:
    """The machine that runs this process."""
    return Machine(
        architecture=architecture(),
        system=platform.system(),
        cpu_features=cpu_features(),
        devices=devices(),
        hal_version=hal_version(),
        runtime_version=runtime_version(),
    )
