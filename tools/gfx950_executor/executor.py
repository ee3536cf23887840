# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""The public interface: run a kernel of a gfx950 code object on NumPy arrays."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from block32.tools.gfx950_executor.code_object import (
    USER_SGPR_SIZES,
    CodeObject,
    Kernel,
    parse_code_object,
)
from block32.tools.gfx950_executor.counts import Report, instruction_class
from block32.tools.gfx950_executor.errors import LaunchError
from block32.tools.gfx950_executor.memory import Memory, Region
from block32.tools.gfx950_executor.program import Program
from block32.tools.gfx950_executor.races import GlobalOrder
from block32.tools.gfx950_executor.scheduler import Scheduler, Workgroup
from block32.tools.gfx950_executor.state import EXEC, LANES, Wave

LDS_BYTES = 160 * 1024
XCDS = 8

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Buffer:
    """A buffer argument with more to say than an array.

    Attributes:
        array: Contiguous; the kernel's stores change it in place.
        initialised: False for a buffer whose bytes the kernel must write before reading them.
        writable: False where a store is an error (and loads then cost less to follow).
    """

    array: npt.NDArray[Any]
    initialised: bool = True
    writable: bool = True


BufferLike = Buffer | npt.NDArray[Any] | None


class Executor:
    """A gfx950 code object, ready to run.

    Args:
        hsaco: Bytes of the ELF file.

    Raises:
        CodeObjectError: The bytes are no gfx950 code object.
    """

    def __init__(self, hsaco: bytes):
        self.code_object: CodeObject = parse_code_object(hsaco)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels by name."""
        return self.code_object.kernels

    def launch(
        self,
        kernel_name: str,
        grid: Sequence[int],
        buffers: Sequence[BufferLike],
        constants: Sequence[int | float | bytes] = (),
        *,
        seed: int = 0,
        workgroup_size: Sequence[int] | None = None,
        workgroups: Sequence[Grid] | None = None,
        dynamic_lds_bytes: int = 0,
        resident: int = 4,
        rely_on_xcds: bool = False,
        step_limit: int = 50_000_000,
    ) -> Report:
        """Run one kernel.

        Args:
            kernel_name: A name of ``kernels``.
            grid: Workgroups in x, y, z; missing ones are 1.
            buffers: Pointer arguments in order; None for a null pointer. Arrays are changed in
                place. Trailing pointers that are not given are null.
            constants: by-value arguments in order: int for integers, float for f32 or f64,
                bytes for anything else.
            seed: Of the order of workgroups and waves.
            workgroup_size: Threads in x, y, z; by default the kernel's required size, or its
                maximum in x.
            workgroups: Run only these (x, y, z); all by default.
            dynamic_lds_bytes: LDS on top of the kernel's own.
            resident: Workgroups that run interleaved.
            rely_on_xcds: Take for granted that workgroup i runs on XCD i % 8, so that workgroups
                of one XCD see each other through its L2.
            step_limit: Instructions a wave may take before it counts as stuck.

        Returns:
            Counts of instructions and bytes.

        Raises:
            LaunchError: The arguments do not fit the kernel.
            ExecutionError: The kernel broke a rule; the subclass and message say which.
        """
        kernel = self._kernel(kernel_name)
        size, shape = _workgroup_size(kernel, workgroup_size), _triple(grid)
        order = GlobalOrder(XCDS if rely_on_xcds else 0)
        lds_bytes = _lds_bytes(kernel, dynamic_lds_bytes)
        launched = self._prepare(kernel, shape, size, lds_bytes, buffers, constants, order)
        image = self.code_object.image
        program = Program(image, (kernel.vgprs, kernel.agprs), len(image))
        scheduler = Scheduler(program, seed, resident, step_limit)
        report = launched.report
        report.workgroups = scheduler.run(launched.workgroups(_chosen(shape, workgroups, seed)))
        for pc, times in scheduler.executed.items():
            inst = program.step(pc).instruction
            report.instructions[instruction_class(inst)] += times
            report.mnemonics[inst.name] += times
        return report

    def _prepare(
        self,
        kernel: Kernel,
        grid: Grid,
        size: Grid,
        lds_bytes: int,
        buffers: Sequence[BufferLike],
        constants: Sequence[int | float | bytes],
        order: GlobalOrder,
    ) -> _Launched:
        """Map buffers, arguments and code."""
        memory = Memory()
        regions = [_map(memory, i, b) for i, b in enumerate(buffers)]
        kernarg = _kernarg(kernel, regions, constants, grid, size)
        kernarg_region = memory.add("the kernarg segment", kernarg, False, True)
        # The code itself can be read, for constants that the compiler put beside it.
        image = np.frombuffer(self.code_object.image, np.uint8)
        code = memory.add("the code object", image, False, True)
        report = Report(kernel.name)
        return _Launched(
            kernel, grid, size, lds_bytes, memory, order, report, kernarg_region, kernarg, code
        )

    def _kernel(self, name: str) -> Kernel:
        if name not in self.kernels:
            known = ", ".join(sorted(self.kernels))
            raise LaunchError(f"no kernel '{name}' in the code object; it has: {known}")
        return self.kernels[name]


@dataclass(frozen=True)
class _Launched:
    """What all workgroups of a launch have in common."""

    kernel: Kernel
    grid: Grid
    size: Grid
    lds_bytes: int
    memory: Memory
    order: GlobalOrder
    report: Report
    kernarg: Region
    kernarg_data: npt.NDArray[np.uint8]
    code: Region

    def workgroups(self, positions: Sequence[Grid]) -> Iterator[Workgroup]:
        """Make the workgroups of some positions one after the other, ready to run."""
        waves = -(-self.size[0] * self.size[1] * self.size[2] // LANES)
        for position in positions:
            number = position[0] + self.grid[0] * (position[1] + self.grid[1] * position[2])
            group = Workgroup(
                self.kernel,
                number,
                position,
                waves,
                self.lds_bytes,
                self.memory,
                self.order,
                self.report.byte_counts,
            )
            group.code_address = self.code.address
            for wave in group.waves:
                _start(wave, self.kernel, self.kernarg, self.kernarg_data, self.size)
            yield group


def _lds_bytes(kernel: Kernel, dynamic: int) -> int:
    """LDS of a workgroup.

    Raises:
        LaunchError: More than it can have.
    """
    lds_bytes = kernel.lds_bytes + dynamic
    if lds_bytes > LDS_BYTES:
        raise LaunchError(f"{lds_bytes} bytes of LDS; a workgroup can have {LDS_BYTES}")
    return lds_bytes


def _triple(values: Sequence[int]) -> Grid:
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise LaunchError(f"a grid is one to three positive numbers, not {tuple(values)}")
    x, y, z = (*values, 1, 1)[:3]
    return int(x), int(y), int(z)


def _workgroup_size(kernel: Kernel, given: Sequence[int] | None) -> Grid:
    size = _triple(given) if given else kernel.workgroup_size or (kernel.max_workgroup_size, 1, 1)
    threads = size[0] * size[1] * size[2]
    if threads > kernel.max_workgroup_size:
        raise LaunchError(f"{threads} threads a workgroup; at most {kernel.max_workgroup_size}")
    return size


def _map(memory: Memory, index: int, buffer: BufferLike) -> Region | None:
    if buffer is None:
        return None
    described = buffer if isinstance(buffer, Buffer) else Buffer(buffer)
    array = described.array
    if not array.flags.c_contiguous:
        raise LaunchError(f"buffer {index} is not contiguous")
    writable = described.writable and array.flags.writeable
    data = array.reshape(-1).view(np.uint8)
    return memory.add(f"buffer {index}", data, writable, described.initialised)


def _chosen(shape: Grid, sample: Sequence[Grid] | None, seed: int) -> list[Grid]:
    if sample is None:
        sample = [
            (x, y, z) for z in range(shape[2]) for y in range(shape[1]) for x in range(shape[0])
        ]
    chosen = [_inside(p, shape) for p in sample]
    random.Random(seed).shuffle(chosen)
    return chosen


def _inside(position: Grid, shape: Grid) -> Grid:
    if not all(0 <= p < s for p, s in zip(position, shape, strict=True)):
        raise LaunchError(f"workgroup {position} is outside of the grid {shape}")
    return position


def _kernarg(
    kernel: Kernel,
    regions: list[Region | None],
    constants: Sequence[int | float | bytes],
    grid: Grid,
    size: Grid,
) -> npt.NDArray[np.uint8]:
    """Build the kernarg segment."""
    data = bytearray(kernel.kernarg_bytes)
    pointers, values = list(regions), list(constants)
    for argument in kernel.arguments:
        if argument.kind == "global_buffer":
            region = pointers.pop(0) if pointers else None
            raw = (region.address if region else 0).to_bytes(8, "little")
        elif argument.kind == "by_value":
            if not values:
                raise LaunchError(
                    f"kernel '{kernel.name}' takes more constants than the {len(constants)} given"
                )
            raw = _encode(values.pop(0), argument.size)
        else:
            raw = _hidden(argument.kind, argument.size, grid, size)
        data[argument.offset : argument.offset + len(raw)] = raw
    if pointers or values:
        raise LaunchError(
            f"kernel '{kernel.name}' takes fewer arguments: {len(pointers)} buffers and "
            f"{len(values)} constants are left over"
        )
    return np.frombuffer(bytes(data), np.uint8).copy()


def _encode(value: int | float | bytes, size: int) -> bytes:
    if isinstance(value, bytes):
        if len(value) != size:
            raise LaunchError(f"a constant of {len(value)} bytes where the kernel takes {size}")
        return value
    if isinstance(value, float):
        return struct.pack({4: "<f", 8: "<d"}[size], value)
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _hidden(kind: str, size: int, grid: Grid, workgroup: Grid) -> bytes:
    """Implicit arguments that tell the launch's shape; zero for the others."""
    values = {"hidden_grid_dims": 3}
    for axis, blocks, threads in zip("xyz", grid, workgroup, strict=True):
        values[f"hidden_block_count_{axis}"] = blocks
        values[f"hidden_group_size_{axis}"] = threads
    return values.get(kind, 0).to_bytes(size, "little")


