# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MXFP8 linear layers for PyTorch; needs the extra ``torch``."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("block32.torch needs PyTorch: pip install 'block32[torch]'") from error

from block32.runtime.torch_linear import (
    Conversion,
    Converted,
    MXLinear,
    convert_linear,
    quantize_mxfp8,
)

__all__ = ["Conversion", "Converted", "MXLinear", "convert_linear", "quantize_mxfp8"]
