# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs a kernel's threads: frames that split at branches and meet again, simdgroups in lock-step.

Threads at one place execute together as a frame. A frame splits where a condition differs between
its threads. At a simdgroup function only simdgroups with all 32 lanes go on; the others wait until
their lanes arrive. When everybody waits, lanes are at different calls, or some have returned: that
is undefined on a GPU and an error here. Without a seed the frame that is furthest behind runs
first, which is how structured code reconverges; with one, threads are permuted and frames picked
at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from block32.lowering.apple.air_parser import Function, Instruction, Module, vector_length
from block32.tools.air_emulator.faults import DivergenceError, UnsupportedError
from block32.tools.air_emulator.frame import Frame
from block32.tools.air_emulator.instructions import Step, compile_instruction, reader
from block32.tools.air_emulator.intrinsics import LANE_FUNCTIONS, simdgroup_function

#: Blocks that one batch of threads may execute: more is taken for an endless loop.
_BLOCK_LIMIT = 2_000_000


@dataclass(frozen=True)
class Collective:
    """A call of a simdgroup function."""

    callee: str
    result: str
    operands: tuple[Callable[[Frame], np.ndarray], ...]
    function: Callable[..., np.ndarray]

    def execute(self, frame: Frame) -> None:
        """Executes the call; every simdgroup of the frame is complete."""
        order = frame.lane_order
        threads = frame.threads.size
        arguments: list[np.ndarray] = []
        for position, operand in enumerate(self.operands):
            value = operand(frame)
            if self._is_constant(position):
                if value.ndim:
                    raise UnsupportedError(f"a flag of {self.callee} that is not constant")
                arguments.append(value)
                continue
            lane_shape = value.shape[-1:] if "matrix" in self.callee else ()
            value = np.broadcast_to(value, (threads, *lane_shape))
            arguments.append(value if order is None else value[order])
        result = self.function(*arguments)
        if order is not None:
            scattered = np.empty_like(result)
            scattered[order] = result
            result = scattered
        frame.registers[self.result] = result

    def _is_constant(self, position: int) -> bool:
        if "matrix" in self.callee:
            return "16x16x16" in self.callee and position in (1, 3)
        return position == 1


@dataclass(frozen=True)
class CompiledBlock:
    """A block: its steps, and what happens on each way out."""

    steps: tuple[Step | Collective, ...]
    terminator: Instruction
    rank: int


class Program:
    """A kernel's function, ready to run."""

    def __init__(self, module: Module, function: Function):
        self.function = function
        self._structs = module.structs
        self._phis = {
            block.label: [i for i in block.instructions if i.opcode == "phi"]
            for block in function.blocks
        }
        self.vectors = frozenset(
            [i.result for i in function.instructions() if i.result and vector_length(i.type)]
            + [p.name for p in function.parameters if vector_length(p.type)]
        )
        self.entry = function.blocks[0].label
        self.blocks = {
            block.label: self._compile_block(block.instructions, rank)
            for rank, block in enumerate(function.blocks)
        }
        self._live = self._live_registers()

    def _compile_block(self, instructions: list[Instruction], rank: int) -> CompiledBlock:
        *body, terminator = instructions
        steps = [self._compile(i) for i in body if i.opcode != "phi"]
        return CompiledBlock(tuple(steps), terminator, rank)

    def _compile(self, instruction: Instruction) -> Step | Collective:
        if instruction.opcode != "call":
            return compile_instruction(instruction, self._structs)
        operands = tuple(reader(operand) for operand in instruction.operands)
        name = instruction.result or ""
        function = simdgroup_function(instruction.callee)
        if function is not None:
            return Collective(instruction.callee, name, operands, function)
        lane_function = LANE_FUNCTIONS.get(instruction.callee)
        if lane_function is None:
            raise UnsupportedError(f"call of '{instruction.callee}'")

        def step(frame: Frame) -> None:
            frame.registers[name] = lane_function(*(operand(frame) for operand in operands))

        return step

    def _live_registers(self) -> dict[str, frozenset[str]]:
        """Registers that a block or what follows it reads, its own phis left out."""
        uses: dict[str, set[str]] = {}
        defines: dict[str, set[str]] = {}
        for block in self.function.blocks:
            body = [i for i in block.instructions if i.opcode != "phi"]
            uses[block.label] = {o.text for i in body for o in i.operands if o.is_name}
            defines[block.label] = {i.result for i in block.instructions if i.result}
        live = {label: frozenset(used) for label, used in uses.items()}
        changed = True
        while changed:
            changed = False
            for block in reversed(self.function.blocks):
                after: set[str] = set()
                for successor in block.instructions[-1].labels:
                    phis = self._phis[successor]
                    after |= live[successor] - {p.result for p in phis}
                    after |= {self._incoming(p, block.label).text for p in phis}
                new = frozenset(uses[block.label] | (after - defines[block.label]))
                changed |= new != live[block.label]
                live[block.label] = new
        return live

    def _incoming(self, phi: Instruction, label: str):
        return phi.operands[phi.labels.index(label)]

    def enter(self, frame: Frame, successor: str) -> Frame:
        """Moves a frame along the edge to ``successor``: phis take their values."""
        phis = self._phis[successor]
        new = {p.result: reader(self._incoming(p, frame.block))(frame) for p in phis}
        registers = {n: v for n, v in frame.registers.items() if n in self._live[successor]}
        registers.update({name: value for name, value in new.items() if name is not None})
        frame.registers, frame.block, frame.index = registers, successor, 0
        return frame


