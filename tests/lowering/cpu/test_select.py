# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernels the CPU target selects, and which explicit choices it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.cpu.formats import SMALL_FLOATS
from block32.lowering.cpu.isa import INSTRUCTION_SETS, instruction_set
from block32.lowering.cpu.select import profiles
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.problem import Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from tests.lowering.cpu.support import ARM_PROCESSORS, X86_PROCESSORS, Processor

TARGET = CpuTarget()
DYNAMIC = ScaledMatmul(None, 4096, 256)
AVX2 = DeviceFacts(frozenset({"avx2", "fma", "f16c"}), "x86_64")


def tiers(problem: ScaledMatmul, facts: DeviceFacts) -> tuple[KernelTier, ...]:
    config = TARGET.select(problem, facts).config
    assert config is not None
    return config.tiers


@pytest.mark.parametrize("processor", X86_PROCESSORS + ARM_PROCESSORS, ids=lambda p: p.profile)
def test_a_processor_gets_its_profile(processor: Processor) -> None:
    expected = next(p.tiers for p in profiles() if p.name == processor.profile)
    assert tiers(DYNAMIC, processor.facts) == expected


def test_arm_and_unknown_architectures() -> None:
    assert tiers(DYNAMIC, DeviceFacts(frozenset({"neon"}), "aarch64"))[0].isa == "neon"
    assert tiers(DYNAMIC, DeviceFacts(frozenset({"avx2"}), "riscv64"))[0].isa == "generic"
    # Half of a set is none of it.
    assert tiers(DYNAMIC, DeviceFacts(frozenset({"avx2"}), "x86_64"))[0].isa == "generic"


@pytest.mark.parametrize("lhs", ["f16", "f32"])
def test_no_bf16_products_for_activations_that_bf16_cannot_hold(lhs: str) -> None:
    problem = dataclasses.replace(DYNAMIC, lhs=lhs, lhs_scaled=False)
    for processor in X86_PROCESSORS + ARM_PROCESSORS:
        used = {tier.isa for tier in tiers(problem, processor.facts)}
        assert all(isa.dot == "f32" for isa in INSTRUCTION_SETS if isa.name in used)


@pytest.mark.parametrize(("m", "rows"), [(8, 8), (9, 5), (16, 8), (17, 6), (32, 8)])
def test_a_static_m_gets_slabs_of_equal_size(m: int, rows: int) -> None:
    (tier,) = tiers(dataclasses.replace(DYNAMIC, m=m), AVX2)
    assert tier.tile is not None and tier.mma is not None
    assert (tier.form, tier.tile[0], tier.mma[0]) == ("stream", m, rows)


def test_a_static_m_gets_one_tier() -> None:
    (tier,) = tiers(dataclasses.replace(DYNAMIC, m=3), AVX2)
    assert (tier.form, tier.max_m, tier.tile[0] if tier.tile else 0) == ("stream", None, 3)
    (tier,) = tiers(dataclasses.replace(DYNAMIC, m=300), AVX2)
    assert (tier.form, tier.max_m) == ("tiled", None)


@pytest.mark.parametrize("profile", profiles(), ids=lambda p: p.name)
def test_the_table_is_valid(profile: object) -> None:
    """Every tier of the table passes the check of explicit choices."""
    for tier in (*profile.tiers, *profile.layout_tiers):  # type: ignore[attr-defined]
        isa = next(isa for isa in INSTRUCTION_SETS if isa.name == tier.isa)
        facts = DeviceFacts(isa.features, (isa.architectures or ("riscv64",))[0])
        assert TARGET.verify(DYNAMIC, tier, facts) is None


STREAM = KernelTier("stream", 4, (4, 128, 32), mma=(4, 2, 32), isa="avx2")
TILED = KernelTier("tiled", None, (384, 128, 96), mma=(6, 16, 1), isa="avx2")
IN_PIECES = KernelTier(
    "stream", 4, (4, 128, 32), mma=(4, 32, 32), isa="avx2", weight_layout="n16k1"
)


