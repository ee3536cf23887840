# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Apple GPUs: kernels in AIR, encoded as LLVM bitcode and carried in a metallib."""
