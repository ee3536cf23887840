# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Machine code to instructions: one adapter around tinygrad's CDNA tables.

The rest of the executor sees only ``Instruction``, so another decoder could take its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from block32.tools.gfx950_executor.errors import UnknownInstructionError

# First half of a scaled MFMA: VOP3P's encoding with the opcode of v_mfma_ld_scale_b32.
_LOAD_SCALE = 0xD3AC
_LONGEST = 16


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

    Attributes:
        pc: Byte address in the loaded image.
        size: Bytes.
        name: Mnemonic in lower case, without the _e32 / _e64 suffix.
        encoding: The format's name in the ISA document, e.g. "VOP3P".
        fields: Raw values; register operands as 9-bit source codes (256 and above: VGPRs).
        widths: Registers that an operand takes, by field name.
        literal: The 32-bit constant after the instruction, if any.
    """

    pc: int
    size: int
    name: str
    encoding: str
    fields: Mapping[str, int]
    widths: Mapping[str, int]
    literal: int | None

    def __getitem__(self, name: str) -> int:
        return self.fields[name]

    def get(self, name: str, default: int = 0) -> int:
        """A field, or the default where the encoding has no such field."""
        return self.fields.get(name, default)

    def width(self, name: str) -> int:
        """Registers of an operand; 1 where the tables name none."""
        return self.widths.get(name, 1)

    def __str__(self) -> str:
        return f"{self.name} at {self.pc:#x}"


def _tinygrad() -> Any:
    try:
        from tinygrad.renderer import amd
    except ImportError as error:
        raise ImportError(
            "the gfx950 executor decodes with tinygrad; install block32[gfx950]"
        ) from error
    return amd


def _formats() -> list[Any]:
    return _tinygrad()._load_formats()["cdna"]


def decode(image: bytes, pc: int) -> Instruction:
    """Decode the instruction at a byte address.

    Raises:
        UnknownInstructionError: The tables have no such encoding.
        ImportError: Tinygrad is not installed; the message names the extra.
    """
    return _instruction(_match(image, pc), pc)


def encode_with(image: bytes, inst: Instruction, changes: Mapping[str, int]) -> bytes:
    """The bytes of an instruction with other raw values in some fields.

    Raises:
        KeyError: The encoding has no such field.
    """
    raw = _match(image, inst.pc)
    fields = dict(raw._fields)
    for name, value in changes.items():
        bits = fields[name]
        # Registers of fields that hold VGPRs alone are stored without the 256.
        stored = value & bits.mask
        raw._raw = raw._raw & ~(bits.mask << bits.lo) | stored << bits.lo
    return raw.to_bytes()


def _match(image: bytes, pc: int) -> Any:
    amd = _tinygrad()
    data = image[pc : pc + _LONGEST]
    word = int.from_bytes(data[:4], "little")
    for cls in _formats():
        # The tables look at the second half alone, where a plain MFMA looks just the same.
        if cls.__name__ == "VOP3PX2" and word >> 16 != _LOAD_SCALE:
            continue
        if amd._matches(data, cls):
            return cls.from_bytes(data)
    raise UnknownInstructionError(f"no encoding matches the word {word:#010x} at {pc:#x}")


def _instruction(inst: Any, pc: int) -> Instruction:
    fields: dict[str, int] = {}
    for name, bits in inst._fields:
        if name in ("encoding", "op"):
            continue
        raw = inst._raw >> bits.lo & bits.mask
        value = getattr(inst, name)
        offset = getattr(value, "offset", None)
        fields[name] = raw if offset is None else offset
    name = inst.op_name.lower().removesuffix("_e32").removesuffix("_e64")
    literal = fields.pop("literal", None)
    return Instruction(
        pc=pc,
        size=inst.size(),
        name=name,
        encoding=type(inst).__name__.removesuffix("_LIT"),
        fields=fields,
        widths=dict(inst.op_regs),
        literal=literal,
    )
