# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tests of the emulator need the extra that writes and reads bitcode."""

from __future__ import annotations

import importlib.util

import pytest

#: Packages of the extra "apple".
PACKAGES = ("llvmlite", "flatbuffers")


@pytest.fixture(autouse=True, scope="package")
def _needs_the_extra() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the apple extra ({', '.join(missing)}) is not installed")
