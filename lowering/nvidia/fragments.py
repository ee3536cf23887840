# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From bytes in shared memory to operand registers of ``mma.sync``.

A *fragment* is what a lane holds of 8 rows and one block of 32 K: four registers of 16-bit pairs,
or two of four fp8 each where the instruction takes fp8. Two fragments (rows g and g + 8) make an A
operand, one makes a B operand.

A fragment of f32 has these registers three times: those of three bf16 that add up to each element,
the smallest first, since their products are added in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.bf16_parts import PARTS, split_f32
from block32.lowering.common.index import Index
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.atoms import (
    LANE_ELEMENTS,
    LANE_ORDERS,
    LaneOrder,
    MmaAtom,
    block_bytes,
)
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.shared_tile import CHUNK_BYTES, SharedTile
from block32.lowering.problem import ELEMENT_BITS

#: Registers of one lane, 8 rows, one block of K.
Fragment = list[ir.Value]

#: PTX's names of the fp8 formats.
PTX_NAMES: Final = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}


@dataclass(frozen=True)
class FragmentReader:
    """Reads an operand's fragments from a tile in shared memory.

    Attributes:
        tile: Where its rows lie.
        element: Its element type.
        order: The order of K that both operands share; the weight decides.
        atom: The instruction that they are for.
        pair_type: ``f16`` or ``bf16``: what 16-bit instructions take.
    """

    tile: SharedTile
    element: str
    order: LaneOrder
    atom: MmaAtom
    pair_type: str

    @property
    def _run_bytes(self) -> int:
        return self.order.run * ELEMENT_BITS[self.element] // 8

    @property
    def _load_bytes(self) -> int:
        """Bytes of one load of a run."""
        return min(self._run_bytes, CHUNK_BYTES)

    @property
    def _uses_ldmatrix(self) -> bool:
        """``ldmatrix`` deals out 4 bytes of each 16 to a lane."""
        return self._run_bytes == 4

    @property
    def groups_at_once(self) -> int:
        """Groups of 8 rows that one ``read`` of a 16-row operand takes."""
        return 2 if self._uses_ldmatrix else 1

    @property
    def blocks_at_once(self) -> int:
        """Blocks of K that one ``read`` takes at the least."""
        if not self._uses_ldmatrix:
            return 1
        chunks = block_bytes(self.element) // CHUNK_BYTES
        return max(1, 4 // (self.groups_at_once * chunks))

    def lane_offsets(self, lane: Index, row: Index, groups: int, blocks: int) -> list[Index]:
        """Byte offsets of a lane's loads that read ``groups`` x 8 rows of ``blocks`` blocks.

        ``row`` is the first row, a multiple of 8. One offset is one ``ldmatrix``, or one load of a
        run in one block.
        """
        if self._uses_ldmatrix:
            return self._matrix_offsets(lane, row, groups, blocks)
        assert groups == 1, "operands that are read run by run take one group of rows at a time"
        group, column = lane // 4, lane % 4
        per_chunk = CHUNK_BYTES // self._load_bytes
        per_run = self._run_bytes // self._load_bytes
        offsets: list[Index] = []
        for run in range(blocks * LANE_ELEMENTS // self.order.run):
            for part in range(per_run):
                chunk = (column * per_run // per_chunk) ^ (run * 4 * per_run // per_chunk + part)
                offset = self.tile.chunk_offset(row + group, chunk)
                offsets.append(offset + column % per_chunk * self._load_bytes)
        return offsets

    def _matrix_offsets(self, lane: Index, row: Index, groups: int, blocks: int) -> list[Index]:
        matrices = groups * blocks * block_bytes(self.element) // CHUNK_BYTES
        assert matrices % 4 == 0, "ldmatrix reads four matrices"
        in_matrix, matrix = lane % 8, lane // 8
        lane_row = row + matrix % groups * 8 + in_matrix
        chunks_at_once = 4 // groups
        return [
            self.tile.chunk_offset(lane_row, (matrix // groups) ^ (load * chunks_at_once))
            for load in range(matrices // 4)
        ]

    def read(
        self, base: Pointer, offsets: Sequence[Index], groups: int, blocks: int
    ) -> list[list[Fragment]]:
        """Fragments by [group][block]; ``offsets`` from ``lane_offsets`` of the same shape."""
        if self._uses_ldmatrix:
            registers = [r for offset in offsets for r in ptx.load_matrices(base + offset)]
            chunks = block_bytes(self.element) // CHUNK_BYTES
            raw = [
                [
                    [registers[(block * chunks + c) * groups + group] for c in range(chunks)]
                    for block in range(blocks)
                ]
                for group in range(groups)
            ]
        else:
            raw = [self.read_raw(base, offsets, blocks)]
        return [[self._convert(lane_registers) for lane_registers in group] for group in raw]

    def read_raw(
        self, base: Pointer, offsets: Sequence[Index], blocks: int
    ) -> list[list[ir.Value]]:
        """By block, a lane's 8 elements of a 16-bit or 32-bit type in memory order, unconverted."""
        words = self._load_bytes // 4
        vector_type = ir.VectorType.get([words], ptx.i32())
        registers = [
            register
            for offset in offsets
            for register in ptx.vector_elements(
                (base + offset).load(vector_type, alignment=self._load_bytes)
            )
        ]
        per_block = len(registers) // blocks
        return [registers[b * per_block : (b + 1) * per_block] for b in range(blocks)]

    def _convert(self, raw: list[ir.Value]) -> Fragment:
        """A lane's 8 elements, in memory order, as the instruction takes them."""
        if self.atom.operand == "fp8":
            assert ELEMENT_BITS[self.element] == 8
            return raw
        match ELEMENT_BITS[self.element]:
            case 4:
                return [_decode_e2m1_pair(raw[0], p, self.pair_type) for p in range(4)]
            case 8:
                return self._decode_fp8(raw)
            case 16:
                return _pick_halves(raw, self.order)
            case _:
                return _split_f32(raw, self.order)

    def _decode_fp8(self, raw: list[ir.Value]) -> Fragment:
        if self.order.pairs[0] != (0, 1):
            raw = [_permute_bytes(raw[0], raw[1], selector) for selector in (0x5140, 0x7362)]
        halves = [half(r) for r in raw for half in (ptx.low_half, ptx.high_half)]
        pairs = [decode_fp8_pair(half, PTX_NAMES[self.element]) for half in halves]
        return [_f16_to_bf16_pair(p) for p in pairs] if self.pair_type == "bf16" else pairs


def lane_order(weight: str) -> LaneOrder:
    """The order of K within a lane that this weight type asks for."""
    return LANE_ORDERS[ELEMENT_BITS[weight]]


def decode_fp8_pair(half: ir.Value, name: str) -> ir.Value:
    """Two fp8 as two f16, exactly."""
    return ptx.inline_ptx(f"cvt.rn.f16x2.{name}x2 $0, $1;", "=r,h", [half], [ptx.i32()])[0]


def _f16_to_bf16_pair(pair: ir.Value) -> ir.Value:
    """Two f16 that came from fp8 as two bf16, exactly: through f32."""
    text = (
        "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; "
        "cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 $0, b, a; }"
    )
    return ptx.inline_ptx(text, "=r,r", [pair], [ptx.i32()])[0]


def _decode_e2m1_pair(register: ir.Value, index: int, pair_type: str) -> ir.Value:
    """Nibbles ``index`` and ``index + 4`` of a register as two f16 or bf16, exactly.

    A nibble ``seem`` put where the sign and the low bits of the exponent and the first of the
    mantissa are is the value times 2^(1 - bias), its subnormals included: 2^(bias - 1) restores it.
    """
    mantissa_bits, factor = (10, "0x74007400") if pair_type == "f16" else (7, "0x7E807E80")
    magnitude = _shift_left(register, mantissa_bits - 1 - 4 * index)
    sign = _shift_left(register, 12 - 4 * index)
    lowest = 1 << (mantissa_bits - 1)
    mask = 7 * lowest * 0x1_0001
    bits = arith.ori(
        arith.andi(magnitude, ptx.i32_value(mask)),
        arith.andi(sign, ptx.i32_value(0x8000_8000 - (1 << 32))),
    )
    # `fma` with -0: sm_89 has no multiplication of bf16 pairs.
    text = f"fma.rn.{pair_type}x2 $0, $1, $2, $3;"
    constants = [ptx.i32_value(int(factor, 16)), ptx.i32_value(0x8000_8000 - (1 << 32))]
    return ptx.inline_ptx(text, "=r,r,r,r", [bits, *constants], [ptx.i32()])[0]


def _shift_left(value: ir.Value, amount: int) -> ir.Value:
    """Shift left, or right where ``amount`` is negative."""
    if amount >= 0:
        return arith.shli(value, ptx.i32_value(amount)) if amount else value
    return arith.shrui(value, ptx.i32_value(-amount))


def _permute_bytes(low: ir.Value, high: ir.Value, selector: int) -> ir.Value:
    """``prmt``: nibble i of ``selector`` says which of the 8 bytes becomes byte i."""
    return ptx.inline_ptx(
        f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [low, high], [ptx.i32()]
    )[0]


def _pick_halves(raw: list[ir.Value], order: LaneOrder) -> Fragment:
    """Eight 16-bit elements in memory order as the pairs of ``order``."""
    if order.pairs[0] == (0, 1):
        return raw
    fragment: Fragment = []
    for first, second in order.pairs:
        selector = 0x7632 if first % 2 else 0x5410
        fragment.append(_permute_bytes(raw[first // 2], raw[second // 2], selector))
    return fragment


def _split_f32(raw: list[ir.Value], order: LaneOrder) -> Fragment:
    """Eight f32 in memory order as the pairs of ``order``, by part."""
    elements = [
        [arith.bitcast(ptx.i32(), part) for part in split_f32(value, PARTS["f32"])]
        for value in (arith.bitcast(ptx.f32(), register) for register in raw)
    ]
    return [
        _permute_bytes(elements[first][part], elements[second][part], 0x7632)
        for part in reversed(range(PARTS["f32"]))
        for first, second in order.pairs
    ]


def multiply(
    atom: MmaAtom,
    rows: tuple[Fragment, Fragment],
    columns: Fragment,
    types: tuple[str, str],
) -> list[ir.Value]:
    """The 16 x 8 sums of products over one block of 32 K, four f32 a lane.

    ``rows`` are the fragments of rows g and g + 8 of A. ``types`` are the PTX types of A and B.
    Where one operand has several parts, the other is multiplied with each.
    """
    sums = [ptx.f32_value(0.0)] * 4
    text = (
        f"mma.sync.aligned.m16n8k{atom.k}.row.col.f32.{types[0]}.{types[1]}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    for step in range(0, max(len(rows[0]), len(columns)), 2):
        of_a, of_b = step % len(rows[0]), step % len(columns)
        a = [rows[half][of_a + i] for i in range(2) for half in range(2)]
        b = columns[of_b : of_b + 2]
        sums = ptx.inline_ptx(
            text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *sums], [ptx.f32()] * 4
        )
    return sums


def operand_types(atom: MmaAtom, lhs: str, rhs: str, pair_type: str) -> tuple[str, str]:
    """PTX's names of the operand types of x and w, as ``atom`` takes them."""
    if atom.operand == "fp8":
        return PTX_NAMES[lhs], PTX_NAMES[rhs]
    return pair_type, pair_type
