# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels for AMD gfx950 (MI350, MI355X), finished by IREE's rocm back end."""
