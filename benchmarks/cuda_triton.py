# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# Triton turns integers into constexpr when a kernel is launched.
# pyright: reportMissingImports=false, reportArgumentType=false, reportPrivateImportUsage=false
"""The yardsticks of ``cuda.py``: Triton kernels of the same design on ``tl.dot_scaled``, and torch.

Needs torch and triton, which block32 itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: What one timing batch gets: the operands of each call.
Calls = Sequence[tuple[torch.Tensor, ...]]


@triton.jit
def _tiled(
    x, w, x_scale, w_scale, y, slots, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Tiles of y = x w^T in order of M; with SPLITS > 1 partial sums go to ``slots``."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(M, BLOCK_M)
    rows = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    ks, blocks = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    is_row, is_column = rows[:, None] < M, columns[:, None] < N
    for step in range(split * steps, min(split * steps + steps, tl.cdiv(K, BLOCK_K))):
        k = step * BLOCK_K + ks
        block = step * (BLOCK_K // 32) + blocks
        in_k, in_blocks = k[None, :] < K, block[None, :] < tl.cdiv(K, 32)
        a = tl.load(x + rows[:, None] * K + k[None, :], is_row & in_k, 0.0)
        b = tl.load(w + columns[:, None] * K + k[None, :], is_column & in_k, 0.0)
        pitch = tl.cdiv(K, 32)
        sa = tl.load(x_scale + rows[:, None] * pitch + block[None, :], is_row & in_blocks, 0)
        place = columns[:, None] // 32 * pitch + block[None, :]
        sb = tl.load(w_scale + place, is_column & in_blocks, 0)
        total = tl.dot_scaled(a, sa, "e4m3", b.T, sb, "e4m3", total)
    mask = is_row & (columns[None, :] < N)
    place = rows[:, None] * N + columns[None, :]
    if SPLITS == 1:
        tl.store(y + place, total.to(y.dtype.element_ty), mask)
    else:
        tl.store(slots + split * M * N + place, total, mask)


@triton.jit
def _reduce(slots, y, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums in split order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(slots + split * size + place, place < size, 0.0)
    tl.store(y + place, total.to(y.dtype.element_ty), place < size)


@triton.jit
def _packed(
    x, w, x_scale, w_scale, y, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Few rows: packed row r is row r // PACK on K panel r % PACK; agreeing panels are summed."""
    packed_m, packed_n = tl.arange(0, BLOCK_M * PACK), tl.arange(0, BLOCK_N * PACK)
    rows, row_panel = packed_m // PACK, packed_m % PACK
    columns = tl.program_id(0) * BLOCK_N + packed_n // PACK
    column_panel = packed_n % PACK
    ks, blocks = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    total = tl.zeros((BLOCK_M * PACK, BLOCK_N * PACK), tl.float32)
    pitch = tl.cdiv(K, 32)
    is_row, is_column = rows[:, None] < M, columns[:, None] < N
    for step in range(tl.cdiv(K, BLOCK_K * PACK)):
        ka = (step * PACK + row_panel[:, None]) * BLOCK_K + ks[None, :]
        kb = (step * PACK + column_panel[:, None]) * BLOCK_K + ks[None, :]
        a = tl.load(x + rows[:, None] * K + ka, is_row & (ka < K), 0.0)
        b = tl.load(w + columns[:, None] * K + kb, is_column & (kb < K), 0.0)
        ba = (step * PACK + row_panel[:, None]) * (BLOCK_K // 32) + blocks[None, :]
        bb = (step * PACK + column_panel[:, None]) * (BLOCK_K // 32) + blocks[None, :]
        sa = tl.load(x_scale + rows[:, None] * pitch + ba, is_row & (ba < pitch), 0)
        sb = tl.load(w_scale + columns[:, None] // 32 * pitch + bb, is_column & (bb < pitch), 0)
        total = tl.dot_scaled(a, sa, "e4m3", b.T, sb, "e4m3", total)
    agree = row_panel[:, None] == column_panel[None, :]
    total = tl.where(agree, total, 0.0)
    by_panel = tl.reshape(total, (BLOCK_M, PACK, BLOCK_N, PACK))
    sums = tl.sum(tl.sum(by_panel, 3), 1)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y + m * N + n, sums.to(y.dtype.element_ty), (m < M) & (n < N))


@dataclass(frozen=True)
class Config:
    """One Triton configuration; ``pack`` 0 means the tiled kernel."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    pack: int = 0

    def describe(self) -> str:
        """Such as ``tiled 64x64x256 split-K 4``."""
        form = f"packed P{self.pack}" if self.pack else "tiled"
        split = f" split-K {self.splits}" if self.splits > 1 else ""
        return f"{form} {self.block_m}x{self.block_n}x{self.block_k}{split}"


def configs(m: int) -> list[Config]:
    """A handful for this many rows: what was best of more on an H200, and its neighbours."""
    if m <= 32:
        rows = 16 if m <= 16 else 32
        tiled = [
            Config(rows, 64, 256, 4, 3, 4),
            Config(rows, 64, 256, 4, 3, 8),
            Config(rows, 32, 256, 4, 3, 4),
            Config(rows, 64, 256, 4, 3, 1),
        ]
        packed = Config(8, 16, 256, 2, 3, pack=2) if m <= 8 else Config(32, 32, 256, 2, 3, pack=1)
        return [*tiled, packed]
    return [
        Config(64, 64, 256, 4, 2, 4),
        Config(128, 128, 128, 8, 3, 4 if m <= 512 else 1),
        Config(128, 128, 128, 4, 2),
        Config(128, 64, 128, 4, 3),
    ]


def triton_call(config: Config, m: int, n: int, k: int) -> Callable[..., torch.Tensor]:
    """A function of (x, w, x_scale, w_scale) that launches the kernels and gives y in bf16."""
    slots = torch.empty(
        (config.splits, m, n) if config.splits > 1 else (1,), dtype=torch.float32, device="cuda"
    )

    def call(
        x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
    ) -> torch.Tensor:
        y = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
        tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        launch = {"num_warps": config.warps, "num_stages": config.stages}
        columns = triton.cdiv(n, config.block_n)
        if config.pack:
            _packed[(columns,)](
                x, w, x_scale, w_scale, y, m, n, k, **tile, PACK=config.pack, **launch
            )
            return y
        grid = (columns * triton.cdiv(m, config.block_m), config.splits)
        _tiled[grid](
            x, w, x_scale, w_scale, y, slots, m, n, k, **tile, SPLITS=config.splits, **launch
        )
        if config.splits > 1:
            blocks = triton.cdiv(m * n, 1024)
            _reduce[(blocks,)](slots, y, m * n, SPLITS=config.splits, BLOCK=1024)
        return y

    return call


def torch_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """PyTorch's own matmul, in the type of its operands."""
    return torch.nn.functional.linear(x, w)


def torch_fp8(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """PyTorch's own fp8 matmul, which has one f32 scale a row and not one a block."""
    return torch._scaled_mm(x, w.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16)


def time_calls(call: Callable[..., torch.Tensor], calls: Calls, repeats: int = 20) -> float:
    """Microseconds of one call: the difference of two CUDA graphs of many and of few calls."""
    for operands in calls[:3]:
        call(*operands)
    torch.cuda.synchronize()
    few = max(1, len(calls) // 6)
    graphs = [_capture(call, calls[:few]), _capture(call, calls)]
    medians = [_median_time(graph, repeats) for graph in graphs]
    return (medians[1] - medians[0]) * 1e3 / (len(calls) - few)


def _capture(call: Callable[..., torch.Tensor], calls: Calls) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operands in calls:
            call(*operands)
    return graph


def _median_time(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Milliseconds of a replay."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Terabytes a second that a large copy on the device reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    # Not in a graph, where a copy may go to the slower copy engine.
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / min(times) / 1e9
