# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of aarch64 against the float64 reference, in an emulator on other machines.

A run in the emulator takes about half a second, so that each one holds many cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from tests.grouped import CASES as GROUPED_CASES
from tests.grouped import compare, operands, viewed
from tests.lowering.cpu.support import (
    ACTIVATION_DTYPES,
    ARM_PROCESSORS,
    Processor,
    all_steps,
    every_arm_processor,
    run,
    scales,
)
from tests.lowering.cpu.test_numbers import agrees, all_codes
from tests.lowering.cpu.test_scales import normal_or_zero, ones
from tests.numbers import random_operands

BF16, NEON = ARM_PROCESSORS
ROW = (1, 32)
E5M2 = "f8E5M2"
FP4 = "f4E2M1FN"

#: (problem, the Ms that it is run with): every tier, format and block, and ragged N and K.
CASES = {
    "tiers": (ScaledMatmul(None, 130, 96), (0, *range(1, 10), 17, 33)),
    "row_blocks": (ScaledMatmul(None, 33, 72, result="bf16", rhs_block=ROW), (1, 4, 13)),
    "e5m2": (ScaledMatmul(None, 12, 200, E5M2, E5M2, ROW), (2, 9)),
    "fp4": (ScaledMatmul(None, 31, 42, rhs=FP4), (1, 3, 20)),
    "fp4_activation": (ScaledMatmul(None, 20, 72, FP4, FP4, result="f16"), (1, 5)),
    "several_panels": (ScaledMatmul(50, 128, 1040), (50,)),
    "tiny": (ScaledMatmul(None, 1, 7), (1, 12)),
}


@pytest.mark.parametrize("name", [*CASES, "tiers on neon", "fp4 on neon"])
def test_agrees_with_the_reference(name: str) -> None:
    name, _, processor_name = name.partition(" on ")
    processor = NEON if processor_name else BF16
    problem, ms = CASES[name]
    for m in ms:
        agrees(problem, processor, m)


@pytest.mark.parametrize(("lhs", "ms"), [("bf16", (1, 4, 9)), ("f16", (2,)), ("f32", (9,))])
def test_activations_without_scales(lhs: str, ms: tuple[int, ...]) -> None:
    """Where bf16 cannot hold an activation, the processor with bf16 products takes f32 ones."""
    for m in ms:
        problem = ScaledMatmul(m, 70, 136, lhs=lhs, lhs_scaled=False)
        w8 = random_operands(dataclasses.replace(problem, lhs="f8E4M3FN", lhs_scaled=True), m)
        x = np.random.default_rng(m).standard_normal((m, problem.k)).astype(ACTIVATION_DTYPES[lhs])
        got = run(problem, BF16, x, w8.arrays()[1], w8.arrays()[3])
        weights = reference.dequantize(w8.rhs, w8.rhs_scale, problem.rhs_block)
        comparison = reference.compare(got, x.astype(np.float64) @ weights.T, "f32")
        assert comparison.ok, f"M = {m}: {comparison}"


@pytest.mark.parametrize(
    ("processor", "small"), [(BF16, "f8E4M3FN"), (BF16, E5M2), (BF16, FP4), (NEON, "f8E4M3FN")]
)
def test_every_code_is_decoded_exactly(processor: Processor, small: str) -> None:
    """Each code of w beside zeros, in a stream, in a panel, and with scales that are not folded."""
    codes = all_codes(small)
    problem = ScaledMatmul(None, len(codes), 32, rhs=small, rhs_block=ROW)
    element: Any = {"f8E4M3FN": "e4m3", E5M2: "e5m2", FP4: "e2m1"}[small]
    every = np.arange(len(codes), dtype=np.uint8)
    packed = reference.pack(every[None])[0] if small == FP4 else every
    values = reference.decode(packed, element).astype(np.float32)
    for m, byte in ((1, 127), (4, 127), (9, 127), (4, 60), (9, 60)):
        case = ones(problem, m)
        case.rhs = codes
        case.lhs_scale[:], case.rhs_scale[:] = byte, 254 - byte
        got = run(problem, processor, *case.arrays())
        assert np.array_equal(got, np.tile(values, (m, 1)), equal_nan=True), (m, byte)


@pytest.mark.parametrize("small", ["f8E4M3FN", E5M2])
def test_every_code_of_an_activation_is_decoded_exactly(small: str) -> None:
    problem = ScaledMatmul(256, 3, 32, lhs=small)
    case = ones(problem, 256)
    case.lhs = all_codes(small)
    element: Any = {"f8E4M3FN": "e4m3", E5M2: "e5m2"}[small]
    values = reference.decode(np.arange(256, dtype=np.uint8), element).astype(np.float32)
    got = run(problem, BF16, *case.arrays())
    assert np.array_equal(got, np.tile(values[:, None], (1, 3)), equal_nan=True)


#: Bytes of scales in the order of a panel's columns and a slab's rows: first those that are folded.
SAFE_FIRST = np.array([*range(83, 172), *range(83), *range(172, 256)], np.uint8)


