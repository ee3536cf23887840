# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The packing launch: x decoded once, in the order in which the matmul kernel reads it.

Layouts share one buffer, one for each kernel:

- *rows* (stream): ``[slab][chunk][row in slab][K of the chunk]`` operands, so that a slab is read
  from end to end, and ``[row][chunk][lane]`` exponents;
- *slabs* (tiled): ``[slab][K / word][row in slab]`` words, so that one row's word is a broadcast
  load (see ``is_halved`` too), and ``[slab][block][row in slab]`` scale bytes;
- *tiles* (matrix): ``[slab][32 K][16 rows of the slab]`` tiles of ``[pair][row]`` elements, or of
  8 rows where a slab has no more, and scale bytes as for slabs. Inside of a block K is in the
  order that decoding gives;
- *digits* (stream with products of integers): see ``digits``.

K is padded with zeros to whole chunks. Rows past the last are copies of it, and are never stored.
Where a row's or slab's scales are safe to fold, its values are folded, its exponents are those of
a scale of 1, and its flag is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, as_integer, minimum, round_up
from block32.lowering.common.weight_layout import PLAIN
from block32.lowering.cpu import amx, decode, digits, operands, ops
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import Factors, power_of_two
from block32.lowering.cpu.formats import SMALL_FLOATS
from block32.lowering.cpu.isa import BF16_EXACT, InstructionSet, instruction_set
from block32.lowering.cpu.registers import transpose
from block32.lowering.cpu.scales import ONE_BYTE, Exponents
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ScaledMatmul

VALUES = "lhs_values"
EXPONENTS = "lhs_exponents"
FOLDED = "lhs_folded"


def row_values(kernel: KernelContext, tier: KernelTier) -> ir.Value:
    """The packed values for the stream kernel, ``memref<slabs x chunks x rows x K of a chunk>``."""
    assert tier.mma is not None
    isa = instruction_set(tier.isa)
    element = "bf16" if isa.dot == "bf16" else "f32"
    slabs = stream_rows(tier) // tier.mma[0]
    chunks = operands.padded_k(kernel.problem, isa) // isa.chunk
    return kernel.memref(VALUES, f"memref<{slabs}x{chunks}x{tier.mma[0]}x{isa.chunk}x{element}>")


def row_exponents(kernel: KernelContext, tier: KernelTier) -> ir.Value:
    """The exponents as rows of chunks."""
    isa = instruction_set(tier.isa)
    chunks = operands.padded_k(kernel.problem, isa) // isa.chunk
    element = Exponents(isa).type_text
    return kernel.memref(EXPONENTS, f"memref<{stream_rows(tier)}x{chunks}x{isa.lanes}x{element}>")


def slab_values(kernel: KernelContext, isa: InstructionSet, rows: int, slabs: Index) -> ir.Value:
    """The packed values as slabs of ``rows`` rows of words."""
    steps = operands.padded_k(kernel.problem, isa) // isa.word
    return kernel.memref(VALUES, f"memref<?x{steps}x{rows}x{isa.word_type}>", (slabs,))


def is_halved(problem: ScaledMatmul, tier: KernelTier) -> bool:
    """Whether slabs of f32 are packed as their upper halves, that is as bf16, which is exact.

    Packed x is the largest buffer that a launch needs. The tiled kernel widens a part at a time.
    """
    lhs = problem.quantized().lhs if problem.lhs_quantize else problem.lhs
    is_f32 = instruction_set(tier.isa).dot == "f32"
    return tier.form == "tiled" and is_f32 and lhs in BF16_EXACT


def slab_halves(kernel: KernelContext, isa: InstructionSet, rows: int, slabs: Index) -> ir.Value:
    """The packed values as slabs of ``rows`` rows of upper halves, a slab as one row."""
    size = operands.padded_k(kernel.problem, isa) * rows
    return kernel.memref(VALUES, f"memref<?x{size}xi16>", (slabs,))


