# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""IREE's wheels hold no type information for this compiled module: every name in it is Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
