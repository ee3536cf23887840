# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix instructions of the gfx950 kernels as data: which lane holds which element.

A wave's 64 lanes form groups: a lane's *row* (A) or *column* (B) is ``lane % m``, its group is
``lane // m``. A lane holds 32 K elements of an operand, as 16-byte chunks, and the scale byte of
one K block.

| | 16x16x128 | 32x32x64 |
|---|---|---|
| 8-bit, chunk h of group g | K = 64h + 16g .. +15 | K = 32h + 16g .. +15 |
| 4-bit, the one chunk of group g | K = 32g .. 32g+31 | K = 32g .. 32g+31 |
| scale byte of group g | block g | block g |
| register r of the result | row 4g + r | row 8(r/4) + 4g + r%4 |

Source: AMD's published example of the 32x32x64 fp8 instruction and the code that Triton makes,
which agree. (IREE 3.13's own layout table has one contiguous chunk for 8-bit operands as well.)

Without scales there is 16x16x32 in bf16: a lane holds K = 8g .. 8g+7 of its row or column, and
register r of the result is row 4g + r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from block32.lowering.common.index import Index, as_integer
from block32.lowering.gfx950.machine import CHUNK_BYTES, WAVE_LANES
from block32.lowering.problem import BLOCK_K


@dataclass(frozen=True)
class ScaledAtom:
    """One scaled matrix instruction, ``m x m x k``.

    Attributes:
        m: Rows of A, columns of B, and both sizes of the result.
        k: K elements that it consumes.
        clocks: Clocks of the matrix unit with an 8-bit operand on either side.
    """

    m: int
    k: int
    clocks: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K), as ``block32.kernel`` spells it."""
        return self.m, self.m, self.k

    @property
    def groups(self) -> int:
        """Lanes that share a row of A."""
        return WAVE_LANES // self.m

    @property
    def blocks(self) -> int:
        """Scale blocks along K; as many as there are groups."""
        return self.k // BLOCK_K

    @property
    def result_registers(self) -> int:
        """f32 registers of the result in each lane."""
        return self.m * self.m // WAVE_LANES

    @property
    def lane_elements(self) -> int:
        """K elements of an operand in each lane."""
        return self.m * self.k // WAVE_LANES

    def lane_words(self, bits: int) -> int:
        """Registers of an operand with elements of ``bits`` in each lane."""
        return self.lane_elements * bits // 32

    def chunk_bytes(self, bits: int) -> int:
        """Bytes of a lane's elements that lie together in memory and that one load brings."""
        return min(CHUNK_BYTES, 4 * self.lane_words(bits))

    def chunks(self, bits: int) -> int:
        """Chunks of an operand with elements of ``bits`` in each lane."""
        return 4 * self.lane_words(bits) // self.chunk_bytes(bits)

    def chunk_k(self, group: Index, chunk: int, bits: int) -> Index:
        """The first K of a lane's chunk; the chunk goes on to the next 16 or 32."""
        if bits == 4:
            return group * BLOCK_K
        return group * CHUNK_BYTES + chunk * (self.k // 2)

    def result_row(self, group: Index, register: int) -> Index:
        """The row of the result that a register holds; its column is ``lane % m``."""
        return group * 4 + (register // 4 * 8 + register % 4)


@dataclass(frozen=True)
class DenseAtom(ScaledAtom):
    """A matrix instruction without scales, for one K block: a lane's elements are neighbours."""

    def chunk_k(self, group: Index, chunk: int, bits: int) -> Index:
        """The first K of a lane's chunk."""
        return group * self.lane_elements + chunk * (8 * CHUNK_BYTES // bits)


MFMA_16X16X128: Final = ScaledAtom(m=16, k=128, clocks=32)
MFMA_32X32X64: Final = ScaledAtom(m=32, k=64, clocks=64)

#: bf16 operands: 16 clocks (AMD's CDNA4 instruction set document, 4 passes).
MFMA_16X16X32_BF16: Final = DenseAtom(m=16, k=32, clocks=16)

#: The scaled instructions by their (M, N, K).
ATOMS: Final = {atom.shape: atom for atom in (MFMA_16X16X128, MFMA_32X32X64)}


@dataclass(frozen=True)
class KWindow:
    """``spread`` matrix instructions that share their scale loads.

    Instruction s of a window takes every ``spread``-th K block, so that its blocks 0, 1, .. are the
    blocks s, spread + s, .. of the window. A lane then needs ``spread`` neighbouring scale bytes:
    one aligned load, and the instruction picks byte s with op_sel.

    Attributes:
        atom: The instruction.
        spread: Instructions in the window: 1, 2 or 4.
    """

    atom: ScaledAtom
    spread: int

    @property
    def k(self) -> int:
        """K elements of the window."""
        return self.atom.k * self.spread

    def chunk_k(self, group: Index, chunk: int, instruction: int, bits: int) -> Index:
        """Where in the window the chunk of a lane starts, in elements of K."""
        inside = self.atom.chunk_k(group, chunk, bits)
        block, rest = inside // BLOCK_K, inside % BLOCK_K
        return (block * self.spread + instruction) * BLOCK_K + rest

    def chunk_step(self, chunk: int, instruction: int, bits: int) -> int:
        """How far a chunk lies behind the lane's first chunk; the same in every lane."""
        return as_integer(self.chunk_k(0, chunk, instruction, bits))

    def scale_block(self, group: Index) -> Index:
        """The first of the ``spread`` K blocks whose scales a lane loads, from the window's."""
        return group * self.spread
