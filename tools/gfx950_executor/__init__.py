# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""An executor for gfx950 machine code on the CPU, strict where hardware is silent.

See docs/gfx950_executor.md. The public interface is what this module exports.
"""

from block32.tools.gfx950_executor.code_object import (
    CodeObject,
    Kernel,
    hsaco_from_vmfb,
    hsacos_from_vmfb,
    parse_code_object,
)
from block32.tools.gfx950_executor.counts import Report
from block32.tools.gfx950_executor.decoder import Instruction, decode
from block32.tools.gfx950_executor.errors import (
    CodeObjectError,
    DamagedCodeError,
    ExecutionError,
    LaunchError,
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    StaleReadError,
    StuckError,
    UninitialisedError,
    UnknownInstructionError,
)
from block32.tools.gfx950_executor.executor import Buffer, Executor
from block32.tools.gfx950_executor.mutate import change, drop, instructions, patch

__all__ = [
    "Buffer",
    "CodeObject",
    "CodeObjectError",
    "DamagedCodeError",
    "ExecutionError",
    "Executor",
    "Instruction",
    "Kernel",
    "LaunchError",
    "MissingWaitError",
    "OutOfBoundsError",
    "RaceError",
    "Report",
    "StaleReadError",
    "StuckError",
    "UninitialisedError",
    "UnknownInstructionError",
    "change",
    "decode",
    "drop",
    "hsaco_from_vmfb",
    "hsacos_from_vmfb",
    "instructions",
    "parse_code_object",
    "patch",
]
