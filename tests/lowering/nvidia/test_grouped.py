# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls (mixture of experts) in the executor, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir

import block32
from block32.dialects.kernel import KernelTier
from block32.lowering.common.group_tiles import first_tile, group_tiles
from block32.lowering.common.index import as_integer
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.runtime import reference
from tests.grouped import program
from tests.lowering.nvidia.kernels import RESULTS, STREAM, TILED, WGMMA, run_kernels
from tests.lowering.nvidia.test_numbers import assert_close
from tests.numbers import random_codes

Arrays = dict[str, npt.NDArray[Any]]

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
_SHORT: Any = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f4E2M1FN": "e2m1"}


def grouped_operands(
    problem: ScaledMatmul, tokens: list[int], ids: list[int], before: int = 0, behind: int = 0
) -> Arrays:
    """Operands for groups of ``tokens`` rows; rows of no group come before and behind them."""
    grouping = problem.grouping
    assert grouping is not None and grouping.groups == len(tokens) == len(ids)
    offsets = [before, *(before + total for total in accumulate(tokens))]
    m = offsets[-1] + behind
    rng = np.random.default_rng(m)
    arrays: Arrays = {}
    if problem.lhs_scaled:
        arrays["lhs"] = random_codes(rng, (m, problem.k), problem.lhs)
        arrays["lhs_scale"] = rng.integers(118, 136, (m, problem.k_blocks), dtype=np.uint8)
    else:
        arrays["lhs"] = rng.standard_normal((m, problem.k)).astype(_DTYPES[problem.lhs])
    shape = (grouping.experts, problem.n, problem.rhs_row_bytes)
    arrays["rhs"] = random_codes(rng, shape, problem.rhs)
    shape = (grouping.experts, *problem.rhs_scale_shape)
    arrays["rhs_scale"] = rng.integers(118, 136, shape, dtype=np.uint8)
    arrays["offsets"] = np.array(offsets, np.int32)
    arrays["expert_ids"] = np.array(ids, np.int32)
    arrays["init"] = rng.standard_normal((m, problem.n)).astype(RESULTS[problem.result])
    return arrays


def expected(problem: ScaledMatmul, arrays: Arrays) -> npt.NDArray[np.float64]:
    x, x_scale = arrays["lhs"], arrays.get("lhs_scale")
    if problem.lhs_quantize:
        x, x_scale = reference.quantize(x, problem.lhs_quantize)  # type: ignore[arg-type]
    return reference.grouped_matmul(
        x,
        x_scale,
        *(arrays[name] for name in ("rhs", "rhs_scale", "offsets", "expert_ids", "init")),
        rhs_block=problem.rhs_block,
        lhs_element=_SHORT.get(problem.lhs, "e4m3"),
        rhs_element=_SHORT[problem.rhs],
    )


def magnitudes(problem: ScaledMatmul, arrays: Arrays) -> npt.NDArray[np.float64]:
    """|x| |w|, and |init| + 1 beside it."""
    mask = 0x77 if problem.rhs == "f4E2M1FN" else 0x7F
    positive = {"rhs": arrays["rhs"] & np.uint8(mask), "init": np.abs(arrays["init"])}
    x = arrays["lhs"]
    positive["lhs"] = x & np.uint8(0x7F) if x.dtype == np.uint8 else np.abs(x)
    return expected(problem, arrays | positive) + 1e-30


def host_text(problem: ScaledMatmul, target: str) -> str:
    """The function that a module of one grouped matmul exports."""
    with ir.Context(), ir.Location.unknown():
        spec = KernelSpec(problem, target_named(target), (STREAM,))
        text = str(build_standalone_module(spec))
    return text[text.index("func.func @main") :]


def problem_of(
    n: int, k: int, experts: int, ids: list[int], **changes: Any
) -> tuple[ScaledMatmul, list[int]]:
    return ScaledMatmul(None, n, k, grouping=Grouping(experts, len(ids)), **changes), ids


CASES: dict[str, tuple[tuple[ScaledMatmul, list[int]], list[int]]] = {
    "an empty group": (problem_of(128, 64, 4, [2, 0, 3, 1]), [3, 0, 5, 2]),
    "ragged": (problem_of(70, 40, 4, [1, 0, 3]), [7, 0, 20]),
    "no expert": (problem_of(70, 40, 4, [0, -1]), [16, 24]),
    "experts that are not there": (problem_of(40, 64, 2, [2, 1, -7]), [3, 2, 4]),
    "W8A16": (problem_of(70, 40, 4, [1, -1, 3], lhs="bf16", lhs_scaled=False), [7, 2, 20]),
    "1x32, bf16": (problem_of(40, 96, 3, [2, 2, 0], rhs_block=(1, 32), result="bf16"), [9, 1, 8]),
    "fp4": (problem_of(40, 96, 3, [2, 1], rhs="f4E2M1FN"), [9, 12]),
}
FORMS = {"stream": STREAM, "tiled": TILED}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_groups_have_their_experts(case: str, form: str):
    (problem, ids), tokens = CASES[case]
    arrays = grouped_operands(problem, tokens, ids, before=2, behind=3)
    m = len(arrays["init"])
    y = run_kernels(problem, "sm_90a", FORMS[form], arrays, m)
    # Rows of no group, bit for bit; the executor refuses a store outside y.
    for rows in (slice(0, 2), slice(m - 3, m)):
        assert y[rows].tobytes() == arrays["init"][rows].tobytes()
    assert_close(y, expected(problem, arrays), magnitudes(problem, arrays), problem.result)


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_many_small_groups(target: str):
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 4, 40).tolist()
    problem, ids = problem_of(32, 64, 16, rng.permutation(40).clip(-1, 15).tolist())
    arrays = grouped_operands(problem, tokens, ids)
    y = run_kernels(problem, target, STREAM, arrays, len(arrays["init"]))
    assert_close(y, expected(problem, arrays), magnitudes(problem, arrays), "f32")