class SlabPart:
    """One slab over a part of K as f32 on the stack, from upper halves.

    Attributes:
        values: ``memref<1 x K x rows x f32>``.
    """

    def __init__(
        self, kernel: KernelContext, isa: InstructionSet, rows: int, part_k: int, slabs: Index
    ):
        """Take the stack for ``rows`` rows of ``part_k`` elements; there are ``slabs`` slabs."""
        self._lanes = isa.lanes
        self._rows = rows
        self._halves = slab_halves(kernel, isa, rows, slabs)
        raw = ops.stack_buffer(f"memref<{part_k * rows * 4}xi8>")
        self._flat = ops.view(raw, f"memref<{part_k * rows}xf32>")
        self.values = ops.view(raw, f"memref<1x{part_k}x{rows}xf32>")

    def fill(self, slab: Index, k: Index, depth: Index, following: Index) -> None:
        """Widen the elements ``k`` to ``k + depth`` of all rows of a slab.

        The same elements of the slab ``following`` are asked for: a part is too short for the
        processor to fetch it ahead by itself.
        """

        def widen(i: IndexValue) -> None:
            ops.prefetch(self._halves, [following, k * self._rows + i])
            halves = ops.load(self._halves, [slab, k * self._rows + i], self._lanes)
            words = ops.convert(arith.extui, halves, ops.i32())
            words = arith.shli(words, ops.splat(16, words.type))
            ops.store(ops.bitcast(words, ops.f32()), self._flat, [i], 4 * self._lanes)

        ops.repeat(0, depth * self._rows, self._lanes, widen)


