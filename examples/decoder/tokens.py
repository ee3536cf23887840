# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The programs of the tutorial "from a checkpoint to tokens" (docs/tutorial.md).

    pip install 'block32[examples]'
    python examples/decoder/tokens.py checkpoint decoder
    python examples/decoder/tokens.py export decoder
    python examples/decoder/tokens.py generate decoder.vmfb decoder.irpa --tokens=12

The first writes a checkpoint as models with block-scaled weights come, the second the decoder's
code, exported from PyTorch, the third runs what block32 made of the two.
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import block32
from block32.runtime import reference

sys.path.insert(0, str(Path(__file__).parent))

PROMPT = (7, 42, 99, 3, 150, 21, 64)


def write_checkpoint(folder: Path) -> None:
    """Two shards of safetensors and their index: fp8 weights, a scale byte for each 32x32 block."""
    from decoder_model import Config, seeded_weights
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, npt.NDArray[Any]]] = [{}, {}]
    for name, array in seeded_weights(Config()).items():
        shard = shards["layers.1" in name]
        if array.ndim == 2 and not name.startswith("embedding"):
            codes, scales = reference.quantize_weight(array, block=(32, 32))
            shard[name] = codes.view(ml_dtypes.float8_e4m3fn)
            shard[f"{name}_scale_inv"] = scales.view(ml_dtypes.float8_e8m0fnu)
        else:
            shard[name] = array
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def export_code(folder: Path) -> None:
    """``model.mlir``: the decoder's two functions, their weights named and not in it."""
    from decoder import export
    from decoder_model import Config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(Config(), folder)


def generate(vmfb: Path, parameters: Path, count: int) -> list[int]:
    """Greedy tokens: the prompt at once, then one token after the other with the cache."""
    module = block32.load(vmfb, parameters={"model": parameters})
    logits, keys, values = module["prefill"](np.array(PROMPT, np.int64))
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(np.argmax(logits)))
        logits, keys, values = module["decode"](np.array(tokens[-1:], np.int64), keys, values)
    return tokens


def expected_tokens(count: int) -> list[int]:
    """The same from a float64 implementation without a cache, on the same weights."""
    from decoder_model import Config, seeded_weights
    from decoder_reference import dequantised, greedy_tokens

    config = Config()
    weights = dequantised(seeded_weights(config))
    sizes = (config.heads, config.cache_heads, config.layers)
    return greedy_tokens(weights, list(PROMPT), count, *sizes)[0]


def main() -> int:
    """Run one of the programs; ``generate`` exits with 1 where a token is another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    programs = parser.add_subparsers(dest="program", required=True)
    for name in ("checkpoint", "export"):
        programs.add_parser(name).add_argument("folder", type=Path)
    generating = programs.add_parser("generate")
    generating.add_argument("vmfb", type=Path)
    generating.add_argument("parameters", type=Path)
    generating.add_argument("--tokens", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.program == "checkpoint":
        write_checkpoint(arguments.folder)
        return 0
    if arguments.program == "export":
        export_code(arguments.folder)
        return 0
    tokens = generate(arguments.vmfb, arguments.parameters, arguments.tokens)
    expected = expected_tokens(arguments.tokens)
    print(f"tokens    {tokens}\nreference {expected}")
    return 0 if tokens == expected else 1


if __name__ == "__main__":
    sys.exit(main())
