# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""The state of one wave: vector and scalar registers, EXEC, SCC, and their poison.

Poison is kept per bit: a set bit in a poison mask means that the bit of the register was never
given a defined value. Rows 0..255 of the vector file are VGPRs, rows 256..511 AGPRs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from block32.tools.gfx950_executor.errors import MissingWaitError, UninitialisedError
from block32.tools.gfx950_executor.waits import Counters

if TYPE_CHECKING:
    from block32.tools.gfx950_executor.code_object import Kernel
    from block32.tools.gfx950_executor.memory import Lds, Memory, Scratch
    from block32.tools.gfx950_executor.races import GlobalOrder, WaveOrder

LANES = 64
FIRST_AGPR = 256
FULL_EXEC = (1 << LANES) - 1
ALL_BITS = 0xFFFFFFFF

FLAT_SCRATCH = 102
VCC = 106
M0 = 124
EXEC = 126

U32 = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


def lanes_of(mask: int) -> Mask:
    """The 64 bits of a lane mask as booleans, lane 0 first."""
    return np.unpackbits(np.array([mask], "<u8").view(np.uint8), bitorder="little").view(np.bool_)


def mask_of(lanes: Mask) -> int:
    """The lane mask of 64 booleans, lane 0 in bit 0."""
    return int(np.packbits(lanes, bitorder="little").view("<u8")[0])


class Surroundings(Protocol):
    """What a wave needs of its workgroup."""

    kernel: Kernel
    position: tuple[int, int, int]
    code_address: int
    lds: Lds
    memory: Memory
    order: GlobalOrder

    def count(self, level: str, size: int) -> None:
        """Add bytes to the report."""
        ...

    def scratch_of(self, wave: Wave) -> Scratch:
        """The wave's scratch memory."""
        ...


class Wave:
    """Registers and counters of one wave64.

    Args:
        index: The wave's number in its workgroup.
        workgroup: The workgroup it belongs to, for LDS, memory and barriers.
        order: What this wave is known to come after, for race detection.
    """

    def __init__(self, index: int, workgroup: Surroundings, order: WaveOrder):
        self.index = index
        self.workgroup = workgroup
        self.order = order
        self.v: U32 = np.zeros((512, LANES), np.uint32)
        self.v_poison: U32 = np.full((512, LANES), ALL_BITS, np.uint32)
        self.v_dirty = bytearray(b"\1" * 512)
        self.v_locked = bytearray(512)
        self.s = [0] * 128
        self.s_poison = [ALL_BITS] * 128
        self.s_locked = bytearray(128)
        self.counters = Counters(self.v_locked, self.s_locked, workgroup.lds.arrive)
        self.scc = 0
        self.scc_poison = True
        self.pc = 0
        self.flush_f32 = False
        self.clamps_overflow = False
        self.lanes: Mask = np.ones(LANES, np.bool_)
        self.active = np.arange(LANES)  # numbers of the active lanes
        self.exec_full = True
        self.at_barrier = False
        self.ended = False
        self.executed = 0
        self.write_s64(EXEC, FULL_EXEC)

    # ---- scalar registers

    def read_s(self, code: int) -> int:
        """A 32-bit scalar register by source code; refuses one that is still being loaded."""
        if self.s_locked[code]:
            self.refuse_locked(scalar_name(code))
        return self.s[code]

    def read_s64(self, code: int) -> int:
        """A 64-bit scalar register pair."""
        return self.read_s(code) | self.read_s(code + 1) << 32

    def poison_s64(self, code: int) -> int:
        """The poison mask of a pair."""
        return self.s_poison[code] | self.s_poison[code + 1] << 32

    def defined_s(self, code: int, use: str) -> int:
        """A scalar register that must hold a defined value."""
        if self.s_poison[code]:
            raise UninitialisedError(f"{scalar_name(code)} is uninitialised and used as {use}")
        return self.read_s(code)

    def write_s(self, code: int, value: int, poison: int = 0) -> None:
        """Write a 32-bit scalar register; EXEC updates the lane mask."""
        if self.s_locked[code]:
            self.refuse_locked(scalar_name(code))
        self.s[code] = value & ALL_BITS
        self.s_poison[code] = poison & ALL_BITS
        if code >= EXEC:
            self._exec_changed()

    def write_s64(self, code: int, value: int, poison: int = 0) -> None:
        """Write a 64-bit scalar register pair."""
        for part in (0, 1):
            if self.s_locked[code + part]:
                self.refuse_locked(scalar_name(code + part))
            self.s[code + part] = value >> 32 * part & ALL_BITS
            self.s_poison[code + part] = poison >> 32 * part & ALL_BITS
        if code >= EXEC:
            self._exec_changed()

    def _exec_changed(self) -> None:
        if self.s_poison[EXEC] or self.s_poison[EXEC + 1]:
            raise UninitialisedError("exec is written with an uninitialised value")
        mask = self.s[EXEC] | self.s[EXEC + 1] << 32
        self.exec_full = mask == FULL_EXEC
        self.lanes = lanes_of(mask)
        self.active = np.flatnonzero(self.lanes)

    @property
    def exec_mask(self) -> int:
        """EXEC as an integer."""
        return self.s[EXEC] | self.s[EXEC + 1] << 32

    # ---- vector registers

    def read_v(self, row: int) -> U32:
        """One vector register, all lanes, not to be written to; refuses one being loaded."""
        if self.v_locked[row]:
            self.refuse_locked(vector_name(row))
        return self.v[row]

    def poison_v(self, row: int) -> U32 | None:
        """The poison mask of a vector register, or None where every bit is defined."""
        return self.v_poison[row] if self.v_dirty[row] else None

    def write_v(self, row: int, value: U32, poison: U32 | None, lanes: Mask | None = None) -> None:
        """Write one vector register in the active lanes.

        Args:
            row: The register.
            value: uint32[64].
            poison: uint32[64], or None where the value is fully defined.
            lanes: Lanes to write instead of EXEC's; None for EXEC.
        """
        if self.v_locked[row]:
            self.refuse_locked(vector_name(row))
        if lanes is None and self.exec_full:
            self.v[row] = value
            if poison is not None:
                self.v_poison[row] = poison
                self.v_dirty[row] = bool(poison.any())
            elif self.v_dirty[row]:
                self.v_poison[row] = 0
                self.v_dirty[row] = 0
            return
        where = self.lanes if lanes is None else lanes
        np.copyto(self.v[row], value, where=where)
        if poison is not None or self.v_dirty[row]:
            np.copyto(self.v_poison[row], 0 if poison is None else poison, where=where)
            self.v_dirty[row] = bool(self.v_poison[row].any())

    def refuse_locked(self, name: str) -> None:
        """Raise the error for touching a register that a load may still write."""
        producer = self.counters.producer_of(name)
        raise MissingWaitError(f"{name} is used before a wait for {producer}")


def scalar_name(code: int) -> str:
    """The assembler's name of a scalar source code."""
    special = {102: "flat_scratch_lo", 103: "flat_scratch_hi", 106: "vcc_lo", 107: "vcc_hi"}
    special |= {124: "m0", 126: "exec_lo", 127: "exec_hi"}
    if code in special:
        return special[code]
    return f"ttmp{code - 108}" if 108 <= code < 124 else f"s{code}"


def vector_name(row: int) -> str:
    """The assembler's name of a vector register row."""
    return f"v{row}" if row < FIRST_AGPR else f"a{row - FIRST_AGPR}"