class Scheduler:
    """Runs one batch of threads to the end."""

    def __init__(self, program: Program, generator: np.random.Generator | None):
        self.program = program
        self.generator = generator
        self.runnable: list[Frame] = []
        self.waiting: list[Frame] = []
        self.blocks_left = _BLOCK_LIMIT

    def run(self, frames: list[Frame]) -> None:
        """Runs the frames until every thread has returned.

        Raises:
            DivergenceError: Lanes of a simdgroup wait at different calls, or for others that
                have returned.
        """
        self.runnable = frames
        while self.runnable or self.waiting:
            if not self.runnable:
                self._release()
            self._advance(self._pick())

    def _pick(self) -> Frame:
        """Takes the next frame, joined by all others that are at the same place."""
        if self.generator is None:
            chosen = min(self.runnable, key=lambda f: self.program.blocks[f.block].rank)
        else:
            chosen = self.runnable[int(self.generator.integers(len(self.runnable)))]
        self.runnable.remove(chosen)
        place = (chosen.block, chosen.index)
        others = [f for f in self.runnable if (f.block, f.index) == place]
        if self.generator is not None and self.generator.random() < 0.5:
            others = []  # frames that could meet need not
        for other in others:
            self.runnable.remove(other)
            chosen = chosen.merged(other)
        return chosen

    def _release(self) -> None:
        """Nobody can run: joins the waiting frames place by place, and lets complete ones go on."""
        merged: dict[tuple[str, int], Frame] = {}
        for frame in self.waiting:
            place = (frame.block, frame.index)
            merged[place] = merged[place].merged(frame) if place in merged else frame
        self.waiting = []
        for frame in merged.values():
            if frame.complete.any():
                self.runnable.append(frame)
            else:
                self.waiting.append(frame)
        if not self.runnable:
            raise DivergenceError(self._describe_waiting())

    def _describe_waiting(self) -> str:
        frame = self.waiting[0]
        call = self.program.blocks[frame.block].steps[frame.index]
        assert isinstance(call, Collective)
        simdgroup = int(frame.threads[0]) // 32
        lanes = np.flatnonzero(frame.threads // 32 == simdgroup).size
        return (
            f"only {lanes} of 32 lanes of simdgroup {simdgroup} reach {call.callee} "
            f"in block {frame.block}; the others are elsewhere or have returned"
        )

    def _advance(self, frame: Frame) -> None:
        """Runs a frame to the end of its block, or to where it has to wait."""
        self.blocks_left -= 1
        if self.blocks_left < 0:
            raise UnsupportedError(f"kernel runs for more than {_BLOCK_LIMIT} blocks")
        block = self.program.blocks[frame.block]
        for index in range(frame.index, len(block.steps)):
            step = block.steps[index]
            if not isinstance(step, Collective):
                step(frame)
                continue
            frame.index = index
            if not frame.complete.all():
                self.waiting.append(frame.select(~frame.complete))
                if not frame.complete.any():
                    return
                frame = frame.select(frame.complete)
            step.execute(frame)
        self._leave(frame, block.terminator)

    def _leave(self, frame: Frame, terminator: Instruction) -> None:
        if terminator.opcode == "ret":
            return
        if not terminator.operands:
            self.runnable.append(self.program.enter(frame, terminator.labels[0]))
            return
        condition = np.asarray(reader(terminator.operands[0])(frame))
        if condition.all() or not condition.any():
            taken = terminator.labels[0 if condition.all() else 1]
            self.runnable.append(self.program.enter(frame, taken))
            return
        for label, mask in zip(terminator.labels, (condition, ~condition), strict=True):
            self.runnable.append(self.program.enter(frame.select(mask), label))
