# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One dispatch of a kernel through IREE's Metal ABI: argument buffer, push constants, grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from block32.lowering.apple import llvm14
from block32.lowering.apple.air_parser import Module, parse
from block32.tools.air_emulator.faults import AbiError
from block32.tools.air_emulator.frame import SIMDGROUP_SIZE, Frame
from block32.tools.air_emulator.interpreter import Program, Scheduler
from block32.tools.air_emulator.memory import Buffer, Memory

#: Threads that run in one batch of arrays.
_BATCH = 8192

_ARGUMENT_BUFFER_INDEX = 0
_PUSH_CONSTANT_INDEX = 3


@dataclass
class Binding:
    """A buffer bound to a kernel.

    Attributes:
        array: The contents; for outputs, what the kernel stores goes into it.
        output: The kernel may write it, and nothing in it counts as written before.
    """

    array: np.ndarray
    output: bool = False


class Kernel:
    """An entry point of an AIR module, ready to be dispatched."""

    def __init__(self, bitcode: bytes, name: str):
        """Decodes the module.

        Raises:
            AbiError: The module has no kernel of this name.
            LlvmError: The bytes are no bitcode.
        """
        module = parse(llvm14.disassemble(bitcode))
        self.name = name
        self.metadata = KernelMetadata.of(module, name)
        self.program = Program(module, module.functions[name])

    def dispatch(
        self,
        bindings: Sequence[Binding],
        grid: tuple[int, int, int],
        threads: tuple[int, int, int] = (128, 1, 1),
        constants: Sequence[int] = (),
        threadgroups: Iterable[tuple[int, int, int]] | None = None,
        seed: int | None = None,
    ) -> None:
        """Runs the kernel.

        Args:
            bindings: In the order of their numbers; outputs are written in place.
            grid: Threadgroups along x, y and z.
            threads: Threads in a threadgroup.
            constants: Push constants, u32.
            threadgroups: The threadgroups (x, y, z) to run, in this order; all by default.
            seed: Permutes threadgroups, lanes and frames; None runs them in order.

        Raises:
            AirError: The kernel did something wrong, or the arguments do not fit its metadata.
        """
        count = int(np.prod(threads))
        if count % SIMDGROUP_SIZE or threads[1:] != (1, 1):
            raise AbiError(f"{threads} threads; expected (a multiple of 32, 1, 1)")
        positions = _positions(grid, threadgroups)
        memory, registers = self._bind(bindings, constants, count, positions)
        generator = None if seed is None else np.random.default_rng(seed)
        order = np.arange(len(positions))
        if generator is not None:
            generator.shuffle(order)
        per_batch = max(_BATCH // count, 1)
        for start in range(0, len(order), per_batch):
            numbers = np.sort(order[start : start + per_batch])
            frames = self._frames(memory, registers, numbers, positions, count, generator)
            Scheduler(self.program, generator).run(frames)

    def _frames(
        self,
        memory: Memory,
        registers: dict[str, np.ndarray],
        numbers: np.ndarray,
        positions: np.ndarray,
        count: int,
        generator: np.random.Generator | None,
    ) -> list[Frame]:
        threads = (numbers[:, None] * count + np.arange(count)).reshape(-1)
        parts = [threads]
        if generator is not None:
            threads = generator.permutation(threads)
            parts = [part for part in np.array_split(threads, 3) if part.size]
        frames: list[Frame] = []
        for part in parts:
            values = dict(registers)
            for parameter, (role, _) in zip(
                self.program.function.parameters, self.metadata.roles, strict=True
            ):
                value = _builtin(role, part, positions, count)
                if value is not None:
                    values[parameter.name] = value
            frames.append(Frame(memory, part, values, self.program.vectors, self.program.entry))
        return frames

    def _bind(
        self,
        bindings: Sequence[Binding],
        constants: Sequence[int],
        count: int,
        positions: np.ndarray,
    ) -> tuple[Memory, dict[str, np.ndarray]]:
        """Memory with all buffers, and the values of the buffer parameters."""

        def describe(thread: int) -> str:
            group, local = divmod(thread, count)
            where = ", ".join(str(int(p)) for p in positions[group])
            simdgroup, lane = divmod(local, SIMDGROUP_SIZE)
            return f"threadgroup ({where}), simdgroup {simdgroup}, lane {lane}"

        fields = self.metadata.fields
        if len(fields) != len(bindings):
            raise AbiError(
                f"kernel '{self.name}' takes {len(fields)} bindings but got {len(bindings)}"
            )
        buffers = [
            _buffer(name, binding, access == "air.read_write")
            for (name, access), binding in zip(fields, bindings, strict=True)
        ]
        memory = Memory(buffers, describe)
        addresses = np.array([memory.address(i) for i in range(len(buffers))], np.int64)
        buffers.append(Buffer("argument buffer", addresses.view(np.uint8)))
        words = np.array(constants, np.uint32)
        buffers.append(Buffer("push constants", words.view(np.uint8)))
        registers: dict[str, np.ndarray] = {}
        for parameter, (role, index) in zip(
            self.program.function.parameters, self.metadata.roles, strict=True
        ):
            if role == "air.indirect_buffer" and index == _ARGUMENT_BUFFER_INDEX:
                registers[parameter.name] = np.array(memory.address(len(buffers) - 2))
            elif role == "air.buffer" and index == _PUSH_CONSTANT_INDEX:
                registers[parameter.name] = np.array(memory.address(len(buffers) - 1))
            elif role in ("air.indirect_buffer", "air.buffer"):
                raise AbiError(f"IREE's runtime binds nothing at Metal index {index}")
        return memory, registers


@dataclass(frozen=True)
class KernelMetadata:
    """What a kernel's metadata says of its parameters.

    Attributes:
        roles: Of each parameter, such as "air.buffer", and its Metal index (0 for builtins).
        fields: Name and access of each pointer in the argument buffer, in binding order.
    """

    roles: tuple[tuple[str, int], ...]
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, module: Module, name: str) -> KernelMetadata:
        """Reads the metadata of the kernel called ``name``.

        Raises:
            AbiError: There is no such kernel, or its parameters are not IREE's ABI.
        """
        for kernel in module.metadata.get("air.kernel", []):
            assert isinstance(kernel, list)
            if str(kernel[0]).endswith(f"@{name}"):
                nodes = kernel[2]
                break
        else:
            raise AbiError(f"the module has no kernel called '{name}'")
        roles: list[tuple[str, int]] = []
        fields: tuple[tuple[str, str], ...] | None = None
        for position, node in enumerate(nodes):
            if node[0] != position:
                raise AbiError(f"parameter {position} of '{name}' has the metadata of {node[0]}")
            index = 0
            if node[1] in ("air.buffer", "air.indirect_buffer"):
                index = node[node.index("air.location_index") + 1]
            if node[1] == "air.indirect_buffer":
                fields = _argument_fields(node)
            roles.append((node[1], index))
        if fields is None or roles[0] != ("air.indirect_buffer", _ARGUMENT_BUFFER_INDEX):
            raise AbiError(f"parameter 0 of '{name}' is no argument buffer at Metal index 0")
        return cls(tuple(roles), fields)


