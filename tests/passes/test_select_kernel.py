# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What selection refuses: unknown targets, malformed and impossible kernels."""

from __future__ import annotations

import pytest

from block32.passes.base import Report
from block32.passes.pipeline import PassFailedError, run_pipeline
from block32.passes.select_kernel import SelectKernelPass
from block32.passes.target_options import enabled_features
from block32.tools.compiler import parse_module

PROGRAM = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @f(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y] {block32.kernel = KERNEL}
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
"""


def error_of(kernel: str, target: str = "cpu") -> str:
    module = parse_module(PROGRAM.replace("KERNEL", kernel).encode(), "model.mlir")
    select = SelectKernelPass(target=target, architecture="x86_64")
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, [select], Report())
    assert failure.value.diagnostic is not None
    return failure.value.diagnostic.render()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("32", "expected a dictionary with 'target' and 'tiers'"),
        ('{target = "cpu"}', "expected an array 'tiers'"),
        ('{target = "cpu", tiers = []}', "expected at least one tier"),
        ('{target = "cpu", tiers = [{}]}', "a tier needs a form"),
        ('{target = "cpu", tiers = [{form = "magic"}]}', "for form but got magic"),
        ('{target = "cpu", tiers = [{form = "tiled", tiel = 3}]}', "unknown field 'tiel'"),
        ('{target = "cpu", tiers = [{form = "tiled", max_m = 8}]}', "the last tier serves every"),
        (
            '{target = "cpu", tiers = [{form = "tiled", max_m = 8}, {form = "tiled", max_m = 4},'
            ' {form = "tiled"}]}',
            "expected max_m to rise from tier to tier",
        ),
        ('{target = "cpu", tiers = [{form = "tiled", splits = 0}]}', "positive integer for splits"),
        ('{target = "cpu", tiers = [{form = "tiled", tile = [1, 2]}]}', "three positive integers"),
    ],
)
def test_a_malformed_kernel_is_an_error(kernel: str, message: str) -> None:
    rendered = error_of(kernel)
    assert message in rendered
    assert "has a malformed 'block32.kernel'" in rendered


def test_a_kernel_that_the_cpu_cannot_run_is_an_error() -> None:
    kernel = '{target = "cpu", tiers = [{form = "stream", isa = "avx512_bf16", tile = [4, 128, 64], mma = [4, 4, 64]}]}'  # noqa: E501
    assert "asks for a kernel that cpu cannot run" in error_of(kernel)


def test_an_unknown_target_is_an_error() -> None:
    assert "unknown target 'vax'; expected one of cpu" in error_of("{}", target="vax")


def test_features_that_are_off_are_not_on() -> None:
    assert enabled_features("+avx2,+fma,-avx512f,sse2,-fma") == {"avx2", "sse2"}
