# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From PTX text, as LLVM prints it, to instructions with operands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """``[base+offset]``."""

    base: str
    offset: int


#: A register or symbol (str), an integer, a memory operand, or a vector of registers.
Operand = str | int | Memory | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: With all its suffixes, such as ``add.s32``.
        operands: In PTX's order, the destination first.
        guard: The predicate that it depends on, or None.
        is_negated: It runs where the guard is false.
        text: As it was written, for messages.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    is_negated: bool
    text: str


@dataclass
class PtxKernel:
    """One ``.entry`` of a PTX module.

    Attributes:
        name: Its symbol.
        parameters: Names of its parameters in order.
        threads: Threads of a workgroup, from ``.maxntid``.
        instructions: Its body.
        labels: The instruction that each label stands before.
        shared: Static variables in shared memory and their sizes.
    """

    name: str
    parameters: list[str]
    threads: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)


_ENTRY = re.compile(r"\.entry\s+(\w+)\((.*?)\)(.*?)^\{(.*?)^\}", re.DOTALL | re.MULTILINE)
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]")
_LABEL = re.compile(r"^(\$\w+):")
_GUARD = re.compile(r"^@(!?)(%?\w+)\s+")


def parse_ptx(text: str) -> dict[str, PtxKernel]:
    """The kernels of a PTX module by name."""
    kernels = {}
    for name, parameters, directives, body in _ENTRY.findall(_without_comments(text)):
        kernel = PtxKernel(name, re.findall(r"(\w+)\s*(?:,|$)", parameters.strip()))
        limits = re.search(r"\.maxntid\s+(\d+)", directives)
        kernel.threads = int(limits.group(1)) if limits else 0
        _parse_body(kernel, body)
        kernels[name] = kernel
    return kernels


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _parse_body(kernel: PtxKernel, body: str) -> None:
    for raw in body.replace("\n", " ").split(";"):
        statement = _without_scope(raw.strip())
        while match := _LABEL.match(statement):
            kernel.labels[match.group(1)] = len(kernel.instructions)
            statement = _without_scope(statement[match.end() :].strip())
        if not statement or statement.startswith((".reg", ".loc", ".file", ".pragma")):
            continue
        if match := _SHARED.match(statement):
            kernel.shared[match.group(1)] = int(match.group(2))
            continue
        kernel.instructions.append(_parse_instruction(statement))


def _without_scope(statement: str) -> str:
    """Without the braces of scopes, which may stand before or after a statement."""
    while statement.startswith(("{", "}")):
        statement = statement[1:].strip()
    return statement


def _parse_instruction(statement: str) -> Instruction:
    guard, is_negated, rest = None, False, statement
    if match := _GUARD.match(statement):
        is_negated, guard = match.group(1) == "!", match.group(2)
        rest = statement[match.end() :]
    opcode, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
    opcode = opcode.strip()
    if "\t" in opcode:
        opcode, _, tail = opcode.partition("\t")
        operands = tail + operands
    parsed = tuple(_parse_operand(item) for item in _split_operands(operands.strip()))
    return Instruction(opcode, parsed, guard, is_negated, " ".join(statement.split()))


def _split_operands(text: str) -> list[str]:
    """Split at commas outside braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text) if part.strip()]


def _parse_operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_parse_operand(part.strip()) for part in text.strip("{} ").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[] ").partition("+")
        return Memory(base.strip(), int(offset, 0) if offset else 0)
    if re.fullmatch(r"(-?\d+|-?0x[0-9A-Fa-f]+)U?", text):
        return int(text.rstrip("U"), 0)
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return int(text[2:], 16)
    return text
