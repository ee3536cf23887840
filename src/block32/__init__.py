# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""block32: an IREE pipeline plugin for matmuls with microscaling (MX) block-32 scales.

``compile`` makes a vmfb from a model, ``load`` runs it. ``block32.passes`` holds the passes,
``block32.runtime.reference`` the float64 meaning of every operation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from block32.runtime.load import load
    from block32.tools.compiler import compile

__version__ = "0.1.0"

#: Names that are imported when first used: the compiler's bindings are large.
_LAZY = {"compile": "block32.tools.compiler", "load": "block32.runtime.load"}

__all__ = ["__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'block32' has no attribute '{name}'")
