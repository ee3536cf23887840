# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``portable``: block-scaled matmuls as plain linalg that IREE's own code generation handles."""
