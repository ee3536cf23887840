# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 quantize``: weights that are resources, and names of all kinds."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from block32.passes.quantizing.patterns import join_patterns, split_patterns
from block32.runtime import reference
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, import_source
from block32.tools.onnx_model import read_argument

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
W = np.random.default_rng(5).standard_normal((64, 32)).astype(np.float16)
W[32:] *= 8  # so that the two scales differ


def model(element: str, weight: str, resources: str = "") -> str:
    """A linear layer whose weight is the global ``fc``."""
    return f"""
#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
util.global private @fc = {weight} : tensor<64x32x{element}>
func.func @main(%x: tensor<4x32x{element}>) -> tensor<4x64x{element}> {{
  %w = util.global.load @fc : tensor<64x32x{element}>
  %z = arith.constant dense<0.0> : tensor<4x64x{element}>
  %y = linalg.matmul indexing_maps = [#mk, #nk, #mn]
      ins(%x, %w : tensor<4x32x{element}>, tensor<64x32x{element}>)
      outs(%z : tensor<4x64x{element}>) -> tensor<4x64x{element}>
  return %y : tensor<4x64x{element}>
}}
{resources}"""


def resource(values: np.ndarray) -> str:
    content = values.tobytes().hex()
    return f'{{-# dialect_resources: {{builtin: {{fc: "0x04000000{content}"}}}} #-}}'


def quantize(folder: Path, source: str, *options: str) -> int:
    (folder / "m.mlir").write_text(source)
    return main(["quantize", f"{folder}/m.mlir", "-o", f"{folder}/q.mlir", "--quiet", *options])


@pytest.mark.parametrize("element", DTYPES)
def test_a_weight_that_is_a_resource(tmp_path: Path, element: str) -> None:
    """As torch and ONNX importers print constants of large models."""
    w = W.astype(DTYPES[element])
    assert quantize(tmp_path, model(element, "dense_resource<fc>", resource(w))) == 0
    codes, scales = reference.quantize_weight(w.astype(np.float32))
    text = (tmp_path / "q.mlir").read_text().lower()
    assert f'dense<"0x{codes.tobytes().hex()}"> : tensor<64x32xi8>' in text
    assert str(scales.view(np.int8).tolist()) in text
    assert "resource" not in text


def test_a_resource_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = W.astype(np.float32)
    w[63, 31] = np.nan
    assert quantize(tmp_path, model("f32", "dense_resource<fc>", resource(w))) == 1
    error = capsys.readouterr().err
    assert "m.mlir:9:8: error: 'linalg.matmul' op has a weight, 'fc', that holds NaN" in error
    assert not (tmp_path / "q.mlir").exists()


def test_a_resource_without_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a module is printed whose large constants were left out."""
    assert quantize(tmp_path, model("f32", "dense_resource<__elided__>")) == 1
    assert (
        "m.mlir:9:8: error: 'linalg.matmul' op has a weight, 'fc', whose elements are not in the "
        "module; expected a dense constant, a resource with its bytes, or a parameter"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("written", [r"a\"b", r"a\\b", r"a\0Ab"])
@pytest.mark.parametrize("command", ["quantize", "compile"])
def test_a_parameter_name_that_iree_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, written: str
) -> None:
    source = model("f32", f'#flow.parameter.named<"model"::"{written}">')
    (tmp_path / "m.mlir").write_text(source)
    output = tmp_path / "out"
    assert main([command, f"{tmp_path}/m.mlir", "-o", str(output), "--quiet"]) == 1
    assert (
        f"m.mlir:5:27: error: the parameter name '{written}' has a quote, a backslash or an "
        "unprintable character, which IREE 3.13 writes without escapes and cannot read again"
    ) in capsys.readouterr().err
    assert not output.exists()


def test_a_parameter_name_whose_escapes_are_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(tmp_path, model("f32", r'#flow.parameter.named<"model"::"\C3\A9">')) == 1
    assert "the model's weights are parameters, such as 'é'" in capsys.readouterr().err


def test_a_pattern_with_a_comma(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model("f32", "dense<1.0>").replace("@fc", '@"fc,1"')
    assert quantize(tmp_path, source, "--keep=fc,1") == 1
    assert "error: nothing to quantise" in capsys.readouterr().err
    assert quantize(tmp_path, source, "--keep=fc", "--keep=1") == 1
    assert "error: the pattern 'fc' matches no linear layer" in capsys.readouterr().err


@pytest.mark.parametrize("patterns", [["a"], ["a,b", "c"], ["a\\", ",", "b\\,*"], []])
def test_patterns_in_the_text_of_a_pipeline(patterns: list[str]) -> None:
    assert split_patterns(join_patterns(patterns)) == patterns
    assert split_patterns("a, b,,c*") == ["a", "b", "c*"]


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs may be large; errors still name the file, which iree-compile reads by itself."""
    path = tmp_path / "m.mlir"
    path.write_text(model("f32", "dense<1.0>"))
    reads: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or read_bytes(self))
    source, name = read_argument(str(path))
    module, _, _ = import_source(source, name, CompileOptions(target="cpu"))
    assert reads == [path]
    assert "m.mlir" in module.operation.get_asm(enable_debug_info=True)
