# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 quantize``: weights that are resources, names of all kinds, and layouts."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from iree import runtime

import block32
from block32.passes.quantizing.patterns import join_patterns, split_patterns
from block32.runtime import reference
from block32.runtime.archive import read_index
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, import_source
from block32.tools.onnx_model import read_argument
from tests.lowering.cpu.support import Processor, skip_unless_it_runs

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


def test_brackets_in_a_pattern_are_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model("f32", "dense<1.0>").replace("@fc", '@"layers[0].fc"')
    assert quantize(tmp_path, source, "--keep=layers[0].*") == 1
    assert "error: nothing to quantise" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["", " "])
def test_an_empty_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    """An unset shell variable, which would quantise what it should have kept."""
    assert quantize(tmp_path, model("f32", "dense<1.0>"), f"--keep={pattern}") == 1
    assert "error: the pattern '' of --keep is empty" in capsys.readouterr().err


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


ARGUMENTS = ("--params={0}/m.irpa", "--output-params={0}/q.irpa", "--layout=n16k1")


def wide_model(folder: Path) -> str:
    """A layer of whole pieces, one of others, and their parameters."""
    rng = np.random.default_rng(9)
    parameters = {
        "wide": rng.standard_normal((64, 64)).astype(np.float32),
        "narrow": rng.standard_normal((40, 64)).astype(np.float32),
    }
    runtime.save_archive_file(parameters, folder / "m.irpa")
    return """
#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
util.global private @wide = #flow.parameter.named<"model"::"wide"> : tensor<64x64xf32>
util.global private @narrow = #flow.parameter.named<"model"::"narrow"> : tensor<40x64xf32>
func.func @main(%x: tensor<9x64xf32>) -> tensor<9x40xf32> {
  %wide = util.global.load @wide : tensor<64x64xf32>
  %narrow = util.global.load @narrow : tensor<40x64xf32>
  %z = arith.constant dense<0.0> : tensor<9x64xf32>
  %h = linalg.matmul indexing_maps = [#mk, #nk, #mn]
      ins(%x, %wide : tensor<9x64xf32>, tensor<64x64xf32>)
      outs(%z : tensor<9x64xf32>) -> tensor<9x64xf32>
  %z2 = arith.constant dense<0.0> : tensor<9x40xf32>
  %y = linalg.matmul indexing_maps = [#mk, #nk, #mn]
      ins(%h, %narrow : tensor<9x64xf32>, tensor<40x64xf32>)
      outs(%z2 : tensor<9x40xf32>) -> tensor<9x40xf32>
  return %y : tensor<9x40xf32>
}
"""


def test_a_layout_changes_the_order_of_the_bytes_alone(tmp_path: Path) -> None:
    source = wide_model(tmp_path)
    options = [option.format(tmp_path) for option in ARGUMENTS]
    assert quantize(tmp_path, source, *options[:2]) == 0
    plain = read_index(tmp_path / "q.irpa")["wide"].read()
    assert quantize(tmp_path, source, *options) == 0
    entries = read_index(tmp_path / "q.irpa")
    rows = np.frombuffer(plain, np.uint8).reshape(64, 64)
    pieces = [rows[at : at + 16, k].tobytes() for at in range(0, 64, 16) for k in range(64)]
    assert entries["wide"].read() == b"".join(pieces)
    text = (tmp_path / "q.mlir").read_text()
    assert '@wide_mx {block32.layout = "n16k1"} = #flow.parameter.named<"model"::"wide">' in text
    assert '@narrow_mx = #flow.parameter.named<"model"::"narrow">' in text, "40 rows are no pieces"


def test_a_model_in_a_layout_gives_the_same_numbers(tmp_path: Path) -> None:
    skip_unless_it_runs(Processor("avx2", "haswell"))
    source = wide_model(tmp_path)
    options = [option.format(tmp_path) for option in ARGUMENTS]
    x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    results = []
    for chosen in (options[:2], options):
        assert quantize(tmp_path, source, *chosen) == 0
        remarks: list[str] = []
        vmfb = block32.compile(
            tmp_path / "q.mlir",
            cpu="haswell",
            on_remark=lambda remark, to=remarks: to.append(remark.message),
        )
        assert any("stored as 'n16k1'" in message for message in remarks) == (chosen is options)
        results.append(run_with_parameters(vmfb, tmp_path / "q.irpa", x))
    assert np.linalg.norm(results[0] - results[1]) < 5e-3 * np.linalg.norm(results[0])


def run_with_parameters(vmfb: bytes, archive: Path, x: np.ndarray) -> np.ndarray:
    config = runtime.Config("local-task")
    index = runtime.ParameterIndex()
    index.load(str(archive))
    parameters = runtime.create_io_parameters_module(
        config.vm_instance, index.create_provider(scope="model")
    )
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    loaded = runtime.load_vm_modules(parameters, module, config=config)[-1]
    return np.asarray(loaded["main"](x).to_host())


@pytest.mark.parametrize("command", [["--target=portable"], ["--target=gfx950"], ["--cpu=znver4"]])
def test_a_model_in_a_layout_is_for_processors_that_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    options = [option.format(tmp_path) for option in ARGUMENTS]
    assert quantize(tmp_path, wide_model(tmp_path), *options) == 0
    output = tmp_path / "m.vmfb"
    assert main(["compile", f"{tmp_path}/q.mlir", "-o", str(output), "--quiet", *command]) == 1
    error = capsys.readouterr().err
    assert "q.mlir:" in error
    assert "op has a weight that is stored as 'n16k1', which no kernel for it on" in error
    assert not output.exists()


def test_layouts_are_for_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option.format(tmp_path) for option in ARGUMENTS]
    assert quantize(tmp_path, wide_model(tmp_path), *options, "--format=mxfp4") == 1
    assert "the layout 'n16k1' is for mxfp8 weights; expected 'plain'" in capsys.readouterr().err
