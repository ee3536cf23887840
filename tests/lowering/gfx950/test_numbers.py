# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The machine code of gfx950 kernels, run in the executor, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import as_integer
from block32.lowering.common.tile_order import die_contiguous, tile_position
from block32.lowering.gfx950 import select
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import XCDS
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_executor import mutate, parse_code_object
from tests.lowering.gfx950.kernels import (
    assert_matches_reference,
    compile_kernels,
    needs_executor,
    run_matmul,
)
from tests.numbers import Operands, random_operands

pytestmark = needs_executor

TILED = KernelTier("tiled", tile=(32, 64, 256), warps=4, stages=2)
TILED_32 = replace(TILED, tile=(64, 64, 128), mma=(32, 32, 64))
PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=3)
FORMS = {
    "tiled": TILED,
    "tiled, 3 stages, M fastest": replace(TILED, tile=(32, 32, 128), stages=3, order="m"),
    "tiled, 1 wave": replace(TILED, warps=1, tile=(16, 16, 256)),
    "tiled, 8 waves": replace(TILED, warps=8, tile=(64, 64, 256)),
    "tiled 32x32x64": TILED_32,
    "packed 1": replace(PACKED, tile=(16, 32, 256), k_pack=1, warps=4, stages=2),
    "packed 2": PACKED,
    "packed 4": replace(PACKED, tile=(4, 32, 128), k_pack=4, warps=1, stages=1),
}


def chosen(problem: ScaledMatmul) -> tuple[KernelTier, ...]:
    """The tiers that selection takes."""
    config = select.select(problem, DeviceFacts()).config
    assert config is not None
    return config.tiers


def operands_for(problem: ScaledMatmul, m: int | None = None, seed: int = 0) -> Operands:
    """Random operands whose products stay within f16 where the result is f16."""
    operands = random_operands(problem, m, seed)
    if problem.result == "f16":
        operands.lhs_scale -= np.uint8(34)
    return operands


def check(problem: ScaledMatmul, *tiers: KernelTier, m: int | None = None) -> None:
    """Run with ``tiers``, or with those that selection takes, and compare every element."""
    operands = operands_for(problem, m)
    y = run_matmul(problem, tiers or chosen(problem), operands)
    assert_matches_reference(problem, y, operands)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rhs", "rhs_block"), [("f8E4M3FN", (32, 32)), ("f4E2M1FN", (1, 32))])
def test_every_form_with_whole_and_ragged_k(form: str, rhs: str, rhs_block: tuple[int, int]):
    check(ScaledMatmul(m=20, n=72, k=1312, rhs=rhs, rhs_block=rhs_block), FORMS[form])


@pytest.mark.parametrize("form", ["tiled", "tiled 32x32x64", "packed 2"])
@pytest.mark.parametrize(
    ("lhs", "rhs", "result"),
    [
        ("f8E4M3FN", "f8E5M2", "bf16"),
        ("f8E5M2", "f8E4M3FN", "f16"),
        ("f8E5M2", "f4E2M1FN", "f16"),
    ],
)
def test_element_types(form: str, lhs: str, rhs: str, result: str):
    check(ScaledMatmul(m=8, n=40, k=512, lhs=lhs, rhs=rhs, result=result), FORMS[form])


@pytest.mark.parametrize(
    ("m", "k"),
    [
        (3, 1),
        (40, 31),
        (3, 33),
        (40, 40),
        (3, 66),
        (40, 130),
        (3, 257),
        (40, 288),
        (3, 320),
        (3, 1040),
        (33, 7040),
    ],
)
def test_any_k(m: int, k: int):
    check(ScaledMatmul(m=m, n=33, k=k, rhs_block=(1, 32) if k % 2 else (32, 32)))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 129, 257])
def test_dynamic_m_in_one_module(m: int):
    check(ScaledMatmul(m=None, n=64, k=512), m=m)


@pytest.mark.parametrize("n", [1, 2, 5, 7, 8, 12, 16, 24, 31, 32, 33, 48, 96])
def test_any_n(n: int):
    """What lies past N in the tile is neither stored nor read: the result starts poisoned."""
    is_small = n in (1, 5, 8, 16, 31, 48)
    check(ScaledMatmul(m=1 if is_small else 40, n=n, k=640, result="bf16"))


@pytest.mark.parametrize("n", [5, 7, 8, 12, 16])
def test_one_row_and_few_columns(n: int):
    check(ScaledMatmul(m=1, n=n, k=512))


def test_ragged_in_every_direction():
    check(ScaledMatmul(m=33, n=130, k=96))


@pytest.mark.parametrize("n", [512, 1024, 6144])
def test_packed_rows_by_sampled_workgroups(n: int):
    problem = ScaledMatmul(m=None, n=n, k=256)
    for m in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33):
        tiers = chosen(problem)
        tier = next(t for t in tiers if t.max_m is None or m <= t.max_m)
        assert (tier.form == "packed") == (m <= 32)
        check_sampled(problem, tiers, tier, sparse_operands(replace(problem, m=m)))


