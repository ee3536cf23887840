# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reference against hand-written values, brute force, and ml_dtypes where that is right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block32.runtime import reference as ref

ALL_CODES = np.arange(256, dtype=np.uint8)
ONE = 0x38  # 1.0 in e4m3
RULES: list[ref.Rule] = ["floor", "rceil", "ceil", "even"]


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> ref.Bytes:
    """Random finite e4m3 codes."""
    codes = rng.integers(0, 0x7F, shape) | rng.integers(0, 2, shape) << 7
    return codes.astype(np.uint8)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> ref.Bytes:
    return rng.integers(115, 140, shape).astype(np.uint8)


# ---- formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "code", "value"),
    [
        ("e4m3", 0x00, 0.0),
        ("e4m3", 0x01, 2.0**-9),
        ("e4m3", 0x07, 7 * 2.0**-9),
        ("e4m3", 0x08, 2.0**-6),
        ("e4m3", ONE, 1.0),
        ("e4m3", 0x7E, 448.0),
        ("e4m3", 0xFE, -448.0),
        ("e5m2", 0x01, 2.0**-16),
        ("e5m2", 0x3C, 1.0),
        ("e5m2", 0x7B, 57344.0),
        ("e5m2", 0xFC, -np.inf),
    ],
)
def test_decode_values_by_hand(element: ref.Element, code: int, value: float):
    assert ref.decode(np.array([code], np.uint8), element)[0] == value


