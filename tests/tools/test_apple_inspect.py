# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 inspect`` on metallibs and on vmfbs for Metal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from block32.lowering.apple.library import build_metallib, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.program import Entry
from block32.tools.apple_program import compile_kernels
from block32.tools.cli import main
from block32.tools.iree_compile import run_iree_compile
from tests.lowering.apple.test_executable import SOURCE

pytest.importorskip("llvmlite", reason="the apple extra (llvmlite) is not installed")
pytest.importorskip("flatbuffers", reason="the apple extra (flatbuffers) is not installed")

MATMUL = Matmul(n=64, k=64)


@pytest.fixture
def metallib(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.metallib"
    kernels = [compile_matmul(MATMUL, "tiled", "big"), compile_matmul(MATMUL, "gemv", "small")]
    path.write_bytes(build_metallib(kernels))
    return path


def test_a_metallib(metallib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(metallib)]) == 0
    output = capsys.readouterr().out
    assert "kernel big\n  AIR 2.8, Metal 4.0, macOS 26.0, " in output
    assert "hot loop: 4 matrix, 8 vector loads, 0 scalar loads, 0 stores, 8 others (1 add" in output
    assert output.count("sha256 ") == 2


def test_a_vmfb_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.vmfb"
    path.write_bytes(compile_kernels({"f": Entry(MATMUL, "tiled"), "g": Entry(MATMUL, "gemv")}))
    assert main(["inspect", str(path), "--json", "--kernel", "f_"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)
    assert kernel["name"] == "f_kernel" and kernel["threads"] == [128, 1, 1]
    assert (kernel["bindings"], kernel["constants"]) == (3, 1)
    assert kernel["loop"]["matrix"] == 4 and kernel["loop"]["others"]["shufflevector"] == 4


def test_code(metallib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(metallib), "--disassemble", "--kernel", "small"]) == 0
    output = capsys.readouterr().out
    assert "define void @small(" in output and "define void @big(" not in output


@pytest.mark.parametrize("arguments", [["--kernel", "huge"], ["--execute"]])
def test_refused(metallib: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(metallib), *arguments]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_truncated_metallib(metallib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metallib.write_bytes(metallib.read_bytes()[:-1])
    assert main(["inspect", str(metallib)]) == 1
    assert "error: metallib is truncated: expected " in capsys.readouterr().err


def test_a_module_with_irees_kernels_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.vmfb"
    path.write_bytes(run_iree_compile(["-", "--iree-hal-target-device=metal"], stdin=SOURCE))
    assert main(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert "hold source text" in error and "compile with --target=apple-m5" in error
