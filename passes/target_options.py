# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The options of passes that ask a target: which it is, and what is known of its device."""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.target import DeviceFacts, Target
from block32.lowering.targets import target_named
from block32.passes.base import Pass


@dataclass
class TargetPass(Pass):
    """A pass whose work depends on the target.

    Attributes:
        target: The target's name.
        cpu_features: The CPU's features as IREE spells them, ``+avx2,+fma,-avx512f``.
        architecture: The triple's architecture, or the GPU's chip.
    """

    target: str = "cpu"
    cpu_features: str = ""
    architecture: str = ""

    def chosen_target(self) -> Target:
        """The target.

        Raises:
            DiagnosticError: There is none of this name.
        """
        return target_named(self.target)

    def device_facts(self) -> DeviceFacts:
        """What is known of the device."""
        return DeviceFacts(enabled_features(self.cpu_features), self.architecture)


def enabled_features(cpu_features: str) -> frozenset[str]:
    """Names of the features that are on, from ``+avx2,-avx512f``; a name without sign is on."""
    enabled: set[str] = set()
    for item in cpu_features.split(","):
        name = item.strip().removeprefix("+")
        if name.startswith("-"):
            enabled.discard(name[1:])
        elif name:
            enabled.add(name)
    return frozenset(enabled)
