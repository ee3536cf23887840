# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ``block32 import checkpoint`` tells of the layers that it imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from block32.runtime.checkpoint.convert import ImportedWeight
from block32.runtime.safetensors import StoredTensor


def render_json(weights: Sequence[ImportedWeight], others: Sequence[StoredTensor]) -> str:
    """The layers, the tensors that are copied as they are, and the sums, as JSON."""
    content = {
        "layers": [_row(weight) for weight in weights],
        "copied": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for tensor in others
        ],
        "total": {
            "layers": len(weights),
            "layer_bytes": sum(weight.size for weight in weights),
            "copied_bytes": sum(tensor.entry.length for tensor in others),
        },
    }
    return json.dumps(content, indent=2)


def _row(weight: ImportedWeight) -> dict[str, Any]:
    source = weight.source
    return {
        "name": source.layer,
        "n": weight.n,
        "k": weight.k,
        "source": {
            "file": source.codes.entry.path.name,
            "shape": [source.n, source.k],
            "scales": source.scales.name,
            "scale_dtype": source.scales.dtype,
            "block": _by(source.block),
        },
        "block": f"{weight.block_rows}x32",
        "shard": weight.shard.describe() if weight.shard else None,
        "bias": weight.bias_key,
        "nan_scales": weight.nan_scales,
        "requantized": weight.requantized,
        "relative_error": weight.loss.relative() if weight.loss.norm else None,
        "bytes": weight.size,
    }


def print_table(weights: Sequence[ImportedWeight], others: Sequence[StoredTensor]) -> None:
    """A line a layer on stdout, and the sums."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for heading in ("N", "K", "scales", "stored as", "part", "bytes"):
        table.add_column(heading, justify="right", no_wrap=heading != "part")
    for weight in weights:
        scales = f"{weight.source.scales.dtype} {_by(weight.source.block)}"
        shard = weight.shard.describe() if weight.shard else "whole"
        numbers = (str(weight.n), str(weight.k), scales, _stored(weight), shard, str(weight.size))
        table.add_row(weight.source.layer, *numbers)
    console.print(table)
    print(summary(weights, others))


def summary(weights: Sequence[ImportedWeight], others: Sequence[StoredTensor]) -> str:
    """One line: how much there is."""
    size = sum(weight.size for weight in weights)
    copied = sum(tensor.entry.length for tensor in others)
    return (
        f"block-scaled layers: {len(weights)} ({size} bytes), other tensors: {len(others)} "
        f"({copied} bytes)"
    )


def _stored(weight: ImportedWeight) -> str:
    block = f"{weight.block_rows}x32"
    if not weight.requantized:
        return block
    error = f"error {weight.loss.relative():.2%}" if weight.loss.norm else "requantised"
    return f"{block}, {error}"


def _by(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"
