# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The targets by name; each is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.target import Target

#: Where each target's class, or a function that creates it, is. One line a target: this is all
#: that the rest knows of them.
TARGETS: Final[dict[str, tuple[str, str]]] = {
    "cpu": ("block32.lowering.cpu.target", "CpuTarget"),
    "gfx950": ("block32.lowering.gfx950.target", "Gfx950Target"),
    "apple-m5": ("block32.lowering.apple.target", "AppleM5Target"),
    "apple-m1": ("block32.lowering.apple.target", "AppleM1Target"),
    "sm_89": ("block32.lowering.nvidia.target", "sm_89"),
    "sm_90a": ("block32.lowering.nvidia.target", "sm_90a"),
    "sm_90a-f32": ("block32.lowering.nvidia.target", "sm_90a_f32"),
    "portable": ("block32.lowering.portable.target", "PortableTarget"),
}

#: Names of machines whose kernels are another target's, and what to say of them.
SERVED_BY: Final[dict[str, str]] = {
    f"apple-m{number}": "its matrix instruction is that of M1; use --target=apple-m1"
    for number in (2, 3, 4)
}


def target_named(name: str) -> Target:
    """The target that ``--target=name`` means.

    Raises:
        DiagnosticError: There is no such target.
    """
    if name in SERVED_BY:
        raise DiagnosticError("block32", f"there is no target '{name}': {SERVED_BY[name]}")
    if name not in TARGETS:
        raise DiagnosticError(
            "block32", f"unknown target '{name}'; expected one of {', '.join(TARGETS)}"
        )
    module, class_name = TARGETS[name]
    return getattr(import_module(module), class_name)()