def _argument_fields(node: list) -> tuple[tuple[str, str], ...]:
    """Name and access of each binding, from the argument buffer's metadata."""
    info = node[node.index("air.struct_type_info") + 1]
    fields: list[tuple[str, str]] = []
    for start in range(0, len(info), 7):
        offset, size, _, _, name, kind, buffer = info[start : start + 7]
        number = len(fields)
        if (offset, size, kind) != (8 * number, 8, "air.indirect_argument"):
            raise AbiError(f"field {number} of the argument buffer is no device pointer")
        location = buffer.index("air.location_index")
        if buffer[location + 1] != number:
            raise AbiError(f"field {number} of the argument buffer has another binding's id")
        fields.append((name, buffer[location + 3]))
    return tuple(fields)


def _positions(
    grid: tuple[int, int, int], threadgroups: Iterable[tuple[int, int, int]] | None
) -> np.ndarray:
    """Positions (x, y, z) of the threadgroups to run."""
    if threadgroups is not None:
        positions = np.array(list(threadgroups), np.int64).reshape(-1, 3)
        if (positions < 0).any() or (positions >= np.array(grid)).any():
            raise AbiError(f"a threadgroup outside the grid {grid}")
        return positions
    z, y, x = np.indices((grid[2], grid[1], grid[0])).reshape(3, -1)
    return np.stack([x, y, z], axis=1)


def _buffer(name: str, binding: Binding, writable: bool) -> Buffer:
    if binding.output and not writable:
        raise AbiError(f"binding '{name}' is an output, but the kernel only reads it")
    if not binding.array.flags.c_contiguous:
        raise AbiError(f"binding '{name}' is not contiguous")
    data = binding.array.reshape(-1).view(np.uint8)
    initialized = np.zeros(data.size, np.bool_) if binding.output else None
    return Buffer(name, data, binding.output, initialized)


def _builtin(
    role: str, threads: np.ndarray, positions: np.ndarray, count: int
) -> np.ndarray | None:
    """A builtin parameter for the given threads, or None where ``role`` is a buffer."""
    local = threads % count
    if role == "air.threadgroup_position_in_grid":
        return positions[threads // count].astype(np.uint32)
    if role == "air.thread_index_in_simdgroup":
        return (local % SIMDGROUP_SIZE).astype(np.uint32)
    if role == "air.simdgroup_index_in_threadgroup":
        return (local // SIMDGROUP_SIZE).astype(np.uint32)
    if role in ("air.buffer", "air.indirect_buffer"):
        return None
    raise AbiError(f"builtin '{role}'")