def test_decode_e2m1_low_nibble_is_even_k():
    packed = np.array([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([magnitudes, np.negative(magnitudes)])
    np.testing.assert_array_equal(ref.decode(packed, "e2m1"), expected)
    np.testing.assert_array_equal(ref.pack(ref.unpack(packed)), packed)


def test_e4m3_has_exactly_two_nans_and_no_infinity():
    values = ref.decode(ALL_CODES)
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(values).any()


@pytest.mark.parametrize(
    ("element", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_decode_agrees_with_ml_dtypes(element: ref.Element, dtype: type):
    want = ALL_CODES.view(dtype).astype(np.float64)
    got = ref.decode(ALL_CODES, element)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_ml_dtypes_array_says_its_own_element():
    codes = np.array([[0x3C, 0x41]], np.uint8)
    e5m2 = ref.decode(codes.view(ml_dtypes.float8_e5m2))  # the default of raw bytes is e4m3
    np.testing.assert_array_equal(e5m2, [[1.0, 2.5]])
    e2m1 = np.array([[0.5, -6.0]]).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(ref.decode(e2m1), [[0.5, -6.0]])


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3, np.float16, np.int16]
)
def test_other_types_are_refused(dtype: type):
    with pytest.raises(TypeError, match="expected raw bytes or an OCP float8 type but got"):
        ref.decode(np.zeros((2, 2), dtype))


def test_int8_is_read_as_bytes():
    np.testing.assert_array_equal(
        ref.decode(np.array([-2], np.int8)), ref.decode(np.array([0xFE], np.uint8))
    )


def test_scales_are_powers_of_two_by_byte():
    """All 256 bytes, with 134 and 255 told apart, and 0 not zero."""
    scales = ref.decode_scales(ALL_CODES)
    for byte in range(255):
        assert scales[byte] == 2.0 ** (byte - 127)
    assert scales[134] == 128
    assert np.isnan(scales[255])
    assert scales[0] > 0


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_finite_code_round_trips(element: ref.Element):
    values = ref.decode(ALL_CODES, element)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(ref.encode(values[finite], element), ALL_CODES[finite])


def test_encode_keeps_a_nan_and_saturates_the_rest():
    values = np.array([np.nan, np.inf, -np.inf, 449.0, 464.0, 1e30, -500.0])
    assert ref.encode(values).tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0xFE]


def test_encode_refuses_a_nan_where_there_is_none():
    with pytest.raises(ValueError, match="e2m1 has no NaN"):
        ref.encode(np.array([np.nan]), "e2m1")


def test_ties_go_to_the_even_code():
    values = np.array([17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    np.testing.assert_array_equal(ref.decode(ref.encode(values)), [16.0, 20.0, 0.0, 4 * 2.0**-10])


def test_encode_256_to_448_by_1_agrees_with_ml_dtypes():
    values = np.arange(256.0, 449.0)
    want = values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(ref.encode(values), want)


@given(st.lists(st.floats(-464.0, 464.0, width=32), min_size=1, max_size=64))
def test_encode_e4m3_agrees_with_ml_dtypes(values: list[float]):
    """Up to 464, from where on ml_dtypes gives NaN instead of saturating."""
    array = np.array(values, np.float32)
    want = array.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(ref.encode(array), want)


@given(st.lists(st.floats(-6.0, 6.0, width=32), min_size=1, max_size=64))
def test_encode_e2m1_takes_the_nearest(values: list[float]):
    array = np.array(values)
    decoded = ref.decode(ref.pack(ref.encode(array, "e2m1")), "e2m1")[: len(values)]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    best = np.min(np.abs(np.abs(array)[:, None] - grid), axis=1)
    np.testing.assert_array_equal(np.abs(decoded - array), best)


# ---- rounding of results -------------------------------------------------------------------


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_round_to_bf16_agrees_with_ml_dtypes_from_f32(values: list[float]):
    """From f32, where ml_dtypes rounds once."""
    array = np.array(values, np.float32)
    want = array.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(ref.round_to(array, "bf16"), want)


@given(st.lists(st.floats(), min_size=1, max_size=64), st.sampled_from(["f16", "f32"]))
def test_round_to_agrees_with_numpy(values: list[float], kind: ref.Kind):
    array = np.array(values)
    with np.errstate(over="ignore", under="ignore"):
        want = array.astype({"f16": np.float16, "f32": np.float32}[kind]).astype(np.float64)
    np.testing.assert_array_equal(ref.round_to(array, kind), want)


def test_round_to_bf16_rounds_once():
    """Just above a bf16 tie by less than f32 can hold: through f32 it would fall to the tie."""
    value = np.array([1.0 + 2.0**-8 + 2.0**-40])
    assert ref.round_to(value, "bf16")[0] == 1.0 + 2.0**-7


# ---- quantisers ----------------------------------------------------------------------------

# amax: floor, rceil, ceil, even
SCALE_BYTES = {
    256.0: (127, 127, 127, 127),
    448.0: (127, 127, 128, 127),
    449.0: (127, 128, 128, 127),
    480.0: (127, 128, 128, 127),
    496.0: (127, 128, 128, 128),
    512.0: (128, 128, 128, 128),
    633.0: (128, 128, 129, 128),
    634.0: (128, 128, 129, 128),
    897.0: (128, 129, 129, 128),
    float(np.nextafter(np.float32(512), np.float32(0))): (127, 128, 128, 128),
    float(np.nextafter(np.float32(2.0**-20), np.float32(0))): (98, 99, 99, 99),
}


@pytest.mark.parametrize("amax", SCALE_BYTES)
@pytest.mark.parametrize("sign", [1, -1])
def test_scale_byte_of_every_rule(amax: float, sign: int):
    block = np.linspace(-1, 1, 32) * amax / 3
    block[17] = sign * amax
    got = tuple(int(ref.quantize(block[None], rule)[1][0, 0]) for rule in RULES)
    assert got == SCALE_BYTES[amax]


def test_quantised_values_of_the_rules_at_480():
    block = np.zeros((1, 32))
    block[0, 5] = 480.0
    expected: dict[ref.Rule, float] = {"floor": 448, "rceil": 480, "ceil": 480, "even": 448}
    for rule, value in expected.items():
        codes, scales = ref.quantize(block, rule)
        assert ref.dequantize(codes, scales)[0, 5] == value, rule


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="unknown rule 'round'"):
        ref.quantize(np.ones((1, 32)), "round")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rule", RULES)
def test_zero_block_has_byte_zero_and_zeros(rule: ref.Rule):
    codes, scales = ref.quantize(np.zeros((2, 40)), rule)
    assert not codes.any()
    assert not scales.any()
    assert scales.shape == (2, 2)


def test_rows_from_the_field():
    """A row of 1e-30, a row of 400, alternating zeros, and one below the least normal f32."""
    rows = np.zeros((4, 32))
    rows[0], rows[1], rows[2, ::2], rows[3] = 1e-30, 400.0, 3.0, 1e-38
    codes, scales = ref.quantize(rows)
    # 1e-30 is 1.27 x 2^-100, 3 is 1.5 x 2^1: the exponent less 8, as both stay below 1.75.
    assert scales[:, 0].tolist() == [127 - 108, 127, 127 - 7, 0]
    back = ref.dequantize(codes, scales)
    np.testing.assert_allclose(back, rows, rtol=1 / 16)
    assert (back[2, 1::2] == 0).all()


def test_nan_element_stays_alone():
    block = np.linspace(-300, 300, 64)[None].copy()
    clean_codes, clean_scales = ref.quantize(block)
    block[0, 3] = np.nan
    codes, scales = ref.quantize(block)
    assert np.flatnonzero(np.isnan(ref.decode(codes))).tolist() == [3]
    # Element 0, not 3, is the largest of its block, so nothing else changes.
    np.testing.assert_array_equal(scales, clean_scales)
    np.testing.assert_array_equal(np.delete(codes, 3, 1), np.delete(clean_codes, 3, 1))


def test_infinity_saturates_and_leaves_the_others_finite():
    block = np.linspace(-300, 300, 64)[None].copy()
    clean_codes, clean_scales = ref.quantize(block)
    block[0, 3] = -np.inf
    codes, scales = ref.quantize(block)
    assert scales[0].tolist() == [254, clean_scales[0, 1]]
    assert codes[0, 3] == 0xFE
    assert np.isfinite(ref.decode(codes)).all()
    np.testing.assert_array_equal(codes[0, 32:], clean_codes[0, 32:])


def test_nan_in_e2m1_makes_its_block_nan():
    rng = np.random.default_rng(2)
    values = rng.standard_normal((2, 70))
    values[1, 40] = np.nan
    codes, scales = ref.quantize(values, element="e2m1")
    assert np.argwhere(scales == 255).tolist() == [[1, 1]]
    nan = np.isnan(ref.dequantize(codes, scales, element="e2m1"))
    assert nan[1, 32:64].all()
    assert nan.sum() == 32


def test_largest_finite_input_has_byte_247():
    largest = np.full((1, 32), np.finfo(np.float32).max)
    assert ref.quantize(largest)[1].tolist() == [[247]]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70)
)
def test_rceil_is_the_least_byte_that_does_not_saturate(values: list[float]):
    row = np.array([values])
    _, scales = ref.quantize(row)
    for block, byte in enumerate(scales[0]):
        amax = max(*np.abs(row[0, 32 * block : 32 * block + 32]), 2.0**-126)
        assert amax <= 448 * 2.0 ** (int(byte) - 127)
        assert byte == 0 or amax > 448 * 2.0 ** (int(byte) - 128)


