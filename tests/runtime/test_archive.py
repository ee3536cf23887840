# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parameter files against IREE's own reader and writer."""

from __future__ import annotations

import struct
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


# Archives that are damaged. Offsets are those of the header and of an entry's table.

HEADER, ENTRY, STRIDE = 104, 96, 96


def archive(*names: bytes, **changes: int) -> bytes:
    """An archive of 8 bytes a parameter; fields of the header or the first entry are changed."""
    joined = b"".join(names)
    fields = {
        "following": 0,
        "count": len(names),
        "table": HEADER + 8,
        "table_size": STRIDE * len(names),
        "names_size": len(joined),
        "size": ENTRY,
        "kind": 2,
        "name": 0,
        "offset": 0,
        "length": 8,
        **changes,
    }
    names_at = HEADER + 8 + STRIDE * len(names)
    data_at = names_at + len(joined)
    header = struct.pack(
        "<4sHHQQQQ6Q",
        *(b"IRPA", 0, 0, HEADER, fields["following"], 0, fields["count"]),
        *(fields["table"], fields["table_size"], names_at, fields["names_size"], data_at, 8),
    )
    entries, at = b"", fields["name"]
    for number, name in enumerate(names):
        size, kind = (fields["size"], fields["kind"]) if number == 0 else (ENTRY, 2)
        head = struct.pack("<QIQQQQQQ", size, kind, 0, at, len(name), 0, 0, 64)
        entries += (head + struct.pack("<QQ", fields["offset"], fields["length"])).ljust(
            STRIDE, b"\0"
        )
        at += len(name)
    return header.ljust(HEADER + 8, b"\0") + entries + joined + b"12345678"


def index_of(folder: Path, content: bytes) -> dict[str, bytes]:
    path = folder / "m.irpa"
    path.write_bytes(content)
    return {name: entry.read() for name, entry in read_index(path).items()}


def test_the_archive_of_these_tests_is_sound(tmp_path: Path) -> None:
    assert index_of(tmp_path, archive(b"a", b"bc")) == {"a": b"12345678", "bc": b"12345678"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(b"a", size=0, count=1 << 62), "an entry of 0 bytes; expected"),
        (archive(b"a", count=1 << 62), "the archive is cut off: its table of parameters ends"),
        (archive(b"a", table_size=1 << 60), "the table of parameters is out of its place"),
        (archive(b"a", table=1 << 60), "the table of parameters is out of its place"),
        (archive(b"a", names_size=1 << 60), "the names of the parameters is out of its place"),
        (archive(b"a", name=9), "the name of a parameter is out of its place"),
        (archive(b"\xff"), "the name of a parameter is no UTF-8"),
        (archive(b"a", b"a"), "the archive has 'a' twice"),
        (archive(b"a", length=9), "the archive is cut off: 'a' ends behind it"),
        (archive(b"a", offset=1 << 63), "the archive is cut off: 'a' ends behind it"),
        (archive(b"a", kind=1), "'a' repeats a pattern of"),
        (archive(b"a", following=8), "the table of parameters is out of its place"),
        (archive(b"a", following=1 << 50), "a header is out of its place"),
        (archive(b"a", following=220) + bytes(200), "expected an archive of version 0"),
        (b"IRPA\1", "the archive is cut off or damaged: a header is out of its place"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        index_of(tmp_path, content)
    assert message in caught.value.message
    assert caught.value.location == f"{tmp_path}/m.irpa"


def test_names_that_overlap_are_not_multiplied(tmp_path: Path) -> None:
    """Each of 100 entries may name nearly all bytes: 100 times the file's size."""
    content = bytearray(archive(*[b"%04d" % n for n in range(100)]))
    for number in range(100):
        struct.pack_into("<QQ", content, HEADER + 8 + STRIDE * number + 20, number, 300)
    with pytest.raises(ArchiveError, match="the names of the parameters overlap"):
        index_of(tmp_path, bytes(content))


def test_a_splat_takes_no_memory_before_it_is_read(tmp_path: Path) -> None:
    index = runtime.ParameterIndex()
    index.add_splat("zeros", bytes(4), 1 << 40)
    path = tmp_path / "m.irpa"
    index.create_archive_file(str(path))
    entry = read_index(path)["zeros"]
    assert entry.length == 1 << 40
    assert next(entry.chunks(64)) == bytes(64)
