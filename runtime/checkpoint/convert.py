# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The weights of a checkpoint as block32 takes them: codes ``[N, K]``, scales of 1x32 or 32x32.

Nothing here holds a weight as a whole: scales are read one weight at a time, codes in slabs of
rows, when the output's turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from block32.lowering.problem import BLOCK_K, ceil_div
from block32.runtime.archive import NewEntry
from block32.runtime.checkpoint import scales as scale_bytes
from block32.runtime.checkpoint.layers import NUMBER_DTYPES, ScaledWeight
from block32.runtime.checkpoint.parallel import Shard
from block32.runtime.entry import Entry
from block32.runtime.quantizer import FORMATS, Loss, quantize_slabs, slab_rows

Bytes = npt.NDArray[np.uint8]

BLOCKS: Final = {"1x32": 1, "32x32": 32}
#: Bytes of codes that are in memory at a time.
_SLAB_BYTES: Final = 1 << 24
_NAN_SCALE: Final = 255


@dataclass
class ImportedWeight:
    """A weight, or its part on one device, on its way into the archive.

    Attributes:
        source: What the checkpoint has.
        shard: Which part it is; None for all of it.
        rows: Rows of the checkpoint's weight in it.
        columns: Columns of the checkpoint's weight in it.
        block_rows: Rows that share a scale in the archive, 1 or 32.
        requantized: Its scales are no powers of two, so that it is quantised anew.
        nan_scales: Scale bytes that stand for NaN.
        loss: What quantising anew lost, once the codes were written.
    """

    source: ScaledWeight
    shard: Shard | None
    rows: range
    columns: range
    block_rows: int = BLOCK_K
    requantized: bool = False
    nan_scales: int = 0
    loss: Loss = field(default_factory=Loss)

    @property
    def n(self) -> int:
        """Columns of the layer's result."""
        return len(self.rows)

    @property
    def k(self) -> int:
        """The reduction."""
        return len(self.columns)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Scale bytes in the archive."""
        return ceil_div(self.n, self.block_rows), ceil_div(self.k, BLOCK_K)

    @property
    def code_key(self) -> str:
        """The name of the codes in the archive: that of the checkpoint."""
        return self.source.name

    @property
    def scale_key(self) -> str:
        """The name of the scales in the archive, which is the same for all checkpoints."""
        return f"{self.source.name}_scale"

    @property
    def bias_key(self) -> str | None:
        """The name of the bias in the archive, where the layer has one on this device."""
        has_bias = self.source.bias and (self.shard is None or self.shard.has_bias)
        return self.source.bias.name if self.source.bias and has_bias else None

    @property
    def size(self) -> int:
        """Bytes of codes and scales in the archive."""
        return self.n * self.k + self.scale_shape[0] * self.scale_shape[1]

    def entries(self, on_progress: Callable[[int], None]) -> list[NewEntry]:
        """Codes, scales and bias for the archive.

        Args:
            on_progress: Called with the number of code bytes that were just read.
        """
        found = self._requantized(on_progress) if self.requantized else self._copied(on_progress)
        bias = self.source.bias
        if bias is not None and self.bias_key is not None:
            width = bias.entry.length // self.source.n
            part = bias.entry.part(self.rows.start * width, self.n * width)
            found.append(NewEntry(self.bias_key, part.length, part.chunks))
        return found

    def _copied(self, on_progress: Callable[[int], None]) -> list[NewEntry]:
        def codes() -> Iterator[bytes]:
            for slab in self._slabs(max(_SLAB_BYTES // self.source.k, 1)):
                yield slab.tobytes()
                on_progress(slab.size)

        def scales() -> Iterator[bytes]:
            read = scale_bytes.read_bytes(self.source)
            rows = scale_bytes.expand(read, self.source.block, self.rows, self.columns)
            yield rows[:: self.block_rows].tobytes()

        return self._pair(codes, scales)

    def _requantized(self, on_progress: Callable[[int], None]) -> list[NewEntry]:
        kept: list[bytes] = []

        def codes() -> Iterator[bytes]:
            self.loss = Loss()
            rows = slab_rows(self.source.k)
            try:
                for slab, scales, loss in quantize_slabs(
                    self._dequantized(rows), self.block_rows, "rceil", FORMATS["mxfp8"]
                ):
                    self.loss = self.loss + loss
                    kept.append(scales.tobytes())
                    yield slab.tobytes()
                    on_progress(slab.size)
            except ValueError as error:
                self.source.refuse(f"the weight '{self.source.name}' holds {error}")

        def scales() -> Iterator[bytes]:
            yield from kept
            kept.clear()

        return self._pair(codes, scales)

    def _pair(
        self, codes: Callable[[], Iterator[bytes]], scales: Callable[[], Iterator[bytes]]
    ) -> list[NewEntry]:
        return [
            NewEntry(self.code_key, self.n * self.k, codes),
            NewEntry(self.scale_key, self.scale_shape[0] * self.scale_shape[1], scales),
        ]

    def _dequantized(self, rows: int) -> Iterator[npt.NDArray[np.float32]]:
        """The values of the weight, ``rows`` rows at a time."""
        numbers = scale_bytes.read_numbers(self.source)
        block_rows, block_columns = self.source.block
        by_column = np.asarray(self.columns) // block_columns
        start = self.rows.start
        for slab in self._slabs(rows):
            by_row = np.arange(start, start + len(slab)) // block_rows
            with np.errstate(over="ignore", invalid="ignore"):
                values = slab.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                values = values * numbers[by_row[:, None], by_column[None, :]]
            yield values
            start += len(slab)

    def _slabs(self, rows: int) -> Iterator[Bytes]:
        """The codes, ``rows`` rows at a time."""
        stored_k = self.source.k
        part: Entry = self.source.codes.entry.part(self.rows.start * stored_k, self.n * stored_k)
        for chunk in part.chunks(rows * stored_k):
            slab = np.frombuffer(chunk, np.uint8).reshape(-1, stored_k)
            yield slab[:, self.columns.start : self.columns.stop]


def prepare(
    source: ScaledWeight, shards: list[Shard], block: str, allows_requantizing: bool
) -> ImportedWeight:
    """Decide how a weight is imported; reads its scales, and no codes.

    Args:
        source: The weight in the checkpoint.
        shards: The first that names the layer says which part is imported.
        block: ``auto`` (32x32 where that is exact), ``1x32`` or ``32x32``.
        allows_requantizing: Quantise it anew where its scales are no powers of two.

    Raises:
        DiagnosticError: A scale is no power of two, the weight has no such part, or 32x32 is asked
            for and rows that would share a scale have different ones.
    """
    shard = next((shard for shard in shards if shard.takes(source)), None)
    rows, columns = shard.part(source) if shard else (range(source.n), range(source.k))
    weight = ImportedWeight(source, shard, rows, columns, BLOCKS.get(block, BLOCK_K))
    if source.scales.dtype in NUMBER_DTYPES and allows_requantizing:
        _, is_exact = scale_bytes.to_bytes(scale_bytes.read_numbers(source))
        weight.requantized = not is_exact.all()
    if weight.requantized:
        return weight
    row_scales = scale_bytes.expand(scale_bytes.read_bytes(source), source.block, rows, columns)
    if weight.block_rows == BLOCK_K and scale_bytes.compact(row_scales) is None:
        if block != "auto":
            source.refuse(
                f"rows of '{source.name}' that would share a 32x32 scale have different ones",
                "--block=1x32 keeps a scale for each row",
            )
        weight.block_rows = 1
    weight.nan_scales = int((row_scales[:: weight.block_rows] == _NAN_SCALE).sum())
    return weight
