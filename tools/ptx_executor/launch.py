# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A launch: workgroups one after another, their warps in a seeded order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from block32.tools.ptx_executor import matrix
from block32.tools.ptx_executor.instructions import execute
from block32.tools.ptx_executor.memory import SHARED_BASE, GlobalMemory, PtxError, SharedMemory
from block32.tools.ptx_executor.parser import Instruction, PtxKernel
from block32.tools.ptx_executor.warp import Event, Warp

__all__ = ["PtxError", "launch"]


def launch(
    kernel: PtxKernel,
    workgroups: int | Iterable[int],
    buffers: Sequence[NDArray],
    written: Sequence[bool],
    constants: Sequence[int] = (),
    dynamic_shared: int = 0,
    seed: int = 0,
) -> None:
    """Run a kernel; buffers that it writes are changed in place.

    Args:
        kernel: From ``parse_ptx``.
        workgroups: How many there are along x, or which of them to run.
        buffers: Its bindings in order, C-contiguous.
        written: Which of them it may write.
        constants: Its push constants.
        dynamic_shared: Bytes of shared memory that come with the launch.
        seed: Of the order of workgroups and warps.

    Raises:
        PtxError: The kernel did something that it must not.
    """
    device = GlobalMemory()
    values = [
        device.add(buffer.reshape(-1).view(np.uint8), is_written)
        for buffer, is_written in zip(buffers, written, strict=True)
    ]
    values += list(constants)
    if len(values) != len(kernel.parameters):
        raise PtxError(f"{kernel.name} takes {len(kernel.parameters)} parameters")
    order = np.random.default_rng(seed)
    numbers = list(range(workgroups)) if isinstance(workgroups, int) else list(workgroups)
    order.shuffle(numbers)
    for number in numbers:
        _run_workgroup(kernel, number, values, device, dynamic_shared, order)


def _run_workgroup(
    kernel: PtxKernel,
    number: int,
    values: Sequence[int],
    device: GlobalMemory,
    dynamic_shared: int,
    order: np.random.Generator,
) -> None:
    shared = SharedMemory(sum(kernel.shared.values()) + dynamic_shared)
    common = {"%ctaid.x": number, "WARP_SZ": 32}
    common |= dict(zip(kernel.parameters, values, strict=True))
    common |= dict.fromkeys(kernel.shared, SHARED_BASE)
    warps = [
        Warp(kernel, index, _constants(common, index), device, shared, execute)
        for index in range(kernel.threads // 32)
    ]
    try:
        _run_warps(warps, shared, order)
    except PtxError as error:
        raise PtxError(f"{kernel.name}, workgroup {number}: {error}") from None


def _constants(common: dict[str, int], warp: int) -> dict[str, NDArray[np.uint64]]:
    constants = {name: np.full(32, value, np.uint64) for name, value in common.items()}
    constants["%tid.x"] = np.arange(32 * warp, 32 * warp + 32, dtype=np.uint64)
    return constants


def _run_warps(warps: list[Warp], shared: SharedMemory, order: np.random.Generator) -> None:
    """Run all warps from barrier to barrier."""
    running: dict[int, Iterator[Event]] = {warp.number: warp.run() for warp in warps}
    while running:
        arrived: dict[int, Event] = {}
        while len(arrived) < len(running):
            pending = [n for n in running if n not in arrived]
            events = {}
            for number in order.permutation(pending):
                event = next(running[number], None)
                if event is None:
                    del running[number]
                else:
                    events[int(number)] = event
            arrived |= _finish_wgmma(warps, events, shared)
            if not running:
                return
        if len(running) != len(warps):
            raise PtxError("some warps end while others wait at a barrier")
        shared.epoch += 1


def _finish_wgmma(
    warps: list[Warp], events: dict[int, Event], shared: SharedMemory
) -> dict[int, Event]:
    """Multiply for the warpgroups that arrived whole; the warps that wait at a barrier."""
    groups = {n // 4 for n, event in events.items() if event.kind == "wgmma"}
    for group in groups:
        members = [warps[n] for n in range(4 * group, 4 * group + 4)]
        here = [events[w.number] for w in members if w.number in events]
        if len(here) != 4 or any(event.kind != "wgmma" for event in here):
            raise PtxError("not all warps of a warpgroup arrive at a wgmma")
        _multiply(members, here[0].instruction, shared)
    return {n: event for n, event in events.items() if event.kind == "bar"}


def _multiply(members: list[Warp], instruction: Instruction, shared: SharedMemory) -> None:
    parts = instruction.opcode.split(".")
    n = int(parts[4].split("n")[1].split("k")[0])
    registers, left, right = instruction.operands[:3]
    descriptors = [int(members[0].read(operand)[0]) for operand in (left, right)]
    reader = members[0].number
    a = shared.gather_async(matrix.swizzled_rows(descriptors[0], 64), reader)
    b = shared.gather_async(matrix.swizzled_rows(descriptors[1], n), reader)
    result = matrix.wgmma(a, b, (parts[-2], parts[-1]))
    for index, warp in enumerate(members):
        for register, name in enumerate(registers):  # type: ignore[arg-type]
            values = result[32 * index : 32 * index + 32, register]
            warp.start_result(name, values.view(np.uint32).astype(np.uint64))