@pytest.mark.parametrize(
    ("tier", "changes", "reason"),
    [
        (STREAM, {"form": "packed"}, "expected form 'stream' or 'tiled' on cpu but got 'packed'"),
        (STREAM, {"isa": "mmx"}, "expected isa to be one of amx_bf16, avx512_bf16, "),
        (STREAM, {"isa": "avx512"}, "need cpu features that are off: avx512bw, avx512f, avx512vl"),
        (STREAM, {"weight_layout": "swizzled"}, "expected weight_layout 'plain'"),
        (STREAM, {"k_pack": 2}, "expected k_pack 1 but got 2"),
        (
            STREAM,
            {"weight_layout": "n16k4"},
            "expected weight_layout 'plain' or 'n16k1' with 'avx2'",
        ),
        (IN_PIECES, {"mma": (2, 32, 32)}, "expected mma[0] to be tile[0] (4) but got 2"),
        (IN_PIECES, {"mma": (4, 24, 32)}, "expected mma[1] to be a multiple of 16 that divides"),
        (IN_PIECES, {"tile": (4, 112, 32)}, "expected mma[1] to be a multiple of 16 that divides"),
        (TILED, {"order": "m"}, "expected order 'n' but got 'm'"),
        (STREAM, {"tile": None}, "expected both tile and mma"),
        (STREAM, {"tile": (3, 128, 32)}, "a stream kernel holds all rows: expected tile[0]"),
        (STREAM, {"max_m": None}, "a stream kernel holds all rows"),
        (STREAM, {"tile": (4, 100, 32)}, "expected tile[1] to be a multiple of 16"),
        (STREAM, {"tile": (4, 128, 100)}, "expected tile[2] to be a multiple of 32 but got 100"),
        (STREAM, {"mma": (4, 3, 32)}, "expected mma[1] to divide 16"),
        (STREAM, {"mma": (25, 1, 32)}, "expected mma[0] of at most 24 but got 25"),
        (TILED, {"tile": (384, 100, 96)}, "expected tile[1] to be a multiple of 64"),
        (TILED, {"tile": (384, 128, 100)}, "expected tile[2] to be a multiple of 32"),
        (TILED, {"tile": (384, 128, 128)}, "expected a panel of at most 28672 bytes but tile[2]"),
        (TILED, {"mma": (6, 24, 1)}, "expected mma[1] to be a multiple of 8 that divides 64"),
    ],
)
def test_refuses(tier: KernelTier, changes: dict[str, object], reason: str) -> None:
    assert TARGET.verify(DYNAMIC, tier, AVX2) is None
    refused = TARGET.verify(DYNAMIC, dataclasses.replace(tier, **changes), AVX2)  # type: ignore[arg-type]
    assert refused is not None and reason in refused


MATRIX = KernelTier("tiled", None, (128, 128, 192), mma=(32, 32, 32), isa="amx_bf16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mma": (24, 32, 32)}, "expected mma[0] to be 8 or a multiple of 16 but got 24"),
        ({"mma": (4, 32, 32)}, "expected mma[0] to be 8 or a multiple of 16 but got 4"),
        ({"mma": (32, 48, 32)}, "expected mma[1] to be 16 or a multiple of 32 but got 48"),
        ({"mma": (48, 32, 32)}, "leave a tile register for w: 6 + 3 of 8 are taken"),
        ({"tile": (128, 48, 192)}, "expected tile[1] to be a multiple of 32 but got 48"),
        ({"tile": (128, 128, 96)}, "expected tile[2] to be a multiple of 64 but got 96"),
        (
            {"tile": (128, 128, 256)},
            "expected panel and sums of at most 28672 bytes but tile takes",
        ),
        ({"tile": (256, 128, 64)}, "expected panel and sums of at most 28672 bytes but tile takes"),
    ],
)
def test_refuses_a_matrix_kernel(changes: dict[str, object], reason: str) -> None:
    facts = X86_PROCESSORS[0].facts
    assert TARGET.verify(DYNAMIC, MATRIX, facts) is None
    refused = TARGET.verify(DYNAMIC, dataclasses.replace(MATRIX, **changes), facts)  # type: ignore[arg-type]
    assert refused is not None and reason in refused


