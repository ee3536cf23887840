# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ``block32 spec`` refuses: one located error, and the output as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from block32.tools.cli import main
from block32.tools.transform_spec import SPEC_FLAG
from tests.tools.specs import LOCAL, layers, write_spec
from tests.tools.test_compile import NO_K


def refuse(
    capsys: pytest.CaptureFixture[str], model: Path, *arguments: str, target: str = "portable"
) -> str:
    """The error of a ``block32 spec`` that must fail, and leave what was there as it was."""
    output = model.with_name("out.mlir")
    output.write_text("// as it was\n")
    assert main(["spec", str(model), f"--target={target}", "-o", str(output), *arguments]) == 1
    assert output.read_text() == "// as it was\n"
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.mlir", "out.mlir"]
    return capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.mlir"
    path.write_text(layers(1))
    return path


def line_of(model: Path, text: str) -> int:
    lines = model.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_matmul_that_the_spec_would_miss(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite = (
        "--iree-preprocessing-pass-pipeline=builtin.module(util.func(linalg-generalize-named-ops))"
    )
    error = refuse(capsys, model, *LOCAL, rewrite)
    line = line_of(model, "linalg.matmul")
    assert (
        f"{model}:{line}:8: error: 'linalg.matmul' op would be missed by the spec: expected "
        in error
    )
    assert "expected it to replace 1 such ops but it replaces 0" in error
    assert "note: flags that rewrite the model before the spec does" in error


def test_a_marked_matmul_that_cannot_be_raised(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write_text(model.read_text().replace("block = [32, 32]", "block = [1, 32]"))
    error = refuse(capsys, model)
    assert "'linalg.matmul' op cannot be raised: expected 'block32.rhs' scales of shape" in error
    assert "in pass 'block32-isolate'" in error
    assert "block32-opt - --pass-pipeline='builtin.module(block32-isolate)'" in error


def test_nothing_to_do(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(
        "func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }"
    )
    assert "holds no block-scaled matmul; a spec would do nothing" in refuse(capsys, model)


def test_a_symbol_of_the_spec_in_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other names that begin like ours are the model's own business, as in a compile."""
    text = model.read_text().replace("@w ", "@block32_w ").replace("@w :", "@block32_w :")
    text = text.replace("@main", "@block32_main")
    model.write_text(text)
    spec = model.with_name("spec.mlir")
    write_spec(model, spec, "--target=portable", *LOCAL)
    spec.unlink()
    model.write_text(
        f"{text}\nfunc.func @block32_call_0(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
        "  return %x : tensor<4xf32>\n}\n"
    )
    error = refuse(capsys, model, *LOCAL)
    line = line_of(model, "func.func @block32_call_0")
    assert f"{model}:{line}:1: error: defines @block32_call_0, and so does the spec" in error


def test_no_k_at_all(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(NO_K)
    error = refuse(capsys, model, *LOCAL)
    assert "'linalg.scaled_contract' op cannot be compiled: expected K of at least 1" in error


def test_operators_that_only_block32_lowers(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write_text('module attributes {a = "onnx.DequantizeLinear"} {}')
    error = refuse(capsys, model)
    assert "holds operators that an iree-compile without block32 does not lower" in error
    assert "--pass-pipeline='builtin.module(block32-lower-onnx)'" in error


def test_an_unknown_target(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refuse(capsys, model, target="tpu")
    assert "error: unknown target 'tpu'; expected one of " in error


def test_a_target_whose_binaries_are_ours(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An iree-compile without block32 would put its own kernels there, which compute nothing."""
    error = refuse(capsys, model, target="apple-m5")
    assert "expected a target whose kernels IREE compiles but got apple-m5" in error


def test_a_cpu_that_llvm_does_not_know(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refuse(capsys, model, "--cpu=z80", target="cpu")
    assert len([line for line in error.splitlines() if "error: " in line]) == 1


@pytest.mark.parametrize("flag", ["--compile-to=hal", "--compile-from=abi", f"{SPEC_FLAG}=a.mlir"])
def test_flags_that_make_no_sense_with_a_spec(
    model: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    error = refuse(capsys, model, flag)
    assert f"block32 spec: error: expected no {flag.partition('=')[0]}: " in error


def test_input_that_is_no_mlir(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text("func.func @f(")
    assert f"{model}:1:" in refuse(capsys, model)
