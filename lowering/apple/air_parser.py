# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading LLVM 14's disassembly of an AIR module into plain data.

The part of the language that compiled kernels use, line by line: what is not understood is refused.
The legality checker, the emulator and ``block32 inspect`` all look at the module through this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class AirSyntaxError(ValueError):
    """A line of the disassembly that this reader does not understand."""


@dataclass(frozen=True)
class Operand:
    """A value with its type: ``%name``, ``@name`` or a constant in LLVM's spelling."""

    type: str
    text: str

    @property
    def is_name(self) -> bool:
        """Whether the value is the result of an instruction or a parameter."""
        return self.text.startswith("%")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: LLVM's mnemonic.
        type: Type of the result; of the value stored by a store; ``void`` for terminators.
        operands: The values it reads, in order.
        result: Name of the result with its ``%``, or None.
        predicate: Of a comparison.
        callee: Name of the called function, without ``@``.
        alignment: In bytes, of a load or store.
        source_type: What a getelementptr steps over.
        mask: Indices of a shufflevector, -1 for undefined ones.
        labels: The successors of a branch, or the predecessors of a phi.
        text: The line itself, for messages.
    """

    opcode: str
    type: str
    operands: tuple[Operand, ...] = ()
    result: str | None = None
    predicate: str = ""
    callee: str = ""
    alignment: int = 1
    source_type: str = ""
    mask: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    text: str = ""


@dataclass
class Block:
    """A basic block."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    type: str
    name: str


