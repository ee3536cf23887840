# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Conversions to and from narrow floats, against ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from block32.tools.gfx950_executor import floats
from tests.tools.gfx950_executor.bench import Bench, ins, v

TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
CLAMP_OVERFLOW = ins.s_setreg_imm32_b32(simm16=1 | 23 << 6, literal=1)


@pytest.mark.parametrize("form", TYPES)
def test_decode_tables(form: str) -> None:
    table = floats.decode_table(floats.BY_NAME[form])
    codes = np.arange(len(table), dtype=np.uint8)
    np.testing.assert_array_equal(table, codes.view(TYPES[form]).astype(np.float32))


@pytest.mark.parametrize("form", TYPES)
def test_rounding(form: str) -> None:
    rng = np.random.default_rng(1)
    narrow = floats.BY_NAME[form]
    values = rng.standard_normal(4000) * 2.0 ** rng.integers(-12, 6, 4000)
    exact = floats.decode_table(narrow)[:-1].astype(np.float64)
    halves = (exact[1:] + exact[:-1]) / 2  # ties, where neighbours have the same sign
    values = np.concatenate([values, exact, halves])
    values = values[np.abs(values) <= narrow.largest]
    codes = floats.encode(values, narrow)
    wanted = values.astype(TYPES[form]).view(np.uint8)
    np.testing.assert_array_equal(codes, wanted)


@pytest.mark.parametrize(
    ("form", "beyond"), [("e4m3", [0x7F, 0xFF, 0x7F]), ("e5m2", [0x7C, 0xFC, 0x7F])]
)
def test_overflow_is_clamped_only_where_asked(form: str, beyond: list[int]) -> None:
    narrow = floats.BY_NAME[form]
    values = np.array([1e6, -np.inf, np.nan])
    np.testing.assert_array_equal(floats.encode(values, narrow, saturate=False), beyond)
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}[form]
    clamped = floats.encode(values, narrow, saturate=True)
    np.testing.assert_array_equal(clamped, [largest, largest | 0x80, 0x7F])


def random_floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(64) * 2.0 ** rng.integers(-6, 6, 64)).astype(np.float32)


def test_bf16_pairs() -> None:
    a, b = random_floats(1), random_floats(2)
    a[:3] = [np.inf, np.nan, np.float32(1 + 2**-8)]  # a tie, to even
    wave = Bench().run([ins.v_cvt_pk_bf16_f32(v[2], v[0], v[1])], vector={0: a, 1: b})
    low, high = wave.v[2] & 0xFFFF, wave.v[2] >> 16
    bits = a.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(np.delete(low, 1), np.delete(bits, 1))
    assert np.isnan((low[1:2] << 16).view(np.float32)[0])
    np.testing.assert_array_equal(high, b.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("name", "form"), [("fp8", "e4m3"), ("bf8", "e5m2")])
def test_fp8_pairs(name: str, form: str, half: int) -> None:
    a, b = random_floats(3), random_floats(4)
    op = getattr(ins, f"v_cvt_pk_{name}_f32")(v[2], v[0], v[1], opsel=8 * half)
    wave = Bench().run([op], vector={0: a, 1: b, 2: 0x55667788})
    codes = [x.astype(TYPES[form]).view(np.uint8).astype(np.uint32) for x in (a, b)]
    pair = codes[0] | codes[1] << 8
    wanted = pair << 16 | 0x7788 if half else pair | 0x55660000
    np.testing.assert_array_equal(wave.v[2], wanted)


@pytest.mark.parametrize("half", [0, 1])
def test_scaled_fp8_pairs_divide_and_multiply(half: int) -> None:
    a, b = random_floats(5), random_floats(6)
    scale = np.float32(2.0**5)
    code = [
        CLAMP_OVERFLOW,
        ins.v_cvt_scalef32_pk_fp8_f32(v[2], v[0], v[1], v[3], opsel=8 * half),
        ins.v_cvt_scalef32_pk_f32_fp8(v[4:5], v[2], v[3], opsel=half),
    ]
    a[0] = 1e30
    wave = Bench().run(code, vector={0: a, 1: b, 2: 0, 3: scale})
    codes = [np.clip(x / scale, -448, 448).astype(TYPES["e4m3"]) for x in (a, b)]
    packed = codes[0].view(np.uint8) | codes[1].view(np.uint8).astype(np.uint32) << 8
    np.testing.assert_array_equal(wave.v[2], packed << 16 * half)
    for row, code_values in zip((4, 5), codes, strict=True):
        wanted = code_values.astype(np.float32) * scale
        np.testing.assert_array_equal(wave.v[row].view(np.float32), wanted)


@pytest.mark.parametrize("byte", range(4))
def test_scaled_fp4_pairs(byte: int) -> None:
    a, b = random_floats(7), random_floats(8)
    scale = np.float32(0.25)
    code = [
        ins.v_cvt_scalef32_pk_fp4_f32(v[2], v[0], v[1], v[3], opsel=4 * byte),
        ins.v_cvt_scalef32_pk_f32_fp4(v[4:5], v[2], v[3], opsel=byte),
    ]
    wave = Bench().run(code, vector={0: a, 1: b, 2: 0, 3: scale})
    codes = [np.clip(x / scale, -6, 6).astype(TYPES["e2m1"]) for x in (a, b)]
    packed = codes[0].view(np.uint8) | codes[1].view(np.uint8).astype(np.uint32) << 4
    np.testing.assert_array_equal(wave.v[2], packed << 8 * byte)
    np.testing.assert_array_equal(wave.v[4].view(np.float32), codes[0].astype(np.float32) * scale)
    np.testing.assert_array_equal(wave.v[5].view(np.float32), codes[1].astype(np.float32) * scale)


def test_thirty_two_fp6_values() -> None:
    rng = np.random.default_rng(9)
    values = (rng.standard_normal((64, 32)) * 3).astype(np.float16)
    words = np.ascontiguousarray(values).view(np.uint32).T
    code = [
        ins.v_cvt_scalef32_pk32_fp6_f16(v[20:25], v[0:15], v[30]),
        ins.v_cvt_scalef32_pk32_f32_fp6(v[40:71], v[20:25], v[30]),
    ]
    wave = Bench().run(code, vector={**dict(enumerate(words)), 30: np.float32(2.0)})
    codes = np.clip(values.astype(np.float64) / 2, -7.5, 7.5).astype(TYPES["e2m3"])
    got = wave.v[40:72].view(np.float32).T
    np.testing.assert_array_equal(got, codes.astype(np.float32) * 2)


def test_fp8_bytes_chosen_by_sdwa() -> None:
    word = np.random.default_rng(10).integers(0, 1 << 32, 64, dtype=np.uint32) & 0x7E7E7E7E
    op = ins.VOP1_SDWA(
        ins.VOP1Op.V_CVT_F32_FP8_E32,
        v[1],
        ins.SDWA,
        vsrc0=v[0],
        src0_sel=2,
        dst_sel=6,
        src1_sel=6,
    )
    wave = Bench().run([op], vector={0: word})
    wanted = (word >> 16 & 0xFF).astype(np.uint8).view(TYPES["e4m3"]).astype(np.float32)
    np.testing.assert_array_equal(wave.v[1].view(np.float32), wanted)
