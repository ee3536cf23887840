# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finding the files of a checkpoint: indices, shards, and paths that lead elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.checkpoint.files import open_checkpoint
from tests.checkpoints import field, write_raw


def write_shard(path: Path, *names: str) -> Path:
    """A shard with a byte a tensor."""
    header = {name: field("U8", [1], at, at + 1) for at, name in enumerate(names)}
    return write_raw(path, header, b"x" * len(names))


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 2}, "weight_map": weight_map}))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shard(tmp_path / "model-00001-of-00002.safetensors", "a", "b")
    write_shard(tmp_path / "model-00002-of-00002.safetensors", "c")
    return tmp_path


def refused(path: Path) -> DiagnosticError:
    with pytest.raises(DiagnosticError) as caught:
        open_checkpoint(path)
    return caught.value


def test_one_file_a_folder_and_an_index_give_the_same(shards: Path) -> None:
    assert list(open_checkpoint(shards).tensors) == ["a", "b", "c"]
    first, second = sorted(shards.glob("*.safetensors"))
    index = write_index(shards, {"a": first.name, "b": first.name, "c": second.name})
    for path in (shards, index):
        assert list(open_checkpoint(path).tensors) == ["a", "b", "c"]
    assert list(open_checkpoint(second).tensors) == ["c"]


def test_only_the_shards_of_the_index_are_read(shards: Path) -> None:
    """Folders hold the same weights in another form, too."""
    (shards / "consolidated.safetensors").write_bytes(b"nothing of the kind")
    first, second = sorted(shards.glob("model*.safetensors"))
    write_index(shards, {"a": first.name, "b": first.name, "c": second.name})
    assert len(open_checkpoint(shards).tensors) == 3


def test_hidden_files_are_passed_over(shards: Path) -> None:
    (shards / "._model-00001-of-00002.safetensors").write_bytes(b"of another system")
    assert len(open_checkpoint(shards).tensors) == 3


def test_a_shard_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write_shard(tmp_path / "parts" / "x.safetensors", "a")
    write_index(tmp_path, {"a": "parts/x.safetensors"})
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "none.safetensors"}, "the shard 'none.safetensors' is missing"),
        ({"a": f"{'n' * 300}.safetensors"}, "n...' is missing"),
        ({"a": "../x.safetensors"}, "the path '../x.safetensors' leads out of the checkpoint's"),
        ({"a": "p/../../x.safetensors"}, "leads out of the checkpoint's folder"),
        ({"a": "/etc/x.safetensors"}, "the path '/etc/x.safetensors' leads out of"),
        ({"a": "C:\\x.safetensors"}, "leads out of the checkpoint's folder"),
        ({"a": "p\\..\\..\\x.safetensors"}, "leads out of the checkpoint's folder"),
        ({"a": "x.bin"}, "expected the name of a .safetensors file but got 'x.bin'"),
        ({"a": "x\x1b.safetensors"}, r"expected the name of a .safetensors file but got 'x\x1b"),
        ({"a": 3}, "expected the name of a file for each tensor"),
        ({"a": {}}, "expected the name of a file for each tensor"),
        ([], "expected 'weight_map', an object with a file each"),
        ({}, "expected 'weight_map', an object with a file each"),
    ],
)
def test_an_index_that_is_wrong(shards: Path, weight_map: Any, message: str) -> None:
    index = write_index(shards, weight_map)
    error = refused(shards)
    assert message in error.message
    assert error.location == str(index)


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for content, message in (
        (b"{", "the file is no JSON"),
        (b"\xff", "the file is no UTF-8"),
        (b'{"weight_map": ' + b"[" * 100_000, "the file is nested too deeply"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "the file names 'a' twice"),
    ):
        index.write_bytes(content)
        assert message in refused(tmp_path).message


