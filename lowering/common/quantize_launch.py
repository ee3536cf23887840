# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The launch that quantises an activation before it is multiplied, and what it hands over.

A target whose tiers quantise in part in the kernel (``quantize = "fused"``) and in part before it
(``"separate"``) plans this launch for all of them. Its grid is 0 for the fused tiers, which read
``lhs``; the others read ``CODES`` and ``SCALES``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import Buffer, Launch

NAME: Final = "quantize"
#: x as fp8 codes, ``[M, K]`` bytes.
CODES: Final = "lhs_codes"
#: The E8M0 scales of x, ``[M, ceil(K/32)]`` bytes.
SCALES: Final = "lhs_code_scales"

LAUNCH: Final = Launch(NAME, reads=("lhs",), writes=(CODES, SCALES))


def buffers(problem: ScaledMatmul) -> dict[str, Buffer]:
    """The transient buffers that the launch writes."""
    return {
        CODES: Buffer("i8", lambda m: m * problem.k),
        SCALES: Buffer("i8", lambda m: m * problem.k_blocks),
    }


def multiplied_operands(problem: ScaledMatmul, tiers: Iterable[KernelTier]) -> tuple[str, ...]:
    """What the launch that multiplies reads: x, what this launch made of it, or both."""
    forms = {tier.quantize for tier in tiers}
    if "separate" not in forms:
        return problem.operand_names
    others = tuple(name for name in problem.operand_names if name != "lhs" or "fused" in forms)
    return (*others, CODES, SCALES)
