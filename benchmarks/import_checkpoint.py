# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much memory ``block32 import checkpoint`` takes, and what it costs beside a copy.

python benchmarks/import_checkpoint.py                    2 GB, in layers of 256 MB
python benchmarks/import_checkpoint.py --layers=4 --n=8192 --k=8192 --folder=/scratch

The checkpoint is generated: sparse files, so that it takes no disk, in two shards with an index.
The output does take disk, as much as the checkpoint says. Memory is the largest resident size of
the process, which has NumPy, rich and IREE's bindings in it. The bound is the largest tensor and
1 GB; the exit code is 1 where it is passed. Times are shown as a ratio to copying the shards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
GB = 1000 * MB


@dataclass(frozen=True)
class Size:
    """What to generate: layers of ``[n, k]`` weights."""

    layers: int
    n: int
    k: int

    @property
    def weight(self) -> int:
        """Bytes of a weight, the largest tensor."""
        return self.n * self.k


def write_checkpoint(folder: Path, size: Size, scale_dtype: str) -> None:
    """Two sparse shards and their index; scales of 128x128, all of one valid value or zero."""
    rows, columns = -(-size.n // 128), -(-size.k // 128)
    width = 4 if scale_dtype == "F32" else 1
    weight_map: dict[str, str] = {}
    for shard in range(2):
        name = f"model-{shard + 1:05}-of-00002.safetensors"
        header: dict[str, object] = {}
        at = 0
        for layer in range(shard, size.layers, 2):
            parts = (
                ("weight", "F8_E4M3", [size.n, size.k], size.weight),
                ("weight_scale_inv", scale_dtype, [rows, columns], rows * columns * width),
            )
            for suffix, dtype, shape, length in parts:
                key = f"layers.{layer}.proj.{suffix}"
                header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
                weight_map[key] = name
                at += length
        content = json.dumps(header).encode()
        with (folder / name).open("wb") as stream:
            stream.write(struct.pack("<Q", len(content)) + content)
            stream.truncate(8 + len(content) + at)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measured(command: list[str]) -> tuple[float, int]:
    """Seconds and the largest resident size in bytes of a process; ends the run where it fails."""
    start = time.perf_counter()
    process = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copied(source: Path, target: Path) -> None:
    """Read and write all bytes of the shards, as an import must at least."""
    with target.open("wb") as output:
        for shard in sorted(source.glob("*.safetensors")):
            with shard.open("rb") as stream:
                shutil.copyfileobj(stream, output, 1 << 24)
    target.unlink()


def main() -> int:
    """Generate, import in several ways, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--k", type=int, default=16384)
    parser.add_argument("--folder", help="where to work; a temporary folder by default")
    arguments = parser.parse_args()
    size = Size(arguments.layers, arguments.n, arguments.k)
    bound = size.weight + GB
    ways = (
        ("whole", "U8", ()),
        ("a quarter of the rows", "U8", ("--shard=rows:1/4",)),
        ("a quarter of the columns", "U8", ("--shard=columns:1/4",)),
        ("quantised anew", "F32", ("--requantize",)),
    )
    print(f"{size.layers} x {size.weight / MB:.0f} MB; bound {bound / MB:.0f} MB")
    print(f"{'import':26} {'memory MB':>10} {'of the bound':>13} {'time / copy':>12}")
    worst = 0
    for name, dtype, options in ways:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            work = Path(folder)
            write_checkpoint(work, size, dtype)
            copy = seconds(lambda work=work: copied(work, work / "copy"))
            command = [sys.executable, "-m", "block32", "import", "checkpoint", str(work)]
            outputs = ["-o", f"{work}/l.mlir", f"--output-params={work}/l.irpa", "--quiet"]
            took, memory = measured([*command, *outputs, *options])
        worst = max(worst, memory)
        ratio = f"{memory / bound:.0%}"
        print(f"{name:26} {memory / MB:10.0f} {ratio:>13} {took / copy:12.1f}")
    return int(worst > bound)


if __name__ == "__main__":
    sys.exit(main())
