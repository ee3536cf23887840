# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Damage a code object on purpose, so that tests can show that the damage is caught."""

from __future__ import annotations

import struct

from block32.tools.gfx950_executor.code_object import parse_code_object
from block32.tools.gfx950_executor.decoder import Instruction, decode, encode_with
from block32.tools.gfx950_executor.errors import CodeObjectError

_S_NOP = (0xBF800000).to_bytes(4, "little")


def instructions(hsaco: bytes, kernel_name: str) -> list[Instruction]:
    """All instructions of a kernel in address order, from where its waves start.

    Raises:
        CodeObjectError: There is no such kernel.
    """
    code = parse_code_object(hsaco)
    if kernel_name not in code.kernels:
        raise CodeObjectError(f"no kernel '{kernel_name}'; there is: {', '.join(code.kernels)}")
    kernel = code.kernels[kernel_name]
    found: list[Instruction] = []
    pc = kernel.entry
    while pc < kernel.end:
        found.append(decode(code.image, pc))
        pc += found[-1].size
    return found


def patch(hsaco: bytes, address: int, code: bytes) -> bytes:
    """A copy of the code object with other bytes at an address of the loaded image."""
    at = _file_offset(hsaco, address)
    return hsaco[:at] + code + hsaco[at + len(code) :]


def drop(hsaco: bytes, inst: Instruction) -> bytes:
    """A copy in which an instruction does nothing (s_nop in its place)."""
    return patch(hsaco, inst.pc, _S_NOP * (inst.size // 4))


def change(hsaco: bytes, inst: Instruction, **fields: int) -> bytes:
    """A copy in which fields of an instruction have other raw values.

    For example ``change(hsaco, load, sc0=0, sc1=0)``, ``change(hsaco, mfma, opsel=1)``, or
    ``change(hsaco, wait, simm16=0xFFFF)``. Register fields take 9-bit source codes.

    Raises:
        KeyError: The encoding has no such field.
    """
    return patch(hsaco, inst.pc, encode_with(parse_code_object(hsaco).image, inst, fields))


def _file_offset(elf: bytes, address: int) -> int:
    table = struct.unpack_from("<Q", elf, 32)[0]
    entry_size, count = struct.unpack_from("<HH", elf, 54)
    for i in range(count):
        kind, _, start, base, _, size = struct.unpack_from("<IIQQQQ", elf, table + i * entry_size)
        if kind == 1 and base <= address < base + size:
            return start + address - base
    raise CodeObjectError(f"address {address:#x} is in no loadable segment")
