# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 import checkpoint`` from a file to numbers on the CPU, against float64."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.runtime import reference
from block32.runtime.archive import read_index
from block32.tools.cli import main
from tests.checkpoints import (
    E4M3,
    E8M0,
    RandomLayer,
    field,
    random_layer,
    save,
    write_raw,
)
from tests.tools.imports import call, import_checkpoint

RNG = np.random.default_rng(5)
Tensors = dict[str, npt.NDArray[Any]]


def imported(folder: Path, tensors: Tensors, *options: str) -> Path:
    assert import_checkpoint(save(folder / "m.safetensors", tensors), folder, *options) == 0
    return folder


def check(
    folder: Path,
    name: str,
    layer: RandomLayer,
    kind: reference.Kind = "f32",
    bias: npt.NDArray[Any] | None = None,
) -> None:
    """The layer's function for a given activation in codes, at two values of M."""
    for m in (1, 5):
        x, x_scale = reference.quantize(RNG.standard_normal((m, layer.codes.shape[1])))
        got = call(folder, name, x.view(E4M3), x_scale.view(E8M0))
        expected = layer.multiplied(x, x_scale) + (0 if bias is None else bias.astype(np.float64))
        comparison = reference.compare(got, expected, kind)
        assert comparison.ok, comparison


@pytest.mark.parametrize(
    ("block", "shape"),
    [((1, 32), (96, 64)), ((32, 32), (96, 64)), ((128, 128), (300, 130)), ((64, 96), (80, 200))],
)
def test_numbers_of_every_block(
    tmp_path: Path, block: tuple[int, int], shape: tuple[int, int]
) -> None:
    layer = random_layer(*shape, block)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    imported(tmp_path, layer.tensors("layers.0.q_proj"), "--activations=given")
    check(tmp_path, "layers.0.q_proj", layer)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("activations", ["mxfp8", "none"])
def test_activations_and_bias(tmp_path: Path, activations: str, kind: reference.Kind) -> None:
    """The bias is added to the f32 sum, which is rounded once."""
    layer = random_layer(96, 64, (32, 32))
    bias = (100 * RNG.standard_normal(96)).astype(ml_dtypes.bfloat16)
    tensors: Tensors = {**layer.tensors("fc"), "fc.bias": bias}
    imported(tmp_path, tensors, f"--activations={activations}", f"--type={kind}")
    x = RNG.standard_normal((5, 64)).astype(np.float32 if kind == "f32" else ml_dtypes.bfloat16)
    values, scales = reference.quantize(x) if activations == "mxfp8" else (x, None)
    expected = layer.multiplied(values, scales) + bias.astype(np.float64)
    comparison = reference.compare(call(tmp_path, "fc", x), expected, kind)
    assert comparison.ok, comparison


def test_several_layers_and_the_other_tensors(tmp_path: Path) -> None:
    first, second = random_layer(32, 64, (32, 32)), random_layer(64, 32, (1, 32), seed=1)
    norm = RNG.standard_normal(7).astype(np.float32)
    tensors = {**first.tensors("a.up"), **second.tensors("a.down", "weight_scale"), "norm": norm}
    imported(tmp_path, tensors, "--activations=given")
    check(tmp_path, "a.up", first)
    check(tmp_path, "a.down", second)
    entries = read_index(tmp_path / "l.irpa")
    assert set(entries) == {
        "a.up.weight",
        "a.up.weight_scale",
        "a.down.weight",
        "a.down.weight_scale",
        "norm",
    }
    assert entries["norm"].read() == norm.tobytes()
    assert entries["a.up.weight"].read() == first.codes.tobytes()
    assert entries["a.up.weight_scale"].read() == first.scales.tobytes()


def test_rows_that_agree_become_32x32(tmp_path: Path) -> None:
    same = random_layer(70, 64, (32, 32))
    rows = RandomLayer(same.codes, same.row_scales(), (1, 32))
    differ = random_layer(70, 64, (1, 32))
    tensors = {**rows.tensors("same"), **differ.tensors("differ")}
    imported(tmp_path, tensors, "--activations=given")
    entries = read_index(tmp_path / "l.irpa")
    assert entries["same.weight_scale"].read() == same.scales.tobytes()
    assert entries["differ.weight_scale"].read() == differ.scales.tobytes()
    imported(tmp_path, tensors, "--block=1x32", "--activations=given")
    assert read_index(tmp_path / "l.irpa")["same.weight_scale"].read() == rows.scales.tobytes()


