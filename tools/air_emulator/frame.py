# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A frame: threads that are at the same place in the program, with their registers."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from block32.tools.air_emulator.memory import Memory

SIMDGROUP_SIZE = 32


class Frame:
    """Some threads of a dispatch, all about to execute one instruction.

    Attributes:
        memory: The dispatch's memory.
        threads: Numbers of the threads; number = threadgroup * threads per group + thread.
        registers: Values by name, with a row a thread or a single value.
        block: Label of the block.
        index: Position in it.
    """

    def __init__(
        self,
        memory: Memory,
        threads: np.ndarray,
        registers: dict[str, np.ndarray],
        vectors: frozenset[str],
        block: str,
        index: int = 0,
    ):
        """``vectors`` names the registers of vector type, in the whole program."""
        self.memory = memory
        self.threads = threads
        self.registers = registers
        self.vectors = vectors
        self.block = block
        self.index = index

    def is_uniform(self, name: str) -> bool:
        """Whether a register holds one value for all threads."""
        return self.registers[name].ndim == (name in self.vectors)

    def select(self, mask: np.ndarray) -> Frame:
        """A frame with the threads for which ``mask`` holds."""
        registers = {
            name: value if self.is_uniform(name) else value[mask]
            for name, value in self.registers.items()
        }
        return Frame(
            self.memory, self.threads[mask], registers, self.vectors, self.block, self.index
        )

    def merged(self, other: Frame) -> Frame:
        """One frame of the threads of two at the same place."""
        threads = np.concatenate([self.threads, other.threads])
        registers: dict[str, np.ndarray] = {}
        for name in self.registers.keys() & other.registers.keys():
            a, b = self.registers[name], other.registers[name]
            if self.is_uniform(name) and other.is_uniform(name) and np.array_equal(a, b):
                registers[name] = a
                continue
            parts = [
                np.broadcast_to(value, (frame.threads.size, *value.shape))
                if frame.is_uniform(name)
                else value
                for frame, value in ((self, a), (other, b))
            ]
            registers[name] = np.concatenate(parts)
        return Frame(self.memory, threads, registers, self.vectors, self.block, self.index)

    @cached_property
    def complete(self) -> np.ndarray:
        """Which threads belong to simdgroups that are here with all their lanes."""
        groups, inverse, counts = np.unique(
            self.threads // SIMDGROUP_SIZE, return_inverse=True, return_counts=True
        )
        del groups
        return counts[inverse] == SIMDGROUP_SIZE

    @cached_property
    def lane_order(self) -> np.ndarray | None:
        """Positions of the threads in order of simdgroup and lane; None where they are in order."""
        if (np.diff(self.threads) > 0).all():
            return None
        return np.argsort(self.threads, kind="stable")
