# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The shapes of whole layers: some threadgroups of each, out of the vmfb, against float64.

What a sample has to write is known here from a Z-order of its own: nothing more is written, and
nothing less. Operands are decoded where the sample needs them, so that large layers cost little.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.lowering.apple import select
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.program import Entry
from block32.lowering.problem import ScaledMatmul
from block32.tools.air_emulator.dispatch import Binding
from block32.tools.air_emulator.vmfb import LoadedKernel, load_kernels
from block32.tools.apple_cases import Case, grid, grouped_case
from block32.tools.apple_program import compile_kernels

Array = npt.NDArray[Any]
Position = tuple[int, int, int]

TILE, GEMV_COLUMNS, SAMPLES = 64, 4, 2


MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True, "rhs_block": (32, 32)}


def _block_scaled(m: int, n: int, k: int) -> Case:
    """MXFP8 with 32x32 weight blocks, in the form that a dynamic M takes for ``m`` rows."""
    tiers = select.tiers(ScaledMatmul(m=None, n=n, k=k))
    form = next(tier.form for tier in tiers if tier.max_m is None or m <= tier.max_m)
    return Case(Matmul(n=n, k=k, **MXFP8), form, m)


LAYERS = (
    *((1152, 5120), (1792, 5120), (2304, 5120), (4096, 1280), (5120, 576)),
    *((5120, 1152), (5120, 2048), (5120, 4096), (8192, 1280), (16384, 1280)),
)

CASES = (
    *(_block_scaled(m, n, k) for n, k in LAYERS for m in (1, 3, 8, 33, 129)),
    *(_block_scaled(*shape) for shape in ((3, 2053, 1280), (31, 4096, 1280), (63, 8193, 1280))),
    *(_block_scaled(*shape) for shape in ((129, 4097, 576), (255, 16385, 1152), (19, 5120, 576))),
    *(_block_scaled(m, n, 128) for n in (1, 2, 16, 31, 32, 33) for m in (1, 33)),
    *(_block_scaled(m, n, 640) for n in (12, 24, 48, 96) for m in (1, 33)),
    Case(Matmul(n=17504, k=3136), "tiled", 1),
    Case(Matmul(n=3136, k=7680), "tiled", 32),
    Case(Matmul(n=73448, k=2560), "tiled", 16),
    Case(Matmul(n=4096, k=4096, result="bf16"), "gemv", 1),
    grouped_case(8, 1856, 2688, [1, 1, 2, 0, 1, 1], [0, 3, 1, 4, 5, 2]),
    grouped_case(8, 1856, 2688, [70, 1, 129, 0, 64, 31], [0, 3, 1, 4, 5, 2], **MXFP8),
)


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[Matmul, str], LoadedKernel]:
    """One kernel a matmul and form, whatever M."""
    wanted = dict.fromkeys((case.matmul, case.form) for case in CASES)
    entries = {f"f{i}": Entry(*key) for i, key in enumerate(wanted)}
    loaded = load_kernels(compile_kernels(entries))
    return {key: loaded[f"f{i}_kernel"] for i, key in enumerate(wanted)}


def _codes(rng: np.random.Generator, *shape: int) -> Array:
    """E4M3 bytes without NaN."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x2A
    return codes


def _e4m3(codes: Array) -> Array:
    """Values of E4M3 bytes: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = (codes >> 3).astype(int) & 15, codes.astype(int) & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.ldexp(1.0, exponent - 10)
    )
    return np.where(codes & 0x80, -magnitude, magnitude)


def _operands(case: Case) -> dict[str, Array]:
    """The buffers by name, all but the result."""
    rng = np.random.default_rng(case.m)
    mm = case.matmul
    experts = (mm.grouping.experts,) if mm.grouping else ()
    arrays: dict[str, Array] = {}
    if mm.lhs_scaled:
        arrays["lhs"] = _codes(rng, case.m, mm.k)
    else:
        arrays["lhs"] = rng.standard_normal((case.m, mm.k)).astype(ml_dtypes.bfloat16)
    arrays["rhs"] = _codes(rng, *experts, mm.n, mm.k)
    if mm.is_scaled:
        arrays["lhs_scale"] = rng.integers(118, 137, (case.m, mm.k_blocks), dtype=np.uint8)
        shape = (*experts, mm.rhs_scale_rows, mm.k_blocks)
        arrays["rhs_scale"] = rng.integers(118, 137, shape, dtype=np.uint8)
    if mm.grouping:
        arrays["offsets"] = np.cumsum([0, *case.tokens]).astype(np.uint32)
        arrays["expert_ids"] = np.array(case.experts, np.int32)
    return arrays


