# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Scalar and vector ALU: values against Python integers, and poison rules by their definition."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from block32.tools.gfx950_executor import decode
from block32.tools.gfx950_executor.state import VCC
from block32.tools.gfx950_executor.valu import DTYPES, bits_of, combined_poison
from block32.tools.gfx950_executor.valu_conversions import OPS
from tests.tools.gfx950_executor.bench import EXEC_REGISTER, VCC_REGISTER, Bench, ins, s, v, wait

LANE = np.arange(64)
MASK = (1 << 32) - 1
UNSIGNED: dict[int, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def random_operands(name: str, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Values and sparse poison masks for an operation's sources."""
    values, masks = [], []
    for kind in OPS[name].sources:
        bits = bits_of(kind)
        limit = 1 << (24 if kind.endswith("24") else bits)
        raw = rng.integers(0, limit, 64, dtype=np.uint64).astype(UNSIGNED[bits])
        mask = rng.integers(0, limit, (3, 64), dtype=np.uint64).astype(UNSIGNED[bits])
        mask = mask[0] & mask[1] & mask[2]
        mask[rng.random(64) < 0.5] = 0
        values.append(raw.view(DTYPES[kind]))
        masks.append(mask)
    return values, masks


@pytest.mark.parametrize("name", sorted(OPS))
def test_bits_without_poison_do_not_depend_on_poisoned_bits(name: str) -> None:
    rng = np.random.default_rng(list(map(ord, name)))
    op = OPS[name]
    with np.errstate(all="ignore"):
        values, masks = random_operands(name, rng)
        result = op.compute(*values)
        unsigned = UNSIGNED[bits_of(op.result)]
        poison = combined_poison(list(masks), values, op)
        assert poison is not None
        assert result.dtype == DTYPES[op.result]
        for _ in range(8):
            flipped = []
            for value, mask in zip(values, masks, strict=True):
                noise = rng.integers(0, 1 << 63, 64, dtype=np.uint64).astype(mask.dtype)
                flipped.append((value.view(mask.dtype) ^ (noise & mask)).view(value.dtype))
            other = op.compute(*flipped)
            changed = result.view(unsigned) ^ other.view(unsigned)
            np.testing.assert_array_equal(changed & ~poison, 0)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("v_mul_hi_u32", lambda a, b: a * b >> 32),
        ("v_mul_lo_u32", lambda a, b: a * b),
        ("v_ashrrev_i32_e64", lambda a, b: signed(b) >> (a & 31)),
        ("v_lshlrev_b32_e64", lambda a, b: b << (a & 31)),
        ("v_mul_i32_i24_e64", lambda a, b: signed(a << 8) // 256 * (signed(b << 8) // 256)),
        ("v_min_i32_e64", lambda a, b: min(signed(a), signed(b))),
        ("v_bcnt_u32_b32", lambda a, b: a.bit_count() + b),
        ("v_bfm_b32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    ],
)
def test_two_operand_integers(name: str, wanted: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 1 << 32, (2, 64), dtype=np.uint32)
    a[:3], b[:3] = [0, MASK, 1 << 31], [MASK, MASK, 1]
    wave = Bench().run([getattr(ins, name)(v[2], v[0], v[1])], vector={0: a, 1: b})
    expected = [wanted(int(x), int(y)) & MASK for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(wave.v[2], np.array(expected, np.uint32))


def signed(value: int) -> int:
    """Two's complement of 32 bits."""
    value &= MASK
    return value - (1 << 32) if value >> 31 else value


def test_byte_permutation() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 1 << 32, (2, 64), dtype=np.uint32)
    selector = rng.integers(0, 14, (64, 4)).astype(np.uint8)
    word = selector.view(np.uint32).ravel()
    wave = Bench().run([ins.v_perm_b32_e64(v[3], v[0], v[1], v[2])], vector={0: a, 1: b, 2: word})
    for lane in range(64):
        pool = int(b[lane]) | int(a[lane]) << 32
        for i, choice in enumerate(selector[lane]):
            byte = int(choice)
            if byte < 8:
                expected = pool >> 8 * byte & 0xFF
            elif byte < 12:
                expected = 0xFF if pool >> (16 * (byte - 8) + 15) & 1 else 0
            else:
                expected = 0 if byte == 12 else 0xFF
            assert int(wave.v[3][lane]) >> 8 * i & 0xFF == expected


def test_carries_chain_through_vcc() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 1 << 64, (2, 64), dtype=np.uint64)
    halves = {0: a & MASK, 1: a >> np.uint64(32), 2: b & MASK, 3: b >> np.uint64(32)}
    code = [
        ins.v_add_co_u32_e32(v[4], v[0], v[2]),
        ins.v_addc_co_u32_e32(v[5], v[1], v[3]),
    ]
    wave = Bench().run(code, vector={k: x.astype(np.int64) for k, x in halves.items()})
    total = wave.v[4].astype(np.uint64) | wave.v[5].astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(total, a + b)


def test_comparison_writes_zero_for_inactive_lanes() -> None:
    wave = Bench().run(
        [ins.v_cmp_gt_u32_e32(40, v[0])], vector={0: LANE}, exec_mask=(1 << 64) - (1 << 8)
    )
    assert wave.read_s64(VCC) == (1 << 40) - (1 << 8)


def test_float_comparisons_with_nan() -> None:
    x = np.where(LANE % 2 == 0, np.nan, 1.0).astype(np.float32)
    code = [
        ins.v_cmp_nge_f32_e32(1.0, v[0]),
        ins.s_mov_b64(s[10:11], VCC_REGISTER),
        ins.v_cmp_lg_f32_e32(2.0, v[0]),
    ]
    wave = Bench().run(code, vector={0: x})
    even = int("01" * 32, 2)
    assert wave.read_s64(10) == even
    assert wave.read_s64(VCC) == ~even & (1 << 64) - 1


@pytest.mark.parametrize(
    ("name", "a", "b", "result", "scc"),
    [
        ("s_add_u32", MASK, 2, 1, 1),
        ("s_add_i32", 0x7FFFFFFF, 1, 0x80000000, 1),
        ("s_sub_u32", 1, 2, MASK, 1),
        ("s_sub_i32", 1, 2, MASK, 0),
        ("s_min_i32", MASK, 3, MASK, 1),
        ("s_max_u32", MASK, 3, MASK, 1),
        ("s_andn2_b32", 0b1110, 0b0110, 0b1000, 1),
        ("s_ashr_i32", 0x80000000, 4, 0xF8000000, 1),
        ("s_bfe_i32", 0b1011000, 3 | 4 << 16, MASK - 4, 1),
        ("s_bfe_u32", 0b1011000, 3 | 4 << 16, 0b1011, 1),
        ("s_lshl3_add_u32", 1 << 29, 5, 5, None),
        ("s_mul_hi_i32", MASK, 5, MASK, None),
        ("s_pack_lh_b32_b16", 0x11112222, 0x33334444, 0x33332222, None),
    ],
)
def test_scalar_arithmetic(name: str, a: int, b: int, result: int, scc: int | None) -> None:
    wave = Bench().run([getattr(ins, name)(s[12], s[10], s[11])], scalar={10: a, 11: b})
    assert wave.s[12] == result
    if scc is not None:
        assert wave.scc == scc


def test_saved_exec_masks_lanes() -> None:
    code = [
        ins.v_cmp_gt_u32_e32(16, v[0]),
        ins.s_and_saveexec_b64(s[10:11], VCC_REGISTER),
        ins.v_mov_b32_e32(v[1], 7),
        ins.s_mov_b64(EXEC_REGISTER, s[10:11]),
        ins.v_add_u32_e32(v[1], 1, v[1]),
    ]
    wave = Bench().run(code, vector={0: LANE, 1: 1})
    np.testing.assert_array_equal(wave.v[1], np.where(LANE < 16, 8, 2))


def test_sdwa_selects_and_preserves_parts() -> None:
    rng = np.random.default_rng(4)
    a, b, old = rng.integers(0, 1 << 32, (3, 64), dtype=np.uint32)
    op = ins.VOP2_SDWA(
        ins.VOP2Op.V_OR_B32_E32,
        v[2],
        ins.SDWA,
        v[1],
        vsrc0=v[0],
        src0_sel=1,
        src1_sel=5,
        dst_sel=2,
        dst_unused=2,
    )
    wave = Bench().run([op], vector={0: a, 1: b, 2: old})
    byte = (a >> 8 & 0xFF | b >> 16) & 0xFF
    np.testing.assert_array_equal(wave.v[2], old & ~np.uint32(0xFF0000) | byte << 16)


def test_packed_halves_and_negation() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 64, 2)).astype(np.float16)
    words = [np.ascontiguousarray(x).view(np.uint32).ravel() for x in (a, b)]
    # The low result takes both high halves, the high result a's low one negated and b's high one.
    op = ins.v_pk_mul_f16(v[2], v[0], v[1], opsel=3, opsel_hi=2, neg_hi=1)
    wave = Bench().run([op], vector={0: words[0], 1: words[1]})
    got = wave.v[2].copy().view(np.float16).reshape(64, 2)
    np.testing.assert_array_equal(got[:, 0], a[:, 1] * b[:, 1])
    np.testing.assert_array_equal(got[:, 1], -a[:, 0] * b[:, 1])


