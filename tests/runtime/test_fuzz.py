# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Damaged modules, archives and checkpoints: the named error or a value, and nothing else."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from iree import runtime

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.archive import read_index
from block32.runtime.checkpoint.files import open_checkpoint
from block32.runtime.checkpoint.layers import find_weights
from block32.runtime.checkpoint.scales import read_bytes
from block32.runtime.errors import LoadError
from block32.runtime.flatbuffer import FlatBufferError, Table
from block32.runtime.safetensors import read_tensors
from block32.runtime.vmfb import read_vmfb
from tests.checkpoints import field, random_layer, save, write_raw
from tests.fuzz import check_reader, damaged
from tests.modules import GFX950, HOST, ONE, SOURCE, compiled

#: Reading a file of some kB, as bytes of Python's objects.
MOST_BYTES = 4 << 20

bounded = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        (SOURCE, HOST),
        (ONE, (*HOST, "--iree-vm-emit-polyglot-zip=true")),
        (ONE, GFX950),
    ],
    ids=["cpu", "zip", "gpu"],
)
@bounded
@given(draw=st.data())
def test_vmfb(source: bytes, flags: tuple[str, ...], draw: st.DataObject) -> None:
    data = draw.draw(damaged(compiled(source, flags)))
    check_reader(read_vmfb, data, LoadError, MOST_BYTES)


def write_archive(path: Path) -> None:
    index = runtime.ParameterIndex()
    index.add_splat("ones", np.float32(1.5).tobytes(), 40)
    index.create_archive_file(str(path))


def write_two_archives(path: Path) -> None:
    """Two archives in a row, the first's header pointing to the second's."""
    runtime.save_archive_file({"a.weight": np.arange(12, dtype=np.float32)}, path)
    first = bytearray(path.read_bytes())
    struct.pack_into("<Q", first, 16, len(first))
    runtime.save_archive_file({"b": np.arange(5, dtype=np.uint8)}, path)
    path.write_bytes(bytes(first) + path.read_bytes())


def write_tensors(path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": field("F8_E4M3", [2, 32], 0, 64),
        "a.weight_scale": field("U8", [2, 1, 1], 64, 66),
    }
    write_raw(path, header, bytes(66))


def read_parameters(path: Path) -> None:
    """The index, and what is small of the parameters."""
    for entry in read_index(path).values():
        if entry.length < 1 << 16:
            assert len(entry.read()) == entry.length


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("m.irpa", write_archive, read_parameters),
        ("m.irpa", write_two_archives, read_parameters),
        ("m.safetensors", write_tensors, read_parameters),
        ("m.safetensors", write_tensors, read_tensors),
    ],
    ids=["splat", "two archives", "safetensors as parameters", "safetensors"],
)
@bounded
@given(draw=st.data())
def test_parameter_files(
    name: str,
    write: Callable[[Path], None],
    read: Callable[[Path], object],
    draw: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        read(path)

        def read_damaged(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        check_reader(read_damaged, draw.draw(damaged(path.read_bytes())), LoadError, MOST_BYTES)


@pytest.mark.parametrize("file", ["a.safetensors", "model.safetensors.index.json", "config.json"])
@bounded
@given(draw=st.data())
def test_checkpoints(file: str, draw: st.DataObject) -> None:
    """Of a checkpoint of three files, one is damaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "a.safetensors", random_layer(33, 40, (32, 32)).tensors("fc"))
        weight_map = {f"fc.weight{suffix}": "a.safetensors" for suffix in ("", "_scale_inv")}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
        (folder / "config.json").write_text(json.dumps(config))

        def read(data: bytes) -> None:
            (folder / file).write_bytes(data)
            for weight in find_weights(open_checkpoint(folder))[0]:
                read_bytes(weight)

        content = (folder / file).read_bytes()
        read(content)
        check_reader(read, draw.draw(damaged(content)), DiagnosticError, MOST_BYTES)


# Files that stand for far more than they hold.


def nested_tables(levels: int, count: int) -> memoryview:
    """Tables of one vector each, all of whose elements are the table of the next level."""
    size = 20 + 4 * count
    data = bytearray(struct.pack("<I", 12))
    for level in range(levels):
        base, following = 4 + level * size, 4 + (level + 1) * size
        offsets = [following + 8 - (base + 20 + 4 * i) for i in range(count)]
        data += struct.pack("<HHHH", 6, 8, 4, 0) + struct.pack("<iI", 8, 4)
        data += struct.pack(f"<I{count}I", count, *offsets)
    return memoryview(bytes(data) + struct.pack("<HHi", 4, 4, 4) + bytes(8))


def test_tables_that_multiply() -> None:
    """Five levels of 300 are 2.4e12 tables in 6 kB."""

    def walk(table: Table) -> int:
        return 1 + sum(walk(inner) for inner in table.tables(0))

    assert walk(Table.root(nested_tables(2, 3))) == 13
    with pytest.raises(FlatBufferError, match="it stands for more tables than it holds"):
        walk(Table.root(nested_tables(5, 300)))


def test_segments_that_overlap() -> None:
    """Ten segments, each the whole rest of the module: none may be searched ten times."""
    flatbuffers = pytest.importorskip("flatbuffers")
    builder = flatbuffers.Builder()
    builder.StartObject(5)
    builder.PrependUint64Slot(4, 1024, 0)
    segment = builder.EndObject()
    builder.StartVector(4, 10, 4)
    for _ in range(10):
        builder.PrependUOffsetTRelative(segment)
    segments = builder.EndVector()
    builder.StartObject(15)
    builder.PrependUOffsetTRelativeSlot(9, segments, 0)
    builder.FinishSizePrefixed(builder.EndObject(), file_identifier=b"IREE")
    content = bytes(builder.Output()).ljust(256, b"\0") + bytes(1024)
    with pytest.raises(LoadError, match="the module is damaged: its segments overlap"):
        read_vmfb(content)
