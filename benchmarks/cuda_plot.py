# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The table of ``cuda.py`` as a plot: how many times as long as ours each yardstick takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_comparison(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of Triton's and torch's times by ours, and the time a copy's bandwidth would allow.

    Args:
        rows: Results of ``cuda.py`` with ``shape``, ``ours``, ``triton``, ``bf16``, ``fp8`` in
            microseconds and ``bandwidth`` in terabytes a second.
        path: The image; its suffix says which kind.

    Raises:
        SystemExit: Matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("error: --plot needs matplotlib: pip install 'block32[plot]'") from None
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    bars = {"Triton, its best": "triton", "torch bf16": "bf16", "torch fp8 (row scales)": "fp8"}
    for offset, (label, key) in enumerate(bars.items()):
        values = [row[key] / min(row["ours"].values()) for row in rows]
        places = [index + (offset - 1) * 0.25 for index in range(len(rows))]
        drawn = axes.bar(places, values, 0.25, label=label)
        axes.bar_label(drawn, [f"{v:.1f}" if math.isfinite(v) else "" for v in values], fontsize=8)
    floors = [_bandwidth_floor(row) / min(row["ours"].values()) for row in rows]
    axes.plot(floors, "k_", markersize=40, label="reading w and x at the copy bandwidth")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(rows)), ["x".join(map(str, row["shape"])) for row in rows])
    axes.set_xlabel("M x N x K")
    axes.set_ylabel("time / block32's time")
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bytes_read(m: int, n: int, k: int) -> float:
    """Bytes of w, of its scales (one for 32 x 32) and of x."""
    return n * k + n * k / 1024 + m * k


def _bandwidth_floor(row: dict[str, Any]) -> float:
    """Microseconds."""
    return bytes_read(*row["shape"]) / row["bandwidth"] / 1e6
