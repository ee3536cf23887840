# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A panel: 64 rows of w over a part of K, decoded and turned so that lanes run along N."""

from __future__ import annotations

from iree.compiler import ir

from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.cpu import operands, ops
from block32.lowering.cpu.decode import COLUMNS_OF_4, Decoder
from block32.lowering.cpu.isa import InstructionSet
from block32.lowering.cpu.registers import transpose
from block32.lowering.cpu.scales import Exponents
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K

#: Columns of y that share a panel.
COLUMNS = 64
#: Rows of w that are turned together.
_TURNED = 16


class Panel:
    """The panel of one workgroup, and the exponents of its blocks.

    The operand of K step ``s`` for columns ``c`` to ``c + lanes`` is ``[s][c : c + lanes]``.
    """

    def __init__(
        self,
        kernel: KernelContext,
        isa: InstructionSet,
        part_k: int,
        workgroup: Index,
        workgroups: Index,
    ):
        """Bind the buffers; ``part_k`` elements of K are held at a time."""
        self._problem = kernel.problem
        self._isa = isa
        self._part_k = part_k
        self._workgroup = workgroup
        self._decoder = Decoder(isa, kernel.problem.rhs)
        self._exponents = Exponents(isa)
        self._weights = operands.rhs_codes(kernel)
        self._scales = operands.rhs_scales(kernel)
        element = "i32" if isa.dot == "bf16" else "f32"
        self._buffer = kernel.memref(
            "panel", f"memref<?x{part_k // isa.pair}x{COLUMNS}x{element}>", (workgroups,)
        )
        blocks = -(-part_k // BLOCK_K)
        self._block_exponents = ops.stack_buffer(
            f"memref<{blocks}x{COLUMNS}x{self._exponents.type_text}>"
        )

    def operand(self, step: Index, column: Index) -> ir.Value:
        """The operand of one K step for the columns from ``column`` of the panel."""
        value = ops.load(self._buffer, [self._workgroup, step, column], self._isa.lanes, 64)
        return ops.bitcast(value, ir.BF16Type.get()) if self._isa.dot == "bf16" else value

    def block_exponents(self, block: Index, column: Index) -> ir.Value:
        """The exponents of a block of K for the columns from ``column`` of the panel."""
        return ops.load(self._block_exponents, [block, column], self._isa.lanes, 64)

    def fill(self, column: Index, k: IndexValue) -> None:
        """Decode the weights of 64 columns of y from ``k`` on, and their scales."""
        self._fill_exponents(column, k // BLOCK_K)
        chunk = self._isa.chunk
        full_chunks, tail = divmod(self._problem.k, chunk)
        first_chunk = k // chunk
        whole = minimum(full_chunks - first_chunk, self._part_k // chunk)

        def groups(local_chunk: Index, count: int) -> None:
            ops.repeat(
                0, COLUMNS, _TURNED, lambda at: self._turn(column, at, k, local_chunk, count)
            )

        ops.repeat(0, whole, 1, lambda local: groups(local, chunk))
        if tail:
            with ops.when(ops.is_below(full_chunks - first_chunk, self._part_k // chunk)):
                groups(full_chunks - first_chunk, tail)

    def _turn(self, column: Index, at: Index, k: Index, local_chunk: Index, count: int) -> None:
        """Load a chunk of 16 rows of w, transpose, decode and store it."""
        rows = [self._existing_row(column + at + i) for i in range(_TURNED)]
        if self._isa.dot == "bf16":
            self._turn_pairs(rows, at, k, local_chunk, count)
        else:
            for offset in range(0, self._isa.chunk, _TURNED):
                present = min(max(count - offset, 0), _TURNED)
                self._turn_bytes(rows, at, k, local_chunk, offset, present)

    def _existing_row(self, row: Index) -> Index:
        """The row, or the last one: columns past N are computed from it and never stored."""
        return row if self._problem.n % COLUMNS == 0 else minimum(row, self._problem.n - 1)

    def _turn_pairs(
        self, rows: list[Index], at: Index, k: Index, local_chunk: Index, count: int
    ) -> None:
        """64 K of 16 columns; four bytes of a row move together as an i32."""
        chunk_k = k + local_chunk * self._isa.chunk
        words = [
            ops.bitcast(self._decoder.load_codes(self._weights, row, chunk_k, count, 64), ops.i32())
            for row in rows
        ]
        for i, turned in enumerate(transpose(words)):
            codes = ops.bitcast(turned, ops.i8())
            for pair, operand in enumerate(self._decoder.operands(codes, COLUMNS_OF_4)):
                step = local_chunk * 32 + (2 * i + pair)
                ops.store(
                    ops.bitcast(operand, ops.i32()), self._buffer, [self._workgroup, step, at], 64
                )

    def _turn_bytes(
        self,
        rows: list[Index],
        at: Index,
        k: Index,
        local_chunk: Index,
        offset: int,
        count: int,
    ) -> None:
        """16 K of 16 columns, byte by byte; K past ``count`` become zeros."""
        chunk_k = k + local_chunk * self._isa.chunk + offset
        if count:
            codes = [
                self._decoder.load_codes(self._weights, row, chunk_k, count, _TURNED)
                for row in rows
            ]
        else:
            codes = [ops.splat(0, ops.vector_type(_TURNED, ops.i8()))] * _TURNED
        for i, turned in enumerate(transpose(codes)):
            step = local_chunk * self._isa.chunk + (offset + i)
            for v, operand in enumerate(self._decoder.operands(turned)):
                position = [self._workgroup, step, at + v * self._isa.lanes]
                ops.store(operand, self._buffer, position, 64)

    def _fill_exponents(self, column: Index, first_block: Index) -> None:
        """The exponents of every block and column of the panel."""
        present = minimum(self._problem.k_blocks - first_block, self._part_k // BLOCK_K)
        share = self._problem.rhs_block[0]
        last_row = self._problem.rhs_scale_shape[0] - 1
        lanes = self._isa.lanes

        def shared(block: IndexValue) -> None:
            for at in range(0, COLUMNS, share):
                row = minimum((column + at) // share, last_row)
                exponent = self._load(row, first_block + block)
                for lane in range(0, share, lanes):
                    ops.store(
                        ops.broadcast(exponent, lanes),
                        self._block_exponents,
                        [block, at + lane],
                        64,
                    )

        def one_a_column(block: IndexValue) -> None:
            def one(at: IndexValue) -> None:
                row = minimum(column + at, last_row)
                exponent = self._load(row, first_block + block)
                ops.store_scalar(exponent, self._block_exponents, [block, at])

            ops.repeat(0, COLUMNS, 1, one)

        ops.repeat(0, present, 1, one_a_column if share == 1 else shared)

    def _load(self, row: Index, block: Index) -> ir.Value:
        return self._exponents.from_bytes(ops.load_scalar(self._scales, [row, block]))
