# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Where vector memory instructions point: global, scratch and buffer addresses of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import (
    OutOfBoundsError,
    UninitialisedError,
    UnknownInstructionError,
)
from block32.tools.gfx950_executor.operands import VGPR_CODE, check_rows, scalar_source
from block32.tools.gfx950_executor.salu import signed
from block32.tools.gfx950_executor.state import U32, Wave
from block32.tools.gfx950_executor.valu import Limits
from block32.tools.gfx950_executor.waits import Index

_OFF = 0x7F


@dataclass
class Addresses:
    """Where the active lanes of one instruction point.

    Attributes:
        lanes: Their numbers, int64[n].
        addresses: uint64[n]; for scratch, byte offsets in a lane's allocation.
        outside: bool[n, dwords or 1], elements that the buffer's bounds rule out.
    """

    lanes: Index
    addresses: np.ndarray
    outside: np.ndarray | None = None


AddressOf = Callable[[Wave], Addresses]


def defined_v(wave: Wave, row: int, lanes: Index, use: str) -> U32:
    """A vector register in some lanes, which must hold defined values there."""
    values = wave.read_v(row)[lanes]
    if wave.v_dirty[row] and wave.v_poison[row][lanes].any():
        lane = int(lanes[np.flatnonzero(wave.v_poison[row][lanes])[0]])
        raise UninitialisedError(f"v{row} lane {lane} is uninitialised and used as {use}")
    return values


def _global_address(inst: Instruction, limits: Limits) -> AddressOf:
    row, saddr = inst["addr"] - VGPR_CODE, inst["saddr"]
    bits = 13 if inst.encoding != "FLAT" else 12
    offset = signed(inst["offset"], bits) if bits == 13 else inst["offset"]
    uses_scalar = inst.encoding == "GLOBAL" and saddr != _OFF
    check_rows(inst, row, 1 if uses_scalar else 2, limits)

    def addresses(wave: Wave) -> Addresses:
        lanes = wave.active
        low = defined_v(wave, row, lanes, "an address").astype(np.uint64)
        if uses_scalar:
            base = (
                wave.defined_s(saddr, "an address") | wave.defined_s(saddr + 1, "an address") << 32
            )
            low = low + np.uint64(base)
        else:
            high = defined_v(wave, row + 1, lanes, "an address").astype(np.uint64)
            low = low | high << np.uint64(32)
        return Addresses(lanes, low + np.uint64(offset & (1 << 64) - 1))

    return addresses


def _scratch_address(inst: Instruction, limits: Limits) -> AddressOf:
    row, saddr = inst["addr"] - VGPR_CODE, inst["saddr"]
    offset = signed(inst["offset"], 13)
    uses_vector = bool(inst["sve"])
    if uses_vector:
        check_rows(inst, row, 1, limits)

    def addresses(wave: Wave) -> Addresses:
        lanes = wave.active
        total = np.full(len(lanes), offset, np.int64)
        if saddr != _OFF:
            total += wave.defined_s(saddr, "an address")
        if uses_vector:
            total += defined_v(wave, row, lanes, "an address").astype(np.int64)
        return Addresses(lanes, total)

    return addresses


_ADD_TID = 1 << 23
_SWIZZLE = 1 << 31


def _buffer_address(inst: Instruction, limits: Limits, size: int) -> AddressOf:
    """Raw and indexed buffer addresses with the bounds check of the resource.

    Documents differ on whether soffset takes part in the check of a raw buffer. Where that
    decides, the access is refused instead of guessed at.
    """
    resource, offen, idxen = inst["srsrc"], inst["offen"], inst["idxen"]
    row = inst["vaddr"] - VGPR_CODE
    if offen or idxen:
        check_rows(inst, row, offen + idxen, limits)
    soffset = scalar_source(inst, "soffset", 1)
    immediate = inst["offset"]
    element = min(size, 4)
    parts = np.arange(max(1, size // 4)) * 4

    def addresses(wave: Wave) -> Addresses:
        lanes = wave.active
        words = [wave.defined_s(resource + i, "a buffer resource") for i in range(4)]
        scalar, poison = soffset(wave)
        if poison:
            raise UninitialisedError("soffset is uninitialised")
        if words[1] & _SWIZZLE or words[3] & _ADD_TID:
            raise UnknownInstructionError(f"{inst.name} through a swizzled or thread-id resource")
        base = words[0] | (words[1] & 0xFFFF) << 32
        stride, records = words[1] >> 16 & 0x3FFF, words[2]
        offset = np.full(len(lanes), immediate, np.int64)
        if offen:
            offset += defined_v(wave, row + idxen, lanes, "an address").astype(np.int64)
        if idxen:
            index = defined_v(wave, row, lanes, "an address").astype(np.int64)
            beyond = (index >= records) | (offset + size > stride if stride else False)
            outside = np.repeat(beyond[:, None], len(parts), axis=1)
            offset = offset + index * stride
        else:
            ends = offset[:, None] + parts + element
            outside = ends > records
            unsure = ~outside & (ends + scalar > records)
            if unsure.any():
                at = int(offset[np.flatnonzero(unsure.any(1))[0]])
                raise OutOfBoundsError(
                    f"offset {at} is inside the buffer's "
                    f"{records} bytes but not with soffset {scalar}, which is outside the check"
                )
        total = np.uint64(base) + (offset + scalar).astype(np.uint64)
        return Addresses(lanes, total, outside)

    return addresses


def compile_address(inst: Instruction, limits: Limits, size: int) -> AddressOf:
    """Where the lanes of a vector memory instruction point.

    Args:
        inst: The instruction.
        limits: The kernel's registers.
        size: Bytes that each lane moves.
    """
    if inst.encoding == "MUBUF":
        return _buffer_address(inst, limits, size)
    if inst.encoding == "SCRATCH":
        return _scratch_address(inst, limits)
    return _global_address(inst, limits)
