# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One row of x: a simdgroup computes a column of y, reading its row of w once, 16 elements a lane.

Lane l takes the chunks of 16 K at l, l + 32, ... and the rest of K element by element; the partial
sums meet in a butterfly. With block scales a chunk lies inside one block and is scaled as a whole.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import block_scaled, builder, fp8
from block32.lowering.apple.builder import AirKernel, Int, Pointer, Word, less, when, wide
from block32.lowering.apple.epilogue import run_alignment, store_run
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import SIMDGROUP_SIZE, KernelError, KernelSignature
from block32.lowering.problem import BLOCK_K, ceil_div

#: Columns of y, one a simdgroup, in a threadgroup.
COLUMNS = 4
THREADS = (COLUMNS * SIMDGROUP_SIZE, 1, 1)

#: K elements that a lane takes at a time, and in one load.
CHUNK = 16
RUN = 4


def serves(matmul: Matmul) -> str | None:
    """Why this form cannot compute a matmul of one row, or None."""
    if matmul.grouping:
        return "a grouped matmul has no GEMV form"
    if matmul.rhs_transposed:
        return "w stored [K, N] has no GEMV form"
    return None


def signature(matmul: Matmul, name: str) -> KernelSignature:
    """The kernel's parameters, those of the dense form: both can be tiers of one dispatch."""
    reason = serves(matmul)
    if reason is not None:
        raise KernelError(reason)
    constants = 1 if matmul.m is None else 0
    return KernelSignature(name, matmul.buffers(), constants, THREADS, matmul.architecture)


def grid(matmul: Matmul, m: int) -> tuple[int, int, int]:
    """Threadgroups: every simdgroup one column, ``m`` is 0 or 1."""
    return ceil_div(matmul.n, COLUMNS) * m, 1, 1


def write(matmul: Matmul, kernel: AirKernel) -> None:
    """Writes the kernel's body."""
    column = kernel.threadgroup(0) * COLUMNS + kernel.simdgroup
    when(less(column, matmul.n), lambda: _column(matmul, kernel, column))


def _column(matmul: Matmul, kernel: AirKernel, column: Word) -> None:
    """One element of y; all lanes of the simdgroup are here."""
    x = kernel.buffer("lhs")
    w = kernel.buffer("rhs").at(wide(column) * matmul.k)
    scale = _ChunkScale(matmul, kernel, column)
    total = _sum_chunks(matmul, kernel, x, w, scale)
    total = _add_rest(matmul, kernel, x, w, scale, total)
    for distance in (16, 8, 4, 2, 1):
        mask = arith.constant(ir.IntegerType.get_signless(16), distance)
        other = kernel.call("air.simd_shuffle_xor.f32", builder.f32(), [total, mask])
        total = arith.addf(total, other)
    row = Word(builder.as_value(0))
    when(builder.equal(kernel.lane, 0), lambda: store_run(kernel, matmul, [total], row, column))


def _sum_chunks(
    matmul: Matmul, kernel: AirKernel, x: Pointer, w: Pointer, scale: _ChunkScale
) -> ir.Value:
    """A lane's sum over its whole chunks."""
    lanes = builder.vector_type(RUN, builder.f32())
    zero = builder.zero(lanes)

    def products(at: Word) -> ir.Value:
        sums = zero
        for offset in range(0, CHUNK, RUN):
            a = _load_run(x, at + offset, matmul.k, matmul.lhs)
            b = _load_run(w, at + offset, matmul.k, matmul.rhs)
            product = arith.mulf(a, b, fastmath=arith.FastMathFlags.contract)
            sums = arith.addf(sums, product, fastmath=arith.FastMathFlags.contract)
        return sums

    def chunk(index: Word, carried: list[ir.Value]) -> list[ir.Value]:
        at = index << (CHUNK.bit_length() - 1)
        if not matmul.is_scaled:
            return [arith.addf(carried[0], products(at))]
        factors = scale.factors(index >> ((BLOCK_K // CHUNK).bit_length() - 1))
        return [block_scaled.add_scaled(carried[0], products(at), factors)]

    chunks = matmul.k // CHUNK
    (sums,) = builder.loop(kernel.lane, chunks, SIMDGROUP_SIZE, [zero], chunk)
    pairs = [builder.extract(sums, i) for i in range(RUN)]
    return arith.addf(arith.addf(pairs[0], pairs[1]), arith.addf(pairs[2], pairs[3]))


def _load_run(base: Pointer, at: Int, row_elements: int, element: str) -> ir.Value:
    alignment = run_alignment(row_elements, base.element, RUN)
    return fp8.decode(base.at(at).load(RUN, alignment), element)


def _add_rest(
    matmul: Matmul,
    kernel: AirKernel,
    x: Pointer,
    w: Pointer,
    scale: _ChunkScale,
    total: ir.Value,
) -> ir.Value:
    """Adds what lies behind the last whole chunk: one element a lane, none for the others."""
    rest = matmul.k % CHUNK
    if rest == 0:
        return total
    first = matmul.k - rest
    inside = less(kernel.lane, rest)
    # Lanes beyond read the last element, and drop it.
    at = builder.choose(inside, kernel.lane + first, first)

    def value(base: Pointer, element: str) -> ir.Value:
        return fp8.decode(builder.broadcast(base.at(at).load(), RUN), element)

    product = arith.mulf(value(x, matmul.lhs), value(w, matmul.rhs))
    if matmul.is_scaled:
        factors = scale.factors(first // BLOCK_K)
        product = block_scaled.add_scaled(builder.zero(product.type), product, factors)
    scalar = arith.select(inside, builder.extract(product, 0), builder.float_constant(0.0))
    return arith.addf(total, scalar)


class _ChunkScale:
    """The scale bytes of one column of y along K."""

    def __init__(self, matmul: Matmul, kernel: AirKernel, column: Word):
        self.keep_infinity = "f8E5M2" in (matmul.lhs, matmul.rhs)
        self.lhs = kernel.buffer("lhs_scale") if matmul.lhs_scaled else None
        self.rhs: Pointer | None = None
        if matmul.rhs_block is not None:
            row = column if matmul.rhs_block[0] == 1 else column >> 5
            self.rhs = kernel.buffer("rhs_scale").at(wide(row) * matmul.k_blocks)

    def factors(self, block: Int) -> block_scaled.Factors:
        """The factors at a block of K, the same in every element of a run."""
        assert self.rhs is not None

        def of(pointer: Pointer, larger_first: bool) -> block_scaled.Factors:
            byte = arith.extui(builder.i32(), pointer.at(block).load())
            return block_scaled.factors(byte, larger_first)

        scale = of(self.rhs, larger_first=True)
        if self.lhs is not None:
            lhs = of(self.lhs, larger_first=False)
            scale = block_scaled.combine(lhs, scale, self.keep_infinity)
        first, second = (builder.broadcast(value, RUN) for value in (scale.first, scale.second))
        return block_scaled.Factors(first, second)


def build(matmul: Matmul, name: str) -> tuple[KernelSignature, ir.Module]:
    """The kernel's signature and its ops."""
    kernel_signature = signature(matmul, name)
    module = builder.build_kernel(kernel_signature, lambda kernel: write(matmul, kernel))
    return kernel_signature, module
