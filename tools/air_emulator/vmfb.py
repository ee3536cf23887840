# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels taken out of a vmfb, dispatched as IREE's Metal runtime would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from block32.lowering.apple import executable
from block32.lowering.apple.executable import Pipeline
from block32.lowering.apple.metallib import Metallib
from block32.tools.air_emulator.dispatch import Binding, Kernel
from block32.tools.air_emulator.faults import AbiError


class LoadedKernel:
    """An entry point of an executable: the pipeline's facts and the library's code."""

    def __init__(self, pipeline: Pipeline, library: Metallib):
        self.pipeline = pipeline
        self.kernel = Kernel(library.function(pipeline.name).bitcode, pipeline.name)

    def dispatch(
        self,
        bindings: Sequence[Binding],
        grid: tuple[int, int, int],
        constants: Sequence[int] = (),
        threadgroups: Iterable[tuple[int, int, int]] | None = None,
        seed: int | None = None,
    ) -> None:
        """Runs the kernel; see ``Kernel.dispatch``.

        Raises:
            AirError: The kernel did something wrong, or the arguments do not fit.
        """
        if len(constants) != self.pipeline.constants:
            raise AbiError(
                f"'{self.pipeline.name}' takes {self.pipeline.constants} push constants "
                f"but got {len(constants)}"
            )
        if len(bindings) != len(self.pipeline.bindings):
            raise AbiError(
                f"'{self.pipeline.name}' takes {len(self.pipeline.bindings)} bindings "
                f"but got {len(bindings)}"
            )
        self.kernel.dispatch(bindings, grid, self.pipeline.threads, constants, threadgroups, seed)


def load_kernels(vmfb: bytes) -> dict[str, LoadedKernel]:
    """Every AIR kernel of a vmfb by its name; executables with Metal source are left out.

    Raises:
        ExecutableError: An executable is damaged.
        AbiError: Two kernels share a name, or a pipeline's function is no kernel.
    """
    kernels: dict[str, LoadedKernel] = {}
    for found in executable.find_all(vmfb):
        if found.metallib is None:
            continue
        for pipeline in found.pipelines:
            if pipeline.name in kernels:
                raise AbiError(f"the vmfb has two kernels called '{pipeline.name}'")
            kernels[pipeline.name] = LoadedKernel(pipeline, found.metallib)
    return kernels
