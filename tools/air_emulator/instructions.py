# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each LLVM instruction computes, on arrays with one row a thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from block32.lowering.apple.air_parser import (
    Instruction,
    Operand,
    element_of,
    vector_length,
)
from block32.tools.air_emulator import values
from block32.tools.air_emulator.faults import PoisonError, UnsupportedError
from block32.tools.air_emulator.frame import Frame

#: A compiled instruction: it reads and writes the registers of a frame.
Step = Callable[[Frame], None]

_SMALLEST_NORMAL = np.float32(2.0**-126)

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def reader(operand: Operand, undefined: bool = False) -> Callable[[Frame], np.ndarray]:
    """How to get an operand's value; undefined values only where ``undefined`` allows them."""
    if operand.is_name:
        name = operand.text
        return lambda frame: frame.registers[name]
    if operand.text in ("undef", "poison"):
        if not undefined:
            raise PoisonError(f"use of an undefined value of type {operand.type}")
        shape = (vector_length(operand.type),) if vector_length(operand.type) else ()
        nothing = np.zeros(shape, values.dtype(operand.type))
        return lambda frame: nothing
    value = values.constant(operand.type, operand.text)
    return lambda frame: value


def flush(value: np.ndarray) -> np.ndarray:
    """Denormals become zeros of their sign, as Apple GPUs do in f32 arithmetic."""
    tiny = np.abs(value) < _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), value), value) if tiny.any() else value


def _signed(value: np.ndarray) -> np.ndarray:
    return value.view(_SIGNED[value.dtype.itemsize])


def _shift(operation: Callable) -> Callable:
    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if (b >= a.dtype.itemsize * 8).any():
            raise PoisonError("shift by at least the width of the value")
        return operation(a, b)

    return shift


def _division(operation: Callable) -> Callable:
    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if (b == 0).any():
            raise PoisonError("integer division by zero")
        return operation(a, b)

    return divide


_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "udiv": _division(np.floor_divide),
    "urem": _division(np.remainder),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift(np.left_shift),
    "lshr": _shift(np.right_shift),
    "ashr": _shift(lambda a, b: (_signed(a) >> _signed(b)).view(a.dtype)),
}

_FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
}

_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "ult": np.less,
    "ule": np.less_equal,
    "ugt": np.greater,
    "uge": np.greater_equal,
    "slt": lambda a, b: _signed(a) < _signed(b),
    "sle": lambda a, b: _signed(a) <= _signed(b),
    "sgt": lambda a, b: _signed(a) > _signed(b),
    "sge": lambda a, b: _signed(a) >= _signed(b),
    "oeq": np.equal,
    "ogt": np.greater,
    "oge": np.greater_equal,
    "olt": np.less,
    "ole": np.less_equal,
    "one": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "une": np.not_equal,
    "uno": lambda a, b: np.isnan(a) | np.isnan(b),
    "ord": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def compile_instruction(instruction: Instruction, structs: dict[str, tuple[str, ...]]) -> Step:
    """A step that executes an instruction without control flow or a call.

    Raises:
        UnsupportedError: The instruction is not known here.
    """
    opcode = instruction.opcode
    if opcode in _BINARY or opcode in _FLOAT:
        return _binary(instruction)
    compiler = _COMPILERS.get(opcode)
    if compiler is None:
        raise UnsupportedError(f"instruction '{instruction.text}'")
    if opcode == "getelementptr":
        return _address(instruction, structs)
    return compiler(instruction)


def _result(instruction: Instruction) -> str:
    assert instruction.result is not None
    return instruction.result


def _binary(instruction: Instruction) -> Step:
    a, b = (reader(operand) for operand in instruction.operands)
    name = _result(instruction)
    if instruction.opcode in _BINARY:
        operation = _BINARY[instruction.opcode]

        def step(frame: Frame) -> None:
            with np.errstate(over="ignore"):
                frame.registers[name] = np.asarray(operation(a(frame), b(frame)))

        return step
    operation = _FLOAT[instruction.opcode]
    if element_of(instruction.type) != "float":
        raise UnsupportedError(f"instruction '{instruction.text}': arithmetic in f32 only")

    def float_step(frame: Frame) -> None:
        with np.errstate(all="ignore"):
            value = operation(flush(a(frame)), flush(b(frame)))
        frame.registers[name] = flush(np.asarray(value, np.float32))

    return float_step


def _negate(instruction: Instruction) -> Step:
    a, name = reader(instruction.operands[0]), _result(instruction)

    def step(frame: Frame) -> None:
        frame.registers[name] = np.negative(a(frame))

    return step


def _compare(instruction: Instruction) -> Step:
    a, b = (reader(operand) for operand in instruction.operands)
    name, operation = _result(instruction), _COMPARE.get(instruction.predicate)
    if operation is None:
        raise UnsupportedError(f"instruction '{instruction.text}'")

    def step(frame: Frame) -> None:
        frame.registers[name] = np.asarray(operation(a(frame), b(frame)))

    return step


def _select(instruction: Instruction) -> Step:
    condition, a, b = (reader(operand) for operand in instruction.operands)
    name = _result(instruction)
    scalar_condition = instruction.operands[0].type == "i1"
    widen = scalar_condition and bool(vector_length(instruction.type))

    def step(frame: Frame) -> None:
        chosen = condition(frame)
        if widen and chosen.ndim:
            chosen = chosen[:, None]
        frame.registers[name] = np.where(chosen, a(frame), b(frame))

    return step


