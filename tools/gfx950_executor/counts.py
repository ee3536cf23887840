# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""What a launch did: instructions by class and bytes by level."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from block32.tools.gfx950_executor.decoder import Instruction


def instruction_class(inst: Instruction) -> str:
    """mfma, valu, salu, smem, vmem, lds, wait, barrier or branch."""
    name, encoding = inst.name, inst.encoding
    if name == "s_waitcnt":
        return "wait"
    if name == "s_barrier":
        return "barrier"
    if "branch" in name:
        return "branch"
    if encoding.startswith("SOP"):
        return "salu"
    if encoding == "SMEM":
        return "smem"
    if encoding == "DS":
        return "lds"
    if encoding in ("GLOBAL", "FLAT", "SCRATCH", "MUBUF"):
        return "vmem"
    return "mfma" if name.startswith("v_mfma_") else "valu"


@dataclass
class Report:
    """The outcome of a launch.

    Attributes:
        kernel: Its name.
        workgroups: How many were run.
        instructions: Executed, a wave each, by class.
        mnemonics: Executed, a wave each, by mnemonic.
        byte_counts: Bytes moved by active lanes, by level: "memory read", "memory written",
            "memory to lds", "memory atomic", "scalar read", "lds read", "lds written",
            "lds atomic", "scratch read", "scratch written".
    """

    kernel: str
    workgroups: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    mnemonics: Counter[str] = field(default_factory=Counter)
    byte_counts: Counter[str] = field(default_factory=Counter)