def tiles_of_slab(tier: KernelTier) -> int:
    """Tiles of a slab of the matrix kernel: one, if it has no more than 16 rows."""
    assert tier.mma is not None
    return -(-tier.mma[0] // amx.ROWS)


class TileLayout:
    """Where the tiles of the packed values are.

    Attributes:
        values: The tiles, ``memref<tiles x 16 pairs x rows x i32>``.
        rows: Rows of x in a tile: 16, or those of a smaller slab.
        along_m: Tiles in a slab.
    """

    def __init__(self, kernel: KernelContext, tier: KernelTier, slabs: Index):
        """Bind the buffer; there are ``slabs`` slabs of ``mma[0]`` rows in all."""
        assert tier.mma is not None
        padded_k = operands.padded_k(kernel.problem, instruction_set(tier.isa))
        self.along_m = tiles_of_slab(tier)
        self.rows = tier.mma[0] // self.along_m
        self._tiles_each = self.along_m * (padded_k // amx.DEPTH)
        tiles = slabs * self._tiles_each
        self.values = kernel.memref(VALUES, f"memref<?x{amx.PAIRS}x{self.rows}xi32>", (tiles,))

    @property
    def row_bytes(self) -> int:
        """Bytes of a tile's row."""
        return 4 * self.rows

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return amx.PAIRS * self.row_bytes

    def position(self, slab: Index, k: Index) -> Index:
        """A slab's first tile for the 32 K from ``k`` on; those of the next K follow."""
        return slab * self._tiles_each + k // amx.DEPTH * self.along_m


def slab_scales(kernel: KernelContext, rows: int, slabs: Index) -> ir.Value:
    """The exponents as slabs of scale bytes."""
    blocks = kernel.problem.k_blocks
    return kernel.memref(EXPONENTS, f"memref<?x{blocks}x{rows}xi8>", (slabs,))


def folded_flags(kernel: KernelContext, parts: Index) -> ir.Value:
    """A flag for each row or slab: whether its scales are folded into its values."""
    if isinstance(parts, int):
        return kernel.memref(FOLDED, f"memref<{parts}xi32>")
    return kernel.memref(FOLDED, "memref<?xi32>", (parts,))


def is_folded(flags: ir.Value, part: Index) -> ir.Value:
    """The flag of a row or slab, as an i1."""
    return arith.trunci(ops.i1(), ops.load_scalar(flags, [part]))


def packs_rows(tier: KernelTier) -> bool:
    """Whether the tier's kernel reads x as rows: its lanes run along K."""
    return tier.form == "stream" and tier.weight_layout == PLAIN


def values_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """32-bit elements of the packed values."""
    isa = instruction_set(tier.isa)
    if digits.serves(problem, tier):
        return _padded_rows(tier, m) * digits.values_size(problem)
    per_word = 2 if is_halved(problem, tier) else isa.pair
    return _padded_rows(tier, m) * (operands.padded_k(problem, isa) // per_word)


def exponents_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """Bytes of the exponents."""
    isa = instruction_set(tier.isa)
    if digits.serves(problem, tier):
        return _padded_rows(tier, m) * (4 * digits.scales_size(problem))
    if packs_rows(tier):
        lanes = operands.padded_k(problem, isa) // isa.chunk * isa.lanes
        return _padded_rows(tier, m) * (4 * lanes)
    return _padded_rows(tier, m) * problem.k_blocks


def flags_size(tier: KernelTier, m: Index) -> Index:
    """Flags: no more than rows."""
    return _padded_rows(tier, m)


def _padded_rows(tier: KernelTier, m: Index) -> Index:
    """Rows that are packed: whole slabs. Of rows there is room for all that a tier may serve."""
    assert tier.mma is not None
    return stream_rows(tier) if packs_rows(tier) else round_up(m, tier.mma[0])


def stream_rows(tier: KernelTier) -> int:
    """The rows of whole slabs that a kernel with lanes along K may serve."""
    assert tier.tile is not None and tier.mma is not None
    return as_integer(round_up(tier.tile[0], tier.mma[0]))


class ActivationReader:
    """Reads chunks of x as operands; elements past ``count`` are zeros."""

    def __init__(self, kernel: KernelContext, isa: InstructionSet):
        """Bind x at the insertion point."""
        self._isa = isa
        self._lhs = operands.lhs_elements(kernel)
        self._order = decode.operand_order(isa, kernel.problem.rhs)
        is_small = kernel.problem.lhs in SMALL_FLOATS
        self._decoder = Decoder(isa, kernel.problem.lhs) if is_small else None

    def in_operand_order(self, row: Index, k: Index, count: int) -> list[ir.Value]:
        """The chunk in the order in which the stream and matrix kernels decode w."""
        if self._decoder is not None:
            return self._decoder.operands(self._codes(row, k, count), order=self._order)
        return decode.in_operand_order(self._isa, self._elements(row, k, count), self._order)

    def natural(self, row: Index, k: Index, count: int) -> list[ir.Value]:
        """The chunk in the order of K."""
        if self._decoder is not None:
            return self._decoder.natural(self._codes(row, k, count))
        return ops.parts(self._elements(row, k, count), self._isa.lanes * self._isa.pair)

    def codes(self, row: Index, k: Index, count: int, width: int) -> ir.Value:
        """``width`` codes of a small activation, one a byte."""
        assert self._decoder is not None
        return self._decoder.load_codes(self._lhs, row, k, count, width)

    def _codes(self, row: Index, k: Index, count: int) -> ir.Value:
        return self.codes(row, k, count, self._isa.chunk)

    def _elements(self, row: Index, k: Index, count: int) -> ir.Value:
        elements = ops.load_first(self._lhs, [row, k], count, self._isa.chunk)
        if self._isa.dot == "bf16" or isinstance(ops.element_type(elements), ir.F32Type):
            return elements
        return ops.convert(arith.extf, elements, ops.f32())


def emit_pack(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the packing kernel: a workgroup packs one row (stream) or one slab (tiled)."""
    if digits.serves(problem, tier):
        _DigitPacker(problem, tier, kernel).emit()
    elif packs_rows(tier):
        _RowPacker(problem, tier, kernel).emit()
    elif instruction_set(tier.isa).tiles:
        _TilePacker(problem, tier, kernel).emit()
    else:
        _SlabPacker(problem, tier, kernel).emit()


class _Packer:
    """What both layouts share: where x is read, and whether its scales are folded."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.part = kernel.workgroup_id()
        self.reader = ActivationReader(kernel, self.isa)
        self.exponents = Exponents(self.isa)
        self.factors = Factors(self.isa)
        self.scales = operands.lhs_scales(kernel) if problem.lhs_scaled else None

    def decide(self, first_row: Index, rows: Index) -> ir.Value:
        """Whether the scales of ``rows`` rows are folded, as an i1; noted for the next launch."""
        if self.scales is None:
            is_folded = ops.splat(1, ops.i1())
        else:
            is_folded = operands.lhs_fold_check(self.kernel).may_fold(first_row, rows)
        flags = folded_flags(self.kernel, self.kernel.workgroup_count())
        ops.store_scalar(ops.convert(arith.extui, is_folded, ops.i32()), flags, [self.part])
        return is_folded

    def remaining_scale(self, scale: ir.Value, is_folded: ir.Value) -> ir.Value:
        """The scale byte that is left for the sums: that of 1 when it is folded."""
        return arith.select(is_folded, ops.splat(ONE_BYTE, scale.type), scale)

    def in_operand_order(
        self, row: Index, is_folded: ir.Value, chunk: Index, count: int
    ) -> list[ir.Value]:
        """A row's chunk in the order in which w is decoded, folded where that holds."""
        values = self.reader.in_operand_order(row, chunk * self.isa.chunk, count)
        if self.scales is None:
            return values
        scales = operands.load_chunk_scales(self.scales, row, chunk, count, self.isa.chunk)
        factors = operands.spread_blocks(self.isa, self.factors.of(scales, is_folded))
        return [self.factors.apply(value, factors) for value in values]


class _RowPacker(_Packer):
    """Packs one row for the stream kernel."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        super().__init__(problem, tier, kernel)
        assert tier.mma is not None
        self.rows = tier.mma[0]
        self.values = row_values(kernel, tier)
        self.packed_exponents = row_exponents(kernel, tier)

    def emit(self) -> None:
        """The walk along the row."""
        row = minimum(self.part, self.kernel.m - 1)
        is_folded = self.decide(row, 1)

        def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
            self._pack_chunk(row, is_folded, chunk, count)
            return []

        operands.for_chunks(self.problem.k, self.isa.chunk, [], pack_chunk)

    def _pack_chunk(self, row: Index, is_folded: ir.Value, chunk: Index, count: int) -> None:
        values = self.in_operand_order(row, is_folded, chunk, count)
        exponents = ops.broadcast(self.exponents.zero(), self.isa.lanes)
        if self.scales is not None:
            scales = operands.load_chunk_scales(self.scales, row, chunk, count, self.isa.chunk)
            left = self.exponents.from_bytes(self.remaining_scale(scales, is_folded))
            exponents = operands.spread_blocks(self.isa, left)
        for i, value in enumerate(values):
            position = [self.part // self.rows, chunk, self.part % self.rows, i * ops.length(value)]
            ops.store(value, self.values, position)
        ops.store(exponents, self.packed_exponents, [self.part, chunk, 0])


class _DigitPacker(_Packer):
    """Packs one row for the stream kernel of integers."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        super().__init__(problem, tier, kernel)
        self.values = digits.values(kernel, VALUES, stream_rows(tier))
        self.packed_scales = digits.scales(kernel, EXPONENTS, stream_rows(tier))
        self.tables = digits.DigitTables(problem.lhs)
        self.unit = digits.unit_exponent(problem.lhs)

    def emit(self) -> None:
        """The walk along the row."""
        row = minimum(self.part, self.kernel.m - 1)
        self.decide(row, 1)

        def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
            codes = self.reader.codes(row, chunk * digits.CHUNK, count, digits.CHUNK)
            halves = [ops.permute(codes, range(first, digits.CHUNK, 2)) for first in (0, 1)]
            self._pack_values(halves, chunk)
            self._pack_scales(halves, row, chunk, count)
            return []

        operands.for_chunks(self.problem.k, digits.CHUNK, [], pack_chunk)

    def _pack_values(self, halves: list[ir.Value], chunk: Index) -> None:
        """Digits of even and of odd codes, the highest first, then the correction."""
        even, odd = (reversed(self.tables.digits(codes)) for codes in halves)
        registers = [digit for pair in zip(even, odd, strict=True) for digit in pair]
        bias = ops.splat(digits.BIAS, registers[0].type)
        # Weights of zero: what their bias adds is to be taken away.
        sums = digits.dot([bias, bias], registers)
        correction = arith.subi(ops.splat(0, sums.type), sums)
        words = [ops.bitcast(register, ops.i32()) for register in registers]
        for i, value in enumerate([*words, correction]):
            ops.store(value, self.values, [self.part, chunk, i, 0])

    def _pack_scales(self, halves: list[ir.Value], row: Index, chunk: Index, count: int) -> None:
        """The scales of a chunk as factors and as exponents."""
        assert self.scales is not None
        scales = operands.load_chunk_scales(self.scales, row, chunk, count, digits.CHUNK)
        factors, exponents = power_of_two(scales), self.exponents.from_bytes(scales)
        unit = ops.splat(self.unit, exponents.type)
        kinds = {
            digits.FACTORS: arith.mulf(factors, ops.splat(2.0**self.unit, factors.type)),
            digits.EXPONENTS: arith.addf(exponents, unit),
        }
        is_nan = self.tables.is_nan(halves)
        for kind, values in kinds.items():
            lanes = operands.spread_blocks(self.isa, values)
            nan = ops.splat(float("nan"), lanes.type)
            ops.store(
                arith.select(is_nan, nan, lanes), self.packed_scales, [self.part, chunk, kind, 0]
            )


class _RowsPacker(_Packer):
    """Packs the rows and the exponents of one slab; how its values lie is left open."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        super().__init__(problem, tier, kernel)
        assert tier.mma is not None
        self.rows = tier.mma[0]
        slabs = kernel.workgroup_count()
        self.packed_scales = slab_scales(kernel, self.rows, slabs)

    def row(self, r: Index) -> Index:
        """Row ``r`` of the slab as a row of x that exists."""
        return minimum(self.part * self.rows + r, self.kernel.m - 1)

    def pack_block(self, is_folded: ir.Value, block: Index) -> None:
        """What is left of the scales of all rows for one block of K."""
        for r in range(self.rows):
            scale = ops.splat(ONE_BYTE, ops.i8())
            if self.scales is not None:
                scale = ops.load_scalar(self.scales, [self.row(r), block])
                scale = self.remaining_scale(scale, is_folded)
            ops.store_scalar(scale, self.packed_scales, [self.part, block, r])


class _TilePacker(_RowsPacker):
    """Packs one slab for the matrix kernel."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        super().__init__(problem, tier, kernel)
        self.layout = TileLayout(kernel, tier, kernel.workgroup_count())
        self.steps = self.isa.chunk // amx.DEPTH
        self.natural = ops.stack_buffer(f"memref<{self.steps}x{amx.ROWS}x{amx.PAIRS}xi32>")

    def emit(self) -> None:
        """The walk along K for each 16 rows, then the exponents."""
        first = self.part * self.rows
        is_folded = self.decide(first, minimum(self.kernel.m - first, self.rows))

        def pack_tile(tile: IndexValue) -> None:
            def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
                self._pack_chunk(tile, is_folded, chunk, count)
                return []

            operands.for_chunks(self.problem.k, self.isa.chunk, [], pack_chunk)

        ops.repeat(0, self.layout.along_m, 1, pack_tile)
        ops.repeat(0, self.problem.k_blocks, 1, lambda block: self.pack_block(is_folded, block))

    def _pack_chunk(self, tile: Index, is_folded: ir.Value, chunk: Index, count: int) -> None:
        """A chunk of a tile's rows: decoded a row at a time, then turned."""
        first = self.layout.position(self.part, chunk * self.isa.chunk) + tile
        present = self.layout.rows

        def decode_row(r: Index) -> None:
            row = self.row(tile * self.layout.rows + r)
            operands_ = self.in_operand_order(row, is_folded, chunk, count)
            for step, value in enumerate(decode.blocks_of_chunk(operands_)):
                ops.store(ops.bitcast(value, ops.i32()), self.natural, [step, r, 0], 64)

        def turn(step: IndexValue) -> None:
            rows = [ops.load(self.natural, [step, r, 0], amx.PAIRS, 64) for r in range(present)]
            rows += [rows[-1]] * (amx.ROWS - present)
            position = first + step * self.layout.along_m
            for pair, values in enumerate(transpose(rows)):
                values = ops.part(values, 0, present)
                ops.store(values, self.layout.values, [position, pair, 0], 64)

        ops.repeat(0, present, 1, decode_row)
        ops.repeat(0, self.steps, 1, turn)


class _SlabPacker(_RowsPacker):
    """Packs one slab for the tiled kernel."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        super().__init__(problem, tier, kernel)
        slabs = kernel.workgroup_count()
        self.is_halved = is_halved(problem, tier)
        self.steps = self.isa.chunk // self.isa.word
        element = "i16" if self.is_halved else self.isa.word_type
        self.natural = ops.stack_buffer(f"memref<{self.rows}x{self.steps}x{element}>")
        if self.is_halved:
            self.values = slab_halves(kernel, self.isa, self.rows, slabs)
        else:
            self.values = slab_values(kernel, self.isa, self.rows, slabs)

    def emit(self) -> None:
        """The walk along K, then the exponents."""
        first = self.part * self.rows
        is_folded = self.decide(first, minimum(self.kernel.m - first, self.rows))

        def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
            def decode_row(r: Index) -> None:
                self._decode_row(r, is_folded, chunk, count)

            ops.repeat(0, self.rows, 1, decode_row)
            ops.repeat(0, self.steps, 1, lambda step: self._scatter(chunk, step))
            return []

        operands.for_chunks(self.problem.k, self.isa.chunk, [], pack_chunk)
        ops.repeat(0, self.problem.k_blocks, 1, lambda block: self.pack_block(is_folded, block))

    def _decode_row(self, r: Index, is_folded: ir.Value, chunk: Index, count: int) -> None:
        """One row's chunk to the stack, in the order of K."""
        row = self.row(r)
        for i, value in enumerate(self.reader.natural(row, chunk * self.isa.chunk, count)):
            k = i * ops.length(value)
            if self.scales is not None and k < count:
                block = chunk * (self.isa.chunk // BLOCK_K) + k // BLOCK_K
                scale = ops.load_scalar(self.scales, [row, block])
                factor = self.factors.of(scale, is_folded)
                value = self.factors.apply(value, ops.broadcast(factor, self.isa.lanes))
            if self.is_halved:
                words = ops.bitcast(value, ops.i32())
                upper = arith.shrui(words, ops.splat(16, words.type))
                value = ops.convert(arith.trunci, upper, ops.i16())
            else:
                value = ops.bitcast(value, ir.Type.parse(self.isa.word_type))
            ops.store(value, self.natural, [r, i * self.isa.words])

    def _scatter(self, chunk: Index, step: Index) -> None:
        """One step of K of all rows, next to each other."""
        for r in range(self.rows):
            element = ops.load_scalar(self.natural, [r, step])
            at = chunk * self.steps + step
            position = [at * self.rows + r] if self.is_halved else [at, r]
            ops.store_scalar(element, self.values, [self.part, *position])