@pytest.mark.parametrize("name", ["row", "row.weight", "x_mx"])
def test_names_that_may_collide(tmp_path: Path, name: str) -> None:
    """A function of a layer keeps its name whatever the globals beside it are called."""
    layers = {n: random_layer(32, 32, (32, 32), seed) for seed, n in enumerate(("x", name))}
    tensors = layers["x"].tensors("x")
    tensors |= {
        name: layers[name].codes.view(E4M3),
        f"{name}_scale": layers[name].scales.view(E8M0),
    }
    imported(tmp_path, tensors, "--activations=given")
    check(tmp_path, "x", layers["x"])
    check(tmp_path, name.removesuffix(".weight"), layers[name])


def test_every_layer_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Where a weight has the name that another one's layer would have, or no other name."""
    functions = {
        "a.weight.weight": "a.weight.weight",
        "a": "a",
        "a.weight": "a.weight",
        "b.weight": "b",
        ".weight": ".weight",
    }
    layers = {n: random_layer(32, 32, (32, 32), seed) for seed, n in enumerate(functions)}
    tensors: Tensors = {}
    for name, layer in layers.items():
        tensors |= {name: layer.codes.view(E4M3), f"{name}_scale": layer.scales.view(E8M0)}
    imported(tmp_path, tensors, "--activations=given")
    for name, function in functions.items():
        check(tmp_path, function, layers[name])


@pytest.mark.parametrize("name", ["größe.0", "with space"])
def test_names_of_other_letters(tmp_path: Path, name: str) -> None:
    """In functions of layers, and as a parameter that a model names."""
    layer = random_layer(96, 64, (32, 32))
    head = RNG.standard_normal((40, 96)).astype(np.float32)
    tensors: Tensors = {**layer.tensors(name), "head": head}
    imported(tmp_path, tensors, "--activations=given")
    check(tmp_path, name, layer)
    (tmp_path / "model.mlir").write_text(MODEL.replace("up.weight", f"{name}.weight"))
    imported(tmp_path, tensors, f"--model={tmp_path}/model.mlir")
    assert f'"{name}.weight_scale"' in (tmp_path / "l.mlir").read_text()
    assert set(read_index(tmp_path / "l.irpa")) == {
        f"{name}.weight",
        f"{name}.weight_scale",
        "head",
    }


def test_nan_codes_and_nan_scales_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = random_layer(64, 64, (32, 32))
    layer.codes[3, 5] = 0x7F
    layer.scales[1, 1] = 255
    imported(tmp_path, layer.tensors("fc"), "--activations=given")
    check(tmp_path, "fc", layer)
    assert "warning: 1 scales of 'fc.weight' are NaN" in capsys.readouterr().err


# Tensor parallelism.


def test_rows_of_all_devices_make_up_the_result(tmp_path: Path) -> None:
    """48 rows in 4 parts of 12: blocks of 32 are cut, so that parts have a scale a row."""
    layer = random_layer(48, 64, (32, 32))
    bias = RNG.standard_normal(48).astype(np.float32)
    x, x_scale = reference.quantize(RNG.standard_normal((3, 64)))
    parts: list[npt.NDArray[Any]] = []
    for rank in range(4):
        tensors: Tensors = {**layer.tensors("fc"), "fc.bias": bias}
        imported(tmp_path, tensors, f"--shard=rows:{rank}/4", "--activations=given")
        parts.append(call(tmp_path, "fc", x.view(E4M3), x_scale.view(E8M0)))
        assert parts[-1].shape == (3, 12)
        rows = 12 if rank == 2 else 1  # rows 24 to 36 lie in two blocks
        assert read_index(tmp_path / "l.irpa")["fc.weight_scale"].length == rows * 2
    expected = layer.multiplied(x, x_scale) + bias
    comparison = reference.compare(np.concatenate(parts, axis=1), expected, "f32")
    assert comparison.ok, comparison


