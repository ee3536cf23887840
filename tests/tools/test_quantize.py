# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 quantize``: a model of parameters and constants, its numbers, and every refusal."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree import runtime

import block32
from block32.runtime import reference
from block32.runtime.archive import read_index
from block32.tools.cli import main

RNG = np.random.default_rng(23)
FC1 = RNG.standard_normal((96, 64)).astype(np.float32)
FC2 = RNG.standard_normal((96, 64)).astype(ml_dtypes.bfloat16)  # stored [K, N]
TIED = RNG.standard_normal((40, 64)).astype(np.float32)
PARAMETERS = {"fc1.weight": FC1, "fc2.weight": FC2, "tied": TIED, "bias": FC1[0] * 0 + 1}

#: Two linear layers, one read transposed, a head that shares the embedding's table, and attention.
MODEL = """
#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
util.global private @fc1 = #flow.parameter.named<"model"::"fc1.weight"> : tensor<96x64xf32>
util.global private @fc2 = #flow.parameter.named<"model"::"fc2.weight"> : tensor<96x64xbf16>
util.global private @tied = #flow.parameter.named<"model"::"tied"> : tensor<40x64xf32>
util.global private @bias = #flow.parameter.named<"model"::"bias"> : tensor<64xf32>
func.func @main(%x: tensor<4x64xf32>) -> (tensor<4x40xf32>, tensor<1x64xf32>, tensor<64xf32>) {
  %fc1 = util.global.load @fc1 : tensor<96x64xf32>
  %fc2 = util.global.load @fc2 : tensor<96x64xbf16>
  %tied = util.global.load @tied : tensor<40x64xf32>
  %bias = util.global.load @bias : tensor<64xf32>
  %z1 = arith.constant dense<0.0> : tensor<4x96xf32>
  %h = linalg.matmul indexing_maps = [#mk, #nk, #mn] ins(%x, %fc1 : tensor<4x64xf32>, tensor<96x64xf32>)
      outs(%z1 : tensor<4x96xf32>) -> tensor<4x96xf32>
  %z2 = arith.constant dense<0.0> : tensor<4x64xf32>
  %y = linalg.matmul ins(%h, %fc2 : tensor<4x96xf32>, tensor<96x64xbf16>)
      outs(%z2 : tensor<4x64xf32>) -> tensor<4x64xf32>
  %z3 = arith.constant dense<0.0> : tensor<4x40xf32>
  %head = linalg.matmul indexing_maps = [#mk, #nk, #mn] ins(%y, %tied : tensor<4x64xf32>, tensor<40x64xf32>)
      outs(%z3 : tensor<4x40xf32>) -> tensor<4x40xf32>
  %row = tensor.extract_slice %tied[3, 0] [1, 64] [1, 1] : tensor<40x64xf32> to tensor<1x64xf32>
  return %head, %row, %bias : tensor<4x40xf32>, tensor<1x64xf32>, tensor<64xf32>
}
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.mlir").write_text(MODEL)
    runtime.save_archive_file(
        {n: a.view(np.uint8) for n, a in PARAMETERS.items()}, tmp_path / "m.irpa"
    )
    return tmp_path


def quantize(folder: Path, *options: str, model: str = "m.mlir") -> int:
    return main(
        [
            "quantize",
            str(folder / model),
            f"--params={folder}/m.irpa",
            f"-o={folder}/q.mlir".replace("-o=", "-o"),
            f"--output-params={folder}/q.irpa",
            "--quiet",
            *options,
        ]
    )


def call(folder: Path, x: npt.NDArray) -> list[npt.NDArray]:
    vmfb = block32.compile(folder / "q.mlir", target="cpu")
    config = runtime.Config("local-task")
    index = runtime.ParameterIndex()
    index.load(str(folder / "q.irpa"))
    parameters = runtime.create_io_parameters_module(
        config.vm_instance, index.create_provider(scope="model")
    )
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    loaded = runtime.load_vm_modules(parameters, module, config=config)[-1]
    return [np.asarray(result.to_host()) for result in loaded["main"](x)]


def linear(
    x: npt.NDArray,
    w: npt.NDArray,
    block: tuple[int, int],
    element: reference.Element,
    dynamic: bool,
) -> npt.NDArray[np.float64]:
    """x times quantised w, in float64; x is quantised, too, where the model does so."""
    codes, scales = reference.quantize_weight(w, block, "rceil", element)
    values, x_scale = reference.quantize(x) if dynamic else (x, None)
    return reference.scaled_matmul(
        values, x_scale, codes, scales, rhs_block=block, rhs_element=element
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "m.mlir"), "m.mlir: error: this file is also an input or another output"),
        (("--output-params=m.irpa",), "m.irpa: error: this file is also an input"),
        (("-o", "-"), "<stdout>: error: this output cannot go there; expected a file name"),
        (("-o", "missing/q.mlir"), "missing/q.mlir: error: cannot write the output"),
    ],
)
def test_outputs_that_cannot_be(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert quantize(folder, *options) == 1
    assert capsys.readouterr().err.startswith(message)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "block", "element", "dynamic"),
    [
        ((), (32, 32), "e4m3", True),
        (("--block=1x32", "--format=mxfp4", "--activations=none"), (1, 32), "e2m1", False),
    ],
    ids=["mxfp8", "mxfp4 weights alone"],
)
def test_a_model_of_parameters(
    folder: Path,
    options: tuple[str, ...],
    block: tuple[int, int],
    element: reference.Element,
    dynamic: bool,
) -> None:
    assert quantize(folder, *options) == 0
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    head, row, bias = call(folder, x)
    h = linear(x, FC1, block, element, dynamic).astype(np.float32)
    y = linear(h, FC2.astype(np.float32).T, block, element, dynamic).astype(np.float32)
    expected = linear(y, TIED, block, element, dynamic)
    # Where a sum is near a tie, its last bit decides how it is quantised.
    assert np.linalg.norm(head - expected) < 5e-3 * np.linalg.norm(expected)
    np.testing.assert_array_equal(row, TIED[3:4])
    np.testing.assert_array_equal(bias, PARAMETERS["bias"])


def test_the_archive_holds_the_bytes_of_the_reference(folder: Path) -> None:
    assert quantize(folder) == 0
    entries = read_index(folder / "q.irpa")
    codes, scales = reference.quantize_weight(FC2.astype(np.float32).T)
    assert entries["fc2.weight"].read() == codes.tobytes()
    assert entries["fc2.weight_scale"].read() == scales.tobytes()
    assert entries["tied"].read() == TIED.tobytes(), "the embedding still reads it"
    assert entries["tied_mx"].length == TIED.size


def test_kept_layers_stay(folder: Path) -> None:
    assert quantize(folder, "--keep=fc*", f"--report={folder}/r.json") == 0
    report = json.loads((folder / "r.json").read_text())
    assert [layer["name"] for layer in report["layers"]] == ["tied"]
    assert "fc1.weight_scale" not in read_index(folder / "q.irpa")


def test_reports(folder: Path) -> None:
    assert quantize(folder, f"--report={folder}/r.json") == 0
    assert quantize(folder, f"--report={folder}/r.html") == 0
    layer = json.loads((folder / "r.json").read_text())["layers"][0]
    codes, scales = reference.quantize_weight(FC1)
    restored = reference.dequantize(codes, scales, (32, 32))
    error = np.linalg.norm(restored - FC1) / np.linalg.norm(FC1)
    assert layer["relative_error"] == pytest.approx(error, rel=1e-4)
    assert (layer["bytes_before"], layer["bytes_after"]) == (96 * 64 * 4, 96 * 64 + 6)
    page = (folder / "r.html").read_text()
    assert page.count("<rect") == 3
    assert "fc1.weight" in page


def test_a_model_of_constants(tmp_path: Path) -> None:
    """Without parameters there is no archive: codes and scales are in the module."""
    w = RNG.standard_normal((32, 8)).astype(np.float32)
    values = ", ".join("[" + ", ".join(map(repr, map(float, row))) + "]" for row in w)
    (tmp_path / "m.mlir").write_text(f"""
