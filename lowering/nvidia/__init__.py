# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""NVIDIA GPUs through IREE's cuda back end: ``mma.sync`` from sm_89 on, ``wgmma`` on sm_90a."""