def test_refuses_half_a_pair_of_rows() -> None:
    facts = ARM_PROCESSORS[0].facts
    tier = KernelTier("tiled", None, (384, 128, 128), mma=(8, 8, 4), isa="neon_bf16")
    assert TARGET.verify(DYNAMIC, tier, facts) is None
    refused = TARGET.verify(DYNAMIC, dataclasses.replace(tier, mma=(7, 8, 4)), facts)
    assert refused == "'neon_bf16' multiplies pairs of rows: expected mma[0] to be even"


def test_refuses_rows_of_w_that_are_no_pairs() -> None:
    facts = ARM_PROCESSORS[0].facts
    tier = KernelTier("tiled", 8, (8, 128, 256), mma=(8, 2, 4), isa="neon_bf16")
    assert TARGET.verify(DYNAMIC, tier, facts) is None
    refused = TARGET.verify(DYNAMIC, dataclasses.replace(tier, mma=(8, 3, 4)), facts)
    assert refused == "expected mma[1] to be an even divisor of 16 but got 3"


def test_refuses_an_activation_that_the_instruction_set_cannot_hold() -> None:
    facts = X86_PROCESSORS[1].facts
    problem = ScaledMatmul(1, 64, 64, lhs="f32", lhs_scaled=False)
    tier = KernelTier("stream", None, (1, 128, 64), mma=(1, 1, 64), isa="avx512_bf16")
    assert TARGET.verify(problem, tier, facts) == "'avx512_bf16' kernels take no f32 activation"


@pytest.mark.parametrize(
    ("name", "element"), [("f8E4M3FN", "e4m3"), ("f8E5M2", "e5m2"), ("f4E2M1FN", "e2m1")]
)
def test_the_formats_are_those_of_the_reference(name: str, element: str) -> None:
    small = SMALL_FLOATS[name]
    for code in range(small.magnitude_mask + 1):
        decoded = reference.decode(np.array([code], np.uint8), element)  # type: ignore[arg-type]
        assert np.array_equal(small.magnitude(code), decoded[0], equal_nan=True), code


@pytest.mark.parametrize(
    "changes",
    [{"n": 40}, {"k": 96}, {"rhs": "f4E2M1FN"}, {"grouping": Grouping(experts=2, groups=2)}],
    ids=str,
)
def test_pieces_are_for_one_8_bit_weight_of_whole_pieces(changes: dict[str, object]) -> None:
    assert TARGET.choose_layout_tiers(dataclasses.replace(DYNAMIC, m=16), AVX2).pays
    assert not TARGET.choose_layout_tiers(dataclasses.replace(DYNAMIC, m=8), AVX2).pays
    assert not TARGET.choose_layout_tiers(DYNAMIC, AVX2).pays, "there may be few rows"
    problem = dataclasses.replace(DYNAMIC, **changes)  # type: ignore[arg-type]
    assert TARGET.choose_layout_tiers(problem, AVX2).tiers == ()
    assert TARGET.verify(problem, IN_PIECES, AVX2) == (
        "weight_layout 'n16k1' is for one 8-bit weight with N a multiple of 16 and K one of 64"
    )


def test_rows_in_pairs_are_not_in_pieces() -> None:
    facts = DeviceFacts(instruction_set("neon_bf16").features, "aarch64")
    tier = dataclasses.replace(TILED, isa="neon_bf16", weight_layout="n16k1")
    assert TARGET.verify(DYNAMIC, tier, facts) == (
        "expected weight_layout 'plain' with 'neon_bf16' but got 'n16k1'"
    )


def test_matrix_tiles_read_plain_weights_alone() -> None:
    facts = X86_PROCESSORS[0].facts
    assert TARGET.choose_layout_tiers(DYNAMIC, facts).tiers == ()
    refused = TARGET.verify(DYNAMIC, dataclasses.replace(MATRIX, weight_layout="n16k4"), facts)
    assert refused == "expected weight_layout 'plain' with 'amx_bf16' but got 'n16k4'"
