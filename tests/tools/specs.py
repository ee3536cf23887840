# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writing and applying specs, and the models that the tests of specs share."""

from __future__ import annotations

from pathlib import Path

from block32.tools.cli import main
from block32.tools.iree_compile import run_iree_compile
from block32.tools.transform_spec import SPEC_FLAG

LOCAL = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
)
GENERIC = (*LOCAL, "--iree-llvmcpu-target-cpu=generic")


def write_spec(model: Path, spec: Path, *arguments: str) -> str:
    """``block32 spec``; the spec's text."""
    assert main(["spec", str(model), *arguments, "-o", str(spec)]) == 0
    return spec.read_text()


def apply_spec(model: Path, spec: Path, *flags: str) -> bytes:
    """An iree-compile that knows nothing of block32, with the one flag."""
    return run_iree_compile([str(model), *flags, f"{SPEC_FLAG}={spec}"])


def layers(count: int, shared_scale: bool = False) -> str:
    """Marked matmuls of one shape, each with scales of its own, summed up."""
    scales = [0 if shared_scale else i for i in range(count)]
    lines = ["#x = affine_map<(m, n, k) -> (m, k)>", "#w = affine_map<(m, n, k) -> (n, k)>"]
    lines += ["#y = affine_map<(m, n, k) -> (m, n)>"]
    lines += ["util.global private @x_scale = dense<127> : tensor<4x2xi8>"]
    for i in sorted(set(scales)):
        lines.append(f"util.global private @scale_{i} = dense<{100 + i % 50}> : tensor<1x2xi8>")
    lines += [
        "util.global private @w = dense<1.0> : tensor<32x64xf8E4M3FN>",
        "func.func @main(%x: tensor<4x64xf8E4M3FN>) -> tensor<4x32xf32> {",
        "%w = util.global.load @w : tensor<32x64xf8E4M3FN>",
        "%zero = arith.constant dense<0.0> : tensor<4x32xf32>",
        "%sum_0 = arith.constant dense<0.5> : tensor<4x32xf32>",
    ]
    for i, scale in enumerate(scales):
        lines.append(
            f"%y_{i} = linalg.matmul indexing_maps = [#x, #w, #y] "
            f"{{block32.lhs = {{block = [1, 32], scale = @x_scale}}, "
            f"block32.rhs = {{block = [32, 32], scale = @scale_{scale}}}}} "
            "ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<32x64xf8E4M3FN>) "
            "outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>"
        )
        lines.append(f"%sum_{i + 1} = arith.addf %sum_{i}, %y_{i} : tensor<4x32xf32>")
    lines.append(f"return %sum_{count} : tensor<4x32xf32>\n}}")
    return "\n".join(lines)