def test_columns_of_all_devices_add_up(tmp_path: Path) -> None:
    """K = 640 in 2 parts of whole blocks; the bias is on the first alone."""
    layer = random_layer(40, 640, (128, 128))
    bias = RNG.standard_normal(40).astype(np.float32)
    x, x_scale = reference.quantize(RNG.standard_normal((3, 640)))
    total = np.zeros((3, 40))
    for rank, part in enumerate((slice(0, 320), slice(320, 640))):
        tensors: Tensors = {**layer.tensors("fc"), "fc.bias": bias}
        imported(tmp_path, tensors, f"--shard=columns:{rank}/2", "--activations=given")
        scales = x_scale[:, part.start // 32 : part.stop // 32]
        arguments = (np.ascontiguousarray(a) for a in (x[:, part], scales))
        codes, scale_bytes = arguments
        total += call(tmp_path, "fc", codes.view(E4M3), scale_bytes.view(E8M0))
    comparison = reference.compare(total, layer.multiplied(x, x_scale) + bias, "f32")
    assert comparison.ok, comparison


def test_the_first_part_that_names_a_layer_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        **random_layer(64, 64, (32, 32)).tensors("q"),
        **random_layer(64, 64, (32, 32)).tensors("o"),
    }
    path = save(tmp_path / "m.safetensors", tensors)
    options = ["--shard=o=columns:1/2", "--shard=rows:1/2", "--json"]
    assert main(["import", "checkpoint", str(path), "--quiet", *options]) == 0
    layers = {layer["name"]: layer for layer in json.loads(capsys.readouterr().out)["layers"]}
    assert (layers["q"]["n"], layers["q"]["k"], layers["q"]["shard"]) == (32, 64, "rows 1 of 2")
    assert (layers["o"]["n"], layers["o"]["k"], layers["o"]["shard"]) == (64, 32, "columns 1 of 2")


def test_the_only_part_is_the_whole(tmp_path: Path) -> None:
    """A short last block of K is no matter where nothing is divided."""
    layer = random_layer(48, 40, (32, 32))
    imported(tmp_path, layer.tensors("fc"), "--shard=columns:0/1", "--activations=given")
    check(tmp_path, "fc", layer)


# Scales that are no powers of two.


@pytest.mark.parametrize(("option", "rows"), [((), 32), (("--block=1x32",), 1)])
def test_requantizing_says_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], rows: int
) -> None:
    rng = np.random.default_rng(1)
    codes = random_layer(150, 130, (32, 32)).codes
    numbers = rng.uniform(1e-4, 2e-4, (2, 2)).astype(np.float32)
    path = save(
        tmp_path / "m.safetensors", {"fc.weight": codes.view(E4M3), "fc.weight_scale_inv": numbers}
    )
    options = ("--requantize", "--json", "--activations=given", *option)
    assert import_checkpoint(path, tmp_path, *options) == 0
    (report,) = json.loads(capsys.readouterr().out)["layers"]
    full = np.repeat(np.repeat(numbers.astype(np.float64), 128, 0), 128, 1)[:150, :130]
    wanted = reference.decode(codes) * full
    quantized, scales = reference.quantize_weight(wanted, (rows, 32))
    entries = read_index(tmp_path / "l.irpa")
    assert entries["fc.weight"].read() == quantized.tobytes()
    assert entries["fc.weight_scale"].read() == scales.tobytes()
    lost = reference.dequantize(quantized, scales, (rows, 32)) - wanted
    error = np.linalg.norm(lost) / np.linalg.norm(wanted)
    assert report["requantized"] and report["relative_error"] == pytest.approx(error, rel=1e-3)
    assert 0.005 < error < 0.05
    check(tmp_path, "fc", RandomLayer(quantized, scales, (rows, 32)))


@pytest.mark.parametrize(
    ("shard", "rows", "columns"),
    [
        ("rows:1/2", slice(75, 150), slice(0, 192)),
        ("columns:1/3", slice(0, 150), slice(64, 128)),
    ],
)
def test_requantizing_a_part(tmp_path: Path, shard: str, rows: slice, columns: slice) -> None:
    """A part's rows and columns keep the scales of their place in the whole."""
    codes = random_layer(150, 192, (32, 32)).codes
    numbers = np.array([[0.3, 0.7], [1.1, 0.0625]], np.float32)
    tensors: Tensors = {"fc.weight": codes.view(E4M3), "fc.weight_scale": numbers}
    imported(tmp_path, tensors, "--requantize", f"--shard={shard}")
    full = np.repeat(np.repeat(numbers.astype(np.float64), 128, 0), 128, 1)[:150, :192]
    wanted = (reference.decode(codes) * full)[rows, columns]
    quantized, scales = reference.quantize_weight(wanted)
    entries = read_index(tmp_path / "l.irpa")
    assert entries["fc.weight"].read() == quantized.tobytes()
    assert entries["fc.weight_scale"].read() == scales.tobytes()


def test_requantizing_leaves_powers_of_two_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = random_layer(64, 64, (32, 32))
    numbers = reference.decode_scales(layer.scales).astype(np.float32)
    tensors: Tensors = {"fc.weight": layer.codes.view(E4M3), "fc.weight_scale": numbers}
    imported(tmp_path, tensors, "--requantize", "--json")
    (report,) = json.loads(capsys.readouterr().out)["layers"]
    assert (report["requantized"], report["relative_error"]) == (False, None)
    assert read_index(tmp_path / "l.irpa")["fc.weight"].read() == layer.codes.tobytes()