def _cast(instruction: Instruction) -> Step:
    source, name = reader(instruction.operands[0]), _result(instruction)
    convert = _conversion(instruction)

    def step(frame: Frame) -> None:
        frame.registers[name] = convert(np.asarray(source(frame)))

    return step


def _conversion(instruction: Instruction) -> Callable[[np.ndarray], np.ndarray]:
    """What a cast does to a value."""
    opcode, kind = instruction.opcode, instruction.type
    from_kind = instruction.operands[0].type
    target = values.dtype(kind)
    if kind.endswith("*"):
        return np.asarray
    if opcode == "bitcast":
        return lambda value: values.from_bytes(values.to_bytes(value, from_kind), kind)
    if opcode == "sext":
        return lambda value: _sign_extend(value, target)
    if opcode == "trunc" and element_of(kind) == "i1":
        return lambda value: (value & 1).astype(np.bool_)
    if opcode == "fptrunc":
        return lambda value: values.round_to(value, kind)
    if opcode in ("zext", "trunc", "fpext", "uitofp"):
        return lambda value: value.astype(target)
    raise UnsupportedError(f"instruction '{instruction.text}'")


def _sign_extend(value: np.ndarray, target: np.dtype) -> np.ndarray:
    if value.dtype == np.bool_:
        return np.where(value, ~target.type(0), target.type(0))
    return _signed(value).astype(_SIGNED[target.itemsize]).view(target)


def _position(operand: Operand) -> int:
    if operand.is_name:
        raise UnsupportedError("a vector element at a position that is not constant")
    return int(operand.text)


def _extract(instruction: Instruction) -> Step:
    source, name = reader(instruction.operands[0]), _result(instruction)
    position = _position(instruction.operands[1])

    def step(frame: Frame) -> None:
        frame.registers[name] = source(frame)[..., position]

    return step


def _insert(instruction: Instruction) -> Step:
    vector = reader(instruction.operands[0], undefined=True)
    element, name = reader(instruction.operands[1]), _result(instruction)
    position = _position(instruction.operands[2])

    def step(frame: Frame) -> None:
        old, new = vector(frame), element(frame)
        rows = np.broadcast_shapes(old.shape[:-1], new.shape)
        value = np.array(np.broadcast_to(old, (*rows, old.shape[-1])))
        value[..., position] = new
        frame.registers[name] = value

    return step


def _shuffle(instruction: Instruction) -> Step:
    first, second = (reader(operand, undefined=True) for operand in instruction.operands)
    name, mask = _result(instruction), np.array(instruction.mask)
    count = vector_length(instruction.operands[0].type)
    if (mask < 0).any():
        raise PoisonError(f"undefined elements in '{instruction.text}'")
    one_source = bool((mask < count).all())

    def step(frame: Frame) -> None:
        a = first(frame)
        if not one_source:
            b = second(frame)
            rows = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
            a = np.concatenate([np.broadcast_to(v, (*rows, v.shape[-1])) for v in (a, b)], axis=-1)
        frame.registers[name] = a[..., mask]

    return step


def _address(instruction: Instruction, structs: dict[str, tuple[str, ...]]) -> Step:
    base, *indices = instruction.operands
    start, name = reader(base), _result(instruction)
    source = instruction.source_type
    if source in structs:
        field = _position(indices[1])
        if not all(kind.endswith("*") for kind in structs[source]):
            raise UnsupportedError(f"struct {source} with fields that are no pointers")
        offset = 8 * field

        def field_step(frame: Frame) -> None:
            frame.registers[name] = start(frame) + np.int64(offset)

        return field_step
    if len(indices) != 1:
        raise UnsupportedError(f"instruction '{instruction.text}'")
    size, index = np.int64(values.size_of(source)), reader(indices[0])

    def step(frame: Frame) -> None:
        frame.registers[name] = start(frame) + _signed(index(frame)).astype(np.int64) * size

    return step


def _load(instruction: Instruction) -> Step:
    pointer, name = reader(instruction.operands[0]), _result(instruction)
    kind, alignment = instruction.type, instruction.alignment
    size = values.size_of(kind)

    def step(frame: Frame) -> None:
        addresses = np.asarray(pointer(frame))
        uniform = addresses.ndim == 0
        who = frame.threads[:1] if uniform else frame.threads
        data = frame.memory.load(addresses.reshape(-1), size, alignment, who)
        frame.registers[name] = values.from_bytes(data[0] if uniform else data, kind)

    return step


def _store(instruction: Instruction) -> Step:
    value, pointer = (reader(operand) for operand in instruction.operands)
    kind, alignment = instruction.operands[0].type, instruction.alignment

    def step(frame: Frame) -> None:
        addresses = np.broadcast_to(pointer(frame), frame.threads.shape)
        data = values.to_bytes(value(frame), kind)
        data = np.broadcast_to(data, (frame.threads.size, data.shape[-1]))
        frame.memory.store(addresses, data, alignment, frame.threads)

    return step


_COMPILERS: dict[str, Callable[[Instruction], Step]] = {
    "fneg": _negate,
    "icmp": _compare,
    "fcmp": _compare,
    "select": _select,
    **dict.fromkeys(("zext", "sext", "trunc", "fptrunc", "fpext", "uitofp", "bitcast"), _cast),
    "extractelement": _extract,
    "insertelement": _insert,
    "shufflevector": _shuffle,
    "getelementptr": lambda instruction: _address(instruction, {}),
    "load": _load,
    "store": _store,
}