def _start(
    wave: Wave, kernel: Kernel, kernarg: Region, kernarg_data: npt.NDArray[np.uint8], size: Grid
) -> None:
    """Set the registers that a wave finds at its first instruction."""
    register = 0
    for name in kernel.user_sgprs:
        count = USER_SGPR_SIZES[name]
        if name == "kernarg_segment_ptr":
            wave.write_s64(register, kernarg.address)
        elif name == "private_segment_size":
            wave.write_s(register, kernel.scratch_bytes)
        register += count  # the others stay poisoned: nothing here has a use for them
    first = 4 * kernel.preload_first_dword
    words = kernarg_data[first : first + 4 * kernel.preload_dwords].view("<u4")
    for i, word in enumerate(words):
        wave.write_s(register + i, int(word))
    register = kernel.user_sgpr_count
    for enabled, value in zip(kernel.workgroup_ids, wave.workgroup.position, strict=True):
        if enabled:
            wave.write_s(register, value)
            register += 1
    wave.write_v(0, _work_items(wave.index, size), None)
    threads = size[0] * size[1] * size[2] - LANES * wave.index
    wave.write_s64(EXEC, (1 << min(threads, LANES)) - 1)
    wave.flush_f32 = not kernel.denormals_f32
    wave.clamps_overflow = kernel.clamps_overflow
    wave.pc = kernel.entry


def _linear(wave: int) -> npt.NDArray[np.int64]:
    return wave * LANES + np.arange(LANES)


def _work_items(wave: int, size: Grid) -> npt.NDArray[np.uint32]:
    """x, y, z of the work items, ten bits each, as gfx90a and later pack them in v0."""
    linear = _linear(wave)
    x, y, z = linear % size[0], linear // size[0] % size[1], linear // (size[0] * size[1])
    return (x | y << 10 | z << 20).astype(np.uint32)