# What is shown.


def test_the_report_alone_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "m.safetensors", random_layer(300, 130, (128, 128)).tensors("l.q"))
    assert main(["import", "checkpoint", str(path), "--report", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "F8_E8M0 128x128" in shown and "32x32" in shown and "l.q" in shown
    assert shown.endswith("block-scaled layers: 1 (39050 bytes), other tensors: 0 (0 bytes)\n")
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]


def test_only_some_layers(tmp_path: Path) -> None:
    tensors: Tensors = {
        **random_layer(32, 32, (32, 32)).tensors("l.0.q"),
        **random_layer(32, 32, (32, 32)).tensors("l.1.q"),
        "l.0.norm": np.zeros(3, np.float32),
        "l.1.norm": np.zeros(3, np.float32),
    }
    imported(tmp_path, tensors, "--only=l.0.q", "--only=l.0.norm")
    names = {"l.0.q.weight", "l.0.q.weight_scale", "l.0.norm"}
    assert set(read_index(tmp_path / "l.irpa")) == names
    assert "@l.1.q" not in (tmp_path / "l.mlir").read_text()


def test_a_configuration_that_contradicts_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    path = save(tmp_path / "m.safetensors", random_layer(96, 64, (32, 32)).tensors("fc"))
    assert main(["import", "checkpoint", str(path), "--report"]) == 0
    assert (
        "config.json: warning: says blocks of 128x128 but the scales of 'fc.weight' are of 32x32; "
        "the scales count"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--block=auto", "--shard=rows:1/2", "--shard=columns:1/2"])
def test_memory_is_below_the_tensor(tmp_path: Path, option: str) -> None:
    """A weight of 64 MiB, sparse, whose parts pass through in pieces of 16 MiB."""
    n, k = 1 << 13, 1 << 13
    scales = n * k // 1024
    header = {
        "w": field("F8_E4M3", [n, k], 0, n * k),
        "w_scale": field("U8", [n // 32, k // 32], n * k, n * k + scales),
    }
    path = write_raw(tmp_path / "m.safetensors", header)
    with path.open("ab") as stream:
        stream.truncate(path.stat().st_size + n * k + scales)
    tracemalloc.start()
    try:
        assert import_checkpoint(path, tmp_path, option) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 56 << 20


# A model of the user's.

MODEL = """
#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
util.global private @up = #flow.parameter.named<"model"::"up.weight"> : tensor<96x64xbf16>
util.global private @head = #flow.parameter.named<"model"::"head"> : tensor<40x96xf32>
func.func @main(%x: tensor<?x64xbf16>) -> tensor<?x40xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c0 : tensor<?x64xbf16>
  %up = util.global.load @up : tensor<96x64xbf16>
  %head = util.global.load @head : tensor<40x96xf32>
  %e1 = tensor.empty(%m) : tensor<?x96xf32>
  %z1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<?x96xf32>) -> tensor<?x96xf32>
  %h = linalg.matmul indexing_maps = [#mk, #nk, #mn]
      ins(%x, %up : tensor<?x64xbf16>, tensor<96x64xbf16>)
      outs(%z1 : tensor<?x96xf32>) -> tensor<?x96xf32>
  %e2 = tensor.empty(%m) : tensor<?x40xf32>
  %z2 = linalg.fill ins(%zero : f32) outs(%e2 : tensor<?x40xf32>) -> tensor<?x40xf32>
  %y = linalg.matmul indexing_maps = [#mk, #nk, #mn]
      ins(%h, %head : tensor<?x96xf32>, tensor<40x96xf32>)
      outs(%z2 : tensor<?x40xf32>) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
"""


def test_a_model_reads_the_checkpoint(tmp_path: Path) -> None:
    """One layer is block-scaled; the head is a plain tensor of the checkpoint, and stays."""
    layer = random_layer(96, 64, (32, 32))
    head = RNG.standard_normal((40, 96)).astype(np.float32)
    tensors: Tensors = {**layer.tensors("up"), "head": head, "unused": np.zeros(3, np.float32)}
    (tmp_path / "model.mlir").write_text(MODEL)
    imported(tmp_path, tensors, f"--model={tmp_path}/model.mlir", "--activations=none")
    assert set(read_index(tmp_path / "l.irpa")) == {"up.weight", "up.weight_scale", "head"}
    x = RNG.standard_normal((5, 64)).astype(ml_dtypes.bfloat16)
    expected = layer.multiplied(x) @ head.astype(np.float64).T
    comparison = reference.compare(call(tmp_path, "main", x), expected, "f32")
    assert comparison.ok, comparison
