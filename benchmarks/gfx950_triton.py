# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# pyright: reportMissingImports=false, reportArgumentType=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
"""Triton's kernels for gfx950, compiled without a card: a yardstick for block32's machine code.

The kernels do what block32's do: e4m3 operands, a scale byte a row and 32 K on x and one a 32x32
block on w, any M and N, tiled and packed, split-K with the sum in the launch. Rows past the end are
read as the last one, so that loops need no masks where K is a whole number of steps. Needs the
extra ``block32[triton]``.
"""

# Triton turns integers into constexpr when a kernel is compiled.

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

# Without a choice Triton warns that the default of fused multiply-adds will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl

from block32.dialects.kernel import KernelTier
from block32.lowering.common.partition import SplitPartition
from block32.lowering.gfx950.select import tier_from_table
from block32.tools.gfx950_executor import Instruction, parse_code_object
from block32.tools.gfx950_executor.mutate import instructions
from block32.tools.gfx950_launch_time import (
    LaunchTime,
    Way,
    Work,
    launch_time,
    moved_bytes,
    slot_bytes,
)
from block32.tools.gfx950_listing import KernelFacts, facts_of, occupancy

#: Rows and columns of w that share a scale byte.
_BLOCK = tl.constexpr(32)


@triton.jit
def _in_split_order(total, slots, counters, tile, split, SPLITS: tl.constexpr):
    """The sum of all splits in the last workgroup to arrive, and whether this is the one."""
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    first = slots + tile * SPLITS * M * N
    tl.store(first + split * M * N + place, total, cache_modifier=".cg")
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        total = tl.zeros((M, N), tl.float32)
        for number in range(SPLITS):
            total += tl.load(first + number * M * N + place, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return total, is_last


@triton.jit
def _tile_and_split(program, SPLITS: tl.constexpr):
    """What a workgroup computes; the splits of one tile are on one XCD, of which there are 8."""
    tile = program
    split = 0
    if SPLITS > 1:
        tile = program // (8 * SPLITS) * 8 + program % 8
        split = program // 8 % SPLITS
    return tile, split


@triton.jit
def _place_of(tile, tiles_m, tiles_n, M_FASTEST: tl.constexpr):
    """Where a tile is, along M and along N."""
    tile_m = tile % tiles_m if M_FASTEST else tile // tiles_n
    tile_n = tile // tiles_m if M_FASTEST else tile % tiles_n
    return tile_m, tile_n


@triton.jit
def tiled(
    x, w, x_scale, w_scale, y, slots, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_PACK: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, M_FASTEST: tl.constexpr,
):  # fmt: skip
    """A tile of y, N fastest or M fastest."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile, split = _tile_and_split(program, SPLITS)
    tile_m, tile_n = _place_of(tile, tiles_m, tiles_n, M_FASTEST)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    here, there = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    ks, blocks = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    size = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    start = split * size
    pitch = tl.cdiv(K, 32)
    x_at = x + here[:, None] * K + (start + ks)[None, :]
    w_at = w + there[None, :] * K + (start + ks)[:, None]
    xs_at = x_scale + here[:, None] * pitch + (start // 32 + blocks)[None, :]
    ws_at = w_scale + (there // _BLOCK)[:, None] * pitch + (start // 32 + blocks)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, tl.minimum(start + size, K), BLOCK_K):
        if EVEN_K:
            left, right = tl.load(x_at), tl.load(w_at)
            left_scale, right_scale = tl.load(xs_at), tl.load(ws_at)
        else:
            left = tl.load(x_at, (k + ks)[None, :] < K, 0.0)
            right = tl.load(w_at, (k + ks)[:, None] < K, 0.0)
            left_scale = tl.load(xs_at, (k // 32 + blocks)[None, :] < pitch, 0)
            right_scale = tl.load(ws_at, (k // 32 + blocks)[None, :] < pitch, 0)
        total = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3", total)
        x_at += BLOCK_K
        w_at += BLOCK_K
        xs_at += BLOCK_K // 32
        ws_at += BLOCK_K // 32
    is_last = True
    if SPLITS > 1:
        total, is_last = _in_split_order(total, slots, counters, tile, split, SPLITS)
    if is_last:
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        place = rows[:, None] * N + columns[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask)


@triton.jit
def packed(
    x, w, x_scale, w_scale, y, slots, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_PACK: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, M_FASTEST: tl.constexpr,
):  # fmt: skip
    """Few rows: packed row r is row r // K_PACK on K panel r % K_PACK; agreeing panels are kept."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile, split = _tile_and_split(program, SPLITS)
    tile_m, tile_n = _place_of(tile, tiles_m, tiles_n, M_FASTEST)
    packed_m, packed_n = tl.arange(0, BLOCK_M * K_PACK), tl.arange(0, BLOCK_N * K_PACK)
    here = tl.minimum(tile_m * BLOCK_M + packed_m // K_PACK, M - 1)
    there = tl.minimum(tile_n * BLOCK_N + packed_n // K_PACK, N - 1)
    m_panel, n_panel = packed_m % K_PACK, packed_n % K_PACK
    ks, blocks = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    step = BLOCK_K * K_PACK
    size = tl.cdiv(tl.cdiv(K, SPLITS), step) * step
    start = split * size
    pitch = tl.cdiv(K, 32)
    x_k = (start + m_panel * BLOCK_K)[:, None] + ks[None, :]
    w_k = (start + n_panel * BLOCK_K)[None, :] + ks[:, None]
    xs_k = (start + m_panel * BLOCK_K)[:, None] // 32 + blocks[None, :]
    ws_k = (start + n_panel * BLOCK_K)[:, None] // 32 + blocks[None, :]
    x_at, w_at = x + here[:, None] * K, w + there[None, :] * K
    xs_at = x_scale + here[:, None] * pitch
    ws_at = w_scale + (there // _BLOCK)[:, None] * pitch
    total = tl.zeros((BLOCK_M * K_PACK, BLOCK_N * K_PACK), tl.float32)
    for _ in range(start, tl.minimum(start + size, K), step):
        if EVEN_K:
            left, right = tl.load(x_at + x_k), tl.load(w_at + w_k)
            left_scale, right_scale = tl.load(xs_at + xs_k), tl.load(ws_at + ws_k)
        else:
            left = tl.load(x_at + x_k, x_k < K, 0.0)
            right = tl.load(w_at + w_k, w_k < K, 0.0)
            left_scale = tl.load(xs_at + xs_k, xs_k < pitch, 0)
            right_scale = tl.load(ws_at + ws_k, ws_k < pitch, 0)
        total = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3", total)
        x_k += step
        w_k += step
        xs_k += step // 32
        ws_k += step // 32
    if K_PACK > 1:
        total = tl.where(m_panel[:, None] == n_panel[None, :], total, 0.0)
        by_panel = tl.reshape(total, (BLOCK_M, K_PACK, BLOCK_N, K_PACK))
        total = tl.sum(tl.sum(by_panel, 3), 1)
    is_last = True
    if SPLITS > 1:
        total, is_last = _in_split_order(total, slots, counters, tile, split, SPLITS)
    if is_last:
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        place = rows[:, None] * N + columns[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask)


@cache
def tuned_tiers() -> dict[tuple[int, int], tuple[KernelTier, ...]]:
    """The configurations that were fastest on an MI355X for kernels of this design, by (N, K)."""
    path = Path(__file__).with_suffix(".toml")
    shapes = tomllib.loads(path.read_text(encoding="utf-8"))["shapes"]
    return {
        (shape["n"], shape["k"]): tuple(tier_from_table(fields) for fields in shape["tiers"])
        for shape in shapes
    }


def tuned_tier(m: int, n: int, k: int) -> KernelTier:
    """The configuration for ``m`` rows; the last one serves all above."""
    tiers = tuned_tiers()[n, k]
    return next((tier for tier in tiers if m <= (tier.max_m or m)), tiers[-1])


@dataclass(frozen=True)
class TritonKernel:
    """A compiled kernel.

    Attributes:
        hsaco: The code object.
        code: Its instructions.
        facts: Its name, registers and LDS.
    """

    hsaco: bytes
    code: tuple[Instruction, ...]
    facts: KernelFacts


def compile_tier(tier: KernelTier, k: int) -> TritonKernel:
    """Triton's kernel for a configuration, and a K that is a whole number of steps or is not."""
    splits = SplitPartition.create(k, tier.splits, step_of(tier)).count
    return _compile(replace(tier, max_m=None, splits=splits), k % step_of(tier) == 0)


def step_of(tier: KernelTier) -> int:
    """K elements of a step."""
    assert tier.tile is not None
    return tier.tile[2] * tier.k_pack


_POINTERS = {
    "x": "*fp8e4nv",
    "w": "*fp8e4nv",
    "x_scale": "*u8",
    "w_scale": "*u8",
    "y": "*bf16",
    "slots": "*fp32",
    "counters": "*i32",
}
_SIZES = ("M", "N", "K")


@cache
def _compile(tier: KernelTier, is_even: bool) -> TritonKernel:
    assert tier.tile is not None
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    constants = dict(zip(names, tier.tile, strict=True)) | {
        "K_PACK": tier.k_pack,
        "SPLITS": tier.splits,
        "EVEN_K": is_even,
        "M_FASTEST": tier.order == "m",
    }
    function = packed if tier.form == "packed" else tiled
    signature = _POINTERS | dict.fromkeys(_SIZES, "i32")
    aligned = [name for name in signature if name != "M"]
    source = triton.compiler.ASTSource(
        fn=function,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("hip", "gfx950", 64),
        options={
            "num_warps": tier.warps,
            "num_stages": tier.stages,
            "matrix_instr_nonkdim": tier.mma[0] if tier.mma else 16,
            "waves_per_eu": tier.waves_per_eu,
        },
    )
    hsaco, lds = result.asm["hsaco"], result.metadata.shared
    (kernel,) = parse_code_object(hsaco).kernels.values()
    facts = facts_of(hsaco, kernel)
    fitting = occupancy(facts.vgprs + facts.agprs, lds, facts.threads)
    return TritonKernel(
        hsaco,
        tuple(instructions(hsaco, kernel.name)),
        replace(facts, lds_bytes=lds, occupancy=fitting),
    )


def work_of(tier: KernelTier, kernel: TritonKernel, m: int, n: int, k: int) -> Work:
    """The work of a launch; a turn of the loop is one step of K."""
    assert tier.tile is not None
    block_m, block_n, _ = tier.tile
    step = step_of(tier)
    partition = SplitPartition.create(k, tier.splits, step)
    k_range = min(partition.size, k)
    mix = kernel.facts.loop or kernel.facts.whole
    tiles = ceil(m / block_m) * ceil(n / block_n)
    return Work(
        waves=tier.warps,
        workgroups=tiles * partition.count,
        matrix_clocks=mix.mfma_clocks * ceil(k_range / step),
        weight_bytes=block_n * k_range / tier.warps,
        weight_bytes_of_clock=block_n * step / tier.warps / mix.mfma_clocks,
        moved_bytes=moved_bytes(m, n, k),
        flops=2.0 * m * n * k,
        slot_bytes=slot_bytes(m, n, partition.count),
        has_second_launch=partition.count > 1 and tier.reduce == "second_launch",
    )


@cache
def _way(tier: KernelTier, k: int) -> Way:
    kernel = compile_tier(tier, k)
    return Way.create(kernel.code, work_of(tier, kernel, 1, 1, k).matrix_clocks)


def triton_launch(tier: KernelTier, m: int, n: int, k: int) -> LaunchTime:
    """The estimate of Triton's kernel of a configuration."""
    kernel = compile_tier(tier, k)
    work = work_of(tier, kernel, m, n, k)
    return launch_time(_way(replace(tier, max_m=None), k), kernel.facts, work)
