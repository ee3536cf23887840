# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All launches of one gfx950 matmul in the executor: buffers, grids and the order of launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.kernel_module import export_name
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import RESULT, Launch
from block32.tools.gfx950_executor import Buffer, Executor, Report

FLOAT_TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

_BUFFER_TYPES: dict[str, Any] = {"f32": np.float32, "i8": np.uint8}

#: What results and slots hold before a launch: a value that no product has.
POISON = 0xA5


@dataclass(frozen=True)
class Outcome:
    """What the launches of a matmul left behind.

    Attributes:
        y: The result.
        buffers: The transient buffers by name: slots, counters.
        reports: What each launch executed, by its name.
    """

    y: npt.NDArray[Any]
    buffers: dict[str, npt.NDArray[Any]]
    reports: dict[str, Report]


def launch_matmul(
    hsaco: bytes,
    problem: ScaledMatmul,
    tiers: Sequence[KernelTier],
    operands: Mapping[str, npt.NDArray[Any]],
    executable: str,
    seed: int = 0,
    workgroups: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    first_counter: int = 0,
) -> Outcome:
    """Run the tier that serves the operands' M.

    Args:
        hsaco: The code object.
        problem: The matmul.
        tiers: Its tiers.
        operands: Its arguments by their ABI name, as bytes.
        executable: The symbol of the executable that the kernels came from.
        seed: Of the schedule.
        workgroups: Run only these of a launch, by its name; all of those that are not named.
        first_counter: What the arrival counters hold at first; 0 is right.

    Raises:
        ExecutionError: A kernel broke a rule of the machine.
    """
    target, tiers = Gfx950Target(), tuple(tiers)
    m = operands["lhs"].shape[0]
    index = next(i for i, t in enumerate(tiers) if t.max_m is None or m <= t.max_m)
    plan = target.plan(problem, tiers)
    arrays = dict(operands)
    arrays[RESULT] = np.empty((m, problem.n), FLOAT_TYPES[problem.result])
    arrays[RESULT].view(np.uint8)[:] = POISON
    if problem.grouping:
        arrays[RESULT] = np.array(operands["init"])
    for name, buffer in plan.buffers.items():
        size = as_integer(buffer.size(m))
        if buffer.zeroed:
            arrays[name] = np.full(size, first_counter, np.int32)
        else:
            dtype = np.dtype(_BUFFER_TYPES[buffer.element])
            arrays[name] = np.full(dtype.itemsize * size, POISON, np.uint8).view(dtype)
    executor, reports = Executor(hsaco), {}
    for launch in plan.launches:
        grid = [
            as_integer(extent) for extent in target.workgroups(problem, tiers[index], launch, m)
        ]
        if grid[0] == 0:
            continue
        reports[launch.name] = executor.launch(
            export_name(executable, launch, index),
            grid,
            [_buffer(launch, name, arrays[name]) for name in launch.bindings],
            [m] if problem.m is None else [],
            seed=seed,
            workgroups=(workgroups or {}).get(launch.name),
        )
    buffers = {name: arrays[name] for name in plan.buffers}
    return Outcome(arrays[RESULT], buffers, reports)


def _buffer(launch: Launch, name: str, array: npt.NDArray[Any]) -> Buffer:
    """A binding; what a launch only writes counts as not initialised."""
    return Buffer(array, initialised=name not in launch.writes, writable=name not in launch.reads)