def test_a_link_that_leads_out(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    outside = write_shard(tmp_path / "outside.safetensors", "a")
    (folder / "x.safetensors").symlink_to(outside)
    assert (
        "the link 'x.safetensors' leads out of the checkpoint's folder" in refused(folder).message
    )
    write_index(folder, {"a": "x.safetensors"})
    assert "the link 'x.safetensors' leads out" in refused(folder).message


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    assert "cannot read the parameters" in refused(tmp_path).message


def test_links_of_the_download_cache(tmp_path: Path) -> None:
    """huggingface_hub keeps files in blobs/, and a revision is a folder of links to them."""
    for name in ("blobs", "snapshots/1234"):
        (tmp_path / name).mkdir(parents=True)
    blob = write_shard(tmp_path / "blobs" / "abcd", "a")
    revision = tmp_path / "snapshots" / "1234"
    (revision / "model.safetensors").symlink_to(Path("../..") / "blobs" / blob.name)
    assert list(open_checkpoint(revision).tensors) == ["a"]
    (revision / "model.safetensors").unlink()
    elsewhere = write_shard(tmp_path / "elsewhere", "a")
    (revision / "model.safetensors").symlink_to(elsewhere)
    assert "leads out of the checkpoint's folder" in refused(revision).message


def test_a_tensor_in_two_shards(shards: Path) -> None:
    second = write_shard(shards / "model-00002-of-00002.safetensors", "b")
    error = refused(shards)
    assert error.message == "the tensor 'b' is in model-00001-of-00002.safetensors, too"
    assert error.location == str(second)
    first = "model-00001-of-00002.safetensors"
    write_index(shards, {"a": first, "b": second.name})
    assert "the tensor 'b' is in" in refused(shards).message


def test_an_index_and_shards_that_differ(shards: Path) -> None:
    first, second = (path.name for path in sorted(shards.glob("*.safetensors")))
    write_index(shards, {"a": first, "b": first, "c": second, "d": second})
    assert refused(shards).message == f"the tensor 'd' is not in '{second}'"
    write_index(shards, {"a": first, "c": second})
    assert refused(shards).message == "the tensor 'b' is not in model.safetensors.index.json"
    write_index(shards, {"a": first, "b": second, "c": second})
    assert f"the tensor 'b' is here, but model.safetensors.index.json says '{second}'" in (
        refused(shards).message
    )


def test_a_numbered_shard_that_is_missing(shards: Path) -> None:
    (shards / "model-00001-of-00002.safetensors").unlink()
    assert refused(shards).message == (
        "the shard 'model-00001-of-00002.safetensors' is missing: 1 of 2 are there"
    )


def test_shards_of_two_models(shards: Path) -> None:
    write_shard(shards / "other.safetensors", "x")
    assert "the .safetensors files are of several models" in refused(shards).message


def test_two_indices(shards: Path) -> None:
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        write_index(shards, {}, name)
    assert "expected one index but got a.safetensors.index.json, b." in refused(shards).message


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    assert "expected .safetensors files or an index in the folder" in refused(tmp_path).message


def test_a_shard_that_is_cut_off_is_named(shards: Path) -> None:
    shard = shards / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    error = refused(shards)
    assert "the file is cut off" in error.message
    assert error.location == str(shard)


@pytest.mark.parametrize(
    ("config", "method", "block"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", (128, 128)),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
            "fp8",
            (32, 32),
        ),
        ({"quant_algo": "MXFP8", "group_size": 32}, "MXFP8", (1, 32)),
        ({"quant_method": "awq", "group_size": 128}, "awq", None),
    ],
)
def test_what_the_configuration_says(
    shards: Path, config: dict[str, Any], method: str, block: tuple[int, int] | None
) -> None:
    for name, field_name in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        path = shards / name
        path.write_text(json.dumps({"rope_theta": 1e6, field_name: config}))
        declared = open_checkpoint(shards).declared
        assert declared is not None
        assert (declared.path, declared.method, declared.block) == (path, method, block)
        path.unlink()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "expected an object as 'quantization_config'"),
        ({"quant_method": 8}, "expected a name as the method in 'quantization_config'"),
        ({"quant_method": "fp8", "weight_block_size": [32]}, "unsupported weight block [32]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, "unsupported weight block"),
        ({"quant_method": "fp8", "weight_block_size": [0, 32]}, "unsupported weight block [0, 32]"),
        ({"quant_algo": "MXFP8", "group_size": 16}, "unsupported weight block [1, 16]"),
    ],
)
def test_a_configuration_that_is_wrong(shards: Path, config: Any, message: str) -> None:
    (shards / "config.json").write_text(json.dumps({"quantization_config": config}))
    error = refused(shards)
    assert message in error.message
    assert error.location == str(shards / "config.json")


def test_a_configuration_without_quantisation(shards: Path) -> None:
    (shards / "config.json").write_text('{"hidden_size": 64}')
    assert open_checkpoint(shards).declared is None
