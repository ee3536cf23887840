# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Codes on their way to operands, as f16 in memory for one step of a loop.

x86 converts f16 to f32 in one instruction from memory, and from a register in two, of which one is
a shuffle (as are those that cut a register in two before it). The loop writes the next chunk's f16
while it reads this one's, so that nothing waits for a store. There are two slots, and the
one in use depends on the chunk's number: LLVM would join the store and the loads of one address.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index
from block32.lowering.cpu import ops
from block32.lowering.cpu.decode import Decoder


class Staging:
    """Chunks of a few rows of w as f16, in the order of K."""

    def __init__(self, decoder: Decoder, rows: int):
        """Take stack for two chunks of ``rows`` rows."""
        self._decoder = decoder
        self._rows = rows
        self._chunk = decoder.isa.chunk
        self._buffer = ops.stack_buffer(f"memref<{2 * rows}x{self._chunk}xf16>")

    def write(self, chunk: Index, row: int, codes: ir.Value) -> None:
        """Keep the codes of a chunk of row ``row`` until the step that is after the next."""
        slot = self._slot(chunk, row)
        for i, halves in enumerate(self._decoder.halves(codes)):
            ops.store(halves, self._buffer, [slot, i * ops.length(halves)], 2 * ops.length(halves))

    def read(self, chunk: Index, row: int) -> list[ir.Value]:
        """The raw operands of that chunk, in the order of K."""
        slot, lanes = self._slot(chunk, row), self._decoder.isa.lanes
        return [
            ops.convert(arith.extf, ops.load(self._buffer, [slot, at], lanes, 2 * lanes), ops.f32())
            for at in self._decoder.halves_at()
        ]

    def _slot(self, chunk: Index, row: int) -> Index:
        return (chunk & 1) * self._rows + row
