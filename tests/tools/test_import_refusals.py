# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 import checkpoint`` on bad input: one line that names it, and nothing left behind."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from block32.tools.cli import main
from tests.checkpoints import E4M3, random_layer, save, write_raw
from tests.tools.imports import import_checkpoint, refused
from tests.tools.test_import_checkpoint import MODEL

Capture = pytest.CaptureFixture[str]


def layer_file(folder: Path, n: int = 64, k: int = 64) -> Path:
    return save(folder / "m.safetensors", random_layer(n, k, (32, 32)).tensors("fc"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shard=rows:2/2",), "expected [PATTERN=]rows:RANK/WORLD or columns:RANK/WORLD"),
        (("--shard=depth:0/2",), "expected [PATTERN=]rows:RANK/WORLD or columns:RANK/WORLD"),
        (("--shard=rows:0/0",), "expected [PATTERN=]rows:RANK/WORLD or columns:RANK/WORLD"),
        (("--shard=rows:-1/2",), "expected [PATTERN=]rows:RANK/WORLD or columns:RANK/WORLD"),
        (("--shard=o=rows:0/2",), "--shard: error: the pattern 'o' matches no linear layer"),
        (("--shard=rows:0/3",), "N = 64 of 'fc.weight' does not divide into 3 equal parts"),
        (
            ("--shard=columns:0/4",),
            "K = 64 of 'fc.weight' does not divide into 4 equal parts of whole blocks of 32",
        ),
        (("--only=q*",), "--only: error: the pattern 'q*' matches no linear layer"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    assert message in refused(layer_file(tmp_path), tmp_path, capsys, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to do: expected -o and --output-params, --report or --json"),
        (("-ol.mlir",), "expected both -o and --output-params, or neither"),
        (("--output-params=l.irpa",), "expected both -o and --output-params, or neither"),
        (
            ("-ox", "--output-params=y", "--model=m", "--activations=given"),
            "--activations=given is for functions of layers, without --model",
        ),
        (("--report", '--scope=a"b'), "--scope: error: expected a printable name without quotes"),
        (("--report", "--scope=a\nb"), "--scope: error: expected a printable name without quotes"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    assert main(["import", "checkpoint", str(layer_file(tmp_path)), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x", "m.safetensors"])
def test_outputs_that_are_something_else_too(tmp_path: Path, capsys: Capture, name: str) -> None:
    path = layer_file(tmp_path)
    before = path.read_bytes()
    outputs = [f"-o{tmp_path}/x", f"--output-params={tmp_path}/./{name}"]
    assert main(["import", "checkpoint", str(path), *outputs]) == 1
    assert "error: this file is also an input or another output" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]


def test_patterns_that_leave_no_layer(tmp_path: Path, capsys: Capture) -> None:
    tensors = random_layer(32, 32, (32, 32)).tensors("fc") | {"norm": np.zeros(3, np.float32)}
    path = save(tmp_path / "m.safetensors", tensors)
    assert "the patterns leave no block-scaled layer" in refused(
        path, tmp_path, capsys, "--only=norm"
    )


@pytest.mark.parametrize("name", ['a"b', "back\\slash"])
def test_names_that_iree_cannot_have(tmp_path: Path, capsys: Capture, name: str) -> None:
    path = save(tmp_path / "m.safetensors", random_layer(32, 32, (32, 32)).tensors(name))
    error = refused(path, tmp_path, capsys)
    assert f"the tensor name '{name}.weight_scale_inv' has a quote or a backslash" in error


def test_rows_that_cannot_share_a_scale(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path / "m.safetensors", random_layer(64, 64, (1, 32)).tensors("fc"))
    error = refused(path, tmp_path, capsys, "--block=32x32")
    assert "rows of 'fc.weight' that would share a 32x32 scale have different ones" in error
    assert "note: --block=1x32 keeps a scale for each row" in error


def test_nan_cannot_be_quantised_anew(tmp_path: Path, capsys: Capture) -> None:
    """Found while codes are written, so that outputs have begun: they go."""
    codes = random_layer(64, 64, (32, 32)).codes
    codes[40, 3] = 0xFF
    scales = np.full((2, 2), 0.3, np.float32)
    tensors: dict[str, npt.NDArray[Any]] = {"w": codes.view(E4M3), "w_scale": scales}
    path = save(tmp_path / "m.safetensors", tensors)
    assert "the weight 'w' holds NaN" in refused(path, tmp_path, capsys, "--requantize")


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    error = refused(tmp_path / "none", tmp_path, capsys)
    assert (
        error == f"{tmp_path}/none: error: cannot read the parameters: no such file or directory\n"
    )


def test_a_name_that_is_too_long(tmp_path: Path, capsys: Capture) -> None:
    error = refused(tmp_path / ("n" * 300), tmp_path, capsys)
    assert "error: cannot read the parameters: file name too long" in error


def test_a_file_of_another_kind(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "no safetensors file" in refused(path, tmp_path, capsys)


def test_a_deeply_nested_header(tmp_path: Path, capsys: Capture) -> None:
    path = write_raw(tmp_path / "m.safetensors", b'{"a":' * 100_000)
    assert "the header is nested too deeply" in refused(path, tmp_path, capsys)


# The outputs.


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    path = layer_file(tmp_path)
    outputs = ["-o", f"{tmp_path}/none/l.mlir", f"--output-params={tmp_path}/l.irpa"]
    assert main(["import", "checkpoint", str(path), *outputs, "--quiet"]) == 1
    assert "error: cannot write the output: no such file" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_full_disk(tmp_path: Path, capsys: Capture) -> None:
    """Stood in for by a limit on the size of files, which gives an error at the same place."""
    path = layer_file(tmp_path, 256, 256)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
        error = refused(path, tmp_path, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "l.irpa: error: cannot write the output: file too large" in error


def test_old_outputs_stay_where_the_import_fails(tmp_path: Path, capsys: Capture) -> None:
    path = layer_file(tmp_path)
    for name in ("l.mlir", "l.irpa"):
        (tmp_path / name).write_text("old")
    refused(path, tmp_path, capsys, "--shard=rows:0/3")
    assert all((tmp_path / name).read_text() == "old" for name in ("l.mlir", "l.irpa"))


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP], ids=lambda ending: ending.name)
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, ending: signal.Signals) -> None:
    """By SIGTERM or its terminal's end. The checkpoint is sparse, and large enough to be seen."""
    n, k = 1 << 16, 1 << 14
    header = {
        "w": {"dtype": "F8_E4M3", "shape": [n, k], "data_offsets": [0, n * k]},
        "w_scale": {
            "dtype": "U8",
            "shape": [n // 32, k // 32],
            "data_offsets": [n * k, n * k + n * k // 1024],
        },
    }
    path = write_raw(tmp_path / "m.safetensors", header)
    with path.open("ab") as stream:
        stream.truncate(path.stat().st_size + n * k + n * k // 1024)
    command = [sys.executable, "-m", "block32", "import", "checkpoint", str(path)]
    outputs = ["-o", f"{tmp_path}/l.mlir", f"--output-params={tmp_path}/l.irpa", "--quiet"]
    with subprocess.Popen(
        [*command, *outputs],
        stderr=subprocess.PIPE,
        # What runs under nohup ignores SIGHUP, and its children would too.
        preexec_fn=lambda: signal.signal(ending, signal.SIG_DFL),
    ) as running:
        while running.poll() is None and not _has_begun(tmp_path):
            time.sleep(0.01)
        running.send_signal(ending)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert error == b"block32: interrupted\n"
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]


def _has_begun(folder: Path) -> bool:
    return any(item.stat().st_size > 1 << 20 for item in folder.glob(".block32-*"))


# Models that do not fit.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.mlir"
    path.write_text(MODEL)
    return path


HEAD = {"head": np.ones((40, 96), np.float32)}


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("up", {}, "the checkpoint has no tensor 'head', which the model reads"),
        ("up", {"head": HEAD["head"][:3]}, "expected 15360 bytes for 'head' (tensor<40x96xf32> in"),
        ("other", HEAD, "no parameter of the model has the name of a block-scaled weight"),
    ],
)
def test_a_model_and_a_checkpoint_that_differ(
    model: Path, capsys: Capture, name: str, tensors: dict[str, npt.NDArray[Any]], message: str
) -> None:
    layer = random_layer(96, 64, (32, 32))
    path = save(model.parent / "m.safetensors", layer.tensors(name) | tensors)
    assert message in refused(path, model.parent, capsys, f"--model={model}")


def test_a_weight_of_another_shape_than_the_models(model: Path, capsys: Capture) -> None:
    tensors = random_layer(48, 64, (32, 32)).tensors("up") | HEAD
    path = save(model.parent / "m.safetensors", tensors)
    error = refused(path, model.parent, capsys, f"--model={model}")
    assert "reads the parameter 'up.weight' as 96x64; the checkpoint has 48x64" in error
    assert error.startswith(f"{model}:15:")


def test_a_model_that_does_not_parse(model: Path, capsys: Capture) -> None:
    model.write_text("func.func @f( {")
    path = layer_file(model.parent)
    assert import_checkpoint(path, model.parent, f"--model={model}") == 1
    assert capsys.readouterr().err.startswith(f"{model}:1:")
    assert sorted(item.name for item in model.parent.iterdir()) == ["m.safetensors", "model.mlir"]
