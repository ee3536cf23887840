# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Skipping tests whose packages an extra brings."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: What writes and reads Apple's bitcode and executables.
APPLE = ("llvmlite", "flatbuffers")


def skip_without(extra: str, packages: tuple[str, ...]) -> None:
    """Skip the test that runs, where a package of an extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"the extra {extra} ({', '.join(missing)}) is not installed")
