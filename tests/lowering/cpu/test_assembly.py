# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The machine code of the innermost loops: instructions that must be there, and none that spill."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from block32.lowering.problem import ScaledMatmul
from block32.tools.cpu_listing import hot_loop, hot_piece, loops, mnemonics, stack_accesses
from block32.tools.iree_compile import run_iree_compile
from tests.lowering.cpu.support import (
    ARM_PROCESSORS,
    X86_PROCESSORS,
    Processor,
    kernel_module,
)

PROCESSORS = {processor.profile: processor for processor in X86_PROCESSORS + ARM_PROCESSORS}


def assembly(problem: ScaledMatmul, processor: Processor, folder: Path) -> str:
    """The assembly of the kernels of ``problem``."""
    source = kernel_module(problem, processor).encode()
    flags = (*processor.flags, f"--iree-hal-dump-executable-files-to={folder}")
    run_iree_compile(["-", *flags], stdin=source)
    (path,) = folder.glob("*.s")
    return path.read_text()


def tiled_loop(
    profile: str, product: str, tile_products: int, folder: Path
) -> tuple[list[str], Counter[str], int]:
    """The loop over register tiles, which does not spill: instructions, their counts, its steps."""
    text = assembly(ScaledMatmul(96, 256, 512), PROCESSORS[profile], folder)
    loop = hot_loop(text, product)
    counts = mnemonics(loop)
    steps = counts[product] // tile_products
    assert steps >= 1 and counts[product] == steps * tile_products
    assert not stack_accesses(loop), "the loop spills"
    return loop, counts, steps


@pytest.mark.parametrize(
    ("profile", "product", "tile_products", "loads"),
    [
        ("avx512_vbmi", "vfmadd231ps", 24, 10),
        ("avx512_bf16", "vdpbf16ps", 24, 10),
        ("avx512", "vfmadd231ps", 24, 10),
        ("avx2", "vfmadd231ps", 12, 8),
    ],
)
def test_the_tiled_loop_is_products_and_loads(
    profile: str, product: str, tile_products: int, loads: int, tmp_path: Path
) -> None:
    """A step of the register tile: its products, a load an operand, and no spill."""
    loop, counts, steps = tiled_loop(profile, product, tile_products, tmp_path)
    moves = sum(n for name, n in counts.items() if name.startswith(("vmov", "vbroadcast", "vpbr")))
    assert moves <= steps * loads
    assert len(loop) <= counts[product] + moves + 6


@pytest.mark.parametrize(
    ("profile", "product", "lookup", "rows"),
    [
        ("amx", "vfmadd", "vpermb", 4),
        ("avx512_bf16", "vdpbf16ps", "vperm[it]2b", 1),
        ("avx512", "vfmadd", "vcvtph2ps", 4),
        ("avx2", "vfmadd", "vcvtph2ps", 2),
    ],
)
def test_the_stream_loop_decodes_in_registers(
    profile: str, product: str, lookup: str, rows: int, tmp_path: Path
) -> None:
    """M = 1: codes are looked up or converted a register at a time, without scalar code."""
    text = assembly(ScaledMatmul(1, 256, 512), PROCESSORS[profile], tmp_path)
    loop = hot_loop(text, product)
    counts = mnemonics(loop)
    assert any(re.match(lookup, name) for name in counts)
    assert not any(re.match(r"vp(extr|insr)|movzb|vgather", name) for name in counts), counts
    fetched = sum(n for name, n in counts.items() if name.startswith("prefetch"))
    assert fetched == (rows if rows > 1 else 0)
    assert not any(re.search(r"^v?mov\w+\s+%\w+, -?\d*\(%r[sb]p\)", line) for line in loop)
    assert len(loop) <= 34 * rows


def test_a_stream_of_bytes_is_looked_up_by_halves(tmp_path: Path) -> None:
    """64 codes of one row of w: 17 vector instructions, of which the permutes are of one step."""
    text = assembly(ScaledMatmul(1, 256, 512), PROCESSORS["amx"], tmp_path)
    loop = hot_loop(text, "vfmadd")
    counts, rows = mnemonics(loop), 4
    expected = {"vptestnmb": 1, "vpermb": 3, "vpsllw": 1, "vpternlogq": 1, "vpunpcklbw": 1}
    expected |= {"vpunpckhbw": 1, "vpslld": 2}
    assert {name: counts[name] for name in expected} == {
        name: count * rows for name, count in expected.items()
    }
    assert sum(n for name, n in counts.items() if name.startswith("vpand")) == 2 * rows
    assert sum(n for name, n in counts.items() if name.startswith("vfmadd")) == 5 * rows
    assert not any(re.match("vperm[it]2", name) for name in counts)


