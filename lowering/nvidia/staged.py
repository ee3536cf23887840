# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Large M: the whole workgroup fills a ring of stages and multiplies out of it together.

What the forms on ``mma.sync`` and on ``wgmma`` share: the ring, the scales, the loop over K, and
the store. A step's scales are decoded to f32 once for the workgroup, one step ahead, into the one
of two buffers that nobody reads; each lane then loads the few that its results need.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.control import for_loop, when
from block32.lowering.common.index import Condition, Index, IndexValue, choose, equal, less
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.operands import (
    tile_row_bytes,
    tile_row_offset,
    weight_scale_rows,
)
from block32.lowering.nvidia.result import ResultWriter
from block32.lowering.nvidia.shared_tile import SharedTile
from block32.lowering.nvidia.staging import ScaleRows, TileCopier, load_scale_word, pick_source
from block32.lowering.nvidia.tile_kernel import TileKernel, TilePosition
from block32.lowering.problem import BLOCK_K

#: The sums of products of one block of K at (row group, column group): four f32 a lane.
BlockProducts = Callable[[int, int], list[ir.Value]]


class StagedKernel(TileKernel):
    """A form whose warps share the stages; each lane holds 2 x 2 results a pair of groups.

    A lane's results of row group i and column group j are at rows ``16 i + lane / 4`` and 8 below,
    columns ``8 j + 2 (lane % 4)`` and the next, counted from ``first_row`` and ``first_column``.
    """

    @property
    @abstractmethod
    def row_groups(self) -> int:
        """Groups of 16 rows that a warp owns."""

    @property
    @abstractmethod
    def column_groups(self) -> int:
        """Groups of 8 columns that a warp owns."""

    @abstractmethod
    def first_row(self, thread: Index) -> Index:
        """The tile's row of a warp's row group 0."""

    @abstractmethod
    def first_column(self, thread: Index) -> Index:
        """The tile's column of a warp's column group 0."""

    @abstractmethod
    def prepare(self, thread: IndexValue) -> None:
        """Compute what does not change over K."""

    @abstractmethod
    def start_block(self, stage: Pointer, block: int) -> BlockProducts:
        """Start the multiplication of one block of K; the function gives its results."""

    def finish_block(self, block: int, scales: list[ir.Value]) -> list[ir.Value]:
        """Wait for the block's results; gives ``scales`` back, which is what they are needed with.

        Where results become valid behind the compiler's back, arithmetic on them must not move up
        before the wait: it cannot, if the scales that it needs come out of the wait.
        """
        del block
        return scales

    def fence_stage(self) -> None:
        """What has to lie between the end of the copies and the barrier."""
        return

    # Shared memory.

    @property
    def blocks(self) -> int:
        """Blocks of K in a step."""
        return self.block_k // BLOCK_K

    @property
    def working_registers(self) -> int:
        """With several blocks in a step the assembler reads fragments ahead."""
        return 96 if self.blocks > 1 else 64

    @property
    def lhs_tile(self) -> SharedTile:
        """The rows of x of a stage; they come first."""
        return SharedTile(self.block_m, tile_row_bytes(self.problem.lhs, self.block_k))

    @property
    def rhs_tile(self) -> SharedTile:
        """The rows of w of a stage."""
        return SharedTile(self.block_n, tile_row_bytes(self.problem.rhs, self.block_k))

    @property
    def stage_bytes(self) -> int:
        """Bytes of x and w in a stage."""
        return self.lhs_tile.bytes + self.rhs_tile.bytes

    @property
    def lhs_scale_rows(self) -> int:
        """Rows of x's scales of a step."""
        return self.block_m if self.problem.lhs_scaled else 0

    @property
    def scale_rows(self) -> int:
        """Rows of scales of a step: x's, then w's."""
        return self.lhs_scale_rows + weight_scale_rows(self.problem, self.block_n)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one buffer of decoded scales, [block][row]."""
        return self.blocks * self.scale_rows * 4

    @property
    def ring_bytes(self) -> int:
        """Bytes of all stages."""
        return self.stage_bytes * self.tier.stages

    @property
    def shared_bytes(self) -> int:
        """The ring, two buffers of scales, and the flag of arrivals."""
        return self.ring_bytes + 2 * self.scale_bytes + 16

    def arrival_flag(self) -> Pointer:
        """Behind the scales."""
        return self._ring + (self.ring_bytes + 2 * self.scale_bytes)

    # The loop over K.

    def accumulate(self, kernel: KernelContext, position: TilePosition) -> list[ir.Value]:
        """The sums of all results of a lane."""
        thread = ptx.thread_id()
        self._ring = ptx.shared_memory()
        self._scale_buffers = self._ring + self.ring_bytes
        first_k, steps = self.steps(position)
        copiers, scales = self._bind(kernel, position, thread, first_k)
        self._set_scale_pointers(thread)
        self.prepare(thread)
        stages = self.tier.stages
        words = scales.prefetch(0)
        for step in range(stages - 1):
            self._start_step(copiers, step, step * self.stage_bytes, less(step, steps))
        scales.publish(words, self._scale_buffers)
        count = self.row_groups * self.column_groups * 4
        sums = [ptx.f32_value(0.0)] * count
        last = (stages - 1) * self.stage_bytes
        offsets = [ptx.i32_value(offset) for offset in (0, last, 0)]

        def body(step: IndexValue, carried: list[ir.Value]) -> list[ir.Value]:
            read, write, buffer = (IndexValue(value) for value in carried[count:])
            ptx.wait_copies(stages - 2)
            self.fence_stage()
            ptx.barrier()
            ahead = step + (stages - 1)
            self._start_step(copiers, ahead, write, less(ahead, steps))
            words = scales.prefetch(step + 1)
            sums = self._multiply_stage(self._ring + read, buffer, carried[:count])
            other = ptx.as_i32_value(self.scale_bytes) - buffer
            scales.publish(words, self._scale_buffers + other)
            return [*sums, self._next(read), self._next(write), ptx.i32_value(other)]

        sums = for_loop(steps, [*sums, *offsets], body, ptx.i32())[:count]
        # Where K fits in one step there is no loop, and LLVM would scale each result only where it
        # is stored: the results of all blocks then need more registers than there are.
        return ptx.computed_here(sums)

    def _bind(
        self, kernel: KernelContext, position: TilePosition, thread: IndexValue, first_k: Index
    ) -> tuple[list[tuple[TileCopier, int, int]], _ScaleStager]:
        operands = self.operands(kernel, position)
        lhs, rhs = self.problem.lhs, self.problem.rhs
        parts = (
            (operands.lhs(lhs), self.lhs_tile, position.first_m, lhs, 0),
            (operands.rhs(), self.rhs_tile, position.first_n, rhs, self.lhs_tile.bytes),
        )
        copiers = [
            (
                TileCopier(
                    rows, tile, first, tile_row_offset(first_k, element), thread, self.threads
                ),
                offset,
                tile.row_bytes,
            )
            for rows, tile, first, element, offset in parts
        ]
        sources = [operands.rhs_scales(position.first_n, self.block_n)]
        if self.problem.lhs_scaled:
            sources.insert(0, operands.lhs_scales(position.first_m, self.block_m))
        return copiers, _ScaleStager(self, sources, thread, first_k // BLOCK_K)

    def _start_step(
        self,
        copiers: list[tuple[TileCopier, int, int]],
        step: Index,
        stage_offset: Index,
        exists: Condition,
    ) -> None:
        """Start the copies of a step that ``exists``; close the group in any case."""
        if exists is not False:
            with when(exists):
                stage = self._ring + stage_offset
                is_whole = self.problem.k % self.block_k == 0
                for copier, offset, step_bytes in copiers:
                    copier.start(stage + offset, step * step_bytes, is_whole)
        ptx.commit_copies()

    def _next(self, offset: IndexValue) -> ir.Value:
        following = offset + self.stage_bytes
        return ptx.i32_value(choose(equal(following, self.ring_bytes), 0, following))

    def _set_scale_pointers(self, thread: IndexValue) -> None:
        """Where this lane's scales are, in the first buffer's block 0."""
        row = self.first_row(thread) + thread % 32 // 4
        self._row_scales = self._scale_buffers + row * 4
        block_n = self.problem.rhs_block[0]
        column = self.first_column(thread)
        column = column + thread % 4 * 2 if block_n == 1 else column // block_n
        self._column_scales = self._scale_buffers + (column + self.lhs_scale_rows) * 4

    def _multiply_stage(
        self, stage: Pointer, buffer: IndexValue, sums: list[ir.Value]
    ) -> list[ir.Value]:
        sums = list(sums)
        for block in range(self.blocks):
            products = self.start_block(stage, block)
            scales = self._scales(buffer + block * self.scale_rows * 4)
            scales = scales.with_values(self.finish_block(block, scales.values))
            for i in range(self.row_groups):
                for j in range(self.column_groups):
                    first = (i * self.column_groups + j) * 4
                    for register, value in enumerate(products(i, j)):
                        scale = scales.of(i, j, register)
                        index = first + register
                        sums[index] = ptx.fma(value, scale, sums[index])
        return sums

    def _scales(self, offset: Index) -> _BlockScales:
        """The scales of all results of a lane in one block of K."""
        columns = [self._load_column_scales(offset, j) for j in range(self.column_groups)]
        scales = _BlockScales()
        for i in range(self.row_groups):
            rows = self._load_row_scales(offset, i)
            for j in range(self.column_groups):
                scales.add(i, j, rows, columns[j])
        return scales

    def _load_row_scales(self, offset: Index, group: int) -> list[ir.Value]:
        if not self.problem.lhs_scaled:
            return []
        place = self._row_scales + offset + group * 16 * 4
        return [(place + half * 32).load(ptx.f32(), alignment=4) for half in range(2)]

    def _load_column_scales(self, offset: Index, group: int) -> tuple[ir.Value, ir.Value]:
        """The scales of a lane's two columns of a group of 8; one load for a block of 32."""
        block_n = self.problem.rhs_block[0]
        place = self._column_scales + offset
        if block_n == 1:
            first = place + group * 8 * 4
            return tuple((first + 4 * i).load(ptx.f32(), alignment=4) for i in range(2))
        shared = group * 8 // block_n
        if group * 8 % block_n == 0:
            self._shared_scale = (place + shared * 4).load(ptx.f32(), alignment=4)
        return self._shared_scale, self._shared_scale

    # The store.

    def store(self, writer: ResultWriter, position: TilePosition, values: list[ir.Value]) -> None:
        """Store pairs of neighbouring columns."""
        thread = ptx.thread_id()
        lane = thread % 32
        first_m = position.first_m + self.first_row(thread) + lane // 4
        first_n = position.first_n + self.first_column(thread) + lane % 4 * 2
        for i in range(self.row_groups):
            for half in range(2):
                row = first_m + (16 * i + 8 * half)
                with when(less(row, writer.m)):
                    for j in range(self.column_groups):
                        first = (i * self.column_groups + j) * 4 + 2 * half
                        writer.write(row, first_n + 8 * j, values[first : first + 2])


