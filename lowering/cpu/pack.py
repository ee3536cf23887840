# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The packing launch: x decoded once, in the order in which the matmul kernel reads it.

Two layouts share one buffer, one for each form:

- *rows* (stream): ``[row][K]`` operands, and ``[row][chunk][lane]`` exponents;
- *slabs* (tiled): ``[slab][K / pair][row in slab]`` elements, so that one row's element is a
  broadcast load, and ``[slab][block][row in slab]`` exponents.

K is padded with zeros to whole chunks. Rows past the last are copies of it, and are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, minimum
from block32.lowering.cpu import operands, ops
from block32.lowering.cpu.decode import IN_LANE, NATURAL, Decoder
from block32.lowering.cpu.formats import SMALL_FLOATS
from block32.lowering.cpu.isa import InstructionSet, instruction_set
from block32.lowering.cpu.scales import Exponents
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul

VALUES = "lhs_values"
EXPONENTS = "lhs_exponents"


def row_values(kernel: KernelContext, isa: InstructionSet, rows: int) -> ir.Value:
    """The packed values as rows."""
    element = "bf16" if isa.dot == "bf16" else "f32"
    padded = operands.padded_k(kernel.problem, isa)
    return kernel.memref(VALUES, f"memref<{rows}x{padded}x{element}>")


def row_exponents(kernel: KernelContext, isa: InstructionSet, rows: int) -> ir.Value:
    """The exponents as rows of chunks."""
    chunks = operands.padded_k(kernel.problem, isa) // isa.chunk
    element = Exponents(isa).type_text
    return kernel.memref(EXPONENTS, f"memref<{rows}x{chunks}x{isa.lanes}x{element}>")


def slab_values(kernel: KernelContext, isa: InstructionSet, rows: int, slabs: Index) -> ir.Value:
    """The packed values as slabs of ``rows`` rows; pairs of bf16 as i32."""
    element = "i32" if isa.dot == "bf16" else "f32"
    steps = operands.padded_k(kernel.problem, isa) // isa.pair
    return kernel.memref(VALUES, f"memref<?x{steps}x{rows}x{element}>", (slabs,))


def slab_exponents(kernel: KernelContext, isa: InstructionSet, rows: int, slabs: Index) -> ir.Value:
    """The exponents as slabs."""
    blocks, element = kernel.problem.k_blocks, Exponents(isa).type_text
    return kernel.memref(EXPONENTS, f"memref<?x{blocks}x{rows}x{element}>", (slabs,))


def values_size(problem: ScaledMatmul, isa: InstructionSet, padded_rows: Index) -> Index:
    """i32 or f32 elements of the packed values."""
    return padded_rows * (operands.padded_k(problem, isa) // isa.pair)


def row_exponents_size(problem: ScaledMatmul, isa: InstructionSet, rows: int) -> int:
    """Elements of the exponents as rows."""
    return rows * (operands.padded_k(problem, isa) // isa.chunk) * isa.lanes


class ActivationReader:
    """Reads x as operands."""

    def __init__(self, kernel: KernelContext, isa: InstructionSet):
        """Bind x at the insertion point."""
        self._isa = isa
        self._lhs = operands.lhs_elements(kernel)
        is_small = kernel.problem.lhs in SMALL_FLOATS
        self._decoder = Decoder(isa, kernel.problem.lhs) if is_small else None

    def operands(self, row: Index, k: Index, count: int, order: Sequence[int]) -> list[ir.Value]:
        """The operands of a chunk, of which ``count`` elements exist and the others are zeros."""
        chunk = self._isa.chunk
        if self._decoder is not None:
            codes = self._decoder.load_codes(self._lhs, row, k, count, chunk)
            return self._decoder.operands(codes, order)
        elements = ops.load_first(self._lhs, [row, k], count, chunk)
        if self._isa.dot == "bf16":
            return ops.parts(ops.permute(elements, order), 32)
        if not isinstance(ops.element_type(elements), ir.F32Type):
            elements = ops.convert(arith.extf, elements, ops.f32())
        return ops.parts(elements, self._isa.lanes)


def emit_pack(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the packing kernel: a workgroup packs one row (stream) or one slab (tiled)."""
    if tier.form == "stream":
        _emit_pack_row(problem, tier, kernel)
    else:
        _emit_pack_slab(problem, tier, kernel)


def _emit_pack_row(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    assert tier.tile is not None
    isa = instruction_set(tier.isa)
    exponents = Exponents(isa)
    reader = ActivationReader(kernel, isa)
    values = row_values(kernel, isa, tier.tile[0])
    packed_exponents = row_exponents(kernel, isa, tier.tile[0])
    scales = operands.lhs_scales(kernel) if problem.lhs_scaled else None
    packed_row = kernel.workgroup_id()
    row = minimum(packed_row, kernel.m - 1)

    def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
        k = chunk * isa.chunk
        for i, operand in enumerate(reader.operands(row, k, count, IN_LANE)):
            ops.store(operand, values, [packed_row, k + i * ops.length(operand)])
        if scales is None:
            lanes = ops.broadcast(exponents.zero(), isa.lanes)
        else:
            lanes = operands.chunk_exponents(exponents, isa, scales, row, chunk, count)
        ops.store(lanes, packed_exponents, [packed_row, chunk, 0])
        return []

    operands.for_chunks(problem.k, isa.chunk, [], pack_chunk)


def _emit_pack_slab(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    assert tier.mma is not None
    rows = tier.mma[0]
    isa = instruction_set(tier.isa)
    reader = ActivationReader(kernel, isa)
    slabs = kernel.workgroup_count()
    values = slab_values(kernel, isa, rows, slabs)
    element = "i32" if isa.dot == "bf16" else "f32"
    steps = isa.chunk // isa.pair
    slab = kernel.workgroup_id()
    natural = ops.stack_buffer(f"memref<{rows}x{steps}x{element}>")

    def pack_chunk(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
        def decode_row(r: Index) -> None:
            row = minimum(slab * rows + r, kernel.m - 1)
            for i, operand in enumerate(reader.operands(row, chunk * isa.chunk, count, NATURAL)):
                if isa.dot == "bf16":
                    operand = ops.bitcast(operand, ops.i32())
                ops.store(operand, natural, [r, i * ops.length(operand)])

        def scatter(step: Index) -> None:
            for r in range(rows):
                element = ops.load_scalar(natural, [r, step])
                ops.store_scalar(element, values, [slab, chunk * steps + step, r])

        ops.repeat(0, rows, 1, decode_row)
        ops.repeat(0, steps, 1, scatter)
        return []

    operands.for_chunks(problem.k, isa.chunk, [], pack_chunk)
    _pack_slab_exponents(problem, isa, rows, kernel)


def _pack_slab_exponents(
    problem: ScaledMatmul, isa: InstructionSet, rows: int, kernel: KernelContext
) -> None:
    slab = kernel.workgroup_id()
    exponents = Exponents(isa)
    packed = slab_exponents(kernel, isa, rows, kernel.workgroup_count())
    scales = operands.lhs_scales(kernel) if problem.lhs_scaled else None

    def pack_block(block: Index) -> None:
        for r in range(rows):
            exponent = exponents.zero()
            if scales is not None:
                row = minimum(slab * rows + r, kernel.m - 1)
                exponent = exponents.from_bytes(ops.load_scalar(scales, [row, block]))
            ops.store_scalar(exponent, packed, [slab, block, r])

    ops.repeat(0, problem.k_blocks, 1, pack_block)
