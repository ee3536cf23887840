# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where a CPU kernel's time goes: blocks of a listing, the address of code, names, refusals."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import cpu_layout, cpu_profile
from benchmarks.cpu_profile import Block, ProfileError
from benchmarks.turns import Contender
from block32.lowering.target import DeviceFacts

#: As ``objdump -d -l --no-show-raw-insn`` prints: two kernels, and a function without a name.
LISTING = """
code.so:     file format elf64-x86-64

Disassembly of section .text:

0000000000001d40 <iree_hal_executable_library_query-0x300>:
pack_tier0():
code.mlir:1
    1d40:\tpush   %rbp
    1d44:\tvpermt2b %zmm1,%zmm19,%zmm20
code.mlir:65
    1d4a:\tadd    $0x40,%r11
    1d4e:\tjb     1d44 <iree_hal_executable_library_query-0x2fc>
    1d54:\t{evex} vmovaps %ymm16,(%rsi)
    1d5a:\tret
    1d5b:\tint3
gemm_tier0():
code.mlir:1
    1d60:\tcall   2051 <iree_hal_executable_library_query+0x11>
    1d65:\ttdpbf16ps %tmm2,%tmm1,%tmm0
    1d6a:\tjmp    *%rax
    1d6c:\tnop
0000000000002040 <iree_hal_executable_library_query>:
iree_hal_executable_library_query():
    2040:\tret
    2051:\tmov    %rdi,%rax
"""
#: The first address of every block there.
STARTS = [0x1D40, 0x1D44, 0x1D54, 0x1D5B, 0x1D60, 0x1D6C, 0x2040, 0x2051]
#: The file of what belongs to none, as perf names it.
MAP = "perf-123.map"


def test_blocks_run_from_a_jump_or_its_target_to_the_next() -> None:
    blocks = cpu_profile.read_blocks(LISTING)
    assert [block.addresses[0] for block in blocks] == STARTS
    pack, gemm, others = "pack_tier0", "gemm_tier0", cpu_profile.NAMELESS
    assert [block.kernel for block in blocks] == [pack] * 4 + [gemm] * 2 + [others] * 2
    assert blocks[2].instructions == ["vmovaps %ymm16,(%rsi)", "ret"]
    assert blocks[4].addresses == [0x1D60, 0x1D65, 0x1D6A], "a call returns to its block"


def test_branches_of_aarch64_end_blocks_too() -> None:
    """With the registers and bits that they name before the label."""
    listing = "k():\n 10:\tfmla v0.4s, v1.4s, v2.4s\n 14:\ttbnz w3, #2, 1c <k+0xc>\n"
    listing += " 18:\tadd x0, x0, #0x1\n 1c:\tb.ne 10 <k>\n 20:\tret\n"
    blocks = cpu_profile.read_blocks(listing)
    assert [block.addresses for block in blocks] == [[0x10, 0x14], [0x18], [0x1C], [0x20]]


def test_a_listing_without_instructions_is_refused() -> None:
    with pytest.raises(ProfileError, match="objdump lists no instructions: it has to be one for"):
        cpu_profile.read_blocks("code.so:     file format elf64-little\n")


def test_samples_have_an_address_and_the_name_of_a_file() -> None:
    text = "    7f3e10 (/a folder/libc.so.6)\n  ffff80 ([kernel.kallsyms])\n"
    text += "    7f3e10 (/b/libc.so.6)\n"
    samples = cpu_profile.read_samples(text)
    assert samples == {(0x7F3E10, "libc.so.6"): 2, (0xFFFF80, "[kernel.kallsyms]"): 1}


def test_code_is_where_most_samples_fall_on_instructions() -> None:
    """Not where most places do, nor where one is hit that is no start of an instruction."""
    addresses = [0x1D40, 0x1D44, 0x1D4A, 0x2D44]
    right, wrong = 0x7F0000003000, 0x7F0000120000
    samples = Counter(
        {
            (right + 0x1D44, MAP): 70,
            (right + 0x2D44, MAP): 50,
            (right + 0x1D45, MAP): 900,
            (wrong + 0x1D40, "libc.so.6"): 30,
            (wrong + 0x1D44, "libc.so.6"): 30,
            (wrong + 0x1D4A, "libc.so.6"): 30,
        }
    )
    assert cpu_profile.load_address(samples, addresses) == right


def test_samples_of_no_kernel_are_refused() -> None:
    with pytest.raises(ProfileError, match="no sample is of the kernels: a longer run"):
        cpu_profile.load_address(Counter({(0x7F0000000001, "libc.so.6"): 9}), [0x10, 0x20])


