# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attributes' typed views: what is built is parsed back, and stock iree-opt takes it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iree.compiler import ir
from iree.compiler.tools.binaries import find_tool

from block32.dialects import builtin, layout
from block32.dialects import problem as problem_attribute
from block32.dialects.block_scale import BlockScale
from block32.dialects.diagnostics import BadAttributeError, describe_location
from block32.dialects.kernel import FORMS, KernelConfig, KernelTier
from block32.lowering.common.weight_layout import LAYOUTS
from block32.lowering.problem import Epilogue, ScaledMatmul


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with ir.Context(), ir.Location.unknown():
        yield


sizes = st.integers(1, 1 << 20)
tiers = st.builds(
    KernelTier,
    form=st.sampled_from(FORMS),
    tile=st.none() | st.tuples(sizes, sizes, sizes),
    k_pack=st.sampled_from([1, 2, 4]),
    splits=st.integers(1, 64),
    reduce=st.sampled_from(["in_launch", "second_launch"]),
    mma=st.none() | st.tuples(sizes, sizes, sizes),
    order=st.sampled_from(["n", "m"]),
    waves_per_eu=st.integers(0, 8),
    weight_layout=st.sampled_from(["plain", "k64"]),
)


@given(tiers)
def test_a_kernel_comes_back(tier: KernelTier) -> None:
    with ir.Context():
        config = KernelConfig("cpu", (KernelTier("packed", max_m=8), tier))
        assert KernelConfig.parse(config.build()) == config
        assert KernelConfig.parse(ir.Attribute.parse(str(config.build()))) == config


@given(
    st.builds(
        ScaledMatmul,
        m=st.none() | sizes,
        n=sizes,
        k=sizes,
        rhs=st.sampled_from(["f8E4M3FN", "f4E2M1FN"]),
        rhs_block=st.sampled_from([(1, 32), (32, 32)]),
        result=st.sampled_from(["f32", "bf16"]),
        epilogue=st.builds(
            Epilogue, row_scale=st.booleans(), bias=st.none() | st.sampled_from(["f32", "bf16"])
        ),
    )
)
def test_a_problem_comes_back(problem: ScaledMatmul) -> None:
    with ir.Context():
        assert problem_attribute.parse(problem_attribute.build(problem)) == problem


@pytest.mark.parametrize(
    "text",
    [
        "{block = [1, 32], scale = @x}",
        "{block = [32, 32], scale = dense<127> : tensor<2x4xi8>}",
        '{block = [1, 32], rule = "even", scale = "dynamic"}',
        "{block = [32, 32]}",
    ],
)
def test_a_block_scale_comes_back(text: str) -> None:
    attribute = ir.Attribute.parse(text)
    scale = BlockScale.parse(attribute)
    assert BlockScale.parse(scale.build()) == scale


def test_an_unknown_problem_field_is_an_error() -> None:
    with pytest.raises(BadAttributeError, match="malformed problem"):
        problem_attribute.parse(ir.Attribute.parse("{n = 4, rhs_block = [1, 32], colour = 3}"))


def test_other_values_have_no_attribute() -> None:
    with pytest.raises(TypeError, match="no builtin attribute for a float"):
        builtin.from_python(1.5)


def test_stock_iree_opt_parses_marked_ir() -> None:
    kernel = KernelConfig("cpu", (KernelTier("stream", tile=(8, 128, 64)),)).build()
    text = f"""
util.global private @ws = dense<127> : tensor<1x2xi8>
func.func @f(%x: tensor<4x64xf8E4M3FN>, %w: tensor<64x32xf8E4M3FN>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {{
  %y = linalg.matmul {{block32.lhs = {{block = [1, 32], scale = dense<127> : tensor<4x2xi8>}},
      block32.rhs = {{block = [32, 32], scale = @ws}}, block32.kernel = {kernel}}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<64x32xf8E4M3FN>) outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}}
"""  # noqa: E501
    done = subprocess.run(
        [find_tool("iree-opt"), "-"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("block32.lhs", "block32.rhs", "block32.kernel"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("location", "described"),
    [
        ('callsite("a.mlir":10:8 at "a.mlir":6:1)', "a.mlir:10:8"),
        ('"name"("b c.mlir":3:4)', "b c.mlir:3:4"),
        ('fused["x":1:2, "y":3:4]', "x:1:2"),
        ("unknown", "<unknown>"),
    ],
)
def test_locations_are_unwrapped(location: str, described: str) -> None:
    module = ir.Module.parse(f"util.global private @a = 1 : i32 loc({location})")
    assert describe_location(module.body.operations[0].location) == described


@given(st.sampled_from(["plain", *LAYOUTS]))
def test_layouts_are_parsed_back(name: str) -> None:
    assert layout.parse(layout.build(name)) == name
    layout.check(name, ir.Type.parse("tensor<32x128xi8>"))
    layout.check(name, ir.Type.parse("tensor<16x64xf8E4M3FN>"))


@pytest.mark.parametrize(
    "type_", ["tensor<32xi8>", "tensor<?x64xi8>", "tensor<32x64xf32>", "tensor<32x40xi8>", "i8"]
)
def test_a_layout_is_for_whole_pieces_of_bytes(type_: str) -> None:
    with pytest.raises(BadAttributeError, match=r"'n16k1' is for \[N, K\] bytes with N a multiple"):
        layout.check("n16k1", ir.Type.parse(type_))
