# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be read from the assembly of CPU kernels: their innermost loops.

Of x86-64 in AT&T syntax, and of aarch64.
"""

from __future__ import annotations

import re
from collections import Counter

_BLOCK = re.compile(r"^(\.LBB\w+):(.*?)(?=^\.L(?:BB|func_end))", re.MULTILINE | re.DOTALL)
#: A jump or a branch; those of aarch64 name a register, or one of its bits, before the label.
BRANCH = r"(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s+(?:[wx]\d+,\s*(?:#\d+,\s*)?)?"


def loops(assembly: str) -> list[list[str]]:
    """Blocks that end by jumping to their own start: the innermost loops, as instructions."""
    found = []
    for label, body in _BLOCK.findall(assembly):
        lines = [re.split(r"\s#\s|//", line)[0].strip() for line in body.splitlines()]
        code = [line for line in lines if line and not line.startswith(".")]
        back = re.compile(BRANCH + re.escape(label) + "$")
        ends = [i for i, line in enumerate(code) if back.match(line)]
        if ends:
            found.append(code[: ends[-1] + 1])
    return found


def hot_loop(assembly: str, wanted: str) -> list[str]:
    """The loop with the largest share of instructions that match ``wanted``.

    Raises:
        ValueError: No loop has any.
    """
    return _largest_share(loops(assembly), wanted)


def straight_pieces(assembly: str) -> list[list[str]]:
    """What runs from a label or a jump to the next, as instructions; of x86-64 alone."""
    lines = [line.split("#")[0].strip() for line in assembly.splitlines()]
    code = "\n".join(line for line in lines if line and not re.match(r"\.(?!LBB)", line))
    pieces = re.split(r"^\.LBB\w+:$|^j\w+\s.*$", code, flags=re.MULTILINE)
    return [piece.strip().split("\n") for piece in pieces if piece.strip()]


def hot_piece(assembly: str, wanted: str) -> list[str]:
    """``hot_loop`` among ``straight_pieces``: for what is not repeated, or not there alone.

    Raises:
        ValueError: None has any.
    """
    return _largest_share(straight_pieces(assembly), wanted)


def _largest_share(pieces: list[list[str]], wanted: str) -> list[str]:
    having = [piece for piece in pieces if any(re.match(wanted, line) for line in piece)]
    if not having:
        raise ValueError(f"nothing holds {wanted}")
    return max(having, key=lambda piece: sum(bool(re.match(wanted, i)) for i in piece) / len(piece))


def mnemonics(loop: list[str]) -> Counter[str]:
    """How often each instruction is in a loop."""
    return Counter(line.split()[0] for line in loop)


def stack_accesses(loop: list[str]) -> list[str]:
    """The instructions of a loop that use the stack pointer: spills."""
    return [line for line in loop if re.search(r"%r[sb]p\b|\[sp\b", line)]
