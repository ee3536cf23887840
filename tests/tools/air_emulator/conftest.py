# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tests of the emulator need the extra that writes and reads bitcode."""

from __future__ import annotations

import pytest

from tests.extras import APPLE, skip_without


@pytest.fixture(autouse=True, scope="package")
def _needs_the_extra() -> None:
    skip_without("apple", APPLE)
