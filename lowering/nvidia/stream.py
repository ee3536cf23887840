# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Small M: weights stream through once, at the width of device memory.

A workgroup owns 32 or more columns of y (rows of w) and 8 to 64 rows. Its warps share out K: warp i
takes the steps i, i + warps, ... and keeps a ring of stages of its own in shared memory, filled by
``cp.async``, so that warps never wait for each other before the end. Rows of w are the 16 rows of
the matrix instruction and rows of x its 8 columns: with one row of x, seven eighths of the products
are wasted, but none of the bytes. At the end the warps' sums are added in the order of the warps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.control import for_loop, when
from block32.lowering.common.index import (
    Index,
    IndexValue,
    choose,
    equal,
    less,
)
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.fragments import Fragment, multiply, operand_types
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import WARP_LANES
from block32.lowering.nvidia.operands import (
    WORD_BLOCKS,
    WORD_K,
    fragment_readers,
    pair_type,
    tile_row_bytes,
    tile_row_offset,
    warp_atom,
    weight_scale_rows,
)
from block32.lowering.nvidia.quantize import LaneBlock, to_f32
from block32.lowering.nvidia.result import ResultWriter
from block32.lowering.nvidia.shared_tile import SharedTile
from block32.lowering.nvidia.staging import ScaleCopier, TileCopier
from block32.lowering.nvidia.tile_kernel import TileKernel, TilePosition
from block32.lowering.problem import BLOCK_K

#: Rows of w of one matrix instruction, and rows of x.
_WEIGHT_ROWS = 16
_TOKENS = 8


@dataclass(frozen=True)
class StageLayout:
    """Bytes of one stage of a warp's ring: weights, then x, then scale words.

    Attributes:
        rhs: The tile of w.
        lhs: The tile of x.
        lhs_rows: Rows of x's scales.
        rhs_rows: Rows of w's scales.
        words: Scale words of a row, one for each 128 K.
    """

    rhs: SharedTile
    lhs: SharedTile
    lhs_rows: int
    rhs_rows: int
    words: int

    @property
    def lhs_offset(self) -> int:
        """Where x begins."""
        return self.rhs.bytes

    @property
    def words_offset(self) -> int:
        """Where the scale words begin: [word][row], x's rows first."""
        return self.lhs_offset + self.lhs.bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of one scale word of all rows."""
        return 4 * (self.lhs_rows + self.rhs_rows)

    @property
    def bytes(self) -> int:
        """Bytes of a stage, whole lines of all banks."""
        size = self.words_offset + self.words * self.word_bytes
        return -(-size // 128) * 128


class StreamKernel(TileKernel):
    """The stream form: see the module's text."""

    @property
    def quantizes(self) -> bool:
        """Each lane quantises what it multiplies."""
        return self.tier.quantize == "fused"

    @property
    def staged_lhs(self) -> str:
        """The element type of x in shared memory."""
        return self.source.lhs if self.quantizes else self.problem.lhs

    @property
    def stage(self) -> StageLayout:
        """The layout of a stage."""
        problem = self.problem
        has_lhs_scales = problem.lhs_scaled and not self.quantizes
        return StageLayout(
            rhs=SharedTile(self.block_n, tile_row_bytes(problem.rhs, self.block_k)),
            lhs=SharedTile(self.block_m, tile_row_bytes(self.staged_lhs, self.block_k)),
            lhs_rows=self.block_m if has_lhs_scales else 0,
            rhs_rows=weight_scale_rows(problem, self.block_n),
            words=self.block_k // WORD_K,
        )

    @property
    def ring_bytes(self) -> int:
        """Bytes of a warp's ring, which later holds its sums."""
        sums = self.block_m * self.block_n * 4
        return max(self.stage.bytes * self.tier.stages, sums)

    @property
    def shared_bytes(self) -> int:
        """The warps' rings, and the flag of arrivals."""
        return self.ring_bytes * self.tier.warps + 16

    @property
    def accumulator_registers(self) -> int:
        """Every warp sums the whole tile."""
        return self.block_m * self.block_n // WARP_LANES

    @property
    def _weight_groups(self) -> int:
        return self.block_n // _WEIGHT_ROWS

    def accumulate(self, kernel: KernelContext, position: TilePosition) -> list[ir.Value]:
        """Each warp's sums over its steps, then the sums over the warps."""
        self._shared = ptx.shared_memory()
        thread = ptx.thread_id()
        lane, warp = thread % WARP_LANES, thread // WARP_LANES
        ring = self._shared + warp * self.ring_bytes
        sums = _WarpLoop(self, kernel, position, ring, lane, warp).run()
        self._share_sums(ring, lane, sums)
        ptx.barrier()
        return [self._sum_over_warps(thread, index) for index in range(self.values_per_thread)]

    def _share_sums(self, ring: Pointer, lane: Index, sums: list[ir.Value]) -> None:
        """Write a warp's sums where its ring was: register by register, a lane each."""
        ptx.wait_copies(0)
        ptx.sync_warp()
        for register, value in enumerate(sums):
            place = ring + (lane * 4 + register * WARP_LANES * 4)
            place.store(value, alignment=4)

    def _element(self, thread: Index, index: int) -> tuple[Index, Index]:
        """(row, column) in the tile of a thread's value: neighbours in a row are neighbours."""
        element = thread + index * self.threads
        return element // self.block_n, element % self.block_n

    def _sum_over_warps(self, thread: IndexValue, index: int) -> ir.Value:
        row, column = self._element(thread, index)
        place = self._shared + sum_offset(row, column, self._weight_groups)
        total = place.load(ptx.f32(), alignment=4)
        for warp in range(1, self.tier.warps):
            value = (place + warp * self.ring_bytes).load(ptx.f32(), alignment=4)
            total = arith.addf(total, value)
        return total

    def store(self, writer: ResultWriter, position: TilePosition, values: list[ir.Value]) -> None:
        """Store one element at a time, neighbouring columns by neighbouring threads."""
        thread = ptx.thread_id()
        for index, value in enumerate(values):
            row, column = self._element(thread, index)
            m = position.first_m + row
            with when(less(m, writer.m)):
                writer.write_one(m, position.first_n + column, value)

    def arrival_flag(self) -> Pointer:
        """Behind the rings."""
        return self._shared + (self.shared_bytes - 16)