@pytest.mark.parametrize(("n", "k"), [(64, 512), (7, 33), (1536, 7168)])
def test_every_kernel_multiplies_with_the_matrix_unit(n: int, k: int):
    problem = ScaledMatmul(m=None, n=n, k=k)
    hsaco = compile_kernels(problem, chosen(problem))
    names = [name for name in parse_code_object(hsaco).kernels if name.startswith("gemm")]
    assert len(names) == len(chosen(problem))
    for name in names:
        mnemonics = [i.name for i in mutate.instructions(hsaco, name)]
        assert any(mnemonic.startswith("v_mfma_scale_f32_") for mnemonic in mnemonics), name
        assert not any(mnemonic.startswith(("v_fma", "v_dot")) for mnemonic in mnemonics), name


@pytest.mark.parametrize(("m", "k"), [(1, 1152), (3, 1312), (4, 1664)])
def test_packed_panels_that_end_early_or_are_empty(m: int, k: int):
    check(ScaledMatmul(m=m, n=32, k=k), PACKED)
    check(ScaledMatmul(m=m, n=32, k=k), FORMS["packed 4"])


def test_one_weight_gives_one_row_the_same_result_alone_and_among_others():
    problem = ScaledMatmul(m=50, n=128, k=1040)
    operands = random_operands(problem)
    together = run_matmul(problem, chosen(problem), operands)
    alone = replace(problem, m=1)
    first = replace(
        operands, problem=alone, m=1, lhs=operands.lhs[:1], lhs_scale=operands.lhs_scale[:1]
    )
    y = run_matmul(alone, chosen(alone), first)
    np.testing.assert_allclose(y[0], together[0], rtol=3e-5, atol=1e-4 * np.abs(together).max())


LARGE = [
    # (M, N, K), a corner and an edge of the tiles, and some inside
    (4096, 4096, 4096),
    (16, 73448, 2560),
    (255, 16385, 1152),
    (63, 8193, 1280),
    (4, 1024, 16384),
    (1, 1536, 7168),
]


@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large_shapes_by_sampled_workgroups(m: int, n: int, k: int):
    problem = ScaledMatmul(m=m, n=n, k=k, result="bf16")
    tier = replace(chosen(problem)[0], splits=1)
    check_sampled(problem, (tier,), tier, sparse_operands(problem))


def check_sampled(
    problem: ScaledMatmul, tiers: tuple[KernelTier, ...], tier: KernelTier, operands: Operands
) -> None:
    """Run the tiles of the corners and one inside, with ``tier``, and compare those."""
    tiles = sampled_tiles(operands.problem, tier)
    y = run_matmul(problem, tiers, operands, workgroups=[(w, 0, 0) for w in tiles.values()])
    assert tier.tile is not None
    block_m, block_n, _ = tier.tile
    for tile_m, tile_n in tiles:
        rows = slice(tile_m * block_m, min(operands.m, (tile_m + 1) * block_m))
        columns = slice(tile_n * block_n, min(problem.n, (tile_n + 1) * block_n))
        part = part_of(operands, rows, columns)
        assert_matches_reference(problem, y[rows, columns], part)


def sparse_operands(problem: ScaledMatmul) -> Operands:
    """Operands of a large shape; random rows that repeat, to be made quickly."""
    few = random_operands(replace(problem, m=min(problem.m or 1, 61), n=min(problem.n, 96)))
    assert problem.m is not None

    def tall(array: np.ndarray, rows: int) -> np.ndarray:
        return np.ascontiguousarray(np.resize(array, (rows, array.shape[1])))

    return Operands(
        problem,
        problem.m,
        lhs=tall(few.lhs, problem.m),
        rhs=tall(few.rhs, problem.n),
        lhs_scale=tall(few.lhs_scale, problem.m),
        rhs_scale=tall(few.rhs_scale, problem.rhs_scale_shape[0]),
    )


def sampled_tiles(problem: ScaledMatmul, tier: KernelTier) -> dict[tuple[int, int], int]:
    """The tiles of the corners and one inside, and the workgroups that own them."""
    geometry = Geometry(problem, tier)
    assert problem.m is not None
    tiles_m, tiles_n = as_integer(geometry.tiles_m(problem.m)), geometry.tiles_n
    wanted = {(0, 0), (tiles_m - 1, tiles_n - 1), (tiles_m // 2, tiles_n // 3)}
    total = tiles_m * tiles_n
    found = {}
    for workgroup in range(total):
        tile = die_contiguous(workgroup, total, XCDS)
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, tier.order)
        position = as_integer(tile_m), as_integer(tile_n)
        if position in wanted:
            found[position] = workgroup
    return found


def part_of(operands: Operands, rows: slice, columns: slice) -> Operands:
    """The operands of one tile of y."""
    block = operands.problem.rhs_block[0]
    first = columns.start // block
    shift = columns.start - first * block
    scales = operands.rhs_scale[first : -(-columns.stop // block)]
    per_row = np.repeat(scales, block, axis=0)[shift:][: columns.stop - columns.start]
    count = rows.stop - rows.start
    problem = replace(operands.problem, m=count, n=columns.stop - columns.start, rhs_block=(1, 32))
    return Operands(
        problem,
        count,
        lhs=operands.lhs[rows],
        rhs=operands.rhs[columns],
        lhs_scale=operands.lhs_scale[rows],
        rhs_scale=per_row,
    )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 100),
    k=st.integers(1, 700),
    rhs_block=st.sampled_from([(1, 32), (32, 32)]),
    result=st.sampled_from(["f32", "bf16"]),
)
def test_random_shapes(m: int, n: int, k: int, rhs_block: tuple[int, int], result: str):
    check(ScaledMatmul(m=m, n=n, k=k, rhs_block=rhs_block, result=result))
