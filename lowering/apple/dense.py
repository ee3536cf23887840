# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Dense matmul: a threadgroup of four simdgroups owns a 64x64 tile of y, in Morton order."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder, morton
from block32.lowering.apple.builder import AirKernel, Int, Word, less, when
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.operand_tiles import Operand
from block32.lowering.apple.signature import KernelSignature
from block32.lowering.apple.simdgroup_tile import SIMDGROUP_TILE, SimdgroupTile
from block32.lowering.apple.tile_scales import Scales
from block32.lowering.common.index import Index, IndexValue, as_value, constant
from block32.lowering.problem import ceil_div

#: Rows and columns of y that one threadgroup owns: two by two simdgroups.
TILE = 2 * SIMDGROUP_TILE

THREADS = (128, 1, 1)


def signature(matmul: Matmul, name: str) -> KernelSignature:
    """The kernel's parameters; M is push constant 0 unless it is known."""
    constants = 1 if matmul.m is None else 0
    return KernelSignature(name, matmul.buffers(), constants, THREADS, matmul.architecture)


def grid(matmul: Matmul, m: int) -> tuple[int, int, int]:
    """Threadgroups for ``m`` rows: a padded Z-order square or oblong in one dimension."""
    if m == 0:
        return 0, 1, 1
    bits = morton.padded_bits(ceil_div(m, TILE)) + morton.padded_bits(ceil_div(matmul.n, TILE))
    return 1 << bits, 1, 1


def next_power_of_two(count: Index) -> Index:
    """The smallest power of two that is not below ``count``; 0 for 0."""
    if isinstance(count, int):
        return 1 << (count - 1).bit_length() if count else 0
    # Fill all bits below the highest one of count - 1. Zero becomes all ones, and then zero again.
    bits = as_value(count - 1)
    for shift in (1, 2, 4, 8, 16, 32):
        bits = arith.ori(bits, arith.shrui(bits, constant(shift)))
    return IndexValue(bits) + 1


def write(matmul: Matmul, kernel: AirKernel) -> None:
    """Writes the kernel's body."""
    m: Int = kernel.constant(0) if matmul.m is None else matmul.m
    tile_m, tile_n = morton.tile_position(kernel.threadgroup(0), *_padded_bits(matmul, kernel, m))
    m0 = tile_m * TILE + (kernel.simdgroup >> 1) * SIMDGROUP_TILE
    n0 = tile_n * TILE + (kernel.simdgroup & 1) * SIMDGROUP_TILE
    lhs = Operand(kernel.buffer("lhs"), m, matmul.k, matmul.lhs_transposed)
    rhs = Operand(kernel.buffer("rhs"), matmul.n, matmul.k, matmul.rhs_transposed)
    scales = None
    if matmul.is_scaled:
        lhs_scale = kernel.buffer("lhs_scale") if matmul.lhs_scaled else None
        scales = Scales(lhs_scale, kernel.buffer("rhs_scale"), m)
    tile = SimdgroupTile(kernel, matmul, lhs, rhs, (Word(m0.value), Word(n0.value)), scales)
    inside = builder.both(less(m0, m), less(n0, matmul.n))
    when(inside, lambda: tile.run(tile.store))


def _padded_bits(matmul: Matmul, kernel: AirKernel, m: Int) -> tuple[Int, int]:
    """Bits of the padded grid along M and N."""
    bits_n = morton.padded_bits(ceil_div(matmul.n, TILE))
    if isinstance(m, int):
        return morton.padded_bits(ceil_div(m, TILE)), bits_n
    last_tile = (m - 1) >> (TILE.bit_length() - 1)
    exact_zero = builder.as_value(0, builder.i1())  # a zero has 32 leading zeros
    zeros = kernel.call("air.clz.i32", builder.i32(), [last_tile.value, exact_zero])
    return 32 - Word(zeros), bits_n


def build(matmul: Matmul, name: str) -> tuple[KernelSignature, ir.Module]:
    """The kernel's signature and its ops."""
    kernel_signature = signature(matmul, name)
    module = builder.build_kernel(kernel_signature, lambda kernel: write(matmul, kernel))
    return kernel_signature, module
