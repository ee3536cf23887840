# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Metal executables: what IREE's runtime reads, written and read back, damage refused."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block32.lowering.apple import executable
from block32.lowering.apple.executable import ExecutableError, Pipeline
from block32.lowering.apple.library import build_metallib, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.metallib import MetallibError
from block32.lowering.apple.metallib import read as read_metallib
from block32.tools.iree_compile import run_iree_compile

PIPELINES = (
    Pipeline("a", (128, 1, 1), 1, (1, 1, 0)),
    Pipeline("b", (32, 2, 3), 0, ()),
)

#: What a length or an offset does not expect to be.
EXTREME_WORDS = [struct.pack("<I", word) for word in (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1)]

#: A dispatch that IREE compiles to Metal source.
SOURCE = b"""
func.func @main(%x: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %y = arith.addf %x, %x : tensor<64x32xf32>
  return %y : tensor<64x32xf32>
}
"""


@pytest.fixture(scope="module")
def metallib() -> bytes:
    return build_metallib([compile_matmul(Matmul(n=64, k=64), "tiled", "a")])


def test_what_is_written_is_read(metallib: bytes) -> None:
    found = executable.read(executable.build(metallib, PIPELINES))
    assert found.pipelines == PIPELINES
    assert found.metallib == read_metallib(metallib)
    assert found.pipeline("b").threads == (32, 2, 3)
    with pytest.raises(ExecutableError, match="no pipeline 'c'; it has: a, b"):
        found.pipeline("c")


def test_header_is_the_runtimes(metallib: bytes) -> None:
    data = executable.build(metallib, PIPELINES)
    magic, version, size = struct.unpack_from("<4sIQ", data)
    assert (magic, version, size) == (b"MTL1", 0, len(data) - 64)
    assert data[16:64] == bytes(48) and data[68:72] == b"MTL1"


def test_irees_own_executables_are_understood() -> None:
    """The reader agrees with the writer of IREE itself on every field."""
    vmfb = run_iree_compile(["-", "--iree-hal-target-device=metal"], stdin=SOURCE)
    (found,) = executable.find_all(vmfb)
    assert found.metallib is None
    (pipeline,) = found.pipelines
    assert pipeline.name.startswith("main_dispatch_0_elementwise")
    assert len(pipeline.bindings) == 2 and pipeline.bindings[0] & 1 and not pipeline.bindings[1] & 1
    assert pipeline.constants == 0 and pipeline.threads[0] >= 32


def test_entry_points_are_read_beside_a_library_of_any_kind() -> None:
    """On a Mac with Xcode, IREE's own executables may hold libraries that Apple's tools built."""
    data = executable.build(b"MTLB of another kind", PIPELINES)
    assert executable.read_pipelines(data) == PIPELINES
    with pytest.raises(MetallibError):
        executable.read(data)


def test_truncation_and_foreign_bytes_are_refused(metallib: bytes) -> None:
    data = executable.build(metallib, PIPELINES)
    for size in (0, 3, 63, 100, len(data) - 1):
        with pytest.raises(ExecutableError):
            executable.read(data[:size])
    with pytest.raises(ExecutableError, match="not a Metal executable: expected 'MTL1'"):
        executable.read(b"ELF\x7f" + data)
    with pytest.raises(ExecutableError, match="of another version"):
        executable.read(data[:4] + b"\1" + data[5:])


def test_a_damaged_library_in_a_vmfb_is_named_with_its_place(metallib: bytes) -> None:
    data = bytearray(executable.build(metallib, PIPELINES))
    at = data.index(b"ENDT")
    data[at] = 0
    with pytest.raises(ExecutableError, match=r"Metal executable at offset 16: .*unknown tag"):
        list(executable.find_all(bytes(16) + bytes(data)))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_to_an_executable_is_named(metallib: bytes, draw: st.DataObject) -> None:
    """Words of the header and the flatbuffer overwritten: never another exception."""
    data = bytearray(executable.build(metallib, PIPELINES))
    tables = len(data) - len(metallib)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.one_of(st.integers(0, 128), st.integers(tables - 300, len(data) - 4)))
        word = draw.draw(
            st.one_of(st.binary(min_size=4, max_size=4), st.sampled_from(EXTREME_WORDS))
        )
        data[at : at + 4] = word
    with contextlib.suppress(ExecutableError, MetallibError):
        executable.read(bytes(data))


def test_one_table_named_many_times_is_refused_before_it_is_copied(metallib: bytes) -> None:
    """A vector of offsets that all lead to one pipeline or library costs four bytes each."""
    many = executable.build(metallib, PIPELINES * 3000)
    with pytest.raises(ExecutableError, match="6000 tables in a vector; expected at most 4096"):
        executable.read(many)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (Pipeline("a" * 5000, (32, 1, 1), 0, ()), "a name of 5000 bytes; expected at most 4096"),
        (Pipeline("a", (32, 1, 1), 0, (1,) * 17), "17 bindings; expected at most 16"),
    ],
    ids=["name", "bindings"],
)
def test_more_than_the_runtime_takes_is_refused(
    metallib: bytes, pipeline: Pipeline, message: str
) -> None:
    with pytest.raises(ExecutableError, match=message):
        executable.read(executable.build(metallib, [pipeline]))


def test_many_marks_of_an_executable_cost_no_copies(metallib: bytes) -> None:
    """Headers that promise the whole file, in a file that is full of them."""
    header = struct.pack("<4sIQ", b"MTL1", 0, 2**21).ljust(64, b"\0") + b"\0\0\0\0MTL1"
    vmfb = header * 20000 + executable.build(metallib, PIPELINES) + bytes(2**21)
    tracemalloc.start()
    (found,) = (found for found in executable.find_all(vmfb) if found.metallib)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.pipelines == PIPELINES and peak < len(vmfb)
