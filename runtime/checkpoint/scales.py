# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The scales of a weight as E8M0 bytes, and their exact changes of block.

A coarser block becomes rows of 1x32 by repetition, which is always exact. Rows of 1x32 become 32x32
where all rows of each block agree, and nowhere else.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from block32.lowering.problem import BLOCK_K, ceil_div
from block32.runtime.checkpoint.layers import BYTE_DTYPES, ScaledWeight

Bytes = npt.NDArray[np.uint8]

_NUMBERS: Final[dict[str, Any]] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def read_numbers(weight: ScaledWeight) -> npt.NDArray[np.float32]:
    """The scales of a weight that are stored as numbers, ``weight.scale_shape``.

    Raises:
        DiagnosticError: One is no finite number.
    """
    dtype = _NUMBERS[weight.scales.dtype]
    stored = np.frombuffer(weight.scales.entry.read(), dtype).reshape(weight.scale_shape)
    values = stored.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        at = tuple(wrong[0])
        weight.refuse(f"'{weight.scales.name}' holds {values[at]!s} at {_place(at)}")
    return values


def read_bytes(weight: ScaledWeight) -> Bytes:
    """The scales of a weight as E8M0 bytes, ``weight.scale_shape``.

    Raises:
        DiagnosticError: A scale that is stored as a number is no power of two that E8M0 has.
    """
    if weight.scales.dtype in BYTE_DTYPES:
        return np.frombuffer(weight.scales.entry.read(), np.uint8).reshape(weight.scale_shape)
    values = read_numbers(weight)
    found, is_exact = to_bytes(values)
    if not is_exact.all():
        at = tuple(np.argwhere(~is_exact)[0])
        weight.refuse(
            f"'{weight.scales.name}' holds {values[at]!s} at {_place(at)}; expected powers of two "
            "from 2^-127 to 2^127",
            "--requantize quantises such weights anew and says what that loses",
        )
    return found


def to_bytes(values: npt.NDArray[np.float32]) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """The E8M0 byte of each f32, and whether it has exactly that value.

    A power of two has no mantissa bit but the implicit one; 2^-127, the byte 0, is the one
    subnormal f32 among E8M0's values.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    exponent = (bits >> 23).astype(np.uint32)
    is_normal = (bits & 0x7FFFFF == 0) & (exponent > 0) & (exponent < 255)
    is_smallest = bits == 0x400000
    return (exponent & 0xFF).astype(np.uint8), is_normal | is_smallest


def expand(scales: Bytes, block: tuple[int, int], rows: range, columns: range) -> Bytes:
    """The scales of a part of a weight, one a row and 32 K.

    Args:
        scales: One a block.
        block: Rows and columns of the weight that share a scale; columns a multiple of 32.
        rows: Rows of the weight in the part.
        columns: Its columns; the first is a multiple of 32.

    Returns:
        ``[len(rows), ceil(len(columns) / 32)]``.
    """
    first = columns.start // BLOCK_K
    k_blocks = np.arange(first, first + ceil_div(len(columns), BLOCK_K))
    by_row = np.asarray(rows) // block[0]
    return scales[by_row[:, None], (k_blocks // (block[1] // BLOCK_K))[None, :]]


def compact(row_scales: Bytes) -> Bytes | None:
    """One scale a row as one for 32 rows; None where the rows of a block disagree."""
    compacted = row_scales[::BLOCK_K]
    agrees = np.array_equal(np.repeat(compacted, BLOCK_K, axis=0)[: len(row_scales)], row_scales)
    return np.ascontiguousarray(compacted) if agrees else None


def _place(at: tuple[int, ...]) -> str:
    return f"[{', '.join(str(int(i)) for i in at)}]"
