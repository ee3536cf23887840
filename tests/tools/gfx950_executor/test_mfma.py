# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Matrix instructions against lane tables written out once more, element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from block32.tools.gfx950_executor import UnknownInstructionError
from tests.tools.gfx950_executor.bench import EXEC_REGISTER, Bench, ins, v

FORMATS = {
    "e4m3": (0, 8, ml_dtypes.float8_e4m3fn),
    "e5m2": (1, 8, ml_dtypes.float8_e5m2),
    "e2m3": (2, 6, ml_dtypes.float6_e2m3fn),
    "e3m2": (3, 6, ml_dtypes.float6_e3m2fn),
    "e2m1": (4, 4, ml_dtypes.float4_e2m1fn),
}
A, B, C, D, SCALE_A, SCALE_B = 8, 16, 32, 48, 64, 65


def random_codes(rng: np.random.Generator, form: str, mn: int, k: int) -> np.ndarray:
    """Codes of finite values, uint8[mn, k]."""
    _, bits, kind = FORMATS[form]
    codes = rng.integers(0, 1 << bits, (mn, k), dtype=np.uint8)
    finite = np.isfinite(codes.view(kind).astype(np.float64))
    return np.where(finite, codes, 1).astype(np.uint8)


def k_of(form: str, mn: int, lane: int, element: int) -> int:
    """Where along K an element of a lane lies, as the table in mfma.py says it in words."""
    group = lane // mn
    if FORMATS[form][1] < 8:
        return 32 * group + element
    half = 64 if mn == 16 else 32
    return 16 * group + element if element < 16 else half + 16 * group + element - 16


def registers(codes: np.ndarray, form: str, mn: int) -> list[np.ndarray]:
    """The operand's registers, one uint32[64] each."""
    bits = FORMATS[form][1]
    words = [np.zeros(64, np.uint32) for _ in range(bits)]
    for lane in range(64):
        number = 0
        for element in range(32):
            number |= int(codes[lane % mn, k_of(form, mn, lane, element)]) << bits * element
        for i in range(bits):
            words[i][lane] = number >> 32 * i & 0xFFFFFFFF
    return words


