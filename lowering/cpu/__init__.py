# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CPU target: vector kernels that IREE's llvm-cpu back end turns into machine code."""
