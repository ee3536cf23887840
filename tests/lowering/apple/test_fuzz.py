# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Damaged metallibs and Metal executables: the named error or a value, within bounds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block32.lowering.apple import executable, metallib
from block32.lowering.apple.executable import ExecutableError, Pipeline
from block32.lowering.apple.metallib import Function, Metallib, MetallibError, Version
from tests.fuzz import check_reader, damaged

MOST_BYTES = 1 << 20


def library(count: int, size: int = 64, reflection: bytes | None = None) -> Metallib:
    functions = [
        Function(f"f{i:03}", bytes([i]) * size, Version(2, 8), Version(4, 0), reflection=reflection)
        for i in range(count)
    ]
    return Metallib(tuple(functions), Version(26, 0))


WHOLE = dataclasses.replace(
    library(2, reflection=b"RBUF" + bytes(8)), dynamic_name="x.metallib", uuid=bytes(16)
).to_bytes()


@settings(max_examples=300)
@given(data=damaged(WHOLE))
def test_metallib(data: bytes) -> None:
    check_reader(metallib.read, data, MetallibError, MOST_BYTES)


@settings(max_examples=200)
@given(draw=st.data())
def test_executables_in_a_module(draw: st.DataObject) -> None:
    pytest.importorskip("flatbuffers")
    part = executable.build(library(1).to_bytes(), [Pipeline("f000", (64, 1, 1), 2, (0, 1))])
    assert len(list(executable.find_all(bytes(64) + part + part))) == 2

    def read(data: bytes) -> None:
        list(executable.find_all(data))

    check_reader(read, draw.draw(damaged(bytes(64) + part + part)), ExecutableError, MOST_BYTES)
