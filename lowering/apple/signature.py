# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel takes: IREE's Metal ABI, written once for the builder, the metadata and the loader.

Parameter 0 is an argument buffer in constant space, a struct with one device pointer a binding.
Push constants, when there are any, are u32 words in the buffer at Metal index 3. The position of
the thread comes as trailing parameters. (Source: IREE 3.13's
``runtime/src/iree/hal/drivers/metal``.)
"""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.apple.architecture import M5, Architecture

#: Metal buffer indices that IREE's runtime binds.
ARGUMENT_BUFFER_INDEX = 0
PUSH_CONSTANT_BUFFER_INDEX = 3

#: Limits of IREE's Metal runtime.
MAX_BINDINGS = 16
MAX_PUSH_CONSTANTS = 64

#: Threads that execute one simdgroup instruction together, on every Apple GPU.
SIMDGROUP_SIZE = 32


class KernelError(ValueError):
    """A kernel that cannot be written for this target; the message says why and what would do."""


@dataclass(frozen=True)
class ElementType:
    """How the element of a buffer is spelled in LLVM IR and in Metal, and its size in bytes."""

    llvm: str
    metal: str
    size: int


#: Elements that a kernel may load or store, by MLIR name. An fp8 value is an ``i8`` in AIR.
ELEMENT_TYPES = {
    "i8": ElementType("i8", "uchar", 1),
    "f16": ElementType("half", "half", 2),
    "bf16": ElementType("bfloat", "bfloat", 2),
    "i32": ElementType("i32", "int", 4),
    "f32": ElementType("float", "float", 4),
}


@dataclass(frozen=True)
class BufferParameter:
    """One binding: its name, the MLIR name of its elements, and whether the kernel writes it."""

    name: str
    element: str
    writable: bool = False


@dataclass(frozen=True)
class KernelSignature:
    """Name and parameters of one kernel.

    Attributes:
        name: The entry point, the symbol of the export that it serves.
        buffers: The bindings, in binding order.
        constants: Number of push constants.
        threads: Threads in a threadgroup, as (x, y, z).
        architecture: The GPUs that the kernel is for.

    Raises:
        KernelError: More than 16 bindings or 64 push constants, or an unknown element type.
    """

    name: str
    buffers: tuple[BufferParameter, ...]
    constants: int = 0
    threads: tuple[int, int, int] = (128, 1, 1)
    architecture: Architecture = M5

    def __post_init__(self) -> None:
        if len(self.buffers) > MAX_BINDINGS:
            raise KernelError(
                f"kernel '{self.name}' has {len(self.buffers)} bindings; "
                f"IREE's Metal runtime takes at most {MAX_BINDINGS}"
            )
        if self.constants > MAX_PUSH_CONSTANTS:
            raise KernelError(
                f"kernel '{self.name}' has {self.constants} push constants; "
                f"IREE's Metal runtime takes at most {MAX_PUSH_CONSTANTS}"
            )
        for buffer in self.buffers:
            if buffer.element not in ELEMENT_TYPES:
                raise KernelError(
                    f"kernel '{self.name}' has a buffer of {buffer.element}; "
                    f"expected one of {', '.join(ELEMENT_TYPES)}"
                )

    def binding(self, name: str) -> int:
        """The number of the binding called ``name``."""
        return [buffer.name for buffer in self.buffers].index(name)