func.func @main(%x: tensor<2x32xf32>) -> tensor<2x8xf32> {{
  %w = arith.constant dense<[{values}]> : tensor<32x8xf32>
  %z = arith.constant dense<0.0> : tensor<2x8xf32>
  %y = linalg.matmul ins(%x, %w : tensor<2x32xf32>, tensor<32x8xf32>)
      outs(%z : tensor<2x8xf32>) -> tensor<2x8xf32>
  return %y : tensor<2x8xf32>
}}
""")
    arguments = ["quantize", f"{tmp_path}/m.mlir", "-o", f"{tmp_path}/q.mlir", "--quiet"]
    assert main(arguments) == 0
    vmfb = block32.compile(tmp_path / "q.mlir", target="cpu")
    x = RNG.standard_normal((2, 32)).astype(np.float32)
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    got = np.asarray(runtime.load_vm_module(module, config)["main"](x).to_host())
    comparison = reference.compare(got, linear(x, w.T, (32, 32), "e4m3", True), "f32")
    assert comparison.ok, comparison


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The error; nothing may be left behind."""
    before = sorted(path.name for path in folder.iterdir())
    assert quantize(folder, *options) == 1
    assert sorted(path.name for path in folder.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize(("value", "named"), [(np.nan, "NaN"), (-np.inf, "an infinity")])
def test_weights_that_are_not_finite_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], value: float, named: str
) -> None:
    bad = FC1.copy()
    bad[95, 63] = value
    parameters = {**PARAMETERS, "fc1.weight": bad}
    runtime.save_archive_file(
        {n: a.view(np.uint8) for n, a in parameters.items()}, folder / "m.irpa"
    )
    assert f"error: the parameter 'fc1.weight' holds {named}" in refused(folder, capsys)


def test_a_pattern_that_matches_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(folder, capsys, "--keep=lm_head*")
    assert "error: the pattern 'lm_head*' matches no linear layer" in error
    assert "note: layers are fc1.weight, fc2.weight, tied" in error


