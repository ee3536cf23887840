# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tests of CPU kernels share: kinds of processors, and compiling a matmul for one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree import runtime
from iree.compiler import ir

from block32.lowering.cpu.isa import ARM
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.iree_compile import device_facts, run_iree_compile
from tests.lowering.cpu import emulator

Array = npt.NDArray[Any]

#: Activations without scales, and results, as NumPy holds them.
ACTIVATION_DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
}

LOCAL = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")


@dataclass(frozen=True)
class Processor:
    """A kind of processor that kernels are compiled for.

    Attributes:
        profile: The profile of ``tiles.json`` that it selects.
        cpu: Its name to LLVM.
        triple: The target triple, where it is not this machine's.
    """

    profile: str
    cpu: str
    triple: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The iree-compile flags for it."""
        triple = (f"--iree-llvmcpu-target-triple={self.triple}",) if self.triple else ()
        return (*LOCAL, *triple, f"--iree-llvmcpu-target-cpu={self.cpu}")

    @property
    def facts(self) -> DeviceFacts:
        """Its features, as IREE sees them."""
        return device_facts(self.flags)

    def runs_here(self) -> bool:
        """Whether this machine has every feature that the kernels use."""
        here = device_facts((*LOCAL, "--iree-llvmcpu-target-cpu=host"))
        used = {
            feature
            for feature in (
                "avx2",
                "fma",
                "f16c",
                "avx512bf16",
                "avx512vbmi",
                "avx512vnni",
                "avx512bw",
                "bf16",
            )
            if feature in self.facts.cpu_features
        }
        return here.architecture == self.facts.architecture and used <= here.cpu_features

    def is_emulated(self) -> bool:
        """Whether its modules are run by an emulator."""
        return self.facts.architecture in ARM and not self.runs_here()


X86_PROCESSORS = (
    Processor("amx", "sapphirerapids"),
    Processor("avx512_bf16", "znver4"),
    Processor("avx512_vbmi", "icelake-server"),
    Processor("avx512", "skylake-avx512"),
    Processor("avx2", "haswell"),
    Processor("generic", "x86-64"),
)
ARM_TRIPLE = "aarch64-linux-gnu"
ARM_PROCESSORS = (
    Processor("neon_bf16", "neoverse-v2", ARM_TRIPLE),
    Processor("neon", "neoverse-n1", ARM_TRIPLE),
)
HOST = Processor("", "host")


def every_processor(test: Any) -> Any:
    """Run a test once for each kind of x86 processor."""
    return pytest.mark.parametrize("processor", X86_PROCESSORS, ids=lambda p: p.profile)(test)


def every_arm_processor(test: Any) -> Any:
    """Run a test once for each kind of aarch64 processor."""
    return pytest.mark.parametrize("processor", ARM_PROCESSORS, ids=lambda p: p.profile)(test)


def skip_unless_it_runs(processor: Processor) -> None:
    """Skip a test of numbers where this machine lacks the processor's instructions."""
    if processor.is_emulated():
        if emulator.missing():
            pytest.skip(f"there is no {emulator.missing()} here")
    elif not processor.runs_here():
        pytest.skip(f"this machine is no {processor.cpu}")


def kernel_module(problem: ScaledMatmul, processor: Processor) -> str:
    """The module that computes ``problem`` with the tiers selected for ``processor``."""
    target = CpuTarget()
    config = target.select(problem, processor.facts).config
    assert config is not None
    with ir.Context(), ir.Location.unknown():
        return str(build_standalone_module(KernelSpec(problem, target, config.tiers)))


@lru_cache(maxsize=64)
def compiled(problem: ScaledMatmul, processor: Processor, *flags: str) -> bytes:
    """The vmfb of ``problem``."""
    source = kernel_module(problem, processor).encode()
    return run_iree_compile(["-", *processor.flags, *flags], stdin=source)


@lru_cache(maxsize=16)
def function(problem: ScaledMatmul, processor: Processor) -> Any:
    """``problem`` as a function of arrays, on the worker threads of this machine."""
    config = runtime.Config("local-task")
    vmfb = compiled(problem, processor)
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    return runtime.load_vm_module(module, config)["main"]


def run(problem: ScaledMatmul, processor: Processor, *arguments: Array) -> Array:
    """The result of ``problem``, in this process or in an emulator."""
    skip_unless_it_runs(processor)
    if processor.is_emulated():
        rows = arguments[0].shape[0]
        result = np.empty((rows, problem.n), ACTIVATION_DTYPES[problem.result])
        return emulator.run_emulated(compiled(problem, processor), result, *arguments)
    return np.asarray(function(problem, processor)(*arguments).to_host())


def scales(array: Array) -> Array:
    """Bytes as the scale type."""
    return array.view(ml_dtypes.float8_e8m0fnu)


def all_steps(rng: np.random.Generator, sums: Array) -> tuple[tuple[Array, ...], Array]:
    """Operands of an epilogue with every step, and what ``sums`` [M, N] are before the activation.

    They are a row scale, a scale, a bf16 bias and an f32 residual; the other result is float64.
    """
    m, n = sums.shape
    row_scale = rng.uniform(0.5, 2, m).astype(np.float32)
    scale = np.array([1.5], np.float32)
    bias = rng.standard_normal(n).astype(ml_dtypes.bfloat16)
    residual = rng.standard_normal((m, n)).astype(np.float32)
    scaled = sums * row_scale[:, None].astype(np.float64) * 1.5
    return (row_scale, scale, bias, residual), scaled + bias.astype(np.float64) + residual