@pytest.mark.parametrize("profile", ["amx", "avx512_bf16", "avx512_vbmi"])
def test_a_stream_of_mxfp4_multiplies_bytes(profile: str, tmp_path: Path) -> None:
    """128 codes: two look-ups and six products of bytes; integers become floats once."""
    text = assembly(ScaledMatmul(1, 256, 512, rhs="f4E2M1FN"), PROCESSORS[profile], tmp_path)
    loop = hot_loop(text, "vpdpbusd")
    counts = mnemonics(loop)
    rows = counts["vcvtdq2ps"]
    assert rows == (1 if profile == "avx512_bf16" else 4)
    expected = {"vpdpbusd": 6, "vpermb": 2, "vpsrlw": 1, "vpslld": 2, "vpaddd": 1}
    assert {name: counts[name] // rows for name in expected} == expected
    assert len(loop) <= 20 * rows + 12
    assert not any(re.search(r"^v?mov\w+\s+%\w+, -?\d*\(%r[sb]p\)", line) for line in loop)


@pytest.mark.parametrize(
    ("profile", "m", "products"), [("avx2", 1, 10), ("avx2", 8, 32), ("avx512", 8, 32)]
)
def test_the_stream_loop_converts_from_memory(
    profile: str, m: int, products: int, tmp_path: Path
) -> None:
    """Conversions take no shuffle, x is an operand of the products, and no register is spilled."""
    text = assembly(ScaledMatmul(m, 256, 2048), PROCESSORS[profile], tmp_path)
    loop = hot_loop(text, r"vcvtph2ps\s+-?\d*\(")
    assert not any(re.match(r"vcvtph2ps\s+%|vextract|vinsert", line) for line in loop)
    assert mnemonics(loop)["vfmadd231ps"] + mnemonics(loop)["vfmadd213ps"] == products
    staged = [line for line in loop if re.match(r"vmov\w+\s+%[yz]mm\d+,.*\(%rsp,", line)]
    stored = [line for line in loop if re.match(r"vmov\w+\s+%[yz]mm\d+,.*\(", line)]
    assert stored == staged and 1 <= len(staged) <= 4, stored
    assert len(loop) <= 90


def test_a_stream_of_mxfp4_and_bf16_is_looked_up_in_one_step(tmp_path: Path) -> None:
    """64 codes: no unpacking to bytes; a spread, two shifts and two look-ups of words."""
    problem = ScaledMatmul(1, 256, 512, "bf16", "f4E2M1FN", lhs_scaled=False)
    text = assembly(problem, PROCESSORS["amx"], tmp_path)
    counts = mnemonics(hot_loop(text, "vfmadd"))
    rows = 4
    assert (counts["vpermw"], counts["vpsrlvw"]) == (2 * rows, 2 * rows)
    assert not any(re.match(r"vpunpck|vpermb|vperm[it]2", name) for name in counts), counts


@pytest.mark.parametrize(
    ("m", "products", "loads"), [(8, 2, 3), (16, 4, 5), (32, 4, 4), (96, 4, 4)]
)
def test_the_matrix_kernel_loads_and_multiplies_tiles(
    m: int, products: int, loads: int, tmp_path: Path
) -> None:
    """A step: each tile is loaded once, and nothing but addresses is computed beside."""
    text = assembly(ScaledMatmul(m, 256, 2048), PROCESSORS["amx"], tmp_path)
    loop = [line for line in hot_piece(text, "tdpbf16ps") if not line.startswith("prefetch")]
    counts = mnemonics(loop)
    steps = counts["tdpbf16ps"] // products
    assert steps >= 1 and counts["tdpbf16ps"] == steps * products
    assert counts["tileloadd"] == steps * loads
    # A tile load takes a base and a stride, so that most need an address of their own.
    assert len(loop) <= steps * (products + 3 * loads) + 14
    stored = [line for line in loop if re.search(r"^(v?mov|tilestore)\w*\s+%.*\(%r[sb]p", line)]
    assert not stored, "the loop spills"


def test_the_matrix_kernel_decodes_a_register_at_a_time(tmp_path: Path) -> None:
    """Two rows by 128 K: for 64 codes two look-ups of two registers and two interleaves.

    Their scale is in the tables: nothing is added to an exponent.
    """
    text = assembly(ScaledMatmul(8, 256, 2048), PROCESSORS["amx"], tmp_path)
    loop = next((loop for loop in loops(text) if any("prefetch" in line for line in loop)), [])
    counts, registers = mnemonics(loop), 4
    lookups = sum(n for name, n in counts.items() if re.match("vperm[it]2b", name))
    assert lookups == 2 * registers
    assert (counts["vpunpcklbw"], counts["vpunpckhbw"]) == (registers, registers)
    assert not any(re.match("vpadd|vpcmp|vptest", name) for name in counts), counts
    assert len(loop) <= 26 * registers


def test_the_matrix_kernel_multiplies_by_scales_of_single_rows(tmp_path: Path) -> None:
    """The same for blocks of 1x32: both registers of pairs are raised by an exponent."""
    problem = ScaledMatmul(8, 256, 2048, rhs_block=(1, 32))
    text = assembly(problem, PROCESSORS["amx"], tmp_path)
    loop = next((loop for loop in loops(text) if any("prefetch" in line for line in loop)), [])
    counts, registers = mnemonics(loop), 2
    lookups = sum(n for name, n in counts.items() if re.match("vperm[it]2b", name))
    assert lookups == 2 * registers
    assert counts["vpcmpltuw"] == 2 * registers


def test_the_matrix_kernel_asks_before_it_uses_tiles(tmp_path: Path) -> None:
    """Without the leave that the system call asks for, a tile instruction ends the process.

    The same function asks: IREE may run the launch that packs a constant x while it compiles.
    """
    text = assembly(ScaledMatmul(8, 64, 64), PROCESSORS["amx"], tmp_path)
    (user,) = (piece for piece in text.split(",@function") if "\tldtilecfg" in piece)
    assert "\tsyscall" in user, "it does not ask"
    assert user.index("\tsyscall") < user.index("\tldtilecfg")
    assert "\ttilerelease" in user


@pytest.mark.parametrize("m", [4, 8])
def test_the_stream_loop_of_several_rows_does_not_spill(m: int, tmp_path: Path) -> None:
    text = assembly(ScaledMatmul(m, 256, 2048), PROCESSORS["avx512_vbmi"], tmp_path)
    loop = hot_loop(text, "vfmadd")
    stores = [line for line in loop if re.search(r"^vmov\w+\s+%zmm\d+, -?\d*\(%rsp", line)]
    assert not stores, stores


def test_no_feature_of_a_larger_processor(tmp_path: Path) -> None:
    """Kernels for baseline x86-64 hold SSE2 alone."""
    text = assembly(ScaledMatmul(None, 64, 96), PROCESSORS["generic"], tmp_path)
    assert "mulps" in text
    assert not re.search(r"%[yz]mm|\bv(mul|add|fmadd)ps\b", text)


@pytest.mark.parametrize(
    ("profile", "product", "products", "loads"),
    [("neon_bf16", "bfmmla", 16, 4), ("neon", "fmla", 24, 7)],
)
def test_the_tiled_loop_of_aarch64_is_products_and_loads(
    profile: str, product: str, products: int, loads: int, tmp_path: Path
) -> None:
    """A step: 16 products of pairs of rows take 4 loads of two registers, 24 of lanes take 7."""
    loop, counts, steps = tiled_loop(profile, product, products, tmp_path)
    loaded = sum(n for name, n in counts.items() if name.startswith("ld"))
    assert loaded <= steps * (loads + 1)
    assert len(loop) <= counts[product] + loaded + 7


#: Scalar work in a loop that is meant to be vector code, but for addresses and the counter.
SCALAR = re.compile(r"ldrsb|[us]bfx|f(add|mul|madd|cvt)\s+[hsd]\d")


#: Products of weights and elements of x that an instruction makes.
PRODUCTS = {"bfmmla": 16, "bfdot": 8, "fmla": 4}


@pytest.mark.parametrize(
    ("profile", "m", "rhs", "product", "weights", "lookups", "most"),
    [
        ("neon_bf16", 1, "f8E4M3FN", "bfdot", 128, 24, 126),
        ("neon_bf16", 1, "f4E2M1FN", "bfdot", 128, 16, 80),
        ("neon_bf16", 2, "f8E4M3FN", "bfmmla", 128, 24, 142),
        ("neon_bf16", 4, "f8E4M3FN", "bfmmla", 128, 24, 164),
        ("neon_bf16", 8, "f8E4M3FN", "bfmmla", 64, 12, 120),
        ("neon", 1, "f8E4M3FN", "fmla", 64, 0, 102),
        ("neon", 4, "f8E4M3FN", "fmla", 64, 0, 184),
    ],
)
def test_the_loop_of_few_rows_of_aarch64(
    profile: str,
    m: int,
    rhs: str,
    product: str,
    weights: int,
    lookups: int,
    most: int,
    tmp_path: Path,
) -> None:
    """So many weights become operands in registers, and take at most so many instructions."""
    problem = ScaledMatmul(m, 256, 512, rhs=rhs)
    loop = hot_loop(assembly(problem, PROCESSORS[profile], tmp_path), product)
    counts = mnemonics(loop)
    assert counts["tbl"] + counts["tbx"] == lookups
    if not lookups:
        assert counts["fcvtl"] == counts["fcvtl2"] > 0
    assert not [line for line in loop if SCALAR.match(line)]
    assert counts["ldrb"] <= weights // 32, "bytes that are loaded one by one are scales"
    assert not stack_accesses(loop), "the loop spills"
    # Sums are scaled by fmla, too.
    assert weights * m <= counts[product] * PRODUCTS[product] <= weights * m + 8
    assert len(loop) <= most


def test_a_panel_of_aarch64_is_filled_by_look_ups(tmp_path: Path) -> None:
    """Two rows of w are interleaved as codes, decoded, scaled and stored: 64 codes a turn."""
    text = assembly(ScaledMatmul(96, 256, 512), PROCESSORS["neon_bf16"], tmp_path)
    loop = next(loop for loop in loops(text) if sum(line.startswith("tbx") for line in loop) == 8)
    assert not [line for line in loop if SCALAR.match(line)]
    assert not stack_accesses(loop), "the loop spills"
    assert len(loop) <= 130
