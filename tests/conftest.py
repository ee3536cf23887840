# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# A machine that is busy is no bug, and a failure has to come back on every run.
settings.register_profile("block32", deadline=None, derandomize=True)
settings.load_profile("block32")
