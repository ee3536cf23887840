# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Kernels that Triton compiles for gfx950: an outside source of right machine code.

Triton runs these kinds of kernels on real gfx950 in its own tests. Compiling needs no GPU.
"""

from __future__ import annotations

# No annotations of types beside constexpr: Triton reads this file's functions as its own language.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportInvalidTypeForm=false
import os
from dataclasses import dataclass
from typing import Any

import pytest

# Without a choice Triton warns that the default of fused multiply-adds will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

triton: Any = pytest.importorskip("triton", reason="the triton extra is not installed")
tl: Any = pytest.importorskip("triton.language")

from block32.tools.gfx950_executor import Executor, Report  # noqa: E402


@triton.jit
def scaled_dot(
    a,
    b,
    c,
    a_scale,
    b_scale,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_PACKED: tl.constexpr,
    B_PACKED: tl.constexpr,
):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    a_k = tl.arange(0, K // A_PACKED)
    b_k = tl.arange(0, K // B_PACKED)
    block = tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * (K // A_PACKED) + a_k[None, :])
    right = tl.load(b + n[None, :] * (K // B_PACKED) + b_k[:, None])
    left_scale = tl.load(a_scale + m[:, None] * (K // 32) + block[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // 32) + block[None, :])
    product = tl.dot_scaled(left, left_scale, A_FORMAT, right, right_scale, B_FORMAT)
    tl.store(c + m[:, None] * N + n[None, :], product)


@triton.jit
def scaled_matmul(
    a,
    b,
    c,
    a_scale,
    b_scale,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK_K // 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + (first + k)[None, :])
        right = tl.load(b + n[None, :] * K + (first + k)[:, None])
        blocks = first // 32 + block
        left_scale = tl.load(a_scale + m[:, None] * (K // 32) + blocks[None, :])
        right_scale = tl.load(b_scale + n[:, None] * (K // 32) + blocks[None, :])
        total = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3", total)
    tl.store(c + m[:, None] * N + n[None, :], total.to(tl.bfloat16))


@triton.jit
def reductions(x, row_sums, column_maxima, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    values = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(row_sums + m, tl.sum(values, 1))
    tl.store(column_maxima + n, tl.max(values, 0))


@triton.jit
def softmax(x, y, columns, N: tl.constexpr):
    n = tl.arange(0, N)
    row = tl.program_id(0) * columns
    values = tl.load(x + row + n, mask=n < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(y + row + n, (powers / tl.sum(powers, 0)).to(tl.float16), mask=n < columns)


@triton.jit
def running_sum(x, y, N: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + n, tl.cumsum(tl.load(x + n), 0))


@triton.jit
def histogram(x, counts, largest, parity, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + i)
    tl.atomic_add(counts + values, 1)
    tl.atomic_max(largest + values % 4, i)
    tl.atomic_xor(parity + values % 2, i)


@triton.jit
def sum_by_last_arrival(x, partials, counter, y, S, N: tl.constexpr, ORDER: tl.constexpr):
    split = tl.program_id(0)
    i = tl.arange(0, N)
    tl.store(partials + split * N + i, tl.load(x + split * N + i) * 2.0)
    arrived = tl.atomic_add(counter, 1, sem=ORDER, scope="gpu")
    if arrived == S - 1:
        total = tl.zeros((N,), tl.float32)
        for s in range(S):
            total += tl.load(partials + s * N + i)
        tl.store(y + i, total)
        tl.store(counter, 0)


@triton.jit
def quotients(x, y, z, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(z + i, tl.fdiv(a, b, ieee_rounding=True))
    tl.store(z + N + i, tl.sqrt_rn(tl.abs(a)))
    tl.store(z + 2 * N + i, tl.floor(a) * tl.exp2(b))


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the code object, its kernel's name and its dynamic LDS."""

    hsaco: bytes
    name: str
    lds_bytes: int
    assembly: str

    def launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Report:
        """Run it: arrays and Buffers are pointers, numbers constants."""
        numbers = [a for a in arguments if isinstance(a, int | float)]
        pointers = [a for a in arguments if not isinstance(a, int | float)]
        return Executor(self.hsaco).launch(
            self.name, grid, pointers, numbers, dynamic_lds_bytes=self.lds_bytes, **options
        )


def compile_kernel(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any
) -> Compiled:
    """Compile for gfx950.

    Args:
        kernel: A function above.
        signature: Triton's types of the run-time arguments by name.
        constants: Values of the constexpr arguments by name.
        options: num_warps, num_stages, matrix_instr_nonkdim.
    """
    types = signature | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants)
    target = triton.backends.compiler.GPUTarget("hip", "gfx950", 64)
    result = triton.compile(source, target=target, options=options)
    return Compiled(
        result.asm["hsaco"], result.metadata.name, result.metadata.shared, result.asm["amdgcn"]
    )
