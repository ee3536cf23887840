# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Textual pipelines: mixing with registered passes, options, failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError, error_at
from block32.passes.base import Pass, Report
from block32.passes.pipeline import PassFailedError, RegisteredPass, parse_pipeline, run_pipeline
from block32.passes.registry import PASSES
from block32.passes.select_kernel import SelectKernelPass
from block32.tools.compiler import parse_module

PROGRAM = b"""
func.func @f() -> i32 {
  %a = arith.constant 1 : i32
  %b = arith.constant 1 : i32
  %c = arith.addi %a, %b : i32
  return %c : i32
}
"""


@dataclass
class FailPass(Pass):
    """Fails on the first function."""

    argument: ClassVar[str] = "test-fail"
    summary: ClassVar[str] = "fail"

    internal: bool = False

    def run(self, module: ir.Module, report: Report) -> None:
        if self.internal:
            raise RuntimeError("a bug")
        raise error_at(module.body.operations[0], "is not liked; expected another")


def test_our_passes_and_registered_ones_mix() -> None:
    text = "builtin.module(block32-raise,func.func(canonicalize,cse),block32-outline)"
    passes = parse_pipeline(text, PASSES)
    assert [p.describe() for p in passes] == [
        "block32-raise",
        "func.func(canonicalize,cse)",
        "block32-outline",
    ]
    module = parse_module(PROGRAM, "model.mlir")
    run_pipeline(module, passes, Report())
    assert "arith.addi" not in str(module)


def test_options_are_read_and_printed() -> None:
    (select,) = parse_pipeline("block32-select-kernel{target=portable cpu-features=+avx2}", PASSES)
    assert select == SelectKernelPass(target="portable", cpu_features="+avx2")
    assert select.describe() == "block32-select-kernel{target=portable cpu-features=+avx2}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "block32-nothing",
            "unknown pass 'block32-nothing'; expected one of block32-declare-functions",
        ),
        ("block32-raise{speed=9}", "pass 'block32-raise' has no option 'speed'"),
        ("builtin.module(block32-raise", "unbalanced brackets"),
        ("test-fail{internal=maybe}", "option 'internal' of pass 'test-fail' needs a bool"),
    ],
)
def test_a_bad_pipeline_is_an_error(text: str, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        parse_pipeline(text, (*PASSES, FailPass))


def test_an_unregistered_pass_is_an_error() -> None:
    module = parse_module(PROGRAM, "model.mlir")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [RegisteredPass("no-such-pass")], Report())
    assert failure.value.diagnostic is not None


def test_an_error_of_mlir_is_one_located_line() -> None:
    """What MLIR says with it, notes and the op in full, is left out."""
    with pytest.raises(DiagnosticError) as parsed:
        parse_module(PROGRAM.replace(b"1 : i32", b"1 : i99x", 1), "model.mlir")
    assert parsed.value.location.startswith("model.mlir:3:")
    text = b"""
    util.func public @f(%x: tensor<4xi32>) -> tensor<4xi32> {
      %y = tosa.abs %x : (tensor<4xi32>) -> tensor<4xi32>
      util.return %y : tensor<4xi32>
    }
    """
    module = parse_module(text, "model.mlir")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [RegisteredPass("iree-verify-input-legality")], Report())
    assert failure.value.diagnostic is not None
    assert failure.value.diagnostic.render() == (
        "-:3:12: error: 'tosa.abs' op : illegal op still exists"
    )


def test_a_failure_names_the_pass_the_place_and_the_ir_before() -> None:
    module = parse_module(PROGRAM, "model.mlir")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [RegisteredPass("cse"), FailPass()], Report())
    error = failure.value
    assert error.failed.describe() == "test-fail"
    assert error.pipeline_through == ("cse", "test-fail")
    assert "arith.addi" in error.ir_before
    assert error.diagnostic is not None
    assert error.diagnostic.render().endswith(
        "error: 'func.func' op is not liked; expected another"
    )


def test_a_bug_in_a_pass_is_no_diagnostic() -> None:
    module = parse_module(PROGRAM, "model.mlir")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [FailPass(internal=True)], Report())
    assert failure.value.diagnostic is None
    assert isinstance(failure.value.__cause__, RuntimeError)
