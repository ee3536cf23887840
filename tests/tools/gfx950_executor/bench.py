# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""A test bench: a few hand-made instructions on waves with chosen registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("tinygrad", reason="the gfx950 extra (tinygrad) is not installed")

from block32.tools.gfx950_executor.code_object import Kernel
from block32.tools.gfx950_executor.executor import Buffer
from block32.tools.gfx950_executor.memory import Memory, Region
from block32.tools.gfx950_executor.program import Program
from block32.tools.gfx950_executor.races import GlobalOrder
from block32.tools.gfx950_executor.scheduler import Scheduler, Workgroup
from block32.tools.gfx950_executor.state import EXEC, Wave

# The tables are generated and untyped.
ins: Any = import_module("tinygrad.runtime.autogen.amd.cdna.ins")
_dsl: Any = import_module("tinygrad.renderer.amd.dsl")
s, v, EXEC_REGISTER, VCC_REGISTER = _dsl.s, _dsl.v, _dsl.EXEC, _dsl.VCC

VGPRS, AGPRS = 256, 256


def wait(vm: int = 63, lgkm: int = 15) -> Any:
    """s_waitcnt for the two counters."""
    return ins.s_waitcnt(vm & 15 | 7 << 4 | lgkm << 8 | (vm >> 4) << 14)


def machine_code(instructions: Sequence[Any]) -> bytes:
    """The bytes of some instructions and an s_endpgm."""
    return b"".join(i.to_bytes() for i in [*instructions, ins.s_endpgm(0)])


class Bench:
    """Runs instructions on one or several workgroups.

    Args:
        buffers: Memory, mapped in order; their addresses are in ``address``.
        lds: Bytes of LDS.
        waves: Waves a workgroup; s0 holds the wave's number, s1 the workgroup's.
        workgroups: How many.
        scratch: Bytes of scratch a lane.
        xcds: See ``GlobalOrder``.
    """

    def __init__(
        self,
        buffers: Sequence[npt.NDArray[Any] | Buffer] = (),
        lds: int = 0,
        waves: int = 1,
        workgroups: int = 1,
        scratch: int = 0,
        xcds: int = 0,
    ):
        self._memory = Memory()
        self._counts: Counter[str] = Counter()
        self._order = GlobalOrder(xcds)
        self.regions: list[Region] = []
        for i, buffer in enumerate(buffers):
            given = buffer if isinstance(buffer, Buffer) else Buffer(buffer)
            data = given.array.reshape(-1).view(np.uint8)
            self.regions.append(
                self._memory.add(f"buffer {i}", data, given.writable, given.initialised)
            )
        kernel = Kernel(
            name="bench",
            entry=0,
            end=0,
            lds_bytes=lds,
            scratch_bytes=scratch,
            kernarg_bytes=0,
            user_sgprs=(),
            user_sgpr_count=0,
            preload_first_dword=0,
            preload_dwords=0,
            workgroup_ids=(False, False, False),
            workgroup_info=False,
            vgprs=VGPRS,
            agprs=AGPRS,
            denormals_f32=True,
            denormals_f16_f64=True,
            clamps_overflow=False,
            arguments=(),
            workgroup_size=None,
            max_workgroup_size=1024,
            metadata={},
        )
        self.groups = [
            Workgroup(kernel, i, (i, 0, 0), waves, lds, self._memory, self._order, self._counts)
            for i in range(workgroups)
        ]

    @property
    def waves(self) -> list[Wave]:
        """All waves of all workgroups."""
        return [w for g in self.groups for w in g.waves]

    def run(
        self,
        instructions: Sequence[Any] | bytes,
        vector: Mapping[int, Any] | None = None,
        scalar: Mapping[int, int] | None = None,
        exec_mask: int | None = None,
        seed: int = 0,
        step_limit: int = 10_000,
    ) -> Wave:
        """Run to the end; the first wave.

        Args:
            instructions: Built with ``ins``, or their bytes.
            vector: Values of vector register rows (AGPRs from 256): a number or 64 of them.
            scalar: Values of scalar registers.
            exec_mask: Active lanes; all by default.
            seed: Of the schedule.
            step_limit: Instructions a wave may take.
        """
        code = instructions if isinstance(instructions, bytes) else machine_code(instructions)
        for wave in self.waves:
            wave.write_s(0, wave.index)
            wave.write_s(1, wave.workgroup.position[0])
            for row, value in (vector or {}).items():
                wave.write_v(row, as_words(value), None)
            for code_number, number in (scalar or {}).items():
                wave.write_s(code_number, number)
            if exec_mask is not None:
                wave.write_s64(EXEC, exec_mask)
        program = Program(code, (VGPRS, AGPRS), len(code))
        Scheduler(program, seed, len(self.groups), step_limit).run(self.groups)
        return self.waves[0]

    def resource(self, index: int, size: int | None = None) -> dict[int, int]:
        """SGPRs 4..7: a raw buffer resource for a buffer."""
        region = self.regions[index]
        records = len(region.data) if size is None else size
        return {
            4: region.address & 0xFFFFFFFF,
            5: region.address >> 32,
            6: records,
            7: 159744,
        }

    def pointer(self, index: int, first: int = 2) -> dict[int, int]:
        """An SGPR pair that points to a buffer."""
        address = self.regions[index].address
        return {first: address & 0xFFFFFFFF, first + 1: address >> 32}


def as_words(value: Any) -> npt.NDArray[np.uint32]:
    """64 register values of numbers; floats by their bits."""
    array = np.broadcast_to(np.asarray(value), (64,))
    if array.dtype.kind == "f":
        return array.astype(np.float32).view(np.uint32).copy()
    return array.astype(np.int64).astype(np.uint32)
