# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The instruction mix of the loops, in the bitcode after LLVM's passes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from block32.lowering.apple import llvm14
from block32.lowering.apple.air_parser import parse
from block32.lowering.apple.air_statistics import Loop, hot_loop, innermost_loops
from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.problem import Grouping


def _hot_loop(matmul: Matmul, form: str = "tiled") -> Loop:
    text = llvm14.disassemble(compile_matmul(matmul, form, "kernel").bitcode)
    loop = hot_loop(parse(text).functions["kernel"])
    assert loop is not None
    return loop


@pytest.mark.parametrize(
    "matmul",
    [
        Matmul(n=4096, k=4096),
        Matmul(n=4097, k=575),
        Matmul(n=64, k=64, lhs="f8E4M3FN", rhs="f8E5M2"),
        Matmul(n=64, k=64, lhs_transposed=True, rhs_transposed=True),
        Matmul(n=64, k=64, grouping=Grouping(4, 9), expert_scale=True),
    ],
    ids=str,
)
def test_a_step_is_four_matrix_instructions_and_eight_vector_loads(matmul: Matmul) -> None:
    loop = _hot_loop(matmul, "grouped" if matmul.grouping else "tiled")
    assert (loop.matrix, loop.vector_loads, loop.scalar_loads, loop.stores) == (4, 8, 0, 0)
    assert loop.others.total() <= 12


ROOT = Path(__file__).parents[3]
MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True}


@pytest.mark.parametrize(
    ("scaled", "words", "products", "others"),
    [
        ({"rhs_block": (32, 32)}, 1, 0, 100),
        ({"rhs_block": (32, 32), **MXFP8}, 5, 8, 144),
        ({"rhs_block": (1, 32)}, 8, 0, 139),
        ({"rhs_block": (1, 32), **MXFP8}, 12, 32, 215),
    ],
    ids=str,
)
@pytest.mark.parametrize("k", [4096, 4100])
def test_four_scaled_blocks_share_one_word_of_scales_a_row(
    scaled: dict[str, Any], words: int, products: int, others: int, k: int
) -> None:
    """No byte is loaded alone; beside the scaling itself only products of factors multiply."""
    loop = _hot_loop(Matmul(n=4096, k=k, **scaled))
    assert (loop.matrix, loop.vector_loads) == (32, 64 + words)
    assert (loop.scalar_loads, loop.stores) == (0, 0)
    assert loop.others["fmul"] == 4 * 8 + products and loop.others["fadd"] == 4 * 4
    assert loop.others.total() <= others


def test_gemv_loads_by_vectors_alone() -> None:
    loop = _hot_loop(Matmul(n=64, k=4096), "gemv")
    assert (loop.matrix, loop.vector_loads, loop.scalar_loads, loop.stores) == (0, 8, 0, 0)


def test_interior_and_edge_have_loops_of_their_own_where_runs_cross_the_edge() -> None:
    matmul = Matmul(n=64, k=64, lhs_transposed=True)
    text = llvm14.disassemble(compile_matmul(matmul, "tiled", "kernel").bitcode)
    loops = innermost_loops(parse(text).functions["kernel"])
    assert sorted(loop.scalar_loads for loop in loops) == [0, 16]


def test_the_table_of_the_docs_is_what_the_benchmark_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No time is compared: the benchmark does that, on a machine that is not shared."""
    path = ROOT / "benchmarks" / "apple_static.py"
    namespace = runpy.run_path(str(path))
    monkeypatch.setattr(sys, "argv", [str(path), "--markdown"])
    namespace["main"]()
    table = capsys.readouterr().out.strip()
    assert table.count("\n") == len(namespace["KERNELS"]) + 1
    assert table in (ROOT / "docs" / "apple.md").read_text()