@dataclass
class Function:
    """A function with a body."""

    name: str
    parameters: tuple[Parameter, ...]
    attributes: frozenset[str]
    blocks: list[Block] = field(default_factory=list)

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction in block order."""
        for block in self.blocks:
            yield from block.instructions


@dataclass(frozen=True)
class Declaration:
    """A function without a body."""

    name: str
    result: str
    operands: tuple[str, ...]
    attributes: frozenset[str]


#: A metadata field: an integer, a string, a node's content, or a reference to a function.
Metadata = int | str | list

_FAST_MATH = {"fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn", "reassoc"}
_WRAP = {"nuw", "nsw", "exact"}


@dataclass
class Module:
    """An AIR module."""

    triple: str = ""
    data_layout: str = ""
    structs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    declarations: dict[str, Declaration] = field(default_factory=dict)
    metadata: dict[str, list[Metadata]] = field(default_factory=dict)


def split_top(text: str, separator: str = ",") -> list[str]:
    """Splits at separators that lie outside every bracket and string."""
    parts, depth, start, quoted = [], 0, 0, False
    for index, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "<([{":
            depth += 1
        elif character in ">)]}":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def parse_type(text: str) -> tuple[str, str]:
    """Splits a type off the front of ``text``: the type, and what follows.

    Raises:
        AirSyntaxError: No type stands there.
    """
    text = text.lstrip()
    if text[:1] in "<[{":
        end = _closing_bracket(text)
        base, rest = text[:end], text[end:]
    else:
        match = re.match(r"%[\w.$-]+|[a-z]\w*", text)
        if match is None:
            raise AirSyntaxError(f"expected a type in '{text}'")
        base, rest = match.group(), text[match.end() :]
    while True:
        pointer = re.match(r"( addrspace\(\d+\))?\*", rest)
        if pointer is None:
            return base, rest.lstrip()
        base, rest = base + pointer.group(), rest[pointer.end() :]


def _closing_bracket(text: str) -> int:
    """Index behind the bracket that closes the one at the start."""
    depth = 0
    for end, character in enumerate(text, start=1):
        depth += (character in "<[{(") - (character in ">]})")
        if depth == 0:
            return end
    raise AirSyntaxError(f"unbalanced type in '{text}'")


def parse_operand(text: str) -> Operand:
    """A typed value such as ``i32 %x``."""
    kind, value = parse_type(text)
    if not value:
        raise AirSyntaxError(f"expected a value after the type in '{text}'")
    return Operand(kind, value)


def pointee(pointer: str) -> str:
    """What a pointer type points to."""
    return re.sub(r"( addrspace\(\d+\))?\*$", "", pointer)


def parse(text: str) -> Module:
    """Reads the disassembly of a module.

    Raises:
        AirSyntaxError: A line that is not understood; the message quotes it.
    """
    return _Parser(text).parse()


class _Parser:
    """Reads top-level entities; instructions are read by ``_instruction``."""

    def __init__(self, text: str):
        self.lines = [line.rstrip() for line in text.splitlines()]
        self.module = Module()
        self.groups = self._attribute_groups()
        self.nodes: dict[str, str] = {}

    def _attribute_groups(self) -> dict[str, frozenset[str]]:
        groups: dict[str, frozenset[str]] = {}
        for line in self.lines:
            match = re.match(r"attributes (#\d+) = \{ (.*) \}$", line)
            if match:
                groups[match.group(1)] = frozenset(
                    re.findall(r'"[^"]*"(?:="[^"]*")?|\S+', match[2])
                )
        return groups

    def parse(self) -> Module:
        lines = iter(self.lines)
        named: dict[str, str] = {}
        for line in lines:
            if not line or line.startswith((";", "source_filename", "attributes ")):
                continue
            if line.startswith("target "):
                self._target(line)
            elif line.startswith("define "):
                self._function(line, lines)
            elif line.startswith("declare "):
                self._declaration(line)
            elif match := re.match(r"(%[\w.$-]+) = type \{(.*)\}$", line):
                self.module.structs[match[1]] = tuple(split_top(match[2]))
            elif match := re.match(r"!(\d+) = (?:distinct )?(!\{.*\})$", line):
                self.nodes[match[1]] = match[2]
            elif match := re.match(r"!([\w.$-]+) = (!\{.*\})$", line):
                named[match[1]] = match[2]
            else:
                raise AirSyntaxError(f"cannot read the line '{line}'")
        for name, node in named.items():
            content = self._metadata(node)
            assert isinstance(content, list)
            self.module.metadata[name] = content
        return self.module

    def _target(self, line: str) -> None:
        match = re.match(r'target (datalayout|triple) = "(.*)"$', line)
        if match is None:
            raise AirSyntaxError(f"cannot read the line '{line}'")
        if match[1] == "triple":
            self.module.triple = match[2]
        else:
            self.module.data_layout = match[2]

    def _attributes(self, text: str) -> frozenset[str]:
        references = re.findall(r"#\d+", text)
        return frozenset().union(*(self.groups.get(r, frozenset()) for r in references))

    def _declaration(self, line: str) -> None:
        match = re.match(r"declare (.*) @([\w.$-]+)\((.*)\)(.*)$", line)
        if match is None:
            raise AirSyntaxError(f"cannot read the line '{line}'")
        operands = tuple(parse_type(part)[0] for part in split_top(match[3]))
        attributes = self._attributes(match[4])
        self.module.declarations[match[2]] = Declaration(match[2], match[1], operands, attributes)

    def _function(self, line: str, lines: Iterator[str]) -> None:
        match = re.match(r"define (?:dso_local )?void @([\w.$-]+)\((.*)\)([^()]*)\{$", line)
        if match is None:
            raise AirSyntaxError(f"cannot read the line '{line}'")
        parameters = []
        for part in split_top(match[2]):
            kind, rest = parse_type(part)
            parameters.append(Parameter(kind, rest.split()[-1]))
        function = Function(match[1], tuple(parameters), self._attributes(match[3]))
        for raw in lines:
            if raw == "}":
                break
            code = re.sub(r"\s*;.*$", "", raw)
            if not code:
                continue
            if label := re.match(r"([\w.$-]+):$", code):
                function.blocks.append(Block(label[1]))
                continue
            if not function.blocks:
                function.blocks.append(Block(""))
            function.blocks[-1].instructions.append(_instruction(code.strip()))
        self.module.functions[function.name] = function

    def _metadata(self, text: str, seen: tuple[str, ...] = ()) -> Metadata:
        text = text.strip()
        if text.startswith("!{"):
            return [self._metadata(part, seen) for part in split_top(text[2:-1])]
        if text.startswith('!"'):
            return text[2:-1]
        if match := re.match(r"!(\d+)$", text):
            if match[1] in seen or match[1] not in self.nodes:
                raise AirSyntaxError(f"metadata node !{match[1]} is circular or missing")
            return self._metadata(self.nodes[match[1]], (*seen, match[1]))
        if match := re.match(r"i\d+ (-?\d+)$", text):
            return int(match[1])
        return text


def _instruction(line: str) -> Instruction:
    """Reads one instruction."""
    result = None
    text = re.sub(r",? ![\w.]+ !\d+", "", line)
    if match := re.match(r"(%[\w.$-]+) = ", text):
        result, text = match[1], text[match.end() :]
    text = re.sub(r"^(tail|musttail|notail) (?=call)", "", text)
    opcode, _, rest = text.partition(" ")
    words = rest.split(" ")
    while words and words[0] in _FAST_MATH | _WRAP | {"inbounds"}:
        words.pop(0)
    reader = _READERS.get(opcode)
    if reader is None:
        raise AirSyntaxError(f"unknown instruction '{line}'")
    try:
        fields = reader(" ".join(words))
    except (ValueError, IndexError, TypeError) as error:
        raise AirSyntaxError(f"cannot read the instruction '{line}': {error}") from None
    return Instruction(opcode=opcode, result=result, text=line, **fields)


def _same_type(text: str) -> dict:
    """``type a, b``: operands of one type, which is the result's too."""
    kind, values = parse_type(text)
    operands = tuple(Operand(kind, value) for value in split_top(values))
    return {"type": kind, "operands": operands}


