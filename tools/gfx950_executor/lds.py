# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""LDS instructions: reads and writes of all widths, transposed reads, atomics, lane moves."""

from __future__ import annotations

import re

import numpy as np

from block32.tools.gfx950_executor.addresses import defined_v
from block32.tools.gfx950_executor.atomics import LDS_NAMES, UPDATES
from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import (
    OutOfBoundsError,
    UninitialisedError,
    UnknownInstructionError,
)
from block32.tools.gfx950_executor.memory import Bytes, byte_index, bytes_of, words_of
from block32.tools.gfx950_executor.operands import VGPR_CODE, check_rows
from block32.tools.gfx950_executor.state import FIRST_AGPR, LANES, Wave
from block32.tools.gfx950_executor.valu import Limits, Step
from block32.tools.gfx950_executor.vmem import Element, extend, put
from block32.tools.gfx950_executor.waits import Index, Outstanding

_READ = re.compile(r"ds_read_(?P<type>[iub]\d+)(?P<d16>_d16)?(?P<hi>_hi)?$")
_WRITE = re.compile(r"ds_write_b(?P<bits>\d+)(?P<d16>_d16_hi)?$")
_PAIR = re.compile(r"ds_(?P<way>read|write)2(?P<far>st64)?_b(?P<bits>32|64)$")
_TRANSPOSED = re.compile(r"ds_read_b(?P<bits>64|96)_tr_b(?P<element>4|6|8|16)$")
_ATOMIC = re.compile(r"ds_(?P<op>\w+?)(?P<rtn>_rtn)?_(?P<type>[iubf])(?P<bits>32|64)$")


class _Operands:
    """Registers of a DS instruction."""

    def __init__(self, inst: Instruction, limits: Limits):
        if inst["gds"]:
            raise UnknownInstructionError(f"{inst.name} to GDS")
        self.inst, self.limits = inst, limits
        self.address = inst["addr"] - VGPR_CODE
        self.accumulator = FIRST_AGPR * inst["acc"]
        self.offset = inst["offset0"] | inst["offset1"] << 8

    def rows(self, field: str, count: int) -> range:
        """Vector register rows of a data or target field."""
        first = self.inst[field] - VGPR_CODE + self.accumulator
        check_rows(self.inst, first, count, self.limits)
        return range(first, first + count)

    def starts(self, wave: Wave, lanes: Index, offset: int) -> Index:
        """LDS byte offsets of the lanes."""
        base = defined_v(wave, self.address, lanes, "an LDS address")
        return base.astype(np.int64) + offset


def _refuse_locked(wave: Wave, rows: range) -> None:
    for row in rows:
        if wave.v_locked[row]:
            wave.read_v(row)


def _check(wave: Wave, starts: Index, size: int) -> None:
    wave.workgroup.lds.check_bounds(starts, size)
    # Bytes and shorts may lie anywhere; wide accesses need dword alignment in HSA's mode.
    if size >= 4 and (starts % 4).any():
        raise OutOfBoundsError(f"{size} bytes at an LDS offset that is not a multiple of 4")


def _gather(wave: Wave, starts: Index, size: int) -> tuple[Bytes, Bytes, Index]:
    _check(wave, starts, size)
    index = byte_index(starts, size)
    data, poison = wave.workgroup.lds.read(wave, index)
    wave.workgroup.count("lds read", data.size)
    return data, poison, index


