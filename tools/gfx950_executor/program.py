# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""A kernel's code, compiled to closures one instruction at a time as waves reach it."""

from __future__ import annotations

from dataclasses import dataclass

from block32.tools.gfx950_executor.convert import CONVERT, compile_scaled_conversion
from block32.tools.gfx950_executor.decoder import Instruction, decode
from block32.tools.gfx950_executor.errors import (
    ExecutionError,
    OutOfBoundsError,
    UnknownInstructionError,
)
from block32.tools.gfx950_executor.lds import compile_ds
from block32.tools.gfx950_executor.mfma import compile_mfma
from block32.tools.gfx950_executor.packed import PACKED, compile_packed
from block32.tools.gfx950_executor.salu import compile_program_control, compile_salu
from block32.tools.gfx950_executor.smem import compile_smem
from block32.tools.gfx950_executor.valu import Limits, Step, compile_simple
from block32.tools.gfx950_executor.valu_conversions import OPS
from block32.tools.gfx950_executor.valu_special import SPECIAL, compile_compare
from block32.tools.gfx950_executor.vmem import compile_vmem


@dataclass(frozen=True)
class CompiledStep:
    """An instruction, its meaning, and the address of the next one."""

    instruction: Instruction
    run: Step
    next_pc: int


def compile_instruction(inst: Instruction, limits: Limits) -> Step:
    """The meaning of any instruction.

    Args:
        inst: The instruction.
        limits: VGPRs and AGPRs that the kernel has.

    Raises:
        UnknownInstructionError: There is none.
        OutOfBoundsError: It names a register beyond the limits.
    """
    name, encoding = inst.name, inst.encoding
    if encoding == "SOPP":
        return compile_program_control(inst)
    if encoding.startswith("SOP"):
        return compile_salu(inst)
    if encoding == "SMEM":
        return compile_smem(inst)
    if encoding == "DS":
        return compile_ds(inst, limits)
    if encoding in ("GLOBAL", "FLAT", "SCRATCH", "MUBUF"):
        return compile_vmem(inst, limits)
    return _compile_vector(inst, limits, name)


def _compile_vector(inst: Instruction, limits: Limits, name: str) -> Step:
    if name.startswith("v_mfma_"):
        return compile_mfma(inst, limits)
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return compile_compare(inst, limits)
    if name.startswith("v_cvt_scalef32_"):
        return compile_scaled_conversion(inst, limits)
    for table in (SPECIAL, CONVERT, PACKED):
        if name in table:
            return table[name](inst, limits)
    if name.startswith("v_pk_"):
        return compile_packed(inst, limits)
    if name in OPS:
        return compile_simple(inst, limits)
    raise UnknownInstructionError(name)


class Program:
    """The steps of one kernel by address.

    Args:
        image: The loaded code object.
        limits: VGPRs and AGPRs of the kernel.
        end: First address after the kernel's code.
    """

    def __init__(self, image: bytes, limits: Limits, end: int):
        self._image = image
        self._limits = limits
        self._end = end
        self._steps: dict[int, CompiledStep] = {}

    def step(self, pc: int) -> CompiledStep:
        """The step at an address; decoded once."""
        step = self._steps.get(pc)
        if step is None:
            step = self._compile(pc)
            self._steps[pc] = step
        return step

    def steps(self) -> dict[int, CompiledStep]:
        """All steps that were reached."""
        return self._steps

    def _compile(self, pc: int) -> CompiledStep:
        if not 0 <= pc < self._end:
            raise OutOfBoundsError(f"the program counter {pc:#x} leaves the kernel's code")
        inst = decode(self._image, pc)
        try:
            run = compile_instruction(inst, self._limits)
        except ExecutionError as error:
            raise error.at(f"{inst}") from None
        return CompiledStep(inst, run, pc + inst.size)
