# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Vector memory: global, flat, buffer and scratch instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from block32.tools.gfx950_executor.addresses import Addresses, compile_address, defined_v
from block32.tools.gfx950_executor.atomics import UPDATES
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import (
    OutOfBoundsError,
    UninitialisedError,
    UnknownInstructionError,
)
from block32.tools.gfx950_executor.memory import Bytes, Region, byte_index, bytes_of, words_of
from block32.tools.gfx950_executor.operands import VGPR_CODE, check_rows
from block32.tools.gfx950_executor.salu import signed
from block32.tools.gfx950_executor.state import FIRST_AGPR, LANES, M0, U32, Wave
from block32.tools.gfx950_executor.valu import Limits, Step
from block32.tools.gfx950_executor.waits import Index, Outstanding

_NAME = re.compile(
    r"(?P<unit>global|flat|buffer|scratch)_(?P<way>load|store)_(?P<lds>lds_)?"
    r"(?P<type>ubyte|sbyte|ushort|sshort|byte|short|dword(?:x[234])?)"
    r"(?P<d16>_d16)?(?P<hi>_hi)?$"
)
_SIZES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2}
_SIZES |= {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _scope(inst: Instruction) -> int:
    return inst["sc0"] | inst["sc1"] << 1


# ---- loads


def _gather(
    wave: Wave, inst: Instruction, where: Addresses, size: int, record: Outstanding
) -> tuple[Bytes, Bytes | None]:
    """Bytes uint8[n, size] of the active lanes and their poison; 0 outside of a buffer."""
    data = np.zeros((len(where.lanes), size), np.uint8)
    poison: Bytes | None = None
    element = size if where.outside is None else min(size, 4)
    group = wave.workgroup
    for part in range(0, size, element):
        inside = np.arange(len(where.lanes))
        if where.outside is not None:
            inside = np.flatnonzero(~where.outside[:, part // 4])
        if where.outside is not None and not where.outside.any():
            element, part_size = size, size
        else:
            part_size = element
        chosen = where.addresses[inside] + np.uint64(part)
        for region, positions, offsets in group.memory.resolve(chosen, part_size):
            index = byte_index(offsets, part_size)
            rows = inside[positions]
            data[rows, part : part + part_size] = region.data[index]
            if region.poison is not None:
                if poison is None:
                    poison = np.zeros_like(data)
                poison[rows, part : part + part_size] = region.poison[index]
            group.order.load(wave.order, region, index, str(inst), _scope(inst))
            _remember(wave, record, region, index, False)
        if part_size == size:
            break
    return data, poison


def _remember(wave: Wave, record: Outstanding, region: Region, index: Index, stores: bool) -> None:
    if stores or region.track_reads:
        table = region.writers() if stores else region.readers()
        number = int(table.flat[index.flat[0]]) if index.size else 0
        if number > 0:
            record.accesses.append((region, index, stores, number))


@dataclass(frozen=True)
class Element:
    """What one lane moves: bytes, sign extension, and which half of a register (d16)."""

    size: int
    sign: bool
    d16: bool
    high: bool


def element_of(name: str) -> tuple[Element, re.Match[str]]:
    """The element of a load or store, from its mnemonic, and the parts of the mnemonic."""
    match = _NAME.match(name)
    if match is None:
        raise UnknownInstructionError(name)
    kind = match["type"]
    return Element(
        _SIZES[kind], kind[0] == "s" and kind != "short", bool(match["d16"]), bool(match["hi"])
    ), match


def extend(words: U32, kind: Element) -> U32:
    """Sign-extend a short load."""
    if kind.sign and kind.size < 4:
        sign = np.uint32(1 << (8 * kind.size - 1))
        words = (words ^ sign) - sign
    return words & np.uint32(0xFFFF) if kind.d16 else words


def put(wave: Wave, row: int, lanes: Index, words: U32, poison: U32 | None, kind: Element) -> None:
    """Write loaded words uint32[n, registers] to the lanes of consecutive registers."""
    chosen = np.zeros(LANES, np.bool_)
    chosen[lanes] = True
    everything = chosen.all()
    for part in range(words.shape[1]):
        value = np.zeros(LANES, np.uint32)
        value[lanes] = words[:, part]
        mask = None
        if poison is not None:
            mask = np.zeros(LANES, np.uint32)
            mask[lanes] = poison[:, part]
        if kind.d16:
            # The other half is not kept: LLVM counts on that for no chip from gfx90a on, nor for
            # any with SRAM ECC (reviews.llvm.org/D46366 and D112635). What it becomes is undefined.
            shift = np.uint32(16 * kind.high)
            value = value << shift
            lost = np.uint32(0xFFFF0000 >> int(shift))
            mask = np.full(LANES, lost) if mask is None else mask << shift | lost
        wave.write_v(row + part, value, mask, None if everything and wave.exec_full else chosen)


def compile_load(inst: Instruction, limits: Limits) -> Step:
    """Loads to registers."""
    kind, match = element_of(inst.name)
    address = compile_address(inst, limits, kind.size)
    field = "vdata" if inst.encoding == "MUBUF" else "vdst"
    row = inst[field] - VGPR_CODE + FIRST_AGPR * inst["acc"]
    registers = max(1, kind.size // 4)
    check_rows(inst, row, registers, limits)
    rows = tuple(range(row, row + registers))
    text, scratch, flat = str(inst), match["unit"] == "scratch", match["unit"] == "flat"

    def run(wave: Wave) -> None:
        where = address(wave)
        record = Outstanding(text, vector=rows, in_order=not flat)
        overtaken = [] if flat or kind.high else wave.counters.overtake(rows)
        if scratch:
            data, poison = _read_scratch(wave, where, kind.size)
            wave.workgroup.count("scratch read", data.size)
        else:
            data, poison = _gather(wave, inst, where, kind.size, record)
            wave.workgroup.count("memory read", data.size)
        words = extend(words_of(data), kind)
        masks = None if poison is None else words_of(poison)
        if masks is not None and kind.size < 4:
            masks = np.where(masks != 0, np.uint32(0xFFFFFFFF), np.uint32(0))
        put(wave, row, where.lanes, words, masks, kind)
        for target, locks in overtaken:
            wave.v_locked[target] = locks
        wave.counters.issue_vm(record)
        if flat:  # it may come from LDS, so both counters have to say that it has arrived
            wave.counters.issue_lgkm(Outstanding(text, vector=rows, in_order=False))

    return run


def _read_scratch(wave: Wave, where: Addresses, size: int) -> tuple[Bytes, Bytes]:
    scratch = wave.workgroup.scratch_of(wave)
    scratch.check_bounds(where.addresses, size)
    index = byte_index(where.addresses, size)
    lanes = where.lanes[:, None]
    return scratch.data[lanes, index], scratch.poison[lanes, index]


# ---- loads to LDS


def compile_load_to_lds(inst: Instruction, limits: Limits) -> Step:
    """buffer_load_* lds and global_load_lds_*: lane l's data goes to M0 + offset + l x size."""
    kind, _ = element_of(inst.name)
    address = compile_address(inst, limits, kind.size)
    text = str(inst)
    offset = inst["offset"] if inst.encoding == "MUBUF" else signed(inst["offset"], 13)
    # Bytes and shorts are widened to a dword each.
    stored = max(4, kind.size)

    def run(wave: Wave) -> None:
        where = address(wave)
        record = Outstanding(text, lds_write=True, lds_direct=True)
        data, poison = _gather(wave, inst, where, kind.size, record)
        base = wave.defined_s(M0, "an LDS address") + offset
        starts = base + where.lanes * stored
        lds = wave.workgroup.lds
        lds.check_bounds(starts, stored)
        words = extend(words_of(data), kind)
        index = byte_index(starts, stored)
        mask = np.zeros_like(data) if poison is None else poison
        lds.write_direct(wave, index, bytes_of(words, stored), bytes_of(words_of(mask), stored))
        record.lds = index
        wave.workgroup.count("memory to lds", data.size)
        wave.counters.issue_vm(record)

    return run


# ---- stores


def _stored(wave: Wave, rows: range, lanes: Index, kind: Element) -> tuple[Bytes, Bytes | None]:
    """The bytes that the lanes store, uint8[n, size], and their poison."""
    words = np.stack([wave.read_v(r)[lanes] for r in rows], axis=1)
    dirty = any(wave.v_dirty[r] for r in rows)
    masks = np.stack([wave.v_poison[r][lanes] for r in rows], axis=1) if dirty else None
    if kind.high:
        words = words >> np.uint32(16)
        masks = None if masks is None else masks >> np.uint32(16)
    return bytes_of(words, kind.size), None if masks is None else bytes_of(masks, kind.size)


def compile_store(inst: Instruction, limits: Limits) -> Step:
    """Stores from registers."""
    kind, match = element_of(inst.name)
    address = compile_address(inst, limits, kind.size)
    field = "vdata" if inst.encoding == "MUBUF" else "data"
    row = inst[field] - VGPR_CODE + FIRST_AGPR * inst["acc"]
    registers = max(1, kind.size // 4)
    check_rows(inst, row, registers, limits)
    rows = range(row, row + registers)
    text, scratch, flat = str(inst), match["unit"] == "scratch", match["unit"] == "flat"

    def run(wave: Wave) -> None:
        where = address(wave)
        data, poison = _stored(wave, rows, where.lanes, kind)
        record = Outstanding(text, in_order=not flat)
        if scratch:
            _write_scratch(wave, where, data, poison)
            wave.workgroup.count("scratch written", data.size)
        else:
            _scatter(wave, inst, where, data, poison, record)
        wave.counters.issue_vm(record)
        if flat:
            wave.counters.issue_lgkm(Outstanding(text, in_order=False))

    return run


def _write_scratch(wave: Wave, where: Addresses, data: Bytes, poison: Bytes | None) -> None:
    scratch = wave.workgroup.scratch_of(wave)
    size = data.shape[1]
    scratch.check_bounds(where.addresses, size)
    index = byte_index(where.addresses, size)
    lanes = where.lanes[:, None]
    scratch.data[lanes, index] = data
    scratch.poison[lanes, index] = 0 if poison is None else poison


def _refuse_poison(poison: Bytes, lanes: Index) -> None:
    bad = np.flatnonzero(poison.any(axis=1))
    if len(bad):
        raise UninitialisedError(f"lane {int(lanes[bad[0]])} stores an uninitialised value")


def _scatter(
    wave: Wave,
    inst: Instruction,
    where: Addresses,
    data: Bytes,
    poison: Bytes | None,
    record: Outstanding,
) -> None:
    size = data.shape[1]
    outside = where.outside
    whole = outside is None or not outside.any()
    element = size if whole else min(size, 4)
    group = wave.workgroup
    for part in range(0, size, element):
        inside = np.arange(len(where.lanes))
        if not whole and outside is not None:
            inside = np.flatnonzero(~outside[:, part // 4])
        piece = data[inside, part : part + element]
        if poison is not None:
            _refuse_poison(poison[inside, part : part + element], where.lanes[inside])
        chosen = where.addresses[inside] + np.uint64(part)
        for region, positions, offsets in group.memory.resolve(chosen, element):
            if not region.writable:
                raise OutOfBoundsError(f"a store to {region.name}, which is read-only")
            index = byte_index(offsets, element)
            through = bool(inst["sc1"])
            group.order.store(wave.order, region, index, str(inst), False, through)
            _remember(wave, record, region, index, True)
            region.data[index] = piece[positions]
            if region.poison is not None:
                region.poison[index] = 0
        group.count("memory written", piece.size)


# ---- atomics

_ATOMIC = re.compile(r"(?:global|flat|buffer)_atomic_(\w+?)(_x2)?$")


def compile_atomic(inst: Instruction, limits: Limits) -> Step:
    """Atomics on memory; sc0 returns the value before."""
    match = _ATOMIC.match(inst.name)
    if match is None or (match[1] != "cmpswap" and match[1] not in UPDATES):
        raise UnknownInstructionError(inst.name)
    operation, size = match[1], 8 if match[2] or match[1].endswith("f64") else 4
    address = compile_address(inst, limits, size)
    registers = size // 4
    field = "vdata" if inst.encoding == "MUBUF" else "data"
    accumulator = FIRST_AGPR * inst["acc"]
    row = inst[field] - VGPR_CODE + accumulator
    compares = operation == "cmpswap"
    check_rows(inst, row, registers * (1 + compares), limits)
    returns = bool(inst["sc0"])
    target = (inst["vdata"] if inst.encoding == "MUBUF" else inst["vdst"]) - VGPR_CODE + accumulator
    rows = tuple(range(target, target + registers)) if returns else ()
    text, flat = str(inst), inst.encoding == "FLAT"
    data_rows = range(row, row + registers * (1 + compares))
    kind = Element(size, False, False, False)

    def run(wave: Wave) -> None:
        where = address(wave)
        words = np.stack([wave.read_v(r)[where.lanes] for r in data_rows], axis=1)
        for r in data_rows:
            defined_v(wave, r, where.lanes, "an atomic's operand")
        record = Outstanding(text, vector=rows, in_order=not flat)
        before = _update(wave, inst, where, words, operation, size, record)
        if returns:
            put(wave, target, where.lanes, words_of(before), None, kind)
        restamped = list(wave.counters.vm)
        wave.counters.issue_vm(record)
        if flat:
            wave.counters.issue_lgkm(Outstanding(text, vector=rows, in_order=False))
        wave.workgroup.order.advance(wave.order)
        wave.workgroup.order.restamp(wave.order, restamped)

    return run


def _update(
    wave: Wave,
    inst: Instruction,
    where: Addresses,
    words: U32,
    operation: str,
    size: int,
    record: Outstanding,
) -> Bytes:
    """Do an atomic lane after lane; the bytes from before, uint8[n, size]."""
    before = np.zeros((len(where.lanes), size), np.uint8)
    inside = np.arange(len(where.lanes))
    if where.outside is not None:
        inside = np.flatnonzero(~where.outside.any(axis=1))
    group = wave.workgroup
    group.count("memory atomic", size * len(inside))
    for region, positions, offsets in group.memory.resolve(where.addresses[inside], size):
        if not region.writable:
            raise OutOfBoundsError(f"an atomic on {region.name}, which is read-only")
        if (offsets % size).any():
            raise OutOfBoundsError(f"an atomic that is not aligned to its {size} bytes")
        index = byte_index(offsets, size)
        if region.poison is not None and region.poison[index].any():
            raise UninitialisedError(f"an atomic on uninitialised bytes of {region.name}")
        group.order.store(wave.order, region, index, str(inst), True, True)
        for offset in np.unique(offsets):
            group.order.atomic(wave.order, region.address + int(offset))
        for position, offset in zip(positions, offsets, strict=True):
            lane = inside[position]
            place = region.data[offset : offset + size]
            before[lane] = place
            data = int.from_bytes(words[lane, : size // 4].astype("<u4").tobytes(), "little")
            old = int.from_bytes(place.tobytes(), "little")
            if operation == "cmpswap":
                # The data comes first, the value to compare with after it.
                compare = int.from_bytes(words[lane, size // 4 :].astype("<u4").tobytes(), "little")
                new = data if old == compare else old
            else:
                new = UPDATES[operation](old, data, 8 * size)
            place[:] = np.frombuffer((new & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
    return before


# ---- cache maintenance


def compile_cache(inst: Instruction) -> Step:
    """buffer_wbl2 and buffer_inv: no data moves; they change what others, or this wave, see."""
    device = bool(inst["sc1"])
    text = str(inst)
    if inst.name == "buffer_wbl2":

        def write_back(wave: Wave) -> None:
            if device:
                wave.workgroup.order.write_back(wave.order)
            wave.counters.issue_vm(Outstanding(text))

        return write_back

    def invalidate(wave: Wave) -> None:
        if device:
            wave.workgroup.order.invalidate(wave.order)

    return invalidate


def compile_vmem(inst: Instruction, limits: Limits) -> Step:
    """The meaning of a vector memory instruction."""
    if inst.name in ("buffer_wbl2", "buffer_inv"):
        return compile_cache(inst)
    if "_atomic_" in inst.name:
        return compile_atomic(inst, limits)
    if inst.get("lds") or "_load_lds_" in inst.name:
        return compile_load_to_lds(inst, limits)
    if "_store_" in inst.name:
        return compile_store(inst, limits)
    return compile_load(inst, limits)