def scale_register(scales: np.ndarray, mn: int, byte: int, rng: np.random.Generator) -> np.ndarray:
    """Scale bytes of each lane's row and K block in one byte; noise in the others."""
    word = rng.integers(0, 1 << 32, 64, dtype=np.uint32) & ~np.uint32(255 << 8 * byte)
    for lane in range(64):
        word[lane] |= int(scales[lane % mn, lane // mn]) << 8 * byte
    return word


def result(wave: object, mn: int) -> np.ndarray:
    """D as a matrix."""
    rows = wave.v[D : D + mn * mn // 64].view(np.float32)  # type: ignore[attr-defined]
    matrix = np.empty((mn, mn))
    for lane in range(64):
        for r in range(len(rows)):
            row = 4 * (lane // mn) + (r if mn == 16 else 8 * (r // 4) + r % 4)
            matrix[row, lane % mn] = rows[r][lane]
    return matrix


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Within float32 rounding of the largest partial sums."""
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6 * np.abs(wanted).max())


def scaled(mn: int, a: str, b: str, byte_a: int, byte_b: int, **changes: object) -> object:
    """The instruction D = A x B + C with scales in v64 and v65."""
    name = "V_MFMA_SCALE_F32_16X16X128_F8F6F4" if mn == 16 else "V_MFMA_SCALE_F32_32X32X64_F8F6F4"
    bits_a, bits_b, count = FORMATS[a][1], FORMATS[b][1], mn * mn // 64
    fields: dict[str, object] = {
        "vdst": v[D : D + count - 1],
        "src0": v[A : A + bits_a - 1],
        "src1": v[B : B + bits_b - 1],
        "src2": v[C : C + count - 1],
        "cbsz": FORMATS[a][0],
        "blgp": FORMATS[b][0],
        "abid": 1,
        "x2encoding": 0xD3AC,
        "scale_src0": 256 + SCALE_A,
        "scale_src1": 256 + SCALE_B,
        "opsel": byte_a & 1 | (byte_b & 1) << 1,
        "opsel_hi": byte_a >> 1 | (byte_b >> 1) << 1,
        **changes,
    }
    return ins.VOP3PX2(getattr(ins.VOP3PX2Op, name), **fields)


def operands(mn: int, a: str, b: str, byte_a: int, byte_b: int) -> tuple[dict, np.ndarray]:
    """Registers for one product, and its float64 result."""
    rng = np.random.default_rng([mn, *map(ord, a + b), byte_a, byte_b])
    k = 2048 // mn
    codes_a, codes_b = random_codes(rng, a, mn, k), random_codes(rng, b, mn, k)
    scale_a, scale_b = rng.integers(117, 137, (2, mn, k // 32), dtype=np.uint8)
    c = rng.standard_normal((mn * mn // 64, 64)).astype(np.float32)
    values = dict(enumerate(registers(codes_a, a, mn), A))
    values |= dict(enumerate(registers(codes_b, b, mn), B))
    values |= dict(enumerate(c, C))
    values[SCALE_A] = scale_register(scale_a, mn, byte_a, rng)
    values[SCALE_B] = scale_register(scale_b, mn, byte_b, rng)

    def real(codes: np.ndarray, form: str, scales: np.ndarray) -> np.ndarray:
        exact = codes.view(FORMATS[form][2]).astype(np.float64)
        return exact * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)

    addend = np.empty((mn, mn))
    for lane in range(64):
        for r in range(len(c)):
            row = 4 * (lane // mn) + (r if mn == 16 else 8 * (r // 4) + r % 4)
            addend[row, lane % mn] = c[r][lane]
    return values, real(codes_a, a, scale_a) @ real(codes_b, b, scale_b).T + addend


@pytest.mark.parametrize("mn", [16, 32])
@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("b", FORMATS)
def test_scaled_formats(mn: int, a: str, b: str) -> None:
    values, wanted = operands(mn, a, b, 0, 0)
    wave = Bench().run([scaled(mn, a, b, 0, 0)], vector=values)
    assert_close(result(wave, mn), wanted)


@pytest.mark.parametrize("byte_a", range(4))
@pytest.mark.parametrize("byte_b", range(4))
def test_op_sel_picks_the_scale_byte(byte_a: int, byte_b: int) -> None:
    values, wanted = operands(16, "e4m3", "e4m3", byte_a, byte_b)
    wave = Bench().run([scaled(16, "e4m3", "e4m3", byte_a, byte_b)], vector=values)
    np.testing.assert_allclose(
        result(wave, 16), wanted, rtol=2e-6, atol=1e-6 * np.abs(wanted).max()
    )


def test_exec_does_not_matter() -> None:
    values, wanted = operands(16, "e4m3", "e2m1", 1, 2)
    clear = ins.s_mov_b64(EXEC_REGISTER, 0)
    wave = Bench().run([clear, scaled(16, "e4m3", "e2m1", 1, 2)], vector=values)
    assert_close(result(wave, 16), wanted)


def test_a_nan_scale_reaches_its_row_and_nothing_else() -> None:
    values, wanted = operands(32, "e4m3", "e4m3", 0, 0)
    word = values[SCALE_A].copy()
    word[5] |= 0xFF  # row 5, K block 0
    wave = Bench().run([scaled(32, "e4m3", "e4m3", 0, 0)], vector={**values, SCALE_A: word})
    got = result(wave, 32)
    assert np.isnan(got[5]).all()
    others = np.arange(32) != 5
    assert_close(got[others], wanted[others])


def test_extreme_scales_cancel_exactly() -> None:
    ones = np.full((16, 128), 0x38, np.uint8)
    values = dict(enumerate(registers(ones, "e4m3", 16), A))
    values |= dict(enumerate(registers(ones, "e4m3", 16), B))
    values |= {C + i: 0 for i in range(4)} | {SCALE_A: 0, SCALE_B: 254}
    wave = Bench().run([scaled(16, "e4m3", "e4m3", 0, 0)], vector=values)
    np.testing.assert_array_equal(result(wave, 16), 128.0)
    wave = Bench().run([scaled(16, "e4m3", "e4m3", 0, 0)], vector={**values, SCALE_A: 254})
    assert np.isinf(result(wave, 16)).all()


@pytest.mark.parametrize("scale", [4, 129], ids=["scalar", "constant"])
def test_a_scale_outside_of_vgprs_is_refused(scale: int) -> None:
    values, _ = operands(16, "e4m3", "e4m3", 0, 0)
    with pytest.raises(UnknownInstructionError, match="keep scales in VGPRs"):
        Bench().run([scaled(16, "e4m3", "e4m3", 0, 0, scale_src0=scale)], vector=values)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mn", [16, 32])
def test_half_precision(kind: str, mn: int) -> None:
    rng = np.random.default_rng(mn)
    k = 512 // mn
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    a, b = (rng.standard_normal((mn, k)).astype(dtype) for _ in range(2))
    values: dict[int, object] = {C + i: 0 for i in range(mn * mn // 64)}
    for first, matrix in ((A, a), (B, b)):
        lanes = np.stack(
            [matrix[lane % mn, 8 * (lane // mn) : 8 * (lane // mn) + 8] for lane in range(64)]
        )
        values |= dict(
            enumerate(np.ascontiguousarray(lanes.view(np.uint16)).view(np.uint32).T, first)
        )
    name = f"V_MFMA_F32_{mn}X{mn}X{k}_{kind.upper()}"
    count = mn * mn // 64
    op = ins.VOP3P_MFMA(
        getattr(ins.VOP3POp, name),
        v[D : D + count - 1],
        v[A : A + 3],
        v[B : B + 3],
        v[C : C + count - 1],
    )
    wave = Bench().run([op], vector=values)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(result(wave, mn), wanted, rtol=1e-5, atol=1e-5)