def test_fused_multiply_add_rounds_once() -> None:
    # 1 + 2^-23 squared, minus its rounded value: zero unless the product keeps its low bits.
    x = np.float32(1 + 2**-12)
    product = np.float32(x * x)
    wave = Bench().run([ins.v_fma_f32_e64(v[2], v[0], v[0], v[1])], vector={0: x, 1: -product})
    exact = float(x) * float(x) - float(product)
    assert exact != 0
    assert wave.v[2].view(np.float32)[0] == np.float32(exact)


def test_double_rounding_is_avoided() -> None:
    a, b, c = np.float32(1 + 2**-23), np.float32(2.0**-25), np.float32(1.0 + 2**-23)
    wave = Bench().run([ins.v_fma_f32_e64(v[3], v[0], v[1], v[2])], vector={0: a, 1: b, 2: c})
    assert wave.v[3].view(np.float32)[0] == c


def test_later_memory_loads_overtake_earlier_ones() -> None:
    data = np.arange(128, dtype=np.uint32)
    bench = Bench([data])
    code = [
        ins.global_load_dword(v[1], v[0], saddr=s[2:3]),
        ins.global_load_dword(v[1], v[0], saddr=s[2:3], offset=256),
        wait(vm=0),
    ]
    wave = bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))
    np.testing.assert_array_equal(wave.v[1], LANE + 64)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinygrad.renderer", None)
    monkeypatch.delitem(sys.modules, "tinygrad.renderer.amd", raising=False)
    with pytest.raises(ImportError, match=r"install block32\[gfx950\]"):
        decode(ins.s_endpgm(0).to_bytes(), 0)
