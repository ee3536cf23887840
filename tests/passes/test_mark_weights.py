# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-mark-weights``: what it refuses, and the layers that it leaves alone."""

from __future__ import annotations

import pytest

from block32.passes.base import Report
from block32.passes.mark_weights import MarkWeightsPass
from block32.passes.pipeline import PassFailedError, run_pipeline
from block32.tools.compiler import parse_module

#: A layer stored [N, K] or [K, N], a second reader of the weight, and another layer.
MODEL = """
#mk = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> ({order})>
#mn = affine_map<(m, n, k) -> (m, n)>
util.global private @w = #flow.parameter.named<"model"::"fc, 1.weight"> : tensor<{shape}xf32>
util.global private @v = #flow.parameter.named<"model"::"v"> : tensor<{shape}xf32>
util.func public @f(%x: tensor<4x64xf32>) -> (tensor<4x32xf32>, tensor<4x32xf32>, tensor<{shape}xf32>) {{
  %w = util.global.load @w : tensor<{shape}xf32>
  %v = util.global.load @v : tensor<{shape}xf32>
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul indexing_maps = [#mk, #w, #mn]
      ins(%x, %w : tensor<4x64xf32>, tensor<{shape}xf32>)
      outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %z = linalg.matmul indexing_maps = [#mk, #w, #mn]
      ins(%x, %v : tensor<4x64xf32>, tensor<{shape}xf32>)
      outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  util.return %y, %z, %{read} : tensor<4x32xf32>, tensor<4x32xf32>, tensor<{shape}xf32>
}}
"""  # noqa: E501


def marked(
    weights: str, order: str = "n, k", shape: str = "32x64", read: str = "v", activations: str = ""
) -> str:
    module = parse_module(MODEL.format(order=order, shape=shape, read=read).encode(), "m.mlir")
    options = {"activations": activations} if activations else {}
    run_pipeline(module, [MarkWeightsPass(weights=weights, **options)], Report())
    return str(module)


def test_only_the_named_layer_is_marked() -> None:
    text = marked("fc, 1.weight:32x64:32x32")
    assert text.count("block32.rhs") == text.count("block32.lhs") == 1
    assert (
        'util.global private @v = #flow.parameter.named<"model"::"v"> : tensor<32x64xf32>' in text
    )
    assert "@w =" not in text


def test_activations_as_they_are() -> None:
    text = marked("fc, 1.weight:32x64:32x32", activations="none")
    assert text.count("block32.rhs") == 1
    assert "block32.lhs" not in text


def test_several_weights_and_a_name_with_a_comma() -> None:
    with pytest.raises(PassFailedError, match="is not all that reads the parameter 'v'"):
        marked("fc, 1.weight:32x64:32x32,v:32x64:1x32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "v:32x64:32x32"}, "is not all that reads the parameter 'v', of which the"),
        ({"weights": "fc, 1.weight:64x32:32x32"}, "as 32x64; the checkpoint has 64x32"),
        (
            {"weights": "fc, 1.weight:64x32:32x32", "order": "k, n", "shape": "64x32"},
            r"reads the parameter 'fc, 1.weight' as \[K, N\]; a checkpoint has \[N, K\]",
        ),
        ({"weights": "other:32x64:32x32"}, "no linear layer of the model reads a block-scaled"),
        ({"weights": ""}, "needs KEY:NxK:1x32 or KEY:NxK:32x32 for each parameter but got ''"),
        ({"weights": "v:32x64:16x32"}, "needs KEY:NxK:1x32 or KEY:NxK:32x32 for each parameter"),
        ({"weights": "v:32x64:1x32,v"}, "needs KEY:NxK:1x32 or KEY:NxK:32x32 for each parameter"),
    ],
)
def test_refusals(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(PassFailedError, match=message):
        marked(**arguments)