def _comparison(text: str) -> dict:
    predicate, _, rest = text.partition(" ")
    fields = _same_type(rest)
    kind = fields["type"]
    fields["type"] = f"<{vector_length(kind)} x i1>" if vector_length(kind) else "i1"
    return {**fields, "predicate": predicate}


def _cast(text: str) -> dict:
    source, _, kind = text.rpartition(" to ")
    return {"type": kind, "operands": (parse_operand(source),)}


def _typed_list(text: str) -> tuple[Operand, ...]:
    return tuple(parse_operand(part) for part in split_top(text))


def _select(text: str) -> dict:
    operands = _typed_list(text)
    return {"type": operands[1].type, "operands": operands}


def _extract(text: str) -> dict:
    operands = _typed_list(text)
    return {"type": element_of(operands[0].type), "operands": operands}


def _insert(text: str) -> dict:
    operands = _typed_list(text)
    return {"type": operands[0].type, "operands": operands}


def _shuffle(text: str) -> dict:
    *operands, mask = _typed_list(text)
    count = vector_length(mask.type)
    if mask.text == "zeroinitializer":
        indices = (0,) * count
    else:
        parts = split_top(mask.text[1:-1])
        indices = tuple(-1 if "undef" in part else int(part.split()[1]) for part in parts)
    kind = f"<{count} x {element_of(operands[0].type)}>"
    return {"type": kind, "operands": tuple(operands), "mask": indices}


def _address(text: str) -> dict:
    source, *rest = split_top(text)
    operands = tuple(parse_operand(part) for part in rest)
    return {"type": operands[0].type, "operands": operands, "source_type": source}


def _aligned(parts: list[str]) -> tuple[list[str], int]:
    if parts and (match := re.match(r"align (\d+)$", parts[-1])):
        return parts[:-1], int(match[1])
    return parts, 1


def _load(text: str) -> dict:
    parts, alignment = _aligned(split_top(text))
    kind, pointer = parts
    return {"type": kind, "operands": (parse_operand(pointer),), "alignment": alignment}


def _store(text: str) -> dict:
    parts, alignment = _aligned(split_top(text))
    value, pointer = (parse_operand(part) for part in parts)
    return {"type": value.type, "operands": (value, pointer), "alignment": alignment}


def _call(text: str) -> dict:
    kind, rest = parse_type(text)
    match = re.match(r"@([\w.$-]+)\((.*)\)( #\d+)?$", rest)
    if match is None:
        raise ValueError("expected a direct call")
    return {"type": kind, "callee": match[1], "operands": _typed_list(match[2])}


def _phi(text: str) -> dict:
    kind, rest = parse_type(text)
    pairs = [split_top(part[1:-1].strip()) for part in split_top(rest)]
    operands = tuple(Operand(kind, value) for value, _ in pairs)
    return {"type": kind, "operands": operands, "labels": tuple(label[1:] for _, label in pairs)}


def _branch(text: str) -> dict:
    parts = split_top(text)
    labels = tuple(part.split()[1][1:] for part in parts if part.startswith("label"))
    operands = tuple(parse_operand(part) for part in parts if not part.startswith("label"))
    if [operand.type for operand in operands] != ["i1"] * (len(labels) - 1):
        raise ValueError("expected a label, or a condition and two labels")
    return {"type": "void", "operands": operands, "labels": labels}


def _return(text: str) -> dict:
    if text != "void":
        raise ValueError("a kernel returns nothing")
    return {"type": "void"}


def vector_length(kind: str) -> int:
    """Elements of a vector type, 0 for other types."""
    match = re.match(r"<(\d+) x .*>$", kind)
    return int(match.group(1)) if match else 0


def element_of(kind: str) -> str:
    """Element type of a vector type; a scalar type itself."""
    match = re.match(r"<\d+ x (.*)>$", kind)
    return match.group(1) if match else kind


_READERS = {
    **dict.fromkeys(
        ("add", "sub", "mul", "udiv", "urem", "and", "or", "xor", "shl", "lshr", "ashr"), _same_type
    ),
    **dict.fromkeys(("fadd", "fsub", "fmul", "fdiv", "fneg"), _same_type),
    **dict.fromkeys(("icmp", "fcmp"), _comparison),
    **dict.fromkeys(
        ("zext", "sext", "trunc", "fptrunc", "fpext", "uitofp", "sitofp", "bitcast"), _cast
    ),
    **dict.fromkeys(("addrspacecast", "inttoptr", "ptrtoint"), _cast),
    "select": _select,
    "extractelement": _extract,
    "insertelement": _insert,
    "shufflevector": _shuffle,
    "getelementptr": _address,
    "load": _load,
    "store": _store,
    "call": _call,
    "phi": _phi,
    "br": _branch,
    "ret": _return,
}
