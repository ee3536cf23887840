# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix instructions as data: which lane holds which element.

A warp's lane is ``4 * group + column``: 8 groups of 4 lanes. A group holds a row of A, a column of
B and a row of the result. Along K each instruction adds products over the whole of its K, so any
order of K will do that A and B share: a lane keeps the 8 elements of a block of 32 that are next to
each other in memory, in runs, whichever instruction consumes them.

| weight | a lane's K of a block of 32 | pairs of a register |
|---|---|---|
| 8-bit | 4c .. 4c+3 and 16+4c .. 16+4c+3 | (0, 1) (2, 3) (4, 5) (6, 7) |
| 4-bit | 8c .. 8c+7 | (0, 4) (1, 5) (2, 6) (3, 7) |

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "... for mma.m16n8k32", and "Register
Fragments and Shared Memory Matrix Layouts" of ``wgmma``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from block32.lowering.common.index import Index
from block32.lowering.problem import BLOCK_K, ELEMENT_BITS

#: Elements of a block of 32 K that one lane holds: 4 lanes share a row.
LANE_ELEMENTS: Final = BLOCK_K // 4


@dataclass(frozen=True)
class LaneOrder:
    """Which K of a block of 32 a lane holds, and in which order.

    Attributes:
        run: Neighbouring elements in a run; a lane has ``8 / run`` runs.
        pairs: The lane's elements that share a 32-bit register of 16-bit operands.
    """

    run: int
    pairs: tuple[tuple[int, int], ...]

    def element_k(self, column: Index, element: int) -> Index:
        """K within the block of a lane's element."""
        run, rest = divmod(element, self.run)
        return column * self.run + (run * 4 * self.run + rest)


#: 8-bit weights: what ``ldmatrix`` gives. 4-bit: what one 16-byte row of ``ldmatrix`` gives, and
#: pairs that one mask takes out of a register of eight nibbles.
LANE_ORDERS: Final = {
    8: LaneOrder(4, ((0, 1), (2, 3), (4, 5), (6, 7))),
    4: LaneOrder(8, ((0, 4), (1, 5), (2, 6), (3, 7))),
}


@dataclass(frozen=True)
class MmaAtom:
    """One matrix instruction, ``m x n x k``.

    Attributes:
        m: Rows of A and of the result.
        n: Columns of B and of the result.
        k: K elements that it consumes.
        operand: ``16bit`` (f16 or bf16) or ``fp8``.
        is_warpgroup: Four warps issue it together, and operands lie in shared memory.
        is_exact: Products are added in f32. ``wgmma`` on fp8 adds with fewer bits.
    """

    m: int
    n: int
    k: int
    operand: str
    is_warpgroup: bool = False
    is_exact: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K), as ``block32.kernel`` spells it."""
        return self.m, self.n, self.k

    @property
    def result_registers(self) -> int:
        """f32 registers of the result in each lane."""
        return self.m * self.n // (128 if self.is_warpgroup else 32)

    def result_row(self, lane: Index, register: int) -> Index:
        """The row of the result that a register of ``lane`` (of 32, or of 128) holds."""
        in_warp = lane % 32 // 4 + 8 * (register // 2 % 2)
        return lane // 32 * 16 + in_warp if self.is_warpgroup else in_warp

    def result_column(self, lane: Index, register: int) -> Index:
        """The column of the result that a register of ``lane`` holds."""
        return lane % 4 * 2 + (register // 4 * 8 + register % 2)


MMA_16BIT: Final = MmaAtom(16, 8, 16, "16bit")
MMA_FP8: Final = MmaAtom(16, 8, 32, "fp8")


def wgmma_atom(n: int) -> MmaAtom:
    """The warpgroup instruction on fp8 with ``n`` columns, a multiple of 8 up to 256."""
    assert n % 8 == 0 and 8 <= n <= 256
    return MmaAtom(64, n, 32, "fp8", is_warpgroup=True, is_exact=False)


def block_bytes(element: str) -> int:
    """Bytes of a row's block of 32 K."""
    return BLOCK_K * ELEMENT_BITS[element] // 8
