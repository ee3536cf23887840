# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All of MiniLM on this CPU: beside f32 that IREE compiles alone, by itself and 16 at a time.

50 sentences of different lengths, one after the other without padding; and 48 of them in three
batches of 16, padded to the longest and masked. All sides take turns in one process, as whole
rounds over the sentences.

    pip install 'block32[examples]'
    python -m benchmarks.cpu_minilm
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.turns import Contender, measure
from block32.lowering.problem import BLOCK_K, ceil_div

EXAMPLE = Path(__file__).parents[1] / "examples" / "minilm"
sys.path.insert(0, str(EXAMPLE))

if TYPE_CHECKING:
    from encoder import Encoder
    from pipeline import Compiled

STOCK = "f32, stock IREE"
#: What block32 does with activations, taken as they are or quantised, and that contender's name.
OURS = {"none": "MXFP8, W8A16", "mxfp8": "MXFP8, W8A8"}
BATCH = 16

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Sentences in the form that one export takes.

    Attributes:
        title: For the table.
        calls: The arguments of each call.
    """

    title: str
    calls: list[tuple[npt.NDArray, ...]]

    @classmethod
    def one_by_one(cls, sentences: list[Ids]) -> Workload:
        """Each sentence by itself."""
        return cls(f"{len(sentences)} sentences, one at a time", [(ids,) for ids in sentences])

    @classmethod
    def in_batches(cls, sentences: list[Ids]) -> Workload:
        """Whole batches in the order of the file; what is left over is left out."""
        whole = range(0, len(sentences) - BATCH + 1, BATCH)
        calls = [padded(sentences[start : start + BATCH]) for start in whole]
        return cls(f"{len(calls) * BATCH} sentences, {BATCH} at a time", list(calls))


def padded(sentences: list[Ids]) -> tuple[Ids, npt.NDArray[np.float32]]:
    """One batch of token ids, ``[B, S]``, and its mask."""
    length = max(ids.shape[1] for ids in sentences)
    rows = [np.pad(ids, ((0, 0), (0, length - ids.shape[1]))) for ids in sentences]
    mask = [np.arange(length) < ids.shape[1] for ids in sentences]
    return np.concatenate(rows), np.array(mask, np.float32)


def runner(compiled: Compiled, workload: Workload) -> Callable[[], npt.NDArray[np.float32]]:
    """Encodes all sentences of a workload: a vector each."""
    return lambda: np.concatenate([compiled.encode(*call) for call in workload.calls])


def compile_all(encoder: Encoder, folder: Path, is_batched: bool) -> dict[str, Compiled]:
    """The model for one kind of workload, by each contender."""
    from encoder import Config
    from pipeline import compile_f32, compile_mxfp8, export

    folder.mkdir(parents=True, exist_ok=True)
    export(encoder, Config().positions, folder, is_batched)
    ours = {name: compile_mxfp8(folder, activations) for activations, name in OURS.items()}
    return {STOCK: compile_f32(folder), **ours}


def time_table(
    workload: Workload, group: list[Contender], vectors: dict[str, npt.NDArray]
) -> Table:
    """Medians of whole rounds, how many times as fast as stock, and how close the vectors are."""
    table = Table(title=workload.title, title_justify="left")
    for column in ("", "median ms", "cpu ms", "times as fast", "by cpu time", "worst cosine"):
        table.add_column(column, justify="left" if not column else "right")
    stock = group[0]
    for contender in group:
        cpu, stock_cpu = (statistics.median(c.cpu_seconds) for c in (contender, stock))
        cosines = (vectors[contender.name] * vectors[STOCK]).sum(axis=1)
        table.add_row(
            contender.name,
            f"{contender.median * 1e3:.0f}",
            f"{cpu * 1e3:.0f}",
            f"{stock.median / contender.median:.2f}",
            f"{stock_cpu / cpu:.2f}",
            f"{cosines.min():.4f}",
        )
    return table


def bytes_table(encoder: Encoder, stock: Compiled, ours: Compiled) -> Table:
    """Bytes of the linear layers' weights, and of the whole parameter file."""
    from torch import nn

    shapes = [m.weight.shape for m in encoder.modules() if isinstance(m, nn.Linear)]
    f32 = sum(4 * n * k for n, k in shapes)
    mxfp8 = sum(n * k + ceil_div(n, BLOCK_K) * ceil_div(k, BLOCK_K) for n, k in shapes)
    table = Table(title="bytes", title_justify="left")
    for column in ("", "f32", "MXFP8", "times as small"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (before, after) in {
        "weights of linear layers": (f32, mxfp8),
        "all parameters (embeddings stay f32)": (stock.parameter_bytes, ours.parameter_bytes),
    }.items():
        table.add_row(name, f"{before:,}", f"{after:,}", f"{before / after:.2f}")
    return table


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11, help="turns that everybody takes")
    parser.add_argument("--folder", type=Path, help="keep the model's files here")
    options = parser.parse_args()
    from minilm import missing_packages

    if missing := missing_packages():
        names = ", ".join(missing)
        print(f"minilm: error: needs {names}; pip install 'block32[examples]'", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        run(options.folder or Path(temporary), options.rounds)
    return 0


def run(folder: Path, rounds: int) -> None:
    """Print all tables."""
    from minilm import token_ids
    from pipeline import pretrained

    console = Console()
    encoder, package = pretrained()
    sentences = token_ids(package)
    compiled: dict[str, Compiled] = {}
    for workload in (Workload.one_by_one(sentences), Workload.in_batches(sentences)):
        is_batched = len(workload.calls[0]) > 1
        files = folder / ("batches" if is_batched else "single")
        compiled = compile_all(encoder, files, is_batched)
        group = [Contender(name, runner(c, workload)) for name, c in compiled.items()]
        vectors = {contender.name: contender.run() for contender in group}
        measure(group, rounds)
        console.print(time_table(workload, group, vectors))
    console.print(bytes_table(encoder, compiled[STOCK], compiled[OURS["none"]]))


if __name__ == "__main__":
    sys.exit(main())
