# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The block32 attributes: typed views over builtin attributes under the ``block32.`` prefix."""
