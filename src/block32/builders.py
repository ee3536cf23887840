# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block-scaled linear layers for people who build MLIR in Python."""

from __future__ import annotations

from block32.lowering.builders import quantize_rows, scaled_linear, weight_constant

__all__ = ["quantize_rows", "scaled_linear", "weight_constant"]
