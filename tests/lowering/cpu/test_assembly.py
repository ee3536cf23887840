# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The machine code of the innermost loops: instructions that must be there, and none that spill."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from block32.lowering.problem import ScaledMatmul
from block32.tools.iree_compile import run_iree_compile
from tests.lowering.cpu.support import X86_PROCESSORS, Processor, kernel_module

PROCESSORS = {processor.profile: processor for processor in X86_PROCESSORS}
FMA = re.compile(r"v(fmadd|dpbf16ps)")


def assembly(problem: ScaledMatmul, processor: Processor, folder: Path) -> str:
    """The assembly of the kernels of ``problem``."""
    source = kernel_module(problem, processor).encode()
    flags = (*processor.flags, f"--iree-hal-dump-executable-files-to={folder}")
    run_iree_compile(["-", *flags], stdin=source)
    (path,) = folder.glob("*.s")
    return path.read_text()


def loops(text: str) -> list[list[str]]:
    """Blocks that end by jumping to their own start: the innermost loops, as instructions."""
    found = []
    for label, body in re.findall(r"^(\.LBB\w+):(.*?)(?=^\.L(?:BB|func_end))", text, re.M | re.S):
        lines = [line.split("#")[0].strip() for line in body.splitlines()]
        code = [line for line in lines if line and not line.startswith(".")]
        ends = [i for i, line in enumerate(code) if re.match(rf"j\w+\s+{re.escape(label)}$", line)]
        if ends:
            found.append(code[: ends[-1] + 1])
    return found


def hot_loop(text: str, wanted: str) -> list[str]:
    """The loop with the largest share of ``wanted`` instructions among those that have any."""
    having = [loop for loop in loops(text) if any(re.match(wanted, line) for line in loop)]
    assert having, f"no loop holds {wanted}"
    return max(having, key=lambda loop: sum(bool(re.match(wanted, i)) for i in loop) / len(loop))


def mnemonics(loop: list[str]) -> Counter[str]:
    return Counter(line.split()[0] for line in loop)


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
    text = assembly(ScaledMatmul(96, 256, 512), PROCESSORS[profile], tmp_path)
    loop = hot_loop(text, product)
    counts = mnemonics(loop)
    steps = counts[product] // tile_products
    assert steps >= 1 and counts[product] == steps * tile_products
    assert not any("rsp" in line or "rbp" in line for line in loop), "the loop spills"
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


def test_a_stream_of_mxfp4_and_bf16_is_looked_up_in_one_step(tmp_path: Path) -> None:
    """64 codes: no unpacking to bytes; a spread, two shifts and two look-ups of words."""
    problem = ScaledMatmul(1, 256, 512, "bf16", "f4E2M1FN", lhs_scaled=False)
    text = assembly(problem, PROCESSORS["amx"], tmp_path)
    counts = mnemonics(hot_loop(text, "vfmadd"))
    rows = 4
    assert (counts["vpermw"], counts["vpsrlvw"]) == (2 * rows, 2 * rows)
    assert not any(re.match(r"vpunpck|vpermb|vperm[it]2", name) for name in counts), counts


@pytest.mark.parametrize(("m", "products", "loads"), [(8, 1, 2), (32, 4, 4), (96, 4, 4)])
def test_the_matrix_loop_is_tile_loads_and_products(
    m: int, products: int, loads: int, tmp_path: Path
) -> None:
    """A step: each tile is loaded once, and nothing but addresses is computed beside."""
    text = assembly(ScaledMatmul(m, 256, 2048), PROCESSORS["amx"], tmp_path)
    loop = [line for line in hot_loop(text, "tdpbf16ps") if not line.startswith("prefetch")]
    counts = mnemonics(loop)
    steps = counts["tdpbf16ps"] // products
    assert steps >= 1 and counts["tdpbf16ps"] == steps * products
    assert counts["tileloadd"] == steps * loads
    # A tile load takes a base and a stride, so that most need an address of their own.
    assert len(loop) <= steps * (products + 3 * loads) + 14
    stored = [line for line in loop if re.search(r"^(v?mov|tilestore)\w*\s+%.*\(%r[sb]p", line)]
    assert not stored, "the loop spills"


def test_the_matrix_kernel_decodes_a_register_at_a_time(tmp_path: Path) -> None:
    """64 codes: two look-ups of two registers, two interleaves, and two stores into the panel."""
    text = assembly(ScaledMatmul(8, 256, 2048), PROCESSORS["amx"], tmp_path)
    loop = next(loop for loop in loops(text) if any("prefetch" in line for line in loop))
    counts = mnemonics(loop)
    lookups = sum(n for name, n in counts.items() if re.match("vperm[it]2b", name))
    assert (lookups, counts["vpunpcklbw"], counts["vpunpckhbw"]) == (2, 1, 1)
    assert len(loop) <= 30


def test_the_matrix_kernel_asks_before_it_uses_tiles(tmp_path: Path) -> None:
    """Without the leave that the system call asks for, a tile instruction ends the process."""
    text = assembly(ScaledMatmul(8, 64, 64), PROCESSORS["amx"], tmp_path)
    asked, used = (text.index(name) for name in ("\tsyscall", "\tldtilecfg"))
    assert asked < used < text.index("\ttilerelease")


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
