# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A panel: 64 rows of w over a part of K, decoded and turned so that lanes run along N."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.common.weight_layout import WeightLayout
from block32.lowering.cpu import operands, ops
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import Factors
from block32.lowering.cpu.isa import InstructionSet
from block32.lowering.cpu.registers import as_operand, transpose
from block32.lowering.cpu.scales import Exponents
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K

#: Columns of y that share a panel.
COLUMNS = 64
#: Rows of w that are turned together.
_TURNED = 16
#: Bytes of a cache line.
_LINE = 64


class Panel:
    """The panel of one workgroup, and the exponents of its blocks.

    It holds words, one of K step ``s`` for column ``c`` at ``[s][c]``. An operand is a register of
    them: ``[s][c : c + words]``.
    """

    def __init__(
        self,
        kernel: KernelContext,
        isa: InstructionSet,
        part_k: int,
        layout: WeightLayout | None = None,
    ):
        """Take the stack for ``part_k`` elements of K, which are held at a time.

        Args:
            kernel: The launch.
            isa: The instruction set.
            part_k: A multiple of its chunk.
            layout: That of w, where it was repacked.
        """
        self._kernel = kernel
        self._problem = kernel.problem
        self._isa = isa
        self._part_k = part_k
        self._decoder = Decoder(isa, kernel.problem.rhs)
        self._exponents = Exponents(isa)
        self._layout = layout
        self._weights = operands.rhs_bytes(kernel, layout)
        self._scales = operands.rhs_scales(kernel)
        steps = part_k // isa.word
        self._buffer = ops.stack_buffer(f"memref<{steps}x{COLUMNS}x{isa.word_type}>")
        blocks = -(-part_k // BLOCK_K)
        self._factors = Factors(isa, self._decoder.unit)
        self._block_exponents = ops.stack_buffer(
            f"memref<{blocks}x{COLUMNS}x{self._exponents.type_text}>"
        )
        self._block_factors = ops.stack_buffer(
            f"memref<{blocks}x{COLUMNS}x{self._factors.type_text}>"
        )

    def operand(self, step: Index, column: Index) -> ir.Value:
        """The operand of one K step for the columns from ``column`` of the panel."""
        words = ops.load(self._buffer, [step, column], self._isa.words, 64)
        return as_operand(self._isa, words)

    def block_exponents(self, block: Index, column: Index) -> ir.Value:
        """The exponents of a block of K for the columns from ``column`` of the panel."""
        return ops.load(self._block_exponents, [block, column], self._isa.lanes, 64)

    def may_fold(self, column: Index) -> ir.Value:
        """Whether the scales of the panel's columns may be folded for all of K, as an i1."""
        return operands.panel_may_fold(self._kernel, column, COLUMNS, self._layout)

    def fill(self, column: Index, k: IndexValue, is_folded: ir.Value) -> None:
        """Decode the weights of 64 columns of y from ``k`` on, and their scales."""
        self._fill_scales(column, k // BLOCK_K, is_folded)
        chunk = self._isa.chunk
        first_chunk = k // chunk
        chunks = minimum(-(-self._problem.k // chunk) - first_chunk, self._part_k // chunk)
        if self._isa.mmla:
            self._fill_pairs(column, first_chunk, chunks)
            return

        def turn_chunk(local: IndexValue) -> None:
            def turn(at: IndexValue) -> None:
                if self._layout is not None:
                    self._decode_pieces(self._layout, column, at, first_chunk + local, local)
                    return
                rows = [self._existing_row(column + at + i) for i in range(_TURNED)]
                self._turn_chunk(rows, at, first_chunk + local, local)

            ops.repeat(0, COLUMNS, _TURNED, turn)

        ops.repeat(0, chunks, 1, turn_chunk)

    def fetch(self, column: Index, k: Index, first: Index, step: Index) -> None:
        """Ask for what ``fill`` will read of the rows ``first``, ``first + step`` and so on.

        A panel is short pieces of many rows, which processors do not fetch ahead by themselves.
        Processors have few lines under way at a time, and stand still when asked for more: hence
        a few rows with every slab, instead of all at once.
        """
        if self._layout is not None or self._isa.mmla:
            return
        per_byte, last = self._decoder.k_per_byte, self._problem.rhs_row_bytes - 1

        def row(at: IndexValue) -> None:
            for line in range(0, self._part_k // per_byte, _LINE):
                byte = minimum(k // per_byte + line, last)
                ops.prefetch(self._weights, [self._existing_row(column + at), byte])

        ops.repeat(first, COLUMNS, step, row)

    def _fill_pairs(self, column: Index, first_chunk: Index, chunks: Index) -> None:
        """Two rows of w side by side, four elements of each at a time."""

        def pair(at: IndexValue) -> None:
            rows = [self._existing_row(column + at + i) for i in (0, 1)]
            ops.repeat(0, chunks, 1, lambda local: self._pair_chunk(rows, at, first_chunk, local))

        ops.repeat(0, COLUMNS, 2, pair)

    def _pair_chunk(
        self, rows: list[Index], at: Index, first_chunk: Index, local_chunk: Index
    ) -> None:
        """A chunk, which is one block, of two rows of w."""
        isa, chunk = self._isa, first_chunk + local_chunk

        def load(row: Index) -> ir.Value:
            def load_some(count: int) -> ir.Value:
                return self._decoder.load_chunk(self._weights, row, chunk * isa.chunk, count)

            width = self._decoder.chunk_bytes
            return operands.whole_or_short(self._problem.k, isa.chunk, chunk, width, load_some)

        upper, lower = (load(row) for row in rows)
        factors = ops.load(self._block_factors, [local_chunk, at], 2)
        # Two 32-bit lanes of an operand hold the four elements of a row.
        factors = ops.shuffle(factors, factors, (0, 0, 1, 1))
        for word, operand in enumerate(self._decoder.paired(upper, lower)):
            value = self._factors.apply(operand, factors)
            value = ops.bitcast(value, ir.Type.parse(isa.word_type))
            step = local_chunk * (isa.chunk // isa.word) + word
            ops.store(value, self._buffer, [step, at], 64)

    def _turn_chunk(self, rows: list[Index], at: Index, chunk: Index, local_chunk: Index) -> None:
        """A chunk of 16 rows of w, transposed, decoded and stored.

        A square of 16 is transposed at a time. Where codes are looked up in tables, four bytes of
        a row move together as an i32, otherwise single bytes.
        """
        moved = 4 if self._isa.widen == "table" else 1
        for offset in range(0, self._isa.chunk, _TURNED * moved):
            codes = self._load_square(rows, chunk, offset, _TURNED * moved)
            if moved == 4:
                codes = [ops.bitcast(row_codes, ops.i32()) for row_codes in codes]
            for i, turned in enumerate(transpose(codes)):
                if moved == 4:
                    turned = ops.bitcast(turned, ops.i8())
                self._store_columns(turned, at, local_chunk, offset + i * moved)

    def _decode_pieces(
        self, layout: WeightLayout, column: Index, at: Index, chunk: Index, local_chunk: Index
    ) -> None:
        """A chunk of 16 rows of w that are turned already, decoded and stored."""
        n, row_bytes = self._problem.n, self._problem.rhs_row_bytes
        row = minimum(column + at, n - layout.rows) if n % COLUMNS else column + at
        first = layout.piece_of(row, chunk * self._isa.chunk, row_bytes)
        for i in range(self._isa.chunk // layout.row_bytes):
            codes = ops.load(self._weights, [first + i, 0], layout.piece, layout.piece)
            if i * layout.piece % 64 == 0:
                last = n * row_bytes // layout.piece - 1
                ahead = self._part_k // layout.row_bytes
                ops.prefetch(self._weights, [minimum(first + i + ahead, last), 0])
            self._store_columns(codes, at, local_chunk, i * layout.row_bytes)

    def _load_square(
        self, rows: list[Index], chunk: Index, offset: int, width: int
    ) -> list[ir.Value]:
        """``width`` codes of each row, from ``offset`` on in a chunk; zeros past the end of K."""
        k = chunk * self._isa.chunk + offset
        full_chunks, tail = divmod(self._problem.k, self._isa.chunk)

        def load(count: int) -> list[ir.Value]:
            if count <= 0:
                return [ops.splat(0, ops.vector_type(width, ops.i8()))] * len(rows)
            return [
                self._decoder.load_codes(self._weights, row, k, min(count, width), width)
                for row in rows
            ]

        if tail == 0:
            return load(width)
        # Only the loads differ in a short last chunk: one body keeps the kernel small.
        is_full = ops.is_below(chunk, full_chunks)
        types = [ops.vector_type(width, ops.i8())] * len(rows)
        return ops.choose_values(is_full, types, lambda: load(width), lambda: load(tail - offset))

    def _store_columns(self, turned: ir.Value, at: Index, local_chunk: Index, k: int) -> None:
        """16 columns of 1 or 4 K, ``k`` elements into the chunk, as operands into the panel."""
        lanes = self._isa.lanes
        blocks = self._isa.chunk // BLOCK_K
        block = local_chunk * blocks + k // BLOCK_K
        step = local_chunk * (self._isa.chunk // self._isa.pair) + k // self._isa.pair
        vectors = _TURNED // lanes
        for i, operand in enumerate(self._decoder.columns(turned)):
            position = at + i % vectors * lanes
            factors = ops.load(self._block_factors, [block, position], lanes, 64)
            operand = self._factors.apply(operand, factors)
            if self._isa.dot == "bf16":
                operand = ops.bitcast(operand, ops.i32())
            ops.store(operand, self._buffer, [step + i // vectors, position], 64)

    def _existing_row(self, row: Index) -> Index:
        return operands.existing_row(self._problem, row, COLUMNS)

    def _fill_scales(self, column: Index, first_block: Index, is_folded: ir.Value) -> None:
        """The factors and the exponents of every block and column of the panel.

        A last chunk may reach past the last block. Its codes there are zeros, but what multiplies
        them must be a number: they take the last block's factor.
        """
        padded_blocks = operands.padded_k(self._problem, self._isa) // BLOCK_K
        present = minimum(padded_blocks - first_block, self._part_k // BLOCK_K)
        last_block = self._problem.k_blocks - 1
        share = self._problem.rhs_block[0]
        last_row = self._problem.rhs_scale_shape[0] - 1
        lanes = self._isa.lanes

        def load(at: Index, block: Index) -> tuple[ir.Value, ir.Value]:
            row = minimum((column + at) // share, last_row)
            scale_block = first_block + block
            if padded_blocks > last_block + 1:
                scale_block = minimum(scale_block, last_block)
            scale = ops.load_scalar(self._scales, [row, scale_block])
            factor = self._factors.of(scale, is_folded)
            left = arith.select(is_folded, ops.splat(127, ops.i8()), scale)
            return self._exponents.from_bytes(left), factor

        def shared(block: IndexValue) -> None:
            for at in range(0, COLUMNS, share):
                exponent, factor = (ops.broadcast(v, lanes) for v in load(at, block))
                for lane in range(at, at + share, lanes):
                    ops.store(exponent, self._block_exponents, [block, lane], 64)
                    ops.store(factor, self._block_factors, [block, lane], 64)

        def one_a_column(block: IndexValue) -> None:
            def one(at: IndexValue) -> None:
                exponent, factor = load(at, block)
                ops.store_scalar(exponent, self._block_exponents, [block, at])
                ops.store_scalar(factor, self._block_factors, [block, at])

            ops.repeat(0, COLUMNS, 1, one)

        ops.repeat(0, present, 1, one_a_column if share == 1 else shared)