@pytest.mark.parametrize(
    ("instructions", "phase"),
    [
        (["tileloadd 0x40(%r9),%tmm4", "tdpbf16ps %tmm4,%tmm5,%tmm0"], "tile products"),
        (["vdpbf16ps %zmm1,%zmm2,%zmm3", "vmovaps (%rsi),%zmm1"], "products"),
        (["vpdpbusd %zmm1,%zmm2,%zmm3"], "products"),
        (["vpermt2b %zmm1,%zmm2,%zmm3", "vpaddw %zmm1,%zmm2,%zmm3"], "decode"),
        (["vfmadd231ps %ymm1,%ymm2,%ymm3", "vcvtph2ps (%rsp),%ymm1"], "products, decode"),
        (["tbl v0.16b, {v1.16b}, v2.16b", "bfmmla v0.4s, v1.8h, v2.8h"], "products, decode"),
        (["vpermt2ps %zmm1,%zmm2,%zmm3"], "turn"),
        (["vaddps %zmm1,%zmm2,%zmm3"], "sums"),
        (["vpaddb %zmm1,%zmm2,%zmm3", "vpmaxub %zmm1,%zmm2,%zmm3"], "check of scales"),
        (["vpaddb %zmm1,%zmm2,%zmm3", "vmovdqa64 %zmm1,(%rsi)"], "scales"),
        (["tilestored %tmm0,(%rsi)", "vmovaps %zmm1,(%rsi)"], "loads, stores of tiles"),
        (["vmovups (%rsi),%zmm1", "add $0x40,%rsi"], "loads, stores"),
        (["ldr q0, [x1]"], "loads, stores"),
        (["movabs $0x7fff,%rax", "vpbroadcastd %eax,%zmm0", "ldr x0, [x1]"], cpu_profile.ADDRESSES),
    ],
)
def test_a_block_is_named_after_what_it_does(instructions: list[str], phase: str) -> None:
    assert Block("k", list(range(len(instructions))), instructions).phase == phase


def test_lines_add_up_blocks_of_a_phase_and_then_others_by_file() -> None:
    """In the order of the code and of shares; phases of few samples are one line."""
    blocks = [
        Block("pack", [0x10, 0x14], ["vpermb %zmm0,%zmm1,%zmm2", "jne 10"]),
        Block("gemm", [0x18, 0x1C], ["vpermb %zmm0,%zmm1,%zmm2", "jb 18"]),
        Block("gemm", [0x20], ["tdpbf16ps %tmm2,%tmm1,%tmm0"]),
        Block("gemm", [0x24], ["vpermb %zmm3,%zmm1,%zmm2"]),
        Block("gemm", [0x28], ["vpermb %zmm4,%zmm1,%zmm2"]),
        Block("gemm", [0x2C], ["mov %eax,%ebx"]),
        Block("gemm", [0x30], ["vaddps %zmm1,%zmm2,%zmm3"]),
    ]
    start = 0x7F0000003000
    at = {0x10: 5, 0x14: 20, 0x18: 100, 0x1C: 50, 0x20: 300, 0x24: 1, 0x28: 49, 0x2C: 1, 0x30: 2}
    samples = Counter({(start + address, MAP): count for address, count in at.items()})
    samples[0x7FAA00000001, "libpython3.11.so.1.0"] = 30
    samples[0x7FBB00000002, "_runtime.cpython-311-x86_64-linux-gnu.so"] = 40
    samples[0xFFFFFFFF80000003, "[kernel.kallsyms]"] = 400
    samples[0x7FCC00000005, "libz.so.1"] = 2
    lines = cpu_profile.lines_of(blocks, samples)
    rest = cpu_profile.REST
    assert [(line.kernel, line.phase, line.samples, len(line.instructions)) for line in lines] == [
        ("pack", "decode", 25, 2),
        ("gemm", "tile products", 300, 1),
        ("gemm", "decode", 200, 3),
        ("gemm", rest, 3, 0),
        ("system", "", 400, 0),
        ("IREE's runtime", "", 40, 0),
        ("Python", "", 30, 0),
        (cpu_profile.ELSEWHERE, "", 2, 0),
    ]
    assert lines[2].cells(all_samples=1000, milliseconds=0.5) == [
        *("gemm", "decode", "20.0%", "0.100", "3", "2 vpermb, 1 jb")
    ]


@pytest.mark.parametrize("missing", ["perf", "objdump"])
def test_a_missing_tool_is_named_in_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_profile, "start_with", lambda _pages, _threads: None)
    monkeypatch.setattr(
        cpu_profile.shutil, "which", lambda tool: None if tool == missing else "/bin/true"
    )
    monkeypatch.setattr(sys, "argv", ["cpu_profile", "8x64x64"])
    assert cpu_profile.main() == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"cpu_profile: error: the tool '{missing}' is not installed: it is in ")
    assert err.count("\n") == 1


def test_a_processor_that_cannot_run_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_profile, "check_tools", lambda: None)
    monkeypatch.setattr(cpu_profile, "features_lacking_here", lambda _flags: ["avx512bf16"])
    with pytest.raises(ProfileError, match="this machine lacks avx512bf16, which 'znver4' has"):
        cpu_profile.profile((8, 64, 64), "W8A8", "znver4", 1.0)


def test_vector_features_beyond_this_machine_s_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    here, wanted = {"avx2", "fma", "sse2"}, {"avx2", "f16c", "avx512f", "amx-bf16", "sse4.1"}
    host = cpu_layout.compile_flags("host")
    monkeypatch.setattr(
        cpu_layout,
        "device_facts",
        lambda flags: DeviceFacts(frozenset(here if flags == host else wanted), "x86_64"),
    )
    assert cpu_layout.features_lacking_here(("--cpu",)) == ["avx512f", "f16c"]
    assert cpu_layout.features_lacking_here(host) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no perf")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Error: >&2; echo Access is limited. >&2; exit 255", "'Access is limited'"),
        ("exit 0", "'none came'"),
    ],
)
def test_a_refusal_of_perf_says_what_would_help(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "perf"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    message = (
        rf"perf takes no samples of the event cpu-clock \({reason}\): it may as root, or where"
    )
    with pytest.raises(ProfileError, match=message):
        cpu_profile.sample(Contender("", lambda: None), 1.0, tmp_path, os.sched_getaffinity(0))
