# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CPU kernels in the IREE runtime against the float64 reference, on each instruction set."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from tests.lowering.cpu.support import (
    ACTIVATION_DTYPES,
    HOST,
    Processor,
    every_processor,
    run,
    scales,
)
from tests.numbers import random_operands

ROW = (1, 32)
E5M2 = "f8E5M2"

#: (problem, the Ms that it is run with): every tier, format and block, and ragged N and K.
CASES = {
    "ragged_n_tiers": (ScaledMatmul(None, 130, 96), (0, 1, 2, 3, 5, 8, 9, 17, 33)),
    "row_blocks": (ScaledMatmul(13, 33, 72, result="bf16", rhs_block=ROW), (13,)),
    "e5m2": (ScaledMatmul(2, 12, 640, E5M2, E5M2, ROW), (2,)),
    "fp4": (ScaledMatmul(None, 31, 42, rhs="f4E2M1FN"), (3, 16, 20)),
    "several_panels": (ScaledMatmul(50, 128, 1040), (50,)),
    "parts_of_k_and_slabs": (ScaledMatmul(13, 40, 2120, result="bf16"), (13,)),
}
HOST_CASES = {
    "fp4_row_blocks": (ScaledMatmul(1, 5, 288, rhs="f4E2M1FN", rhs_block=ROW), (1,)),
    "fp4_activation": (ScaledMatmul(None, 20, 72, "f4E2M1FN", "f4E2M1FN"), (1, 5, 13)),
    "e5m2_tiers": (ScaledMatmul(None, 12, 640, E5M2, E5M2, ROW), (1, 31, 50)),
    "row_blocks_tiers": (ScaledMatmul(None, 33, 72, result="bf16", rhs_block=ROW), (1, 4, 7, 13)),
    "one_column": (ScaledMatmul(None, 1, 32), (1, 3, 33)),
    "tiny_k": (ScaledMatmul(None, 2, 7), (1, 12)),
    "narrow": (ScaledMatmul(1, 7, 512), (1,)),
}
BIG_CASES = (
    ScaledMatmul(64, 256, 5120),
    ScaledMatmul(32, 512, 8192, result="bf16"),
    ScaledMatmul(3, 2053, 1280),
    ScaledMatmul(33, 2053, 1152, rhs_block=ROW),
    ScaledMatmul(4, 1024, 16384),
    ScaledMatmul(16, 73448, 64),
    ScaledMatmul(1000, 70, 576),
    ScaledMatmul(10, 96, 40000),
)


def agrees(problem: ScaledMatmul, processor: Processor, m: int, seed: int = 0) -> None:
    """Run on random operands and compare."""
    operands = random_operands(problem, m, seed)
    got = run(problem, processor, *operands.arrays())
    assert got.shape == (m, problem.n)
    comparison = reference.compare(got, operands.expected(), problem.result)  # type: ignore[arg-type]
    assert comparison.ok, f"M = {m}: {comparison}"


@every_processor
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(processor: Processor, name: str) -> None:
    problem, ms = CASES[name]
    for m in ms:
        agrees(problem, processor, m)


@pytest.mark.parametrize("name", HOST_CASES)
def test_agrees_with_the_reference_here(name: str) -> None:
    problem, ms = HOST_CASES[name]
    for m in ms:
        agrees(problem, HOST, m)


@pytest.mark.parametrize("problem", BIG_CASES, ids=lambda p: p.describe())
def test_agrees_on_shapes_that_people_run(problem: ScaledMatmul) -> None:
    assert problem.m is not None
    agrees(problem, HOST, problem.m)


def test_m_from_one_to_thirty_three() -> None:
    problem = ScaledMatmul(None, 96, 160)
    for m in range(1, 34):
        agrees(problem, HOST, m, seed=m)


def test_a_row_alone_is_the_row_among_others() -> None:
    problem = ScaledMatmul(None, 128, 1040)
    operands = random_operands(problem, 50)
    together = run(problem, HOST, *operands.arrays()).astype(np.float64)
    x, w, x_scale, w_scale = operands.arrays()
    for i in range(3):
        alone = run(problem, HOST, x[i : i + 1], w, x_scale[i : i + 1], w_scale)
        assert reference.compare(alone, together[i : i + 1], "f32").ok


@settings(max_examples=10)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 80),
    k=st.integers(1, 200),
    lhs=st.sampled_from(["f8E4M3FN", "f8E5M2"]),
    rhs=st.sampled_from(["f8E4M3FN", "f8E5M2", "f4E2M1FN"]),
    block=st.sampled_from([(1, 32), (32, 32)]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    m: int, n: int, k: int, lhs: str, rhs: str, block: tuple[int, int], seed: int
) -> None:
    if rhs == "f4E2M1FN":
        k += k % 2  # the reference takes whole bytes of packed codes
    agrees(ScaledMatmul(m, n, k, lhs, rhs, block), HOST, m, seed)


