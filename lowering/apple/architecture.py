# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The generations of Apple GPUs as rows of data: what they multiply, and which AIR they take.

Versions and triples were read off libraries that Apple's toolchain built for each macOS. The 8x8
instruction is in Apple's shading language since its version 2.3, for bfloat since 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.apple.metallib import Version


@dataclass(frozen=True)
class Architecture:
    """A generation of GPUs, with the oldest system whose AIR can say what its kernels need.

    Attributes:
        name: Of the target.
        matrix: Rows, columns and depth of the simdgroup matrix instruction.
        multiplies_fp8: Whether the instruction takes fp8 operands.
        os: The oldest macOS that loads the kernels.
        air: Version of AIR.
        language: Version of the Metal language.
        triple: Of the modules.
        container_patch: Third number of the metallib's own version.
        blocks: Blocks of 32 K in a step of a block-scaled loop. An 8x8 instruction does an eighth
            of the work, and a step of four blocks would outgrow an instruction cache.
    """

    name: str
    matrix: int
    multiplies_fp8: bool
    os: Version
    air: Version
    language: Version
    triple: str
    container_patch: int
    blocks: int


#: The M5 family: 16x16x16 with fp8 operands.
M5 = Architecture(
    name="apple-m5",
    matrix=16,
    multiplies_fp8=True,
    os=Version(26, 0),
    air=Version(2, 8),
    language=Version(4, 0),
    triple="air64_v28-apple-macosx26.0.0",
    container_patch=9,
    blocks=4,
)

#: M1 to M4: 8x8 with bf16, f16 and f32 operands.
M1 = Architecture(
    name="apple-m1",
    matrix=8,
    multiplies_fp8=False,
    os=Version(14, 0),
    air=Version(2, 6),
    language=Version(3, 1),
    triple="air64-apple-macosx14.0.0",
    container_patch=7,
    blocks=1,
)

ARCHITECTURES = {architecture.name: architecture for architecture in (M5, M1)}
