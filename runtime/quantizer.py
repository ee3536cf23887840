# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising weights in NumPy, a slab of rows at a time, with a measure of what is lost.

The rules are those of ``reference.quantize_weight``, whose bytes these are; here in f32 and
integers, for tensors of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

_BLOCK: Final = 32
_SMALLEST_NORMAL: Final = 1 << 23
_MANTISSA: Final = (1 << 23) - 1
#: Elements that are quantised at a time: the work on them takes some 60 bytes each.
_SLAB: Final = 1 << 20


@dataclass(frozen=True)
class WeightFormat:
    """An element type of weights.

    Attributes:
        name: Its MLIR name.
        dtype: What rounds to it, nearest even.
        largest: The largest finite value.
        mantissa_bits: Width of the mantissa.
        bits: Width of a code.
    """

    name: str
    dtype: Any
    largest: float
    mantissa_bits: int
    bits: int


#: By the name that a user gives (OCP Microscaling Formats 1.0, table 1).
FORMATS: Final = {
    "mxfp8": WeightFormat("f8E4M3FN", ml_dtypes.float8_e4m3fn, 448.0, 3, 8),
    "mxfp4": WeightFormat("f4E2M1FN", ml_dtypes.float4_e2m1fn, 6.0, 1, 4),
}


@dataclass
class Loss:
    """What quantising a tensor lost: sums over its elements.

    Attributes:
        error: Of squared errors.
        norm: Of squared values.
        clipped: Elements beyond the largest value of the format, and so set to it.
    """

    error: float = 0.0
    norm: float = 0.0
    clipped: int = 0

    def relative(self) -> float:
        """The Frobenius norm of the error over that of the values."""
        return (self.error / self.norm) ** 0.5 if self.norm else 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.error + other.error, self.norm + other.norm, self.clipped + other.clipped)


def slab_rows(k: int) -> int:
    """How many rows of K elements to quantise at a time: whole blocks of 32."""
    return max(_SLAB // max(k, 1) // _BLOCK, 1) * _BLOCK


def quantize_slabs(
    slabs: Iterable[npt.NDArray[Any]], block_rows: int, rule: str, form: WeightFormat
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Loss]]:
    """Quantise a weight a slab of rows at a time, as ``quantize_rows`` does each.

    Args:
        slabs: Its rows in order, ``slab_rows(K)`` at a time.
        block_rows: Rows that share a scale, 1 or 32.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.
        form: The format.

    Raises:
        ValueError: It holds a NaN or an infinity.
    """
    for slab in slabs:
        values = np.asarray(slab, np.float32)
        if not np.isfinite(values).all():
            raise ValueError("NaN" if np.isnan(values).any() else "an infinity")
        yield quantize_rows(values, block_rows, rule, form)


def quantize_rows(
    values: npt.NDArray[Any], block_rows: int, rule: str, form: WeightFormat
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Loss]:
    """Quantise whole rows of a weight.

    Args:
        values: Finite ``[rows, K]`` of a float type; rows a multiple of ``block_rows``, but at
            the tensor's end.
        block_rows: Rows that share a scale, 1 or 32.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.
        form: The format.

    Returns:
        Codes as stored (``[rows, K]``, for 4-bit codes ``[rows, ceil(K/2)]``), scale bytes
        ``[ceil(rows / block_rows), ceil(K / 32)]``, and the loss.
    """
    values = np.asarray(values, np.float32)
    rows, k = values.shape
    padded = np.zeros((-(-rows // block_rows) * block_rows, -(-k // _BLOCK) * _BLOCK), np.float32)
    padded[:rows, :k] = values
    blocks = padded.reshape(-1, block_rows, padded.shape[1] // _BLOCK, _BLOCK)
    scales = _scale_bytes(np.abs(blocks).max(axis=(1, 3)), rule, form)
    exponents = (scales.astype(np.int32) - 127)[:, None, :, None]
    scaled = np.ldexp(blocks, -exponents)
    clipped = np.clip(scaled, -form.largest, form.largest)
    codes = clipped.astype(form.dtype)
    restored = np.ldexp(codes.astype(np.float32), exponents)
    error = (restored - blocks).astype(np.float64)
    loss = Loss(
        float(np.vdot(error, error)),
        float(np.vdot(values.astype(np.float64), values.astype(np.float64))),
        int((np.abs(scaled) > form.largest).sum()),
    )
    stored = codes.view(np.uint8).reshape(padded.shape)[:rows, :k]
    return _packed(stored) if form.bits == 4 else stored, scales, loss


def _scale_bytes(
    amax: npt.NDArray[np.float32], rule: str, form: WeightFormat
) -> npt.NDArray[np.uint8]:
    """The E8M0 byte of each block: amax's exponent, after what the rule adds to its bits."""
    largest = int(np.float32(form.largest).view(np.uint32))
    addend = {
        "floor": 0,
        "rceil": _MANTISSA - (largest & _MANTISSA),
        "ceil": _MANTISSA,
        "even": 1 << (22 - form.mantissa_bits),
    }[rule]
    bits = np.maximum(amax.view(np.uint32), _SMALLEST_NORMAL) + np.uint32(addend)
    exponent = (bits >> 23).astype(np.int32) - ((largest >> 23) - 127)
    return np.clip(exponent, 0, 254).astype(np.uint8)


def _packed(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit codes a byte, the low nibble the even one."""
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
