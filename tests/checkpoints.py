# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Small checkpoints: random block-scaled layers, and files with any header."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from block32.runtime import reference
from tests.numbers import random_codes

Bytes = npt.NDArray[np.uint8]

E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu


@dataclass
class RandomLayer:
    """A weight of any finite codes with a scale byte for each block of rows and columns."""

    codes: Bytes
    scales: Bytes
    block: tuple[int, int]

    def tensors(self, name: str, scale: str = "weight_scale_inv") -> dict[str, npt.NDArray[Any]]:
        """The layer as a checkpoint names and types it."""
        return {
            f"{name}.weight": self.codes.view(E4M3),
            f"{name}.{scale}": self.scales.view(E8M0),
        }

    def row_scales(self) -> Bytes:
        """A scale byte a row and 32 K, by NumPy's own repetition."""
        n, k = self.codes.shape
        rows, columns = self.block
        full = np.repeat(np.repeat(self.scales, rows, 0), columns // 32, 1)
        return full[:n, : -(-k // 32)]

    def multiplied(
        self, x: npt.NDArray[Any], x_scale: Bytes | None = None
    ) -> npt.NDArray[np.float64]:
        """``x @ w^T`` in float64; x are codes where it has scales."""
        return reference.scaled_matmul(x, x_scale, self.codes, self.row_scales(), rhs_block=(1, 32))


def random_layer(n: int, k: int, block: tuple[int, int], seed: int = 0) -> RandomLayer:
    """Scale bytes from 118 to 135: no two neighbours can be mistaken for each other."""
    rng = np.random.default_rng(seed)
    shape = (-(-n // block[0]), -(-k // block[1]))
    return RandomLayer(
        random_codes(rng, (n, k), "f8E4M3FN"),
        rng.integers(118, 136, shape, dtype=np.uint8),
        block,
    )


def save(path: Path, tensors: dict[str, npt.NDArray[Any]]) -> Path:
    """Write a file with the package safetensors, which shares no code with what reads it."""
    save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, path)
    return path


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """Write a file with any header, right or wrong."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def field(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
