# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parameter files against IREE's own reader and writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from iree import runtime
from safetensors.numpy import save_file

from block32.runtime.archive import NewEntry, read_index, write_archive
from block32.runtime.entry import ArchiveError

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "ü": np.arange(5, dtype=np.uint8),
    "empty": np.zeros(0, np.float32),
}


def test_reads_what_iree_writes(tmp_path: Path) -> None:
    path = tmp_path / "iree.irpa"
    runtime.save_archive_file(ARRAYS, path)
    entries = read_index(path)
    assert set(entries) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert entries[name].read() == array.tobytes()


def test_iree_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ours.irpa"
    with path.open("wb") as stream:
        entries = [NewEntry(n, a.nbytes, lambda a=a: [a.tobytes()]) for n, a in ARRAYS.items()]
        write_archive(stream, entries)
    index = runtime.ParameterIndex()
    index.load(str(path))
    found = {name: bytes(entry.file_view) for name, entry in index.items()}
    assert found == {name: array.tobytes() for name, array in ARRAYS.items()}
    assert {name: entry.read() for name, entry in read_index(path).items()} == found


def test_reads_splats(tmp_path: Path) -> None:
    """A splat is a pattern and a length, without bytes in the file."""
    index = runtime.ParameterIndex()
    index.add_splat("ones", np.float32(1.5).tobytes(), 40)
    path = tmp_path / "splat.irpa"
    index.create_archive_file(str(path))
    assert read_index(path)["ones"].read() == np.full(10, 1.5, np.float32).tobytes()


def test_reads_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": ARRAYS["a.weight"], "y": ARRAYS["ü"]}, path)
    entries = read_index(path)
    assert entries["x"].read() == ARRAYS["a.weight"].tobytes()
    assert entries["y"].read() == ARRAYS["ü"].tobytes()


@pytest.mark.parametrize("size", [3, 20, 100, 300])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    whole = tmp_path / "whole.irpa"
    runtime.save_archive_file(ARRAYS, whole)
    cut = tmp_path / "cut.irpa"
    cut.write_bytes(whole.read_bytes()[:size])
    with pytest.raises(ArchiveError):
        read_index(cut)["a.weight"].read()
