# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The encoder: the right LLVM or a named error, and the same bytes every time."""

from __future__ import annotations

import importlib.metadata

import pytest

from block32.lowering.apple import llvm14
from block32.lowering.apple.library import build_metallib, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.metallib import read


def test_another_version_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.50.0")
    with pytest.raises(llvm14.LlvmError, match=r"needs llvmlite 0.43.0 .* but 0.50.0.*\[apple\]"):
        llvm14.binding()


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(llvm14.LlvmError, match=r"pip install 'block32\[apple\]'"):
        llvm14.binding()


def test_bad_text_and_bad_bitcode_are_refused() -> None:
    with pytest.raises(llvm14.LlvmError, match="LLVM refuses the kernel"):
        llvm14.encode("define void @f() { ret i32 %missing }")
    with pytest.raises(llvm14.LlvmError, match="LLVM refuses the bitcode"):
        llvm14.disassemble(b"BC\xc0\xde" + bytes(40))


def test_bitcode_carries_apples_wrapper_and_typed_pointers() -> None:
    bitcode = compile_matmul(Matmul(n=64, k=64), "tiled", "gemm").bitcode
    magic, version, offset, size = (
        int.from_bytes(bitcode[i : i + 4], "little") for i in range(0, 16, 4)
    )
    assert (magic, version, offset) == (0x0B17C0DE, 0, 20)
    assert bitcode[16:20] == b"\xff" * 4 and bitcode[20:24] == b"BC\xc0\xde"
    assert len(bitcode) % 16 == 0 and 20 + size <= len(bitcode) < 20 + size + 16
    text = llvm14.disassemble(bitcode)
    assert "bfloat addrspace(1)*" in text and "ptr" not in text.replace("getelementptr", "")


def test_the_same_kernel_gives_the_same_bytes() -> None:
    """Whatever was compiled before it in this process."""
    first = compile_matmul(Matmul(n=64, k=64), "tiled", "gemm").bitcode
    compile_matmul(Matmul(n=96, k=40, result="bf16"), "tiled", "gemm")
    assert compile_matmul(Matmul(n=64, k=64), "tiled", "gemm").bitcode == first


def test_a_library_holds_every_kernel_under_its_name() -> None:
    kernels = [
        compile_matmul(Matmul(n=64, k=64), "tiled", "a"),
        compile_matmul(Matmul(n=64, k=64), "gemv", "b"),
    ]
    library = read(build_metallib(kernels))
    assert [f.name for f in library.functions] == ["a", "b"]
    assert [f.bitcode for f in library.functions] == [k.bitcode for k in kernels]
