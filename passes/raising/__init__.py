# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The spellings of a block-scaled matmul that ``block32-raise`` recognises, one file each.

Each file offers ``match(op) -> ScaledContraction | None``: None for an op of another kind, an
``NotServedError`` for one that looks like ours and cannot be served.
"""