def compile_read(inst: Instruction, limits: Limits) -> Step:
    """ds_read_*: one element of 1 to 16 bytes a lane."""
    match = _READ.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    operands = _Operands(inst, limits)
    size = int(match["type"][1:]) // 8
    kind = Element(
        size, match["type"][0] == "i" and size < 4, bool(match["d16"]), bool(match["hi"])
    )
    rows = operands.rows("vdst", max(1, size // 4))
    text = str(inst)

    def run(wave: Wave) -> None:
        lanes = wave.active
        _refuse_locked(wave, rows)
        data, poison, index = _gather(wave, operands.starts(wave, lanes, operands.offset), size)
        masks = words_of(poison) if poison.any() else None
        if masks is not None and kind.sign:
            masks = np.where(masks != 0, np.uint32(0xFFFFFFFF), np.uint32(0))
        put(wave, rows[0], lanes, extend(words_of(data), kind), masks, kind)
        wave.counters.issue_lgkm(Outstanding(text, vector=tuple(rows), lds=index))

    return run


def compile_pair(inst: Instruction, limits: Limits) -> Step:
    """ds_read2 and ds_write2: two elements at two offsets, counted in elements."""
    match = _PAIR.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    operands = _Operands(inst, limits)
    size = int(match["bits"]) // 8
    step = size * (64 if match["far"] else 1)
    offsets = (inst["offset0"] * step, inst["offset1"] * step)
    words = size // 4
    kind = Element(size, False, False, False)
    text = str(inst)
    if match["way"] == "write":
        sources = [operands.rows(f, words) for f in ("data0", "data1")]

        def run_write(wave: Wave) -> None:
            lanes = wave.active
            touched = []
            for rows, offset in zip(sources, offsets, strict=True):
                starts = operands.starts(wave, lanes, offset)
                touched.append(_scatter(wave, rows, lanes, starts, size, 0))
            index = np.concatenate(touched)
            wave.counters.issue_lgkm(Outstanding(text, lds=index, lds_write=True))

        return run_write
    rows = operands.rows("vdst", 2 * words)

    def run_read(wave: Wave) -> None:
        lanes = wave.active
        _refuse_locked(wave, rows)
        parts = [_gather(wave, operands.starts(wave, lanes, o), size) for o in offsets]
        for part, (data, poison, _) in enumerate(parts):
            masks = words_of(poison) if poison.any() else None
            put(wave, rows[part * words], lanes, words_of(data), masks, kind)
        index = np.concatenate([p[2] for p in parts])
        wave.counters.issue_lgkm(Outstanding(text, vector=tuple(rows), lds=index))

    return run_read


def _scatter(wave: Wave, rows: range, lanes: Index, starts: Index, size: int, shift: int) -> Index:
    """Write registers' low bytes (after a shift) to LDS; the byte indices."""
    _check(wave, starts, size)
    words = np.stack([wave.read_v(r)[lanes] for r in rows], axis=1) >> np.uint32(shift)
    masks = np.stack([wave.v_poison[r][lanes] for r in rows], axis=1) >> np.uint32(shift)
    index = byte_index(starts, size)
    wave.workgroup.lds.write(wave, index, bytes_of(words, size), bytes_of(masks, size))
    wave.workgroup.count("lds written", index.size)
    return index


def compile_write(inst: Instruction, limits: Limits) -> Step:
    """ds_write_*: one element of 1 to 16 bytes a lane."""
    match = _WRITE.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    operands = _Operands(inst, limits)
    size = int(match["bits"]) // 8
    rows = operands.rows("data0", max(1, size // 4))
    shift = 16 if match["d16"] else 0
    text = str(inst)

    def run(wave: Wave) -> None:
        lanes = wave.active
        starts = operands.starts(wave, lanes, operands.offset)
        index = _scatter(wave, rows, lanes, starts, size, shift)
        wave.counters.issue_lgkm(Outstanding(text, lds=index, lds_write=True))

    return run


def compile_transposed(inst: Instruction, limits: Limits) -> Step:
    """ds_read_b64_tr_b8 and relatives: 16 lanes read a tile and get its columns.

    The tile has 16 columns; a row of it is spread over as many lanes as it needs. Lane i of the
    16 receives column i: element j is element i of row j.
    """
    match = _TRANSPOSED.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    operands = _Operands(inst, limits)
    size, element = int(match["bits"]) // 8, int(match["element"])
    count = 8 * size // element
    rows = operands.rows("vdst", size // 4)
    lane, j = np.meshgrid(np.arange(LANES), np.arange(count), indexing="ij")
    lanes_a_row = 16 // count
    column = lane % 16
    from_lane = lane // 16 * 16 + j * lanes_a_row + column // count
    from_element = column % count
    kind = Element(size, False, False, False)
    text = str(inst)

    def transpose(data: Bytes) -> Bytes:
        bits = np.unpackbits(data, axis=1, bitorder="little").reshape(LANES, count, element)
        moved = bits[from_lane, from_element]
        return np.packbits(moved.reshape(LANES, -1), axis=1, bitorder="little")

    def run(wave: Wave) -> None:
        if not wave.exec_full:
            raise UnknownInstructionError(f"{inst.name} with inactive lanes")
        lanes = wave.active
        _refuse_locked(wave, rows)
        data, poison, index = _gather(wave, operands.starts(wave, lanes, operands.offset), size)
        masks = words_of(transpose(poison)) if poison.any() else None
        put(wave, rows[0], lanes, words_of(transpose(data)), masks, kind)
        wave.counters.issue_lgkm(Outstanding(text, vector=tuple(rows), lds=index))

    return run


def compile_lane_move(inst: Instruction, limits: Limits) -> Step:
    """ds_bpermute_b32, ds_permute_b32 and ds_swizzle_b32: lanes exchange a register."""
    operands = _Operands(inst, limits)
    target = operands.rows("vdst", 1)
    text = str(inst)
    if inst.name == "ds_swizzle_b32":
        source = operands.address
        pattern = _swizzle_pattern(operands.offset)
    else:
        source = operands.rows("data0", 1)[0]
        pattern = None

    def run(wave: Wave) -> None:
        lanes = wave.active
        _refuse_locked(wave, target)
        value, mask = wave.read_v(source), wave.v_poison[source].copy()
        result, poison = np.zeros(LANES, np.uint32), np.zeros(LANES, np.uint32)
        if pattern is not None:
            chosen, here = pattern, np.arange(LANES)
        else:
            address = defined_v(wave, operands.address, lanes, "a lane number")
            number = (address.astype(np.int64) + operands.offset) // 4 % LANES
            chosen, here = number, lanes
        if inst.name == "ds_permute_b32":
            result[chosen], poison[chosen] = value[here], mask[here]
        else:
            active = wave.lanes[chosen]
            result[here] = np.where(active, value[chosen], 0)
            poison[here] = np.where(active, mask[chosen], 0)
        wave.write_v(target[0], result, poison)
        wave.counters.issue_lgkm(Outstanding(text, vector=tuple(target)))

    return run


def _swizzle_pattern(offset: int) -> Index:
    lane = np.arange(LANES)
    if offset >> 15:
        if offset & 0x7F00:
            raise UnknownInstructionError(f"ds_swizzle_b32 with offset {offset:#x}")
        pattern = np.array([offset >> 2 * i & 3 for i in range(4)])
        return lane // 4 * 4 + pattern[lane % 4]
    within = lane % 32
    moved = (within & (offset & 0x1F) | offset >> 5 & 0x1F) ^ (offset >> 10 & 0x1F)
    return lane // 32 * 32 + moved


def compile_atomic(inst: Instruction, limits: Limits) -> Step:
    """LDS atomics, with and without return."""
    match = _ATOMIC.match(inst.name)
    if match is None:
        raise UnknownInstructionError(inst.name)
    kind_letter = match["type"]
    name = LDS_NAMES.get(f"{match['op']}_{kind_letter}")
    if kind_letter == "f":
        name = f"{match['op']}_f{match['bits']}"
    compares = match["op"] == "cmpst" and kind_letter == "b"
    if not compares and name not in UPDATES:
        raise UnknownInstructionError(inst.name)
    operands = _Operands(inst, limits)
    size = int(match["bits"]) // 8
    data_rows = operands.rows("data0", size // 4)
    other_rows = operands.rows("data1", size // 4) if compares else None
    target = operands.rows("vdst", size // 4) if match["rtn"] else None
    kind = Element(size, False, False, False)
    text = str(inst)

    def value_of(wave: Wave, rows: range, lane: int) -> int:
        return sum(int(wave.v[r][lane]) << 32 * i for i, r in enumerate(rows))

    def run(wave: Wave) -> None:
        lanes = wave.active
        for row in (*data_rows, *(other_rows or ())):
            defined_v(wave, row, lanes, "an atomic's operand")
        starts = operands.starts(wave, lanes, operands.offset)
        _check(wave, starts, size)
        index = byte_index(starts, size)
        lds = wave.workgroup.lds
        if lds.poison[index].any():
            raise UninitialisedError("an atomic on uninitialised LDS")
        lds.atomic(wave, index)
        before = np.zeros((len(lanes), size), np.uint8)
        for i, (lane, start) in enumerate(zip(lanes, starts, strict=True)):
            place = lds.data[start : start + size]
            before[i] = place
            old = int.from_bytes(place.tobytes(), "little")
            data = value_of(wave, data_rows, int(lane))
            if other_rows is not None:  # the first operand is what to compare with
                new = value_of(wave, other_rows, int(lane)) if old == data else old
            else:
                assert name is not None
                new = UPDATES[name](old, data, 8 * size)
            place[:] = np.frombuffer((new & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
        wave.workgroup.count("lds atomic", index.size)
        if target is not None:
            put(wave, target[0], lanes, words_of(before), None, kind)
        record = Outstanding(text, vector=tuple(target or ()), lds=index, lds_write=True)
        wave.counters.issue_lgkm(record)

    return run


def compile_ds(inst: Instruction, limits: Limits) -> Step:
    """The meaning of an LDS instruction."""
    name = inst.name
    if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return compile_lane_move(inst, limits)
    if name == "ds_nop":
        return lambda wave: None
    for pattern, compiler in (
        (_TRANSPOSED, compile_transposed),
        (_PAIR, compile_pair),
        (_READ, compile_read),
        (_WRITE, compile_write),
        (_ATOMIC, compile_atomic),
    ):
        if pattern.match(name):
            return compiler(inst, limits)
    raise UnknownInstructionError(name)