class _BlockScales:
    """The distinct scales of a lane's results, and which result has which."""

    def __init__(self) -> None:
        self.values: list[ir.Value] = []
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._factors: list[tuple[ir.Value | None, ir.Value]] = []

    def add(self, i: int, j: int, rows: list[ir.Value], columns: Sequence[ir.Value]) -> None:
        """Add the four results of a pair of groups: two rows, or none, by two columns."""
        for register in range(4):
            row = rows[register // 2] if rows else None
            self._numbers[i, j, register] = self._number(row, columns[register % 2])

    def _number(self, row: ir.Value | None, column: ir.Value) -> int:
        """Column groups that share a scale share the product."""
        for number, (known_row, known_column) in enumerate(self._factors):
            if known_row == row and known_column == column:
                return number
        self._factors.append((row, column))
        self.values.append(column if row is None else arith.mulf(row, column))
        return len(self.values) - 1

    def of(self, i: int, j: int, register: int) -> ir.Value:
        """The scale of a result."""
        return self.values[self._numbers[i, j, register]]

    def with_values(self, values: list[ir.Value]) -> _BlockScales:
        """The same results with other values for their scales."""
        other = _BlockScales()
        other.values, other._numbers, other._factors = values, self._numbers, self._factors
        return other


class _ScaleStager:
    """Decodes the scales of a step to f32 in shared memory, each row by one thread."""

    def __init__(
        self,
        form: StagedKernel,
        sources: list[ScaleRows],
        thread: IndexValue,
        first_block: Index,
    ):
        self._form = form
        self._first_block = first_block
        self._rows = []
        for first in range(0, form.scale_rows, form.threads):
            row = thread + first
            pointer, is_row = pick_source(sources, row)
            is_mine = (
                True if first + form.threads <= form.scale_rows else less(row, form.scale_rows)
            )
            self._rows.append((row, is_mine, pointer, is_row))

    def prefetch(self, step: Index) -> list[ir.Value]:
        """Load the scale bytes of a step; those of a step past the end are 0."""
        form = self._form
        block = self._first_block + step * form.blocks
        return [
            load_scale_word(pointer, form.problem.k_blocks, block, form.blocks, is_row)
            for _, _, pointer, is_row in self._rows
        ]

    def publish(self, words: list[ir.Value], buffer: Pointer) -> None:
        """Write the decoded scales of ``words`` to a buffer."""
        form = self._form
        for word, (row, is_mine, _, _) in zip(words, self._rows, strict=True):
            with when(is_mine):
                place = buffer + row * 4
                for block in range(form.blocks):
                    scale = ptx.decode_scale(word, block)
                    (place + block * form.scale_rows * 4).store(scale, alignment=4)