@pytest.mark.parametrize("m", [1, 4, 33])
def test_twenty_runs_are_bitwise_equal(m: int) -> None:
    problem = ScaledMatmul(None, 300, 1056)
    arrays = random_operands(problem, m).arrays()
    first = run(problem, HOST, *arrays)
    for _ in range(20):
        assert np.array_equal(run(problem, HOST, *arrays).view(np.uint32), first.view(np.uint32))


@every_processor
def test_bf16_activations(processor: Processor) -> None:
    unquantised_activation(processor, "bf16")


@pytest.mark.parametrize("lhs", ["f16", "f32"])
@pytest.mark.parametrize("processor", [HOST, Processor("avx2", "haswell")], ids=lambda p: p.cpu)
def test_wider_activations(processor: Processor, lhs: str) -> None:
    unquantised_activation(processor, lhs)


def unquantised_activation(processor: Processor, lhs: str) -> None:
    problem = ScaledMatmul(None, 70, 136, lhs=lhs, lhs_scaled=False, result="f32")
    for m in (1, 5, 20):
        w8 = random_operands(dataclasses.replace(problem, lhs="f8E4M3FN", lhs_scaled=True), m)
        x = np.random.default_rng(m).standard_normal((m, problem.k)).astype(ACTIVATION_DTYPES[lhs])
        got = run(problem, processor, x, w8.arrays()[1], w8.arrays()[3])
        weights = reference.dequantize(w8.rhs, w8.rhs_scale, problem.rhs_block)
        expected = x.astype(np.float64) @ weights.T
        assert reference.compare(got, expected, "f32").ok


@every_processor
def test_f16_results_round_once(processor: Processor) -> None:
    problem = ScaledMatmul(5, 24, 64, result="f16")
    operands = random_operands(problem)
    operands.lhs_scale[:] = 120
    operands.rhs_scale[:] = 118
    got = run(problem, processor, *operands.arrays())
    assert reference.compare(got, operands.expected(), "f16").ok


@every_processor
def test_padding_of_a_packed_row_is_not_read(processor: Processor) -> None:
    """With an odd K the high half of a row's last byte is no element."""
    problem = ScaledMatmul(None, 40, 41, rhs="f4E2M1FN")
    for m in (1, 12):
        operands = random_operands(problem, m)
        operands.rhs[:, -1] |= 0xF0
        got = run(problem, processor, *operands.arrays())
        operands.lhs = np.pad(operands.lhs, ((0, 0), (0, 1)))
        assert reference.compare(got, operands.expected(), "f32").ok


def test_operands_that_are_the_same_array() -> None:
    problem = ScaledMatmul(40, 40, 64, rhs_block=(1, 32))
    operands = random_operands(problem)
    x, _, x_scale, _ = operands.arrays()
    operands.rhs, operands.rhs_scale = operands.lhs, operands.lhs_scale
    got = run(problem, HOST, x, x, x_scale, scales(operands.lhs_scale))
    assert reference.compare(got, operands.expected(), "f32").ok


def all_codes(small: str) -> npt.NDArray[np.uint8]:
    """Every code of a format, one in each row of a [codes, 32] operand of zeros."""
    count = 16 if small == "f4E2M1FN" else 256
    codes = np.zeros((count, 32), np.uint8)
    codes[np.arange(count), np.arange(count) % 32] = np.arange(count)
    return reference.pack(codes) if small == "f4E2M1FN" else codes


@every_processor
@pytest.mark.parametrize("small", ["f8E4M3FN", "f8E5M2", "f4E2M1FN"])
def test_every_code_is_decoded_exactly(processor: Processor, small: str) -> None:
    codes = all_codes(small)
    problem = ScaledMatmul(None, len(codes), 32, rhs=small, rhs_block=(1, 32))
    element: Any = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f4E2M1FN": "e2m1"}[small]
    one = np.full((1, 32), 0x38, np.uint8)
    every = np.arange(len(codes), dtype=np.uint8)
    if small == "f4E2M1FN":
        every = reference.pack(every[None])[0]
    expected = reference.decode(every, element)
    for m in (1, 3, 9):
        arrays = (np.repeat(one, m, 0), codes, np.full((m, 1), 127, np.uint8))
        operands = random_operands(problem, m)
        operands.lhs, operands.rhs, operands.lhs_scale = arrays
        operands.rhs_scale[:] = 127
        got = run(problem, processor, *operands.arrays())
        assert np.array_equal(got, np.tile(expected, (m, 1)).astype(np.float32), equal_nan=True)


@every_processor
@pytest.mark.parametrize("small", ["f8E4M3FN", "f8E5M2"])
def test_every_code_of_an_activation_is_decoded_exactly(processor: Processor, small: str) -> None:
    codes = all_codes(small)
    problem = ScaledMatmul(256, 3, 32, lhs=small)
    operands = random_operands(problem)
    operands.lhs, operands.rhs = codes, np.full((3, 32), 0x38, np.uint8)
    operands.lhs_scale[:] = operands.rhs_scale[:] = 127
    element: Any = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}[small]
    expected = reference.decode(np.arange(256, dtype=np.uint8), element).astype(np.float32)
    got = run(problem, processor, *operands.arrays())
    assert np.array_equal(got, np.tile(expected[:, None], (1, 3)), equal_nan=True)
