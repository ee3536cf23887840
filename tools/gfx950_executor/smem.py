# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Scalar memory: s_load, s_buffer_load and the scalar cache's maintenance."""

from __future__ import annotations

import re

import numpy as np

from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.memory import byte_index
from block32.tools.gfx950_executor.salu import signed
from block32.tools.gfx950_executor.state import Wave
from block32.tools.gfx950_executor.valu import Step
from block32.tools.gfx950_executor.waits import Outstanding

_LOAD = re.compile(r"s_(buffer_)?load_dword(?:x(\d+))?$")
_SCALAR_SCOPE = 4


def compile_smem(inst: Instruction) -> Step:
    """The meaning of a scalar memory instruction."""
    if inst.name.startswith("s_dcache_"):
        return lambda wave: None
    match = _LOAD.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    count = int(match[2] or 1)
    buffered = bool(match[1])
    base, target = inst["sbase"], inst["sdata"]
    immediate = signed(inst["offset"], 21)
    registers = tuple(range(target, target + count))
    text = str(inst)

    def offset_of(wave: Wave) -> int:
        total = immediate if inst["imm"] else 0
        if inst["soffset_en"]:
            total += wave.defined_s(inst["soffset"], "an address")
        elif not inst["imm"]:
            total += wave.defined_s(inst["offset"] & 0x7F, "an address")
        return total

    def run(wave: Wave) -> None:
        offset = offset_of(wave)
        address = wave.defined_s(base, "an address") | wave.defined_s(base + 1, "an address") << 32
        live = count
        if buffered:
            address &= (1 << 48) - 1
            records = wave.defined_s(base + 2, "a buffer resource")
            live = max(0, min(count, (records - (offset & ~3)) // 4))
        # The hardware ignores the two low bits of the address.
        start = (address + offset) & ~3
        values, masks = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        group = wave.workgroup
        if live:
            where = np.array([start], np.uint64)
            for region, _, offsets in group.memory.resolve(where, 4 * live):
                index = byte_index(offsets, 4 * live)
                values[:live] = region.data[index].view("<u4")[0]
                if region.poison is not None:
                    masks[:live] = region.poison[index].view("<u4")[0]
                group.order.load(wave.order, region, index, text, _SCALAR_SCOPE)
        group.count("scalar read", 4 * live)
        for register, value, mask in zip(registers, values, masks, strict=True):
            wave.write_s(register, int(value), int(mask))
        wave.counters.issue_lgkm(Outstanding(text, scalar=registers, in_order=False))

    return run