@given(st.integers(0, 0x7F7F))
def test_rceil_has_an_exact_integer_form_for_bf16(bits: int):
    """The form that kernels use, on the bits of a finite bf16 as f32."""
    x = np.array([[bits]], np.uint16).view(ml_dtypes.bfloat16)
    byte = max((max(bits << 16, 1 << 23) + 0x1FFFFF >> 23) - 8, 0)
    assert ref.quantize(x)[1][0, 0] == byte


def test_quantize_weight_shares_a_scale_over_rows():
    rng = np.random.default_rng(5)
    w = rng.standard_normal((70, 100)) * np.exp2(rng.integers(-9, 9, (70, 100)))
    codes, scales = ref.quantize_weight(w)
    assert (codes.shape, scales.shape) == ((70, 100), (3, 4))
    for n, k in np.ndindex(3, 4):
        block = w[32 * n : 32 * n + 32, 32 * k : 32 * k + 32].reshape(1, -1)
        amax_only = np.zeros((1, 32))
        amax_only[0, 0] = np.abs(block).max()
        assert scales[n, k] == ref.quantize(amax_only)[1][0, 0]
    error = np.abs(ref.dequantize(codes, scales, (32, 32)) - w)
    step = ref.expand(ref.decode_scales(scales), w.shape, (32, 32))
    assert (error <= np.maximum(np.abs(w) / 16, step * 2.0**-10)).all()


def test_quantize_weight_per_row_is_quantize():
    w = np.random.default_rng(6).standard_normal((5, 70))
    for got, want in zip(ref.quantize_weight(w, (1, 32)), ref.quantize(w), strict=True):
        np.testing.assert_array_equal(got, want)


def test_quantize_keeps_leading_dimensions():
    x = np.random.default_rng(7).standard_normal((2, 3, 65))
    codes, scales = ref.quantize(x)
    assert (codes.shape, scales.shape) == ((2, 3, 65), (2, 3, 3))
    np.testing.assert_array_equal(codes[1], ref.quantize(x[1])[0])
    assert ref.quantize(np.zeros((0, 65)))[1].shape == (0, 3)


# ---- the matmul ----------------------------------------------------------------------------


