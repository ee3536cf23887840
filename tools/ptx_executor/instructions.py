# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each instruction does to a warp."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from block32.tools.ptx_executor import matrix
from block32.tools.ptx_executor.memory import PtxError
from block32.tools.ptx_executor.parser import Instruction, Operand
from block32.tools.ptx_executor.warp import Bits, Copy, Warp

_TYPES = {
    **{f"u{b}": np.dtype(f"u{b // 8}") for b in (8, 16, 32, 64)},
    **{f"b{b}": np.dtype(f"u{b // 8}") for b in (8, 16, 32, 64)},
    **{f"s{b}": np.dtype(f"i{b // 8}") for b in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def _as(bits: Bits, name: str) -> NDArray:
    """The low bits of registers as values of a type."""
    dtype = _TYPES[name]
    return bits.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)


def _bits(values: NDArray) -> Bits:
    """Values as the low bits of registers."""
    values = np.ascontiguousarray(values)
    return values.view(np.dtype(f"u{values.dtype.itemsize}")).astype(np.uint64)


def execute(warp: Warp, instruction: Instruction) -> None:
    """Run one instruction in the warp's active lanes.

    Raises:
        PtxError: It is not known, or does what it must not.
    """
    parts = instruction.opcode.split(".")
    handler = _HANDLERS.get(parts[0])
    if handler is None:
        raise PtxError("unknown instruction")
    with np.errstate(all="ignore"):
        handler(warp, parts, instruction.operands)


def _arithmetic(function: Callable[..., NDArray]) -> Callable[..., None]:
    """An instruction whose result and operands are of its last suffix's type."""

    def run(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
        values = [_as(warp.read(operand), parts[-1]) for operand in operands[1:]]
        warp.write(operands[0], _bits(function(*values).astype(_TYPES[parts[-1]])))

    return run


def _logic(function: Callable[..., Bits]) -> Callable[..., None]:
    """A bitwise instruction, on predicates too."""

    def run(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
        values = [warp.read(operand) for operand in operands[1:]]
        result = function(*values)
        width = 1 if parts[-1] == "pred" else int(parts[-1][1:])
        warp.write(operands[0], result & np.uint64((1 << width) - 1))

    return run


def _shift(is_left: bool) -> Callable[..., None]:
    def run(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
        width = int(parts[-1][1:])
        value, amount = _as(warp.read(operands[1]), parts[-1]), warp.read(operands[2])
        wide = value.astype(np.int64 if parts[-1][0] == "s" else np.uint64)
        amount = np.minimum(amount & np.uint64(0xFFFFFFFF), np.uint64(63)).astype(wide.dtype)
        result = np.left_shift(wide, amount) if is_left else np.right_shift(wide, amount)
        mask = np.uint64((1 << width) - 1)
        warp.write(operands[0], result.astype(np.uint64) & mask)

    return run


def _mov(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    destination, source = operands
    if isinstance(destination, tuple):
        bits = warp.read(source)
        step = int(parts[-1][1:]) // len(destination)
        for index, name in enumerate(destination):
            part = bits >> np.uint64(step * index) & np.uint64((1 << step) - 1)
            warp.write(name, part)
        return
    if isinstance(source, tuple):
        step = int(parts[-1][1:]) // len(source)
        fields = [warp.read(item) & np.uint64((1 << step) - 1) for item in source]
        total = sum((f << np.uint64(step * i) for i, f in enumerate(fields)), np.uint64(0))
        warp.write(destination, np.asarray(total))
        return
    width = 1 if parts[-1] == "pred" else int(parts[-1][1:])
    warp.write(destination, warp.read(source) & np.uint64((1 << width) - 1))


def _mul(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    kind = parts[-1]
    a, b = (_as(warp.read(operand), kind) for operand in operands[1:])
    if kind == "f32":
        warp.write(operands[0], _bits(a * b))
        return
    wide = np.int64 if kind[0] == "s" else np.uint64
    product = a.astype(wide) * b.astype(wide)
    if "hi" in parts:
        assert kind.endswith("32"), "only 32-bit high products"
        product = product >> wide(32)
    width = 64 if "wide" in parts or kind.endswith("64") else 32
    warp.write(operands[0], product.astype(np.uint64) & np.uint64((1 << width) - 1))


def _mad(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    kind = parts[-1]
    wide = np.int64 if kind[0] == "s" else np.uint64
    a, b = (_as(warp.read(operand), kind).astype(wide) for operand in operands[1:3])
    width = 64 if "wide" in parts or kind.endswith("64") else 32
    total = (a * b).astype(np.uint64) + warp.read(operands[3])
    warp.write(operands[0], total & np.uint64((1 << width) - 1))


def _fma(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    name = parts[-1]
    if name in ("f16x2", "bf16x2"):
        halves = name[:-2]
        values = [
            warp.read(operand).astype(np.uint32).view(_TYPES[halves]).astype(np.float64)
            for operand in operands[1:]
        ]
        result = (values[0] * values[1] + values[2]).astype(_TYPES[halves])
        warp.write(operands[0], result.view(np.uint32).astype(np.uint64))
        return
    a, b, c = (_as(warp.read(operand), "f32").astype(np.float64) for operand in operands[1:])
    warp.write(operands[0], _bits((a * b + c).astype(np.float32)))


def _cvt(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    to, source = parts[-2], parts[-1]
    if to in ("e4m3x2", "e5m2x2"):
        if "satfinite" not in parts:
            raise PtxError("only conversions to fp8 that saturate")
        high, low = (_as(warp.read(operand), source) for operand in operands[1:])
        codes = matrix.encode_fp8(np.stack([low, high], axis=1), to[:-2])
        warp.write(operands[0], codes.view(np.uint16)[:, 0].astype(np.uint64))
        return
    if source in ("e4m3x2", "e5m2x2"):
        pair = warp.read(operands[1]).astype(np.uint16).reshape(32, 1)
        values = matrix.unpack(pair, source[:-2]).astype(np.float16)
        warp.write(operands[0], values.view(np.uint32)[:, 0].astype(np.uint64))
        return
    if to in ("bf16x2", "f16x2"):
        high, low = (_as(warp.read(operand), source) for operand in operands[1:])
        values = np.stack([low, high], axis=1).astype(_TYPES[to[:-2]])
        warp.write(operands[0], values.view(np.uint32)[:, 0].astype(np.uint64))
        return
    value = _as(warp.read(operands[1]), source)
    warp.write(operands[0], _bits(value.astype(_TYPES[to])))


def _setp(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    compare = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[parts[1]]
    a, b = (_as(warp.read(operand), parts[-1]) for operand in operands[1:])
    warp.write(operands[0], compare(a, b).astype(np.uint64))


def _extremum(integers: Callable[..., NDArray], floats: Callable[..., NDArray]):
    """``min`` and ``max``: of a float and a NaN the float, unless the opcode says otherwise."""

    def run(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
        chosen = floats if parts[-1][0] == "f" and "NaN" not in parts else integers
        _arithmetic(chosen)(warp, parts, operands)

    return run


def _popc(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    del parts
    bits = warp.read(operands[1]).astype(np.uint32).view(np.uint8).reshape(32, 4)
    warp.write(operands[0], np.unpackbits(bits, axis=1).sum(axis=1).astype(np.uint64))


def _vote(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    if parts[1:] != ["sync", "ballot", "b32"] or not warp.active.all():
        raise PtxError("only ballots of all lanes")
    lanes = warp.read(operands[1]).astype(bool)
    ballot = sum(1 << lane for lane in range(32) if lanes[lane])
    warp.write(operands[0], np.full(32, ballot, np.uint64))


def _shfl(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    destination, value, lane = operands[:3]
    if not warp.active.all():
        raise PtxError("not all lanes take part")
    if warp.read(operands[3])[0] != 31:
        raise PtxError("only exchanges within the whole warp")
    chosen = warp.read(lane).astype(np.int64)
    source = {"idx": chosen & 31, "bfly": np.arange(32) ^ chosen}[parts[2]]
    warp.write(destination, warp.read(value)[source])


def _selp(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    del parts
    a, b, condition = (warp.read(operand) for operand in operands[1:])
    warp.write(operands[0], np.where(condition.astype(bool), a, b))


def _prmt(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    del parts
    low, high = (warp.read(operand).astype(np.uint32) for operand in operands[1:3])
    data = np.stack([low, high], axis=1).view(np.uint8)
    selector = operands[3]
    if not isinstance(selector, int) or selector & 0x8888:
        raise PtxError("only selectors that are known and pick whole bytes")
    chosen = data[:, [selector >> (4 * i) & 7 for i in range(4)]]
    warp.write(operands[0], np.ascontiguousarray(chosen).view(np.uint32)[:, 0].astype(np.uint64))


def _access(parts: list[str]) -> tuple[int, int]:
    """(elements, bytes of one) of a load or store."""
    count = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
    return count, _TYPES[parts[-1]].itemsize


def _load(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    if parts[1].startswith("param"):
        memory = operands[1]
        warp.write(operands[0], warp.read(memory.base))  # type: ignore[union-attr]
        return
    count, size = _access(parts)
    addresses = warp.addresses(operands[1])
    if "shared" in parts:
        raw = warp.shared.gather(addresses, count * size, warp.number)
    else:
        raw = warp.device.gather(addresses, count * size)
    values = np.ascontiguousarray(raw).view(np.dtype(f"u{size}"))
    names = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
    for index, name in enumerate(names):
        bits = np.zeros(32, np.uint64)
        bits[warp.active] = values[:, index]
        warp.write(name, bits)


def _store(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    count, size = _access(parts)
    names = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
    assert len(names) == count
    columns = [warp.read(name)[warp.active].astype(np.dtype(f"u{size}")) for name in names]
    raw = np.stack(columns, axis=1).view(np.uint8)
    addresses = warp.addresses(operands[0])
    if "shared" in parts:
        warp.shared.scatter(addresses, raw, warp.number)
    else:
        warp.device.scatter(addresses, raw)


def _cp(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    if "commit_group" in parts:
        warp.groups.append(warp.open_copies)
        warp.open_copies = []
        return
    if "wait_group" in parts:
        pending = operands[0]
        assert isinstance(pending, int)
        warp.finish_groups(pending)
        return
    target, source, size, *rest = operands
    assert isinstance(size, int)
    valid = warp.read(rest[0]).astype(np.int64) if rest else np.full(32, size)
    active = warp.active
    targets = warp.addresses(target)
    sources = warp.addresses(source)
    data = np.zeros((active.sum(), size), np.uint8)
    whole = valid[active] == size
    if not (whole | (valid[active] == 0)).all():
        raise PtxError("copies a part of a piece")
    if whole.any():
        data[whole] = warp.device.gather(sources[whole], size)
    warp.shared.check_write(targets, size, warp.number)
    warp.open_copies.append(Copy(targets, data))


def _ldmatrix(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    assert parts[:5] == ["ldmatrix", "sync", "aligned", "m8n8", "x4"]
    if not warp.active.all():
        raise PtxError("not all lanes take part")
    rows = warp.shared.gather(warp.addresses(operands[1]), 16, warp.number)
    registers = matrix.load_matrices(rows)
    for index, name in enumerate(operands[0]):  # type: ignore[arg-type]
        warp.write(name, registers[:, index].astype(np.uint64))


def _mma(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    if not warp.active.all():
        raise PtxError("not all lanes take part")
    types = (parts[-3], parts[-2])
    a, b, c = (
        np.stack([warp.read(name).astype(np.uint32) for name in group], axis=1)  # type: ignore
        for group in operands[1:]
    )
    result = matrix.mma_sync(a, b, c.view(np.float32), types)
    for index, name in enumerate(operands[0]):  # type: ignore[arg-type]
        warp.write(name, _bits(result[:, index]))


def _atom(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    if parts[1:4] != ["acq_rel", "gpu", "global"] or parts[4:] != ["inc", "u32"]:
        raise PtxError("unknown atomic")
    if warp.active.sum() != 1:
        raise PtxError("one lane counts for its workgroup")
    address = warp.addresses(operands[1])
    old = warp.device.gather(address, 4).view(np.uint32)[:, 0]
    limit = warp.read(operands[2])[warp.active].astype(np.uint32)
    new = np.where(old >= limit, 0, old + 1).astype(np.uint32)
    warp.device.scatter(address, new.view(np.uint8).reshape(1, 4))
    bits = np.zeros(32, np.uint64)
    bits[warp.active] = old
    warp.write(operands[0], bits)


def _fence(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    del operands
    if "proxy" in parts:
        warp.shared.fence_proxy(warp.number)


def _wgmma(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    match parts[1]:
        case "commit_group":
            warp.result_groups.append(warp.open_results)
            warp.open_results = {}
        case "wait_group":
            pending = operands[0]
            assert isinstance(pending, int)
            warp.finish_results(pending)
        case "fence":
            pass
        case _:
            raise PtxError("unknown instruction")


def _nothing(warp: Warp, parts: list[str], operands: tuple[Operand, ...]) -> None:
    """Orders what this executor does in order: the lanes of a warp, one workgroup's accesses."""
    del warp, parts, operands


def _divide(a: NDArray, b: NDArray) -> NDArray:
    return a // np.where(b == 0, 1, b)


def _remainder(a: NDArray, b: NDArray) -> NDArray:
    return a % np.where(b == 0, 1, b)


_HANDLERS: dict[str, Callable[..., None]] = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "div": _arithmetic(_divide),
    "rem": _arithmetic(_remainder),
    "min": _extremum(np.minimum, np.fmin),
    "max": _extremum(np.maximum, np.fmax),
    "popc": _popc,
    "shfl": _shfl,
    "vote": _vote,
    "neg": _arithmetic(np.negative),
    "abs": _arithmetic(np.abs),
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _logic(np.bitwise_not),
    "shl": _shift(True),
    "shr": _shift(False),
    "mov": _mov,
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "cvt": _cvt,
    "cvta": _mov,
    "setp": _setp,
    "selp": _selp,
    "prmt": _prmt,
    "ld": _load,
    "st": _store,
    "cp": _cp,
    "ldmatrix": _ldmatrix,
    "mma": _mma,
    "atom": _atom,
    "fence": _fence,
    "membar": _nothing,
    "bar": _nothing,
    "wgmma": _wgmma,
}
