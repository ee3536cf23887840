# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Executing AIR on the CPU: the bitcode that ships, strict where hardware is silent."""
