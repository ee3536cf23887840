# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising x: in the lanes that multiply it, or in a launch of its own.

Both work on what four neighbouring lanes hold of one row's block of 32 K, 8 elements each, and give
the bytes of ``lowering/common/quantization.py``. Scales come from that rule itself. Codes come from
the chip's conversion, which rounds and saturates alike; only the sign of a NaN is lost in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith, math

from block32.lowering.common.control import when
from block32.lowering.common.index import Condition, Index, both, ceil_div, choose, equal, less
from block32.lowering.common.quantization import scale_byte
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.atoms import LANE_ELEMENTS, LaneOrder, MmaAtom
from block32.lowering.nvidia.fragments import PTX_NAMES, Fragment, decode_fp8_pair
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.problem import BLOCK_K, ELEMENT_BITS, ScaledMatmul

#: Lanes that share a block of a row.
_LANES = BLOCK_K // LANE_ELEMENTS

#: Threads of a workgroup of the launch that quantises.
THREADS = 256

_BLOCKS_OF_A_WORKGROUP = THREADS // _LANES


class LaneBlock:
    """What a lane holds of a block: 8 elements of x as f32, and how the block is scaled.

    Attributes:
        values: The elements.
        byte: The block's scale byte as i32, the same in all four lanes.
    """

    def __init__(self, values: Sequence[ir.Value], rule: str, code_element: str):
        """Find the scale together with the three lanes that have the rest of the block."""
        self.values = values
        self._name = PTX_NAMES[code_element]
        self.byte = scale_byte(_largest_magnitude(values), rule, code_element)
        # 2^(127 - byte) has the exponent field 254 - byte: no division, which 2^-127 would break.
        opposite = arith.subi(ptx.i32_value(254), self.byte)
        self._factor = ptx.decode_scale(opposite)

    def code_pair(self, first: int, second: int) -> ir.Value:
        """The codes of two of the elements as an i16."""
        low, high = (arith.mulf(self.values[index], self._factor) for index in (first, second))
        return ptx.encode_fp8_pair(low, high, self._name)

    def code_word(self, first: int) -> ir.Value:
        """The codes of four neighbouring elements as an i32."""
        low, high = (self.code_pair(first + i, first + i + 1) for i in (0, 2))
        wide = arith.extui(ptx.i32(), high)
        return arith.ori(arith.extui(ptx.i32(), low), arith.shli(wide, ptx.i32_value(16)))

    def f16_pair(self, first: int, second: int) -> ir.Value:
        """The codes of two of the elements, as the f16 that they stand for."""
        return decode_fp8_pair(self.code_pair(first, second), self._name)

    def fragment(self, order: LaneOrder, atom: MmaAtom) -> Fragment:
        """The lane's elements, quantised, as a matrix instruction takes them."""
        if atom.operand == "fp8":
            return [self.code_word(first) for first in range(0, LANE_ELEMENTS, 4)]
        return [self.f16_pair(*pair) for pair in order.pairs]


def _largest_magnitude(values: Sequence[ir.Value]) -> ir.Value:
    """The largest ``|x|`` of the block in all four lanes; NaNs are passed over."""
    largest = ptx.f32_value(0.0)
    for value in values:
        largest = arith.maxnumf(largest, math.AbsFOp(value).result)
    distance = 1
    while distance < _LANES:
        largest = arith.maxnumf(largest, ptx.exchange_across(largest, distance))
        distance *= 2
    return largest


def to_f32(registers: Sequence[ir.Value], element: str) -> list[ir.Value]:
    """The elements of i32 registers in memory order, as f32."""
    match element:
        case "f32":
            return [arith.bitcast(ptx.f32(), register) for register in registers]
        case "bf16":
            halves = [
                half
                for register in registers
                for half in (
                    arith.shli(register, ptx.i32_value(16)),
                    arith.andi(register, ptx.i32_value(-0x1_0000)),
                )
            ]
            return [arith.bitcast(ptx.f32(), half) for half in halves]
        case _:
            f16 = ir.F16Type.get()
            return [
                arith.extf(ptx.f32(), arith.bitcast(f16, half(register)))
                for register in registers
                for half in (ptx.low_half, ptx.high_half)
            ]


# The launch.


