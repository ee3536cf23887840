# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel's hot loop consists of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from block32.lowering.apple.air_parser import Block, Function, Instruction

#: Instructions that cost nothing, or an addressing mode: not counted among the arithmetic.
_FREE = {"phi", "getelementptr", "bitcast", "zext", "sext", "trunc"}

_MATRIX = "air.simdgroup_matrix"


@dataclass(frozen=True)
class Loop:
    """An innermost loop.

    Attributes:
        header: Label of its first block.
        matrix: Matrix instructions in one iteration.
        loads: Loads in one iteration, of vectors and of scalars.
        stores: Stores in one iteration.
        others: Every other instruction by mnemonic, but phis, addresses and casts.
    """

    header: str
    matrix: int
    vector_loads: int
    scalar_loads: int
    stores: int
    others: Counter[str]

    def describe(self) -> str:
        """One line for people."""
        mix = ", ".join(f"{count} {name}" for name, count in sorted(self.others.items()))
        return (
            f"{self.matrix} matrix, {self.vector_loads} vector loads, "
            f"{self.scalar_loads} scalar loads, {self.stores} stores, "
            f"{self.others.total()} others ({mix})"
        )


def innermost_loops(function: Function) -> list[Loop]:
    """The loops of a function that hold no other loop, in block order."""
    blocks = {block.label: block for block in function.blocks}
    bodies = [(header, _body(blocks, header, latch)) for latch, header in _back_edges(function)]
    innermost = [
        (header, body) for header, body in bodies if not any(other < body for _, other in bodies)
    ]
    return [_describe(header, [blocks[label] for label in body]) for header, body in innermost]


def hot_loop(function: Function) -> Loop | None:
    """The loop that interior tiles spend their time in; None in a kernel without loops.

    Of several with as many matrix instructions it is the one that loads by vectors: the other one
    serves the edge.
    """
    loops = innermost_loops(function)
    return max(loops, key=lambda loop: (loop.matrix, -loop.scalar_loads), default=None)


def _back_edges(function: Function) -> list[tuple[str, str]]:
    """(latch, header) of each loop; a kernel's blocks are in an order where these lead back."""
    rank = {block.label: index for index, block in enumerate(function.blocks)}
    return [
        (block.label, successor)
        for block in function.blocks
        for successor in block.instructions[-1].labels
        if rank[successor] <= rank[block.label]
    ]


def _body(blocks: dict[str, Block], header: str, latch: str) -> frozenset[str]:
    """The blocks from which the latch is reached without passing the header."""
    predecessors: dict[str, list[str]] = {label: [] for label in blocks}
    for block in blocks.values():
        for successor in block.instructions[-1].labels:
            predecessors[successor].append(block.label)
    body, pending = {header}, [latch]
    while pending:
        label = pending.pop()
        if label not in body:
            body.add(label)
            pending += predecessors[label]
    return frozenset(body)


def _describe(header: str, blocks: list[Block]) -> Loop:
    instructions = [i for block in blocks for i in block.instructions]
    loads = [i for i in instructions if i.opcode == "load"]
    vectors = sum(i.type.startswith("<") for i in loads)
    others = Counter(_name(i) for i in instructions if not _is_counted_apart(i))
    return Loop(
        header=header,
        matrix=sum(i.callee.startswith(_MATRIX) for i in instructions),
        vector_loads=vectors,
        scalar_loads=len(loads) - vectors,
        stores=sum(i.opcode == "store" for i in instructions),
        others=others,
    )


def _is_counted_apart(instruction: Instruction) -> bool:
    is_matrix = instruction.callee.startswith(_MATRIX)
    return is_matrix or instruction.opcode in _FREE | {"load", "store"}


def _name(instruction: Instruction) -> str:
    return instruction.callee or instruction.opcode
