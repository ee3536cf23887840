# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""block32: an IREE pipeline plugin for matmuls with microscaling (MX) block-32 scales."""
