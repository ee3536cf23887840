# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a block-scaled matmul to kernels: what all targets share, and one folder for each target."""
