# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reader of safetensors: what the package writes, and every damage by name."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from block32.runtime.entry import ArchiveError
from block32.runtime.safetensors import read_tensors
from block32.runtime.strict_json import MOST_BYTES
from tests.checkpoints import E4M3, E8M0, field, save, write_raw

ONE = {"a": field("U8", [4], 0, 4)}


def refused(path: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        read_tensors(path)
    assert caught.value.location == str(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.integers(0, 256, (3, 64), dtype=np.uint8).view(E4M3),
        "s": rng.integers(0, 256, (3, 2), dtype=np.uint8).view(E8M0),
        "bf": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "number": np.array(7, np.int64),
        "none": np.zeros((0, 4), np.float32),
    }
    found = read_tensors(save(tmp_path / "m.safetensors", arrays))
    dtypes = {"w": "F8_E4M3", "s": "F8_E8M0", "bf": "BF16", "number": "I64", "none": "F32"}
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].entry.read() == array.tobytes()


def test_metadata_is_no_tensor_and_padding_is_no_fault(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **ONE}).encode() + b"   "
    found = read_tensors(write_raw(tmp_path / "m.safetensors", header, b"abcd"))
    assert list(found) == ["a"]
    assert found["a"].entry.read() == b"abcd"


def test_pieces_of_a_tensor(tmp_path: Path) -> None:
    entry = read_tensors(write_raw(tmp_path / "m.safetensors", ONE, b"abcd"))["a"].entry
    assert list(entry.chunks(3)) == [b"abc", b"d"]
    assert entry.part(1, 2).read() == b"bc"


def test_a_file_that_shrinks_after_its_check(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", ONE, b"abcd")
    entry = read_tensors(path)["a"].entry
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArchiveError, match="the file ends within a parameter"):
        entry.read()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"\xff{}", b"", "the header is no UTF-8: byte 0 is wrong"),
        (b"[1]", b"", "the header is no JSON object"),
        (b"{", b"", "the header is no JSON"),
        (b'{"a": NaN}', b"", "expected dtype, shape and data_offsets, and nothing else"),
        (b"[" * 100_000, b"", "the header is nested too deeply"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}", b"", "the header is no JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
            "the header names 'a' twice",
        ),
        ({"a": [1]}, b"", "expected dtype, shape and data_offsets, and nothing else, of the"),
        ({"a": {**ONE["a"], "more": 1}}, b"abcd", "and nothing else, of the tensor 'a'"),
        ({"a\x1b[2J": ONE["a"]}, b"abcd", r"the tensor name 'a\x1b[2J' cannot be printed"),
        ({"a": field("F9", [4], 0, 4)}, b"abcd", "unknown dtype 'F9' of the tensor 'a'; expected"),
        ({"a": {**ONE["a"], "dtype": 3}}, b"abcd", "unknown dtype '3'"),
        ({"a": field("U8", [-4], 0, 4)}, b"abcd", "expected a shape of sizes from 0 on"),
        ({"a": field("U8", [1 << 70], 0, 4)}, b"abcd", "expected a shape of sizes from 0 on"),
        ({"a": {**ONE["a"], "shape": [4.0]}}, b"abcd", "expected a shape of sizes from 0 on"),
        ({"a": {**ONE["a"], "shape": [True]}}, b"a", "expected a shape of sizes from 0 on"),
        ({"a": {**ONE["a"], "shape": "4"}}, b"abcd", "expected a shape of sizes from 0 on"),
        ({"a": field("U8", [4], -4, 0)}, b"abcd", "expected a start and an end from 0 on"),
        ({"a": field("U8", [4], 4, 0)}, b"abcd", "expected a start and an end from 0 on"),
        ({"a": field("U8", [4], 0, 1 << 64)}, b"abcd", "expected a start and an end from 0 on"),
        ({"a": {**ONE["a"], "data_offsets": [0]}}, b"abcd", "expected a start and an end"),
        ({"a": field("U8", [5], 0, 4)}, b"abcd", "expected 5 bytes for U8 [5] but got 4 of the"),
        ({"a": field("F32", [1 << 60], 0, 4)}, b"abcd", "but got 4 of the tensor 'a'"),
        ({"a": field("U8", [1 << 62] * 64, 0, 4)}, b"abcd", "bytes for U8 [4611686018427387904"),
        (
            {"a": field("U8", [1 << 62] * 1_000_000, 0, 4)},
            b"abcd",
            "expected at most 64 dimensions but got 1000000 of the tensor 'a'",
        ),
        ({"a": field("F4", [3], 0, 2)}, b"ab", "expected 2 bytes for F4 [3] but got 2"),
        (ONE, b"abc", "the file is cut off: its tensors end at byte"),
        (ONE, b"abcde", "1 bytes behind the tensors belong to none"),
        ({"a": field("U8", [2], 2, 4)}, b"abcd", "expected the first tensor behind the header"),
        (
            {"a": field("U8", [3], 0, 3), "b": field("U8", [2], 2, 4)},
            b"abcd",
            "the tensor 'b' overlaps 'a'",
        ),
        (
            {"a": field("U8", [1], 0, 1), "b": field("U8", [1], 3, 4)},
            b"abcd",
            "the tensor 'b' leaves a gap behind 'a'",
        ),
    ],
)
def test_damage_is_named(
    tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, message: str
) -> None:
    assert message in refused(write_raw(tmp_path / "m.safetensors", header, data))


@pytest.mark.parametrize("length", [0, 7])
def test_a_file_without_a_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(length))
    assert f"expected a safetensors file but got {length} bytes" in refused(path)


@pytest.mark.parametrize("length", [10, MOST_BYTES, 1 << 40, (1 << 64) - 1])
def test_an_absurd_length_of_the_header_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    tracemalloc.start()
    try:
        message = refused(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert f"the header says that it has {length} bytes but 2 follow" in message
    assert peak < 1 << 20


def test_a_header_that_is_there_and_too_long(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", MOST_BYTES + 1))
        stream.truncate(MOST_BYTES + 100)
    assert f"but at most {MOST_BYTES} are read" in refused(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path) == "expected a file"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "expected a file"
    assert refused(tmp_path / "none") == "cannot read the parameters: no such file or directory"
