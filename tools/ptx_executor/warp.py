# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One warp: 32 lanes with registers, and the order in which diverging lanes run.

Lanes that are at the earliest instruction run first, so that lanes meet again where branches join;
at an instruction that needs the whole warp, lanes wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from block32.tools.ptx_executor.memory import GlobalMemory, PtxError, SharedMemory
from block32.tools.ptx_executor.parser import Instruction, Memory, Operand, PtxKernel

#: Instructions that all lanes of a warp execute together.
_WHOLE_WARP = ("bar", "wgmma", "ldmatrix", "mma")

Lanes = NDArray[np.bool_]
Bits = NDArray[np.uint64]


@dataclass
class Copy:
    """A ``cp.async`` under way: what it will have read, and where it will go."""

    addresses: NDArray[np.int64]
    data: NDArray[np.uint8]


@dataclass
class Event:
    """Why a warp stopped: ``bar.sync``, or a ``wgmma`` that needs its warpgroup."""

    kind: str
    instruction: Instruction


@dataclass
class Warp:
    """The state of one warp; ``execute`` runs an instruction in its active lanes."""

    kernel: PtxKernel
    number: int
    constants: dict[str, Bits]
    device: GlobalMemory
    shared: SharedMemory
    execute: Callable[[Warp, Instruction], None]
    registers: dict[str, Bits] = field(default_factory=dict)
    open_copies: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)
    open_results: dict[str, Bits] = field(default_factory=dict)
    result_groups: list[dict[str, Bits]] = field(default_factory=list)
    active: Lanes = field(default_factory=lambda: np.ones(32, bool))

    def run(self) -> Iterator[Event]:
        """Run to the end; gives an event at each place where other warps have to arrive."""
        waiting: dict[int, Lanes] = {0: np.ones(32, bool)}
        end = len(self.kernel.instructions)
        while waiting:
            at = self._next(waiting)
            lanes = waiting.pop(at)
            if at >= end:
                raise PtxError("runs past its last instruction")
            instruction = self.kernel.instructions[at]
            taken = lanes & self._guard(instruction)
            if instruction.opcode.startswith("bra"):
                self._merge(waiting, self.kernel.labels[str(instruction.operands[0])], taken)
                self._merge(waiting, at + 1, lanes & ~taken)
                continue
            if instruction.opcode == "ret":
                self._merge(waiting, at + 1, lanes & ~taken)
                continue
            self.active = taken
            if instruction.opcode.startswith(("bar.sync", "wgmma.mma_async")):
                if waiting or not taken.all():
                    raise PtxError(f"not all lanes of a warp arrive at: {instruction.text}")
                yield Event(instruction.opcode.split(".")[0], instruction)
            elif taken.any():
                try:
                    self.execute(self, instruction)
                except PtxError as error:
                    raise PtxError(f"{error}: {instruction.text}") from None
            self._merge(waiting, at + 1, lanes)
        if self.open_copies or any(self.groups):
            raise PtxError("ends with copies that it never waited for")
        if self.open_results or self.result_groups:
            raise PtxError("ends with a wgmma that it never waited for")

    def _next(self, waiting: dict[int, Lanes]) -> int:
        """The earliest instruction whose lanes need not wait for others."""
        if len(waiting) == 1:
            return next(iter(waiting))
        instructions = self.kernel.instructions
        free = [
            at
            for at in waiting
            if at < len(instructions) and not instructions[at].opcode.startswith(_WHOLE_WARP)
        ]
        return min(free) if free else min(waiting)

    def _guard(self, instruction: Instruction) -> Lanes:
        if instruction.guard is None:
            return np.ones(32, bool)
        value = self.read(instruction.guard).astype(bool)
        return ~value if instruction.is_negated else value

    @staticmethod
    def _merge(waiting: dict[int, Lanes], at: int, lanes: Lanes) -> None:
        if lanes.any():
            waiting[at] = waiting[at] | lanes if at in waiting else lanes

    def read(self, operand: Operand) -> Bits:
        """The bits of an operand in all lanes."""
        if isinstance(operand, int):
            return np.full(32, operand & (2**64 - 1), np.uint64)
        assert isinstance(operand, str)
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.constants:
            return self.constants[operand]
        raise PtxError(f"{operand} is read before it is written")

    def write(self, name: Operand, bits: Bits) -> None:
        """Set a register in the active lanes."""
        assert isinstance(name, str)
        if self.active.all():
            self.registers[name] = bits
            return
        old = self.registers.get(name, np.zeros(32, np.uint64))
        self.registers[name] = np.where(self.active, bits, old)

    def addresses(self, operand: Operand) -> NDArray[np.int64]:
        """The addresses of a memory operand in the active lanes."""
        assert isinstance(operand, Memory)
        offset = np.uint64(operand.offset & (2**64 - 1))
        return (self.read(operand.base)[self.active] + offset).astype(np.int64)

    def start_result(self, name: Operand, bits: Bits) -> None:
        """A register that an unfinished ``wgmma`` will write: until then it holds nothing."""
        assert isinstance(name, str)
        self.registers.pop(name, None)
        self.open_results[name] = bits

    def finish_results(self, pending: int) -> None:
        """Complete the oldest groups of ``wgmma`` until ``pending`` are left."""
        while len(self.result_groups) > pending:
            self.registers |= self.result_groups.pop(0)

    def finish_groups(self, pending: int) -> None:
        """Complete the oldest groups of copies until ``pending`` are left."""
        while len(self.groups) > pending:
            for copy in self.groups.pop(0):
                self.shared.scatter(copy.addresses, copy.data, self.number)
