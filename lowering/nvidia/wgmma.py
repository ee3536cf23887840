# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiled form on ``wgmma``, for fp8 on sm_90a: the fastest, and the only one that is not exact.

A warpgroup multiplies 64 rows of x straight out of shared memory. The hardware adds the products of
fp8 operands with fewer bits than f32 has; here each sum spans one block of 32 K and is added to an
f32 accumulator by ordinary arithmetic, so the shortness does not grow with K. Its error is about
1e-4 of |x| |w| (measured on an H200; docs/nvidia.md), against 1e-7 of the other forms. A caller who
asks for f32 accumulation does not get this form.
"""

from __future__ import annotations

from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index, IndexValue
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.atoms import wgmma_atom
from block32.lowering.nvidia.fragments import operand_types
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import WARPGROUP_LANES
from block32.lowering.nvidia.staged import BlockProducts, StagedKernel
from block32.lowering.problem import BLOCK_K

#: Rows of x of one instruction.
GROUP_ROWS: Final = 64

#: Bytes of a row of a stage: what the 128-byte swizzle spans.
ROW_BYTES: Final = 128

#: The constant part of a matrix descriptor: 128-byte swizzle (bits 62-63), 1024 bytes between
#: groups of 8 rows (bits 32-45, in units of 16), and 1 for the offset that this swizzle ignores.
_DESCRIPTOR: Final = 1 << 62 | 1024 // 16 << 32 | 1 << 16


class WgmmaKernel(StagedKernel):
    """One warpgroup for each 64 rows of the tile, across all its columns."""

    @property
    def row_groups(self) -> int:
        """A warp holds 16 of its warpgroup's rows."""
        return 1

    @property
    def column_groups(self) -> int:
        """All columns of the tile."""
        return self.block_n // 8

    @property
    def working_registers(self) -> int:
        """The results of the block at hand and of the next one, beside the sums."""
        return 2 * self.accumulator_registers + 64

    def first_row(self, thread: Index) -> Index:
        """Warp i holds rows 16 i to 16 i + 15, across warpgroups too."""
        return thread // 32 * 16

    def first_column(self, thread: Index) -> Index:
        """All columns of the tile."""
        return thread * 0

    def prepare(self, thread: IndexValue) -> None:
        """The warpgroup's first byte of x in a stage."""
        self._rows_offset = thread // WARPGROUP_LANES * (GROUP_ROWS * ROW_BYTES)

    def fence_stage(self) -> None:
        """Copies go through the generic proxy, ``wgmma`` reads through the asynchronous one."""
        ptx.inline_ptx("fence.proxy.async.shared::cta;", "~{memory}", [], [], True)

    def start_block(self, stage: Pointer, block: int) -> BlockProducts:
        """Start one block of K for all column groups, and the next one behind it.

        The matrix unit then works on the next block while this one's results are scaled.
        """
        if block == 0:
            self._ahead = self._issue(stage, block)
        results = self._ahead
        if block + 1 < self.blocks:
            self._ahead = self._issue(stage, block + 1)

        def products(i: int, j: int) -> list[ir.Value]:
            del i  # one row group
            return results[4 * j : 4 * j + 4]

        return products

    def finish_block(self, block: int, scales: list[ir.Value]) -> list[ir.Value]:
        """Wait for this block, not for the next."""
        pending = 1 if block + 1 < self.blocks else 0
        count = len(scales)
        text = f"wgmma.wait_group.sync.aligned {pending};"
        constraints = ",".join(["=f"] * count + [str(index) for index in range(count)])
        return ptx.inline_ptx(
            text, constraints + ",~{memory}", scales, [ptx.f32()] * count, has_side_effects=True
        )

    def _issue(self, stage: Pointer, block: int) -> list[ir.Value]:
        offset = block * BLOCK_K
        rows = _descriptor(stage + self._rows_offset + offset)
        columns = _descriptor(stage + (self.lhs_tile.bytes + offset))
        return self._multiply(rows, columns)

    def _multiply(self, rows: ir.Value, columns: ir.Value) -> list[ir.Value]:
        """Start from zero: the sum of one block has a scale of its own."""
        atom = wgmma_atom(self.block_n)
        x, w = operand_types(atom, self.problem.lhs, self.problem.rhs, "f16")
        count = atom.result_registers
        registers = ", ".join(f"${index}" for index in range(count))
        text = (
            "{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned; "
            f"wgmma.mma_async.sync.aligned.m64n{atom.n}k{atom.k}.f32.{x}.{w} "
            f"{{{registers}}}, ${count}, ${count + 1}, p, 1, 1; "
            "wgmma.commit_group.sync.aligned; }"
        )
        constraints = ",".join(["=f"] * count) + ",l,l,~{memory}"
        return ptx.inline_ptx(text, constraints, [rows, columns], [ptx.f32()] * count, True)


def _descriptor(place: Pointer) -> ir.Value:
    """The matrix descriptor of rows that begin at a place in shared memory."""
    address = ptx.shared_address(place)
    units = (address & 0x3FFFF) // 16
    wide = arith.extui(ptx.i64(), ptx.i32_value(units))
    return arith.ori(wide, arith.constant(ptx.i64(), _DESCRIPTOR))