def _expected(
    case: Case, arrays: dict[str, Array], rows: slice, columns: slice, group: int
) -> Array:
    """A part of y in float64."""
    mm = case.matmul
    x, w = arrays["lhs"][rows], arrays["rhs"]
    w = _e4m3((w[case.experts[group]] if mm.grouping else w)[columns])
    x = _e4m3(x) if mm.lhs_scaled else x.astype(np.float64)
    if mm.is_scaled:
        k_block = np.arange(mm.k) // 32
        blocks = np.arange(columns.start, columns.stop)[:, None] // 32
        scales = arrays["rhs_scale"]
        scales = scales[case.experts[group]] if mm.grouping else scales
        x = x * np.exp2(arrays["lhs_scale"][rows][:, k_block].astype(float) - 127)
        w = w * np.exp2(scales[blocks, k_block].astype(float) - 127)
    return x @ w.T


def _z_order(tile_m: int, tile_n: int, bits_m: int, bits_n: int) -> int:
    """The place of a tile: bits of both interleaved, n first, then the rest of the longer axis."""
    place = 0
    low = min(bits_m, bits_n)
    for bit in range(low):
        place |= (tile_n >> bit & 1) << (2 * bit) | (tile_m >> bit & 1) << (2 * bit + 1)
    return place | (tile_n if bits_n > bits_m else tile_m) >> low << (2 * low)


def _part(case: Case, rng: np.random.Generator | None) -> tuple[Position, slice, slice, int]:
    """A threadgroup, and the rows, columns and group of its part of y; the last one without rng."""
    n = case.matmul.n

    def draw(count: int) -> int:
        return count - 1 if rng is None else int(rng.integers(count))

    if case.form == "gemv":
        number = draw(-(-n // GEMV_COLUMNS))
        first = number * GEMV_COLUMNS
        return (number, 0, 0), slice(0, 1), slice(first, min(first + GEMV_COLUMNS, n)), 0
    tiles_m, tiles_n = -(-case.m // TILE), -(-n // TILE)
    tile_m, tile_n = draw(tiles_m), draw(tiles_n)
    columns = slice(tile_n * TILE, min((tile_n + 1) * TILE, n))
    if case.form == "grouped":
        group = draw(len(case.tokens))
        first = sum(case.tokens[:group])
        end = first + case.tokens[group]
        tile = draw(max(1, -(-case.tokens[group] // TILE)))
        rows = slice(first + tile * TILE, min(first + (tile + 1) * TILE, end))
        return (tile_n, first // TILE + group + tile, 0), rows, columns, group
    bits = (tiles_m - 1).bit_length(), (tiles_n - 1).bit_length()
    rows = slice(tile_m * TILE, min((tile_m + 1) * TILE, case.m))
    return (_z_order(tile_m, tile_n, *bits), 0, 0), rows, columns, 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sample_of_the_threadgroups(
    kernels: dict[tuple[Matmul, str], LoadedKernel], case: Case
) -> None:
    """The last threadgroup, which has every edge, and others."""
    rng = np.random.default_rng(case.matmul.n)
    parts = [_part(case, None), *(_part(case, rng) for _ in range(SAMPLES - 1))]
    arrays = _operands(case)
    element = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[case.matmul.result]
    y = np.full((case.m, case.matmul.n), np.nan, np.float32).astype(element)
    kernels[case.matmul, case.form].dispatch(
        [*(Binding(array) for array in arrays.values()), Binding(y, output=True)],
        grid(case),
        [case.m],
        threadgroups=sorted({part[0] for part in parts}),
    )
    written = np.zeros(y.shape, bool)
    for _, rows, columns, group in parts:
        written[rows, columns] = True
        expected = _expected(case, arrays, rows, columns, group)
        error = np.abs(y[rows, columns].astype(np.float64) - expected)
        tolerance = 1e-5 if case.matmul.result == "f32" else 2.0**-8
        assert error.size == 0 or error.max() <= tolerance * np.abs(expected).max()
    np.testing.assert_array_equal(~np.isnan(y.astype(np.float32)), written)
