# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the chips are: facts that kernels and the choice of kernels depend on, written once.

Sources: the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the
PTX ISA's target notes of ``mma`` and ``wgmma``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Lanes of a warp.
WARP_LANES: Final = 32

#: Shared memory that the driver takes for each workgroup.
RESERVED_SHARED_BYTES: Final = 1024

#: Threads of the four warps that issue one ``wgmma`` together.
WARPGROUP_LANES: Final = 128


@dataclass(frozen=True)
class Chip:
    """One compute capability.

    Attributes:
        name: The architecture as PTX spells it.
        multiprocessors: How many a typical card of this kind has (H200: 132; RTX 4090: 128).
        shared_memory: Bytes of shared memory that one workgroup may use.
        shared_memory_total: Bytes of shared memory of a multiprocessor, for all its workgroups.
        has_fp8_mma_sync: ``mma.sync`` takes fp8 operands in hardware. sm_90 accepts the
            instruction, but its assembler takes it apart into f16 instructions and more.
        has_wgmma: The warpgroup matrix instructions of sm_90a.
    """

    name: str
    multiprocessors: int
    shared_memory: int
    shared_memory_total: int
    has_fp8_mma_sync: bool
    has_wgmma: bool

    def compile_flags(self) -> tuple[str, ...]:
        """The iree-compile flags for this chip."""
        if not self.has_wgmma:
            return ("--iree-hal-target-device=cuda", f"--iree-cuda-target={self.name}")
        return (f"--iree-hal-target-device={self._spelled_out_device()}",)

    def _spelled_out_device(self) -> str:
        """A device that IREE's table of CUDA targets does not have."""
        workgroup_processor = ", ".join(
            [
                "compute = fp64|fp32|fp16|int64|int32|int16|int8",
                "storage = b64|b32|b16|b8",
                "subgroup = shuffle|arithmetic",
                "dot = dp4xi8toi32",
                "mma = [<NV_MMA_SYNC_F32_16x8x32_F8E4M3FN>]",
                f"subgroup_size_choices = [{WARP_LANES}]",
                "max_workgroup_sizes = [1024, 1024, 1024]",
                "max_thread_count_per_workgroup = 1024",
                f"max_workgroup_memory_bytes = {self.shared_memory}",
                "max_workgroup_counts = [2147483647, 65535, 65535]",
            ]
        )
        gpu = (
            f'#iree_gpu.target<arch = "{self.name}", features = "+ptx84", '
            f"wgp = <{workgroup_processor}>>"
        )
        executable = (
            f'#hal.executable.target<"cuda", "cuda-nvptx-fb", {{iree_codegen.target_info = {gpu}}}>'
        )
        return f'#hal.device.target<"cuda", [{executable}]> : !hal.device'


SM_89: Final = Chip(
    name="sm_89",
    multiprocessors=128,
    shared_memory=101_376,
    shared_memory_total=102_400,
    has_fp8_mma_sync=True,
    has_wgmma=False,
)

SM_90A: Final = Chip(
    name="sm_90a",
    multiprocessors=132,
    shared_memory=232_448,
    shared_memory_total=233_472,
    has_fp8_mma_sync=False,
    has_wgmma=True,
)