def test_nothing_to_quantise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: nothing to quantise" in refused(folder, capsys, "--keep=*")


def test_a_missing_parameter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime.save_archive_file({"fc1.weight": FC1}, folder / "m.irpa")
    error = refused(folder, capsys)
    assert "error: the archive has no parameter 'fc2.weight' and 1 more" in error


def test_a_parameter_of_another_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = {**PARAMETERS, "tied": TIED[:3]}
    runtime.save_archive_file(
        {n: a.view(np.uint8) for n, a in parameters.items()}, folder / "m.irpa"
    )
    assert "expected 10240 bytes for 'tied' (40x64xf32) but got 768" in refused(folder, capsys)


def test_no_parameter_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", f"{folder}/m.mlir", "-o", f"{folder}/q.mlir", "--quiet"]) == 1
    assert "expected --params and --output-params" in capsys.readouterr().err
    assert not (folder / "q.mlir").exists()


def test_a_file_that_is_no_archive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "m.irpa").write_bytes(b"nothing of the kind")
    assert "error: expected an .irpa or .safetensors file" in refused(folder, capsys)


def test_a_full_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stood in for by a limit on the size of files, which gives an error at the same place."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
        assert "error: cannot write the output: file too large" in refused(folder, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_report_of_another_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a report that ends in .html or .json" in refused(
        folder, capsys, f"--report={folder}/r.pdf"
    )


@pytest.mark.parametrize("option", ["--output-params={}/q.mlir", "--report={}/q.json"])
def test_two_outputs_of_one_name(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    error = refused(folder, capsys, "--output-params=" + f"{folder}/q.json", option.format(folder))
    assert "error: this file is also an input or another output; expected another name" in error


def test_a_name_that_the_archive_has_already(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A runtime would read the model's own parameter as scales."""
    parameters = {**PARAMETERS, "fc1.weight_scale": FC1}
    runtime.save_archive_file(
        {n: a.view(np.uint8) for n, a in parameters.items()}, folder / "m.irpa"
    )
    error = refused(folder, capsys)
    assert "error: the new archive would hold two parameters 'fc1.weight_scale'" in error


#: What else may read the parameter of ``fc1``, and the names that the archive gets for it.
OTHER_READERS = {
    "another global, in another layer": (
        "%w = util.global.load @again : tensor<96x64xf32>",
        "[#mk, #nk, #mn] ins(%x, %w : tensor<96x64xf32>, tensor<96x64xf32>)",
        ["fc1.weight", "fc1.weight_scale"],
    ),
    "the other transpose": (
        "%w = util.global.load @fc1 : tensor<96x64xf32>",
        "[#mk, affine_map<(m, n, k) -> (k, n)>, #mn]"
        " ins(%t, %w : tensor<96x96xf32>, tensor<96x64xf32>)",
        [
            "fc1.weight",
            "fc1.weight_scale",
            "fc1.weight_transposed",
            "fc1.weight_transposed_scale",
        ],
    ),
    "a left operand": (
        "%w = util.global.load @fc1 : tensor<96x64xf32>",
        "[#mk, #nk, #mn] ins(%w, %x : tensor<96x64xf32>, tensor<96x64xf32>)",
        ["fc1.weight", "fc1.weight_mx", "fc1.weight_scale"],
    ),
    "another global, as a left operand": (
        "%w = util.global.load @again : tensor<96x64xf32>",
        "[#mk, #nk, #mn] ins(%w, %x : tensor<96x64xf32>, tensor<96x64xf32>)",
        ["fc1.weight", "fc1.weight_mx", "fc1.weight_scale"],
    ),
}


@pytest.mark.parametrize("name", OTHER_READERS)
def test_who_else_reads_a_parameter(folder: Path, name: str) -> None:
    """Nobody finds codes where he looks for values."""
    load, matmul, names = OTHER_READERS[name]
    columns = 64 if "transpose" in name else 96
    other = f"""
util.global private @again = #flow.parameter.named<"model"::"fc1.weight"> : tensor<96x64xf32>
func.func @other(%x: tensor<96x64xf32>, %t: tensor<96x96xf32>) -> tensor<96x{columns}xf32> {{
  {load}
  %z = arith.constant dense<0.0> : tensor<96x{columns}xf32>
  %y = linalg.matmul indexing_maps = {matmul}
      outs(%z : tensor<96x{columns}xf32>) -> tensor<96x{columns}xf32>
  return %y : tensor<96x{columns}xf32>
}}
"""
    (folder / "m.mlir").write_text(MODEL + other)
    assert quantize(folder) == 0
    entries = read_index(folder / "q.irpa")
    assert sorted(entry for entry in entries if entry.startswith("fc1")) == names
    if "fc1.weight_mx" in names:
        assert entries["fc1.weight"].read() == FC1.tobytes()
    if "fc1.weight_transposed" in names:
        codes, scales = reference.quantize_weight(FC1.T)
        assert entries["fc1.weight_transposed"].read() == codes.tobytes()
        assert entries["fc1.weight_transposed_scale"].read() == scales.tobytes()
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_array_equal(call(folder, x)[1], TIED[3:4])