def test_wgmma_on_groups():
    problem, ids = problem_of(72, 288, 3, [2, 0, -1])
    arrays = grouped_operands(problem, [70, 5, 3], ids, behind=1)
    y = run_kernels(problem, "sm_90a", WGMMA, arrays, len(arrays["init"]))
    assert_close(y, expected(problem, arrays), magnitudes(problem, arrays), "f32")


@pytest.mark.parametrize("quantize", ["fused", "separate"])
def test_groups_of_an_activation_that_is_quantised(quantize: str):
    changes: dict[str, Any] = {"lhs": "bf16", "lhs_scaled": False, "lhs_quantize": "rceil"}
    problem, ids = problem_of(40, 136, 3, [2, 0, -1], **changes)
    arrays = grouped_operands(problem, [3, 9, 2], ids, before=1)
    tier = replace(STREAM, quantize=quantize)
    y = run_kernels(problem, "sm_90a", tier, arrays, len(arrays["init"]))
    assert_close(y, expected(problem, arrays), magnitudes(problem, arrays), "f32")


@pytest.mark.parametrize("offsets", [[9, 2, 5], [0, 99, 200], [-5, 3, 2**31 - 1], [4, 4, 4]])
def test_offsets_that_do_not_rise_store_nothing_outside(offsets: list[int]):
    # What they store is undefined; the executor refuses accesses outside of buffers.
    problem, ids = problem_of(40, 64, 2, [1, 0])
    arrays = grouped_operands(problem, [6, 6], ids)
    arrays["offsets"] = np.array(offsets, np.int32)
    run_kernels(problem, "sm_90a", STREAM, arrays, 12)


@pytest.mark.parametrize("rows", [8, 64])
def test_every_division_into_groups_has_its_tiles(rows: int):
    rng = np.random.default_rng(rows)
    for _ in range(50):
        tokens = rng.integers(0, 3 * rows, 7) * rng.integers(0, 2, 7)
        offsets = [0, *accumulate(tokens.tolist())]
        owned = [
            as_integer(first_tile(offsets[group], group, rows)) + part
            for group, count in enumerate(tokens)
            for part in range(-(-count // rows))
        ]
        assert len(set(owned)) == len(owned), "a tile of two groups"
        assert all(tile < as_integer(group_tiles(offsets[-1], rows, 7)) for tile in owned)
        starts = [as_integer(first_tile(offsets[group], group, rows)) for group in range(7)]
        assert starts == sorted(set(starts))


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_90a-f32"])
def test_tiers_follow_from_the_rows_of_a_group(target: str):
    problem = ScaledMatmul(None, 1856, 2688, grouping=Grouping(8, 6))
    config = target_named(target).select(problem, DeviceFacts()).config
    assert config is not None
    tiers: tuple[KernelTier, ...] = config.tiers
    assert [tier.max_m for tier in tiers[:3]] == [48, 96, 192]
    for tier in tiers:
        assert tier.splits == 1
        assert target_named(target).verify(problem, tier, DeviceFacts()) is None
    split = replace(STREAM, splits=2)
    reason = target_named(target).verify(problem, split, DeviceFacts())
    assert reason == "expected splits 1 for groups of rows but got 2"


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(
    ("m", "groups"), [(None, 0), (5, 0), (0, 3)], ids=["no groups", "no groups of 5", "no tokens"]
)
def test_without_groups_or_tokens_there_is_no_launch(
    tmp_path: Path, m: int | None, groups: int, target: str
):
    problem = ScaledMatmul(m, 40, 64, grouping=Grouping(4, groups))
    host = host_text(problem, target)
    assert "flow.dispatch" not in host and "return %arg6" in host
    source = tmp_path / "grouped.mlir"
    source.write_text(program(problem))
    vmfb = block32.compile(source, target=target, on_remark=lambda _: None)
    assert b".entry" not in vmfb  # no PTX either


def test_tokens_that_are_counted_at_run_time_guard_the_launch():
    problem = ScaledMatmul(None, 40, 64, grouping=Grouping(4, 3))
    host = host_text(problem, "sm_90a")
    assert host.index("arith.cmpi eq") < host.index("scf.if") < host.index("flow.dispatch")
    assert "scf.yield %arg6" in host[host.index("scf.if") : host.index("flow.dispatch")]
