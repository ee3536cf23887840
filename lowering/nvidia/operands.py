# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operands of a matmul as rows in device memory, and how 16-bit instructions take them."""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.common.index import Index
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.atoms import MMA_16BIT, MMA_FP8, MmaAtom
from block32.lowering.nvidia.fragments import FragmentReader, lane_order
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import Chip
from block32.lowering.nvidia.shared_tile import SharedTile
from block32.lowering.nvidia.staging import GlobalRows, ScaleRows
from block32.lowering.problem import BLOCK_K, ELEMENT_BITS, ScaledMatmul, ceil_div


def warp_atom(problem: ScaledMatmul, chip: Chip) -> MmaAtom:
    """The ``mma.sync`` that multiplies these operands in the fewest instructions.

    fp8 in hardware where the chip has it and both operands are fp8. Elsewhere both become 16-bit,
    which is exact, once for all products that they take part in.
    """
    both_fp8 = ELEMENT_BITS[problem.lhs] == 8 and ELEMENT_BITS[problem.rhs] == 8
    return MMA_FP8 if chip.has_fp8_mma_sync and both_fp8 else MMA_16BIT


def pair_type(problem: ScaledMatmul) -> str:
    """The 16-bit type of both operands: f16 holds every fp8 and fp4 value exactly, as bf16 does.

    An f32 is a sum of bf16; f16 have not its range.
    """
    return "bf16" if problem.lhs in ("bf16", "f32") else "f16"


def tile_row_bytes(element: str, block_k: int) -> int:
    """Bytes of a row of ``block_k`` elements."""
    return block_k * ELEMENT_BITS[element] // 8


def tile_row_offset(k: Index, element: str) -> Index:
    """Bytes from a row's start to element ``k``, an even number for 4-bit elements."""
    bits = ELEMENT_BITS[element]
    return k * (bits // 8) if bits >= 8 else k // 2


@dataclass(frozen=True)
class Operands:
    """A workgroup's view of x, w and their scales.

    Attributes:
        problem: The matmul, after x was quantised where a launch before does that.
        kernel: Where the operands are bound.
        names: The bindings of x and of its scales.
        end: One past the last row of x that the workgroup may read.
        expert: Which of several weights is multiplied.
    """

    problem: ScaledMatmul
    kernel: KernelContext
    names: tuple[str, str]
    end: Index
    expert: Index

    def lhs(self, element: str) -> GlobalRows:
        """The rows of x, which are of type ``element``."""
        row_bytes = ceil_div(self.problem.k * ELEMENT_BITS[element], 8)
        base = ptx.global_pointer(self.kernel, self.names[0], self.kernel.m * row_bytes)
        return GlobalRows(base, self.end, row_bytes)

    def rhs(self) -> GlobalRows:
        """The rows of w."""
        problem = self.problem
        base = self._weight("rhs", problem.n * problem.rhs_row_bytes)
        return GlobalRows(base, problem.n, problem.rhs_row_bytes)

    def _weight(self, name: str, size: int) -> Pointer:
        """The expert's part of a binding that has ``size`` bytes for each."""
        experts = self.problem.grouping.experts if self.problem.grouping else 1
        base = ptx.global_pointer(self.kernel, name, experts * size)
        return base + ptx.row_offset(self.expert, size)

    def lhs_scales(self, first_m: Index, rows: int) -> ScaleRows:
        """The scales of a tile's rows of x."""
        blocks = self.problem.k_blocks
        base = ptx.global_pointer(self.kernel, self.names[1], self.kernel.m * blocks)
        return ScaleRows(base, self.end, blocks, first_m, rows)

    def rhs_scales(self, first_n: Index, columns: int) -> ScaleRows:
        """The scales of a tile's rows of w."""
        problem = self.problem
        scale_rows, blocks = problem.rhs_scale_shape
        base = self._weight("rhs_scale", scale_rows * blocks)
        block_n = problem.rhs_block[0]
        first = first_n if block_n == 1 else first_n // block_n
        return ScaleRows(base, scale_rows, blocks, first, weight_scale_rows(problem, columns))


def weight_scale_rows(problem: ScaledMatmul, columns: int) -> int:
    """Rows of w's scales that a tile of ``columns`` columns of y needs."""
    return max(1, columns // problem.rhs_block[0])


def fragment_readers(
    problem: ScaledMatmul, chip: Chip, lhs: SharedTile, rhs: SharedTile
) -> tuple[FragmentReader, FragmentReader]:
    """Readers of x and of w for the instruction that ``warp_atom`` chooses."""
    atom, order, pair = warp_atom(problem, chip), lane_order(problem.rhs), pair_type(problem)
    return (
        FragmentReader(lhs, problem.lhs, order, atom, pair),
        FragmentReader(rhs, problem.rhs, order, atom, pair),
    )


#: K blocks of a step of 128, whose scale bytes make a word.
WORD_BLOCKS = 4
WORD_K = WORD_BLOCKS * BLOCK_K