def sum_offset(row: Index, column: Index, weight_groups: int) -> Index:
    """Where among a warp's shared sums the one of (row, column) of the tile lies, in bytes.

    The instruction's result has rows of w along its rows and rows of x along its columns:
    register ``r`` of a lane is row ``lane / 4 + 8 (r / 2)``, column ``2 (lane % 4) + r % 2``.
    """
    token_group, token = row // _TOKENS, row % _TOKENS
    weight_group, weight = column // _WEIGHT_ROWS, column % _WEIGHT_ROWS
    register = weight // 8 * 2 + token % 2
    register = (token_group * weight_groups + weight_group) * 4 + register
    lane = weight % 8 * 4 + token // 2
    return (register * WARP_LANES + lane) * 4


class _WarpLoop:
    """One warp's walk over its steps of K."""

    def __init__(
        self,
        form: StreamKernel,
        kernel: KernelContext,
        position: TilePosition,
        ring: Pointer,
        lane: Index,
        warp: Index,
    ):
        self.form = form
        self.stage = form.stage
        self.ring = ring
        self.lane = lane
        first_k, steps = form.steps(position)
        warps = form.tier.warps
        # Steps warp, warp + warps, ...; none where there are fewer steps than warps.
        self.count = (ptx.as_i32_value(steps) + (warps - 1) - warp) // warps
        own_k = ptx.as_i32_value(first_k) + warp * form.block_k
        self._bind(kernel, position, own_k)

    def _bind(self, kernel: KernelContext, position: TilePosition, own_k: Index) -> None:
        form, stage = self.form, self.stage
        problem = form.problem
        operands = form.operands(kernel, position)
        self.copiers = [
            (
                TileCopier(
                    rows, tile, first_row, tile_row_offset(own_k, element), self.lane, WARP_LANES
                ),
                offset,
                tile_row_bytes(element, form.block_k),
            )
            for rows, tile, first_row, element, offset in (
                (operands.rhs(), stage.rhs, position.first_n, problem.rhs, 0),
                (
                    operands.lhs(form.staged_lhs),
                    stage.lhs,
                    position.first_m,
                    form.staged_lhs,
                    stage.lhs_offset,
                ),
            )
        ]
        sources = [operands.rhs_scales(position.first_n, form.block_n)]
        if stage.lhs_rows:
            sources.insert(0, operands.lhs_scales(position.first_m, form.block_m))
        self.scales = ScaleCopier(
            sources, self.lane, WARP_LANES, own_k // BLOCK_K, self.stage.words
        )
        self.lhs_reader, self.rhs_reader = fragment_readers(
            problem, form.chip, stage.lhs, stage.rhs
        )
        if form.quantizes:
            self.lhs_reader = replace(self.lhs_reader, element=form.staged_lhs)
        # The first weight group's and token group's; others are a constant further.
        self.blocks = form.block_k // BLOCK_K
        self.rhs_offsets = self.rhs_reader.lane_offsets(self.lane, 0, 2, self.blocks)
        self.lhs_offsets = self.lhs_reader.lane_offsets(self.lane, 0, 1, self.blocks)

    def run(self) -> list[ir.Value]:
        """The loop: wait for a stage, multiply it, refill the one before."""
        form = self.form
        stages = form.tier.stages
        for step in range(stages - 1):
            with when(less(step, self.count)):
                self._start_step(step, self.ring + step * self.stage.bytes)
            ptx.commit_copies()
        registers = form.block_m * form.block_n // WARP_LANES
        sums = [ptx.f32_value(0.0)] * registers
        offsets = [ptx.i32_value(0), ptx.i32_value((stages - 1) * self.stage.bytes)]

        def body(step: IndexValue, carried: list[ir.Value]) -> list[ir.Value]:
            read, write = (IndexValue(value) for value in carried[registers:])
            ptx.wait_copies(stages - 2)
            ptx.sync_warp()
            sums = self._multiply_stage(self.ring + read, carried[:registers])
            # The stage to fill was read in the step before: all lanes have to be past it.
            ptx.sync_warp()
            with when(less(step + (stages - 1), self.count)):
                self._start_step(step + (stages - 1), self.ring + write)
            ptx.commit_copies()
            return [*sums, self._next_stage(read), self._next_stage(write)]

        return for_loop(self.count, [*sums, *offsets], body, ptx.i32())[:registers]

    def _next_stage(self, offset: IndexValue) -> ir.Value:
        following = offset + self.stage.bytes
        is_end = equal(following, self.stage.bytes * self.form.tier.stages)
        return ptx.i32_value(choose(is_end, 0, following))

    def _start_step(self, step: Index, stage: Pointer) -> None:
        form = self.form
        is_whole = form.problem.k % form.block_k == 0
        for copier, offset, step_bytes in self.copiers:
            copier.start(stage + offset, step * (step_bytes * form.tier.warps), is_whole)
        for word in range(self.stage.words):
            words = stage + (self.stage.words_offset + word * self.stage.word_bytes)
            self.scales.start(words, step * (self.blocks * form.tier.warps) + word * WORD_BLOCKS)

    def _multiply_stage(self, stage: Pointer, sums: list[ir.Value]) -> list[ir.Value]:
        form = self.form
        sums = list(sums)
        read = self._quantized_tokens if form.quantizes else self._scaled_tokens
        tokens, token_words = zip(
            *(read(stage, group) for group in range(form.block_m // _TOKENS)), strict=True
        )
        weight_groups = form.block_n // _WEIGHT_ROWS
        for weight_group in range(weight_groups):
            weights = self._weights(stage, weight_group)
            weight_words = self._weight_words(stage, weight_group)
            for block in range(self.blocks):
                weight_scales = decode_words(weight_words, block)
                for group, fragments in enumerate(tokens):
                    scales = _products(weight_scales, decode_words(token_words[group], block))
                    rows = (weights[0][block], weights[1][block])
                    product = self._multiply(rows, fragments[block])
                    first = (group * weight_groups + weight_group) * 4
                    for register, value in enumerate(product):
                        index = first + register
                        sums[index] = ptx.fma(value, scales[register], sums[index])
        return sums

    def _multiply(self, rows: tuple[Fragment, Fragment], columns: Fragment) -> list[ir.Value]:
        problem = self.form.problem
        atom = warp_atom(problem, self.form.chip)
        types = operand_types(atom, problem.rhs, problem.lhs, pair_type(problem))
        return multiply(atom, rows, columns, types)

    def _weights(self, stage: Pointer, group: int) -> list[list[Fragment]]:
        base = stage + group * _WEIGHT_ROWS * self.stage.rhs.row_bytes
        return self.rhs_reader.read(base, self.rhs_offsets, 2, self.blocks)

    def _token_rows(self, stage: Pointer, group: int) -> Pointer:
        return stage + (self.stage.lhs_offset + group * _TOKENS * self.stage.lhs.row_bytes)

    def _scaled_tokens(
        self, stage: Pointer, group: int
    ) -> tuple[list[Fragment], list[list[ir.Value]]]:
        """The fragments of 8 rows of x by block, and this lane's scale words."""
        base = self._token_rows(stage, group)
        fragments = self.lhs_reader.read(base, self.lhs_offsets, 1, self.blocks)[0]
        return fragments, self._token_words(stage, group)

    def _quantized_tokens(
        self, stage: Pointer, group: int
    ) -> tuple[list[Fragment], list[list[ir.Value]]]:
        """The same out of rows that are not quantised yet.

        A lane makes the scales of row ``lane / 4``, and needs those of rows ``2 (lane % 4)`` and
        the next.
        """
        reader, rule = self.lhs_reader, self.form.source.lhs_quantize
        base = self._token_rows(stage, group)
        blocks = [
            LaneBlock(to_f32(registers, reader.element), rule, self.form.problem.lhs)
            for registers in reader.read_raw(base, self.lhs_offsets, self.blocks)
        ]
        fragments = [block.fragment(reader.order, reader.atom) for block in blocks]
        words = [
            join_bytes([block.byte for block in blocks[first : first + WORD_BLOCKS]])
            for first in range(0, self.blocks, WORD_BLOCKS)
        ]
        owner = self.lane % 4 * 8
        return fragments, [[ptx.exchange(word, owner + row) for row in (0, 4)] for word in words]

    def _token_words(self, stage: Pointer, group: int) -> list[list[ir.Value]]:
        """The scale words of the two rows of x that this lane's results are of, by 128 K."""
        if not self.form.problem.lhs_scaled:
            return [[]] * self.stage.words
        row = self.lane % 4 * 8
        return self._load_words(stage, row + group * _TOKENS * 4, (0, 4))

    def _weight_words(self, stage: Pointer, group: int) -> list[list[ir.Value]]:
        """The scale words of the rows g and g + 8 of w, or the one that they share, by 128 K."""
        first = 4 * self.stage.lhs_rows
        block_n = self.form.problem.rhs_block[0]
        if block_n > 1:
            return self._load_words(stage, first + group * _WEIGHT_ROWS // block_n * 4, (0,))
        row = self.lane // 4 * 4
        return self._load_words(stage, row + (first + group * _WEIGHT_ROWS * 4), (0, 32))

    def _load_words(
        self, stage: Pointer, offset: Index, rows: tuple[int, ...]
    ) -> list[list[ir.Value]]:
        """Words at ``rows`` bytes from ``offset``, by 128 K."""
        place = stage + self.stage.words_offset + offset
        return [
            [
                (place + (word * self.stage.word_bytes + row)).load(ptx.i32(), alignment=4)
                for row in rows
            ]
            for word in range(self.stage.words)
        ]


def join_bytes(values: list[ir.Value]) -> ir.Value:
    """Bytes, each in an i32, as one word."""
    word = values[0]
    for index, value in enumerate(values[1:], 1):
        word = arith.ori(word, arith.shli(value, ptx.i32_value(8 * index)))
    return word


def decode_words(words: list[list[ir.Value]], block: int) -> list[ir.Value]:
    """The scales of a block of K out of scale words."""
    word, byte = divmod(block, WORD_BLOCKS)
    return [ptx.decode_scale(value, byte) for value in words[word]]


def _products(weights: list[ir.Value], tokens: list[ir.Value]) -> list[ir.Value]:
    """The scale of each of a lane's four results: rows of w by rows of x."""
    rows = weights * (2 // len(weights))
    if not tokens:
        return [rows[0], rows[0], rows[1], rows[1]]
    if len(weights) == 1:
        products = [arith.mulf(weights[0], token) for token in tokens]
        return products * 2
    return [arith.mulf(row, token) for row in rows for token in tokens]