@every_arm_processor
@pytest.mark.parametrize("m", [1, 4, 256])
def test_every_scale_byte_with_every_other(processor: Processor, m: int) -> None:
    """Each column of w has its own byte, and of x each row: all pairs, in whole slabs and panels.

    With few rows, pairs whose product is 1 and what is at the ends.
    """
    problem = ScaledMatmul(None, 256, 96, rhs_block=ROW)
    if m == 256:
        rows = [SAFE_FIRST]
    else:
        few = ([127], [0], [254, 80], [255, 1])
        rows = [np.resize(np.array(bytes_, np.uint8), m) for bytes_ in few]
    for bytes_ in rows:
        case = ones(problem, m)
        case.lhs_scale[:] = bytes_[:, None]
        case.rhs_scale[:] = SAFE_FIRST[:, None]
        expected = normal_or_zero(case.expected())
        got = run(problem, processor, *case.arrays())
        # A result of 96 next to the smallest f32 is a sum of smaller ones, which are flushed.
        is_small = np.abs(expected) < 96 * np.finfo(np.float32).tiny
        assert np.array_equal(got[~is_small], expected[~is_small], equal_nan=True)
        assert np.all((got >= 0) & (got <= expected), where=is_small)


def test_another_power_of_two_in_every_block() -> None:
    """Also a byte that is not folded in one row and one column, and a block of zeros at byte 0."""
    problem = ScaledMatmul(None, 64, 136)
    for m in (1, 4, 33):
        case = random_operands(problem, m)
        row, block = np.indices(case.lhs_scale.shape)
        case.lhs_scale[:] = 120 + (row + 4 * block) % 16
        case.lhs[m // 2, 32:64], case.lhs_scale[m // 2, 1] = 0x80, 0
        row, block = np.indices(case.rhs_scale.shape)
        case.rhs_scale[:] = 119 + (3 * row + 5 * block) % 17
        case.rhs_scale[1] = 200
        got = run(problem, BF16, *case.arrays())
        comparison = reference.compare(got, case.expected(), "f32")
        assert comparison.ok, f"M = {m}: {comparison}"


def test_all_fields_of_an_epilogue() -> None:
    epilogue = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f32", activation="silu")
    problem = ScaledMatmul(None, 45, 64, result="bf16", epilogue=epilogue)
    rng = np.random.default_rng(2)
    for m in (3, 10):
        case = random_operands(problem, m)
        case.lhs = reference.encode(rng.standard_normal(case.lhs.shape))
        case.rhs = reference.encode(rng.standard_normal(case.rhs.shape) / 8)
        case.lhs_scale[:] = case.rhs_scale[:] = 127
        steps, y = all_steps(rng, case.expected())
        got = run(problem, BF16, *case.arrays(), *steps)
        assert reference.compare(got, y / (1 + np.exp(-y)), "bf16").ok


def test_quantising_where_x_is_packed() -> None:
    problem = ScaledMatmul(None, 70, 104, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil")
    for m in (3, 13):
        problem = dataclasses.replace(problem, m=m)
        quantized = problem.quantized()
        w = random_operands(quantized)
        rng = np.random.default_rng(m)
        x = rng.standard_normal((m, 104)) * 10.0 ** rng.uniform(-3, 3, (m, 1))
        x = x.astype(ml_dtypes.bfloat16)
        codes, x_scale = reference.quantize(x, "rceil")
        got = run(problem, BF16, x, w.arrays()[1], w.arrays()[3])
        arrays = (codes.view(ml_dtypes.float8_e4m3fn), w.arrays()[1], scales(x_scale))
        two_steps = run(quantized, BF16, *arrays, w.arrays()[3])
        np.testing.assert_array_equal(got.view(np.uint32), two_steps.view(np.uint32))


@pytest.mark.parametrize(
    ("processor", "name"), [*((BF16, n) for n in ("ragged", "many", "fp4")), (NEON, "quantised")]
)
def test_grouped(processor: Processor, name: str) -> None:
    problem, tokens, ids = GROUPED_CASES[name]
    offsets = np.cumsum([0, *tokens]).tolist()
    problem = dataclasses.replace(problem, m=offsets[-1])
    arrays = operands(problem, offsets, ids, offsets[-1])
    comparison = compare(problem, run(problem, processor, *viewed(problem, arrays)), arrays)
    assert comparison.ok, comparison


def test_rows_alone_are_the_rows_among_others() -> None:
    """What a row gives does not depend on the others, nor from run to run."""
    problem = ScaledMatmul(None, 130, 96)
    case = random_operands(problem, 33)
    x, w, x_scale, w_scale = case.arrays()
    together = run(problem, BF16, x, w, x_scale, w_scale)
    again = run(problem, BF16, x, w, x_scale, w_scale)
    assert np.array_equal(together.view(np.uint32), again.view(np.uint32))
    # Nine rows take the same kernel as 33.
    alone = run(problem, BF16, x[9:18], w, x_scale[9:18], w_scale)
    assert np.array_equal(alone.view(np.uint32), together[9:18].view(np.uint32))