def workgroups(problem: ScaledMatmul, m: Index) -> Index:
    """Workgroups of the launch: four lanes for each block of each row."""
    return ceil_div(m * problem.k_blocks, _BLOCKS_OF_A_WORKGROUP)


def emit_quantize(problem: ScaledMatmul, kernel: KernelContext) -> None:
    """The body of the launch that writes ``CODES`` and ``SCALES``."""
    m = ptx.as_i32(kernel.m)
    workgroup = ptx.as_i32(kernel.workgroup_id())
    thread = ptx.thread_id()
    number = workgroup * _BLOCKS_OF_A_WORKGROUP + thread // _LANES
    row, block = number // problem.k_blocks, number % problem.k_blocks
    lane = thread % _LANES
    first = block * BLOCK_K + lane * LANE_ELEMENTS
    is_row = less(row, m)
    values = _load(problem, kernel, row, first, is_row)
    code_element = problem.quantized().lhs
    quantized = LaneBlock(values, problem.lhs_quantize, code_element)
    codes = ptx.global_pointer(kernel, CODES, kernel.m * problem.k)
    codes = codes + ptx.row_offset(row, problem.k, first)
    with when(is_row):
        _store_codes(problem, codes, quantized, first)
        with when(equal(lane, 0)):
            scales = ptx.global_pointer(kernel, SCALES, kernel.m * problem.k_blocks)
            place = scales + ptx.row_offset(row, problem.k_blocks, block)
            i8 = ir.IntegerType.get_signless(8)
            place.store(arith.trunci(i8, quantized.byte), alignment=1)


def _is_even(problem: ScaledMatmul) -> bool:
    """A lane's elements are all inside the row or all behind it."""
    return problem.k % LANE_ELEMENTS == 0


def _load(
    problem: ScaledMatmul, kernel: KernelContext, row: Index, first: Index, is_row: Condition
) -> list[ir.Value]:
    """A lane's elements as f32; zeros where there are none."""
    size = ELEMENT_BITS[problem.lhs] // 8
    base = ptx.global_pointer(kernel, "lhs", kernel.m * problem.lhs_row_bytes)
    row_start = base + ptx.row_offset(choose(is_row, row, 0), problem.lhs_row_bytes)
    if _is_even(problem):
        exists = both(is_row, less(first, problem.k))
        place = row_start + choose(exists, first, 0) * size
        return to_f32(_load_words(place, LANE_ELEMENTS * size // 4, exists), problem.lhs)
    registers: list[ir.Value] = []
    element = ir.IntegerType.get_signless(8 * size)
    for index in range(LANE_ELEMENTS):
        exists = both(is_row, less(first + index, problem.k))
        loaded = (row_start + choose(exists, first + index, 0) * size).load(element, size)
        wide = arith.extui(ptx.i32(), loaded) if size < 4 else loaded
        registers.append(ptx.or_zero(wide, exists))
    if size == 2:
        pairs = zip(registers[::2], registers[1::2], strict=True)
        shift = ptx.i32_value(16)
        registers = [arith.ori(low, arith.shli(high, shift)) for low, high in pairs]
    return to_f32(registers, problem.lhs)


def _load_words(place: Pointer, count: int, exists: Condition) -> list[ir.Value]:
    """``count`` i32, 16 bytes at a time; zeros where they do not exist."""
    four = ir.VectorType.get([4], ptx.i32())
    return [
        ptx.or_zero(word, exists)
        for chunk in range(count // 4)
        for word in ptx.vector_elements((place + 16 * chunk).load(four, alignment=16))
    ]


def _store_codes(problem: ScaledMatmul, place: Pointer, block: LaneBlock, first: Index) -> None:
    """Store a lane's codes, those that exist."""
    if _is_even(problem):
        with when(less(first, problem.k)):
            words = [block.code_word(index) for index in range(0, LANE_ELEMENTS, 4)]
            place.store(ptx.make_vector(words), alignment=LANE_ELEMENTS)
        return
    i8 = ir.IntegerType.get_signless(8)
    for index in range(LANE_ELEMENTS):
        with when(less(first + index, problem.k)):
            code = arith.trunci(i8, block.code_pair(index, index))
            (place + index).store(code, alignment=1)
