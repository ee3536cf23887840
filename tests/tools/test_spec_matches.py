# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a spec matches: the ops it was made for, all of them, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.specs import GENERIC, LOCAL, apply_spec, layers, write_spec

BASE = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @a = dense<127> : tensor<4x2xi8>
util.global private @b = dense<127> : tensor<1x2xi8>
func.func @contract(%x: tensor<?x64xf8E4M3FN>, %xs: tensor<?x2xf8E8M0FNU>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>, %init: tensor<?x32xf32>) -> tensor<?x32xf32> {
  %cst = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%cst : f32) outs(%init : tensor<?x32xf32>) -> tensor<?x32xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y] ins(%x, %xs, %w, %ws : tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>) outs(%zero : tensor<?x32xf32>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}
func.func @marked(%x: tensor<4x64xf8E4M3FN>, %w: tensor<32x64xf8E4M3FN>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y] {block32.lhs = {block = [1, 32], scale = @a}, block32.rhs = {block = [32, 32], scale = @b}} ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<32x64xf8E4M3FN>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
func.func @generic(%x: tensor<4x2x32xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>, %w: tensor<32x2x32xf8E4M3FN>, %ws: tensor<32x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(m, n, b, k) -> (m, b, k)>, affine_map<(m, n, b, k) -> (m, b)>, affine_map<(m, n, b, k) -> (n, b, k)>, affine_map<(m, n, b, k) -> (n, b)>, affine_map<(m, n, b, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction", "reduction"]} ins(%x, %xs, %w, %ws : tensor<4x2x32xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<32x2x32xf8E4M3FN>, tensor<32x2xf8E8M0FNU>) outs(%zero : tensor<4x32xf32>) {
  ^bb0(%a: f8E4M3FN, %as: f8E8M0FNU, %b: f8E4M3FN, %bs: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %a, %as : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %acc, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
"""  # noqa: E501

#: A change to the model, and how many of its three matmuls a spec of the unchanged one replaces.
CHANGES: dict[str, tuple[str, str, int]] = {
    "none": ("", "", 3),
    "an init that is no zero": ("%cst = arith.constant 0.0", "%cst = arith.constant 1.0", 2),
    "an init from outside": ("outs(%zero : tensor<?x32", "outs(%init : tensor<?x32", 2),
    "a static M": ("?x", "7x", 2),
    "another scale": ("scale = @b", "scale = dense<127> : tensor<1x2xi8>", 2),
    "a further attribute": ("[#x, #w, #y] {", "[#x, #w, #y] {mine = 1 : i32, ", 2),
    "another body": ("arith.mulf %0, %1", "arith.addf %0, %1", 2),
    "another type": ("?x64xf8E4M3FN", "?x64xf8E5M2", 2),
}


@pytest.fixture(scope="module")
def base_spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model, spec = folder / "model.mlir", folder / "spec.mlir"
    model.write_text(BASE)
    write_spec(model, spec, "--target=portable", *LOCAL)
    return spec


@pytest.mark.parametrize(("old", "new", "replaced"), CHANGES.values(), ids=CHANGES.keys())
def test_a_spec_matches_its_own_ops_and_no_others(
    tmp_path: Path, base_spec: Path, old: str, new: str, replaced: int
) -> None:
    """A spec used with another model than its own must not compute another matmul."""
    assert old in BASE
    model = tmp_path / "changed.mlir"
    model.write_text(BASE.replace(old, new))
    applied = apply_spec(model, base_spec, *GENERIC, "--compile-to=preprocessing").decode()
    assert applied.count("block32.replaced = ") == replaced


def test_a_spec_grows_linearly_with_the_layers(tmp_path: Path) -> None:
    """One filter and one matcher a layer, and one executable for all: nothing is quadratic."""
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    sizes = {}
    for count in (50, 100, 150):
        model.write_text(layers(count))
        text = write_spec(model, spec, "--target=cpu", "--quiet", "--no-check")
        assert text.count("transform.structured.match") == count
        assert text.count(" -> @block32_replace_") == count
        assert text.count("hal.executable.source private") == 1
        sizes[count] = len(text.splitlines())
    assert sizes[150] - sizes[100] == sizes[100] - sizes[50]


def test_layers_that_are_alike_share_a_matcher(tmp_path: Path) -> None:
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    x = ", ".join(f"%x{i}: tensor<4x64xf8E4M3FN>" for i in range(30))
    text = layers(30, shared_scale=True).replace("%x: tensor<4x64xf8E4M3FN>", x)
    for i in range(30):
        text = text.replace("ins(%x,", f"ins(%x{i},", 1)
    model.write_text(text)
    spec_text = write_spec(model, spec, "--target=portable", *LOCAL)
    assert spec_text.count("transform.structured.match") == 1
    assert "Block-scaled matmuls: 30 (distinct: 1)." in spec_text


def test_a_thousand_layers_are_all_found(tmp_path: Path) -> None:
    """The check counts what the spec replaces: it refuses a spec that misses one."""
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(layers(1000))
    write_spec(model, spec, "--target=cpu", "--quiet")