def brute_force(x: ref.Bytes, xs: ref.Bytes, w: ref.Bytes, ws: ref.Bytes, block: tuple[int, int]):
    """The definition, element by element."""
    xv, wv = ref.decode(x), ref.decode(w)
    out = np.zeros((len(x), len(w)))
    for m, n in np.ndindex(out.shape):
        for k in range(x.shape[1]):
            scale = 2.0 ** (int(xs[m, k // 32]) - 127)
            scale *= 2.0 ** (int(ws[n // block[0], k // block[1]]) - 127)
            out[m, n] += xv[m, k] * wv[n, k] * scale
    return out


@pytest.mark.parametrize("block", [(1, 32), (32, 32), (128, 128)])
@pytest.mark.parametrize(("M", "N", "K"), [(3, 5, 40), (2, 33, 72), (1, 130, 130), (4, 1, 31)])
def test_matmul_is_the_definition(block: tuple[int, int], M: int, N: int, K: int):
    rng = np.random.default_rng([M, N, K, *block])
    x, w = random_codes(rng, (M, K)), random_codes(rng, (N, K))
    xs = random_scales(rng, (M, -(-K // 32)))
    ws = random_scales(rng, (-(-N // block[0]), -(-K // block[1])))
    got = ref.scaled_matmul(x, xs, w, ws, rhs_block=block)
    np.testing.assert_allclose(got, brute_force(x, xs, w, ws, block), rtol=1e-12, atol=1e-300)


def test_coarse_weight_scales_expand_exactly():
    rng = np.random.default_rng(1)
    x, w = random_codes(rng, (4, 160)), random_codes(rng, (150, 160))
    xs, ws = random_scales(rng, (4, 5)), random_scales(rng, (2, 2))
    per_row = np.repeat(np.repeat(ws, 128, axis=0)[:150], 4, axis=1)[:, :5]
    np.testing.assert_array_equal(
        ref.scaled_matmul(x, xs, w, ws, rhs_block=(128, 128)),
        ref.scaled_matmul(x, xs, w, per_row, rhs_block=(1, 32)),
    )


@pytest.mark.parametrize("bytes_", [(0, 254), (254, 0), (1, 253)])
def test_extreme_scale_bytes_are_exact(bytes_: tuple[int, int]):
    ones = np.full((1, 32), ONE, np.uint8)
    lhs, rhs = (np.array([[byte]], np.uint8) for byte in bytes_)
    assert ref.scaled_matmul(ones, lhs, ones, rhs) == [[32.0]]


def test_largest_scales_overflow_f32_only_when_rounded():
    ones = np.full((1, 32), ONE, np.uint8)
    scale = np.array([[254]], np.uint8)
    result = ref.scaled_matmul(ones, scale, ones, scale)
    assert result == [[32 * 2.0**254]]
    assert ref.round_to(result, "f32") == [[np.inf]]


def test_nan_scale_byte_takes_only_its_row():
    rng = np.random.default_rng(3)
    x, w = random_codes(rng, (5, 96)), random_codes(rng, (40, 96))
    xs, ws = random_scales(rng, (5, 3)), random_scales(rng, (2, 3))
    clean = ref.scaled_matmul(x, xs, w, ws)
    xs[2, 1] = 255
    poisoned = ref.scaled_matmul(x, xs, w, ws)
    assert np.isnan(poisoned[2]).all()
    np.testing.assert_array_equal(np.delete(poisoned, 2, 0), np.delete(clean, 2, 0))


def test_nan_weight_scale_byte_takes_only_its_columns():
    rng = np.random.default_rng(4)
    x, w = random_codes(rng, (5, 96)), random_codes(rng, (70, 96))
    xs, ws = random_scales(rng, (5, 3)), random_scales(rng, (3, 3))
    w[40], clean = 0, ref.scaled_matmul(x, xs, w, ws)  # a NaN scale makes zeros NaN, too
    ws[1, 2] = 255
    poisoned = ref.scaled_matmul(x, xs, w, ws)
    assert np.isnan(poisoned[:, 32:64]).all()
    np.testing.assert_array_equal(poisoned[:, :32], clean[:, :32])
    np.testing.assert_array_equal(poisoned[:, 64:], clean[:, 64:])


def test_every_row_and_block_has_its_own_scale():
    ones = np.full((16, 128), ONE, np.uint8)
    row, block = np.ogrid[:16, :4]
    xs = (120 + (row + 4 * block) % 16).astype(np.uint8)
    result = ref.scaled_matmul(ones, xs, ones, np.full((1, 4), 127, np.uint8))
    np.testing.assert_array_equal(result[:, 5], 32 * np.exp2(xs.astype(float) - 127).sum(axis=1))


def test_blocks_of_very_different_scales():
    ones = np.full((1, 64), ONE, np.uint8)
    result = ref.scaled_matmul(ones, np.array([[137, 117]]).astype(np.uint8), ones, None)
    assert result == [[32 * 1024 + 32 / 1024]]


def test_packed_weights_and_unquantised_activations():
    rng = np.random.default_rng(8)
    x = rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16)
    packed = rng.integers(0, 256, (6, 32)).astype(np.uint8)
    ws = random_scales(rng, (1, 2))
    result = ref.scaled_matmul(x, None, packed, ws, rhs_element="e2m1")
    values = ref.decode(packed, "e2m1") * np.repeat(np.exp2(ws.astype(float) - 127), 32, axis=1)
    np.testing.assert_allclose(result, x.astype(float) @ values.T, rtol=1e-12)


def test_trailing_one_of_a_scale_shape_is_dropped():
    rng = np.random.default_rng(9)
    x, w = random_codes(rng, (2, 64)), random_codes(rng, (6, 64))
    xs, ws = random_scales(rng, (2, 2)), random_scales(rng, (6, 2))
    np.testing.assert_array_equal(
        ref.scaled_matmul(x, xs, w, ws[..., None], rhs_block=(1, 32)),
        ref.scaled_matmul(x, xs, w, ws, rhs_block=(1, 32)),
    )


def test_wrong_shapes_are_refused():
    x, w = np.zeros((2, 64), np.uint8), np.zeros((40, 64), np.uint8)
    xs, ws = np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"expected scales of shape \(2, 2\) but got \(2, 3\)"):
        ref.scaled_matmul(x, np.zeros((2, 3), np.uint8), w, ws)
    with pytest.raises(ValueError, match=r"expected scales of shape \(2, 2\) but got \(1, 2\)"):
        ref.scaled_matmul(x, xs, w, ws[:1])
    with pytest.raises(ValueError, match="x has K = 64 but w has K = 32"):
        ref.scaled_matmul(x, xs, w[:, :32], ws[:, :1])


# ---- compare -------------------------------------------------------------------------------


def reference_result() -> ref.Reals:
    return np.random.default_rng(11).standard_normal((20, 30)) * 100


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_compare_takes_a_rounded_result(kind: ref.Kind):
    want = reference_result()
    report = ref.compare(ref.round_to(want, kind), want, kind)
    assert report.ok, report
    assert report.mismatches == 0


@pytest.mark.parametrize(("kind", "rtol"), [("bf16", 0.016), ("f16", 0.002), ("f32", 3e-5)])
def test_compare_finds_one_element_past_its_tolerance(kind: ref.Kind, rtol: float):
    want = reference_result()
    index = np.unravel_index(np.abs(want).argmax(), want.shape)
    got = want.copy()
    got[index] *= 1 + rtol + 4e-5
    assert ref.compare(got, want, kind).ok
    got[index] = want[index] * (1 + rtol + 6e-5)
    report = ref.compare(got, want, kind)
    assert not report.ok
    assert report.first_mismatch == tuple(int(i) for i in index)
    assert "1 of 600 elements off" in str(report)


def test_compare_finds_a_small_error_everywhere():
    """Each element within 0.016, but the norm is not below 5e-3."""
    want = reference_result()
    report = ref.compare(want * 1.008, want, "bf16")
    assert report.mismatches == 0
    assert not report.ok


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_compare_finds_a_wrong_special_value(wrong: float):
    want = reference_result()
    want[3, 4] = 1e39  # infinite in f32 and bf16
    want[5, 6] = np.nan
    right = want.copy()
    right[3, 4] = np.inf
    assert ref.compare(right, want, "f32").ok
    for index in [(3, 4), (5, 6), (7, 8)]:
        got = right.copy()
        got[index] = wrong
        if not np.array_equal(got, right, equal_nan=True):
            assert ref.compare(got, want, "f32").first_mismatch == index


def test_compare_refuses_another_shape_and_takes_an_empty_one():
    with pytest.raises(ValueError, match=r"expected a result of shape \(2, 3\) but got \(3, 2\)"):
        ref.compare(np.zeros((3, 2)), np.zeros((2, 3)), "f32")
    assert ref.compare(np.zeros((0, 3)), np.zeros((0, 3)), "bf16").ok
