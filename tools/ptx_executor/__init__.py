# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the PTX of a kernel on the CPU: numbers where there is no NVIDIA card.

It knows the instructions that block32's kernels use and refuses all others. It is strict where
hardware is silent: accesses outside a buffer, shared memory read before it is written, copies that
were not waited for, and warps that touch the same bytes with no barrier between are errors. It says
nothing about speed, and nothing about how the driver's assembler treats the PTX.
"""

from block32.tools.ptx_executor.launch import PtxError, launch
from block32.tools.ptx_executor.parser import PtxKernel, parse_ptx

__all__ = ["PtxError", "PtxKernel", "launch", "parse_ptx"]
