# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A two-layer decoder: quantised to MXFP8, prefill and decode in one module, greedy tokens checked.

The module has two functions that share the weights: ``prefill`` takes a prompt of any length,
``decode`` one token and the cache. The tokens have to be those of a float64 implementation that
has no cache.

    pip install 'block32[examples]'
    python examples/decoder/decoder.py
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from iree import runtime

import block32
from block32.tools.cli import main as block32_main

sys.path.insert(0, str(Path(__file__).parent))

PACKAGES = ("torch", "iree.turbine")
PROMPT = [7, 42, 99, 3, 150, 21, 64]


def export(config: Any, folder: Path) -> None:
    """Write ``model.mlir`` with both functions, and ``model.irpa``."""
    import torch
    from decoder_model import Decoder
    from iree.turbine import aot

    decoder = Decoder(config).eval()
    aot.externalize_module_parameters(decoder)
    aot.save_module_parameters(folder / "model.irpa", decoder)
    programs = aot.FxProgramsBuilder(decoder)
    shape = (config.layers, config.cache_heads, 5, config.head_width)
    # Two tensors: the export would take one that is given twice for one argument.
    keys, values = torch.zeros(shape), torch.zeros(shape)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    cached = torch.export.Dim("cached", min=2, max=4096)

    @programs.export_program(
        name="prefill",
        args=(torch.zeros(6, dtype=torch.int64),),
        dynamic_shapes={"tokens": {0: tokens}},
        strict=False,
    )
    def prefill(module: Any, tokens: Any) -> Any:
        empty = torch.zeros(config.layers, config.cache_heads, 0, config.head_width)
        return module(tokens, empty, empty)

    @programs.export_program(
        name="decode",
        args=(torch.zeros(1, dtype=torch.int64), keys, values),
        dynamic_shapes={"tokens": {}, "keys": {2: cached}, "values": {2: cached}},
        strict=False,
    )
    def decode(module: Any, tokens: Any, keys: Any, values: Any) -> Any:
        return module(tokens, keys, values)

    aot.export(programs).save_mlir(str(folder / "model.mlir"))


def compile_decoder(folder: Path) -> tuple[Any, list[str]]:
    """Quantise and compile; the loaded module, and what block32 said of each matmul.

    Raises:
        RuntimeError: ``block32 quantize`` refused the model; it has said why.
    """
    command = ["quantize", f"{folder}/model.mlir", f"--params={folder}/model.irpa"]
    command += [f"--output-params={folder}/mx.irpa", "-o", f"{folder}/mx.mlir"]
    if block32_main([*command, "--activations=none", "--quiet"]) != 0:
        raise RuntimeError("the model could not be quantised")
    remarks: list[str] = []
    vmfb = block32.compile(
        folder / "mx.mlir", target="cpu", on_remark=lambda r: remarks.append(r.message)
    )
    config = runtime.Config("local-task")
    index = runtime.ParameterIndex()
    index.load(str(folder / "mx.irpa"))
    provider = index.create_provider(scope="model")
    modules = runtime.load_vm_modules(
        runtime.create_io_parameters_module(config.vm_instance, provider),
        runtime.VmModule.copy_buffer(config.vm_instance, vmfb),
        config=config,
    )
    return modules[-1], remarks


def generate(module: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens: one prefill, then one decode a token."""
    logits, keys, values = module["prefill"](np.array(prompt, np.int64))
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(np.argmax(logits.to_host())))
        logits, keys, values = module["decode"](np.array(tokens[-1:], np.int64), keys, values)
    return tokens


def main() -> int:
    """Run the example; the exit code says whether all tokens are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=24, help="how many to generate")
    arguments = parser.parse_args()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"decoder: error: needs {names}; pip install 'block32[examples]'", file=sys.stderr)
        return 1
    from decoder_model import Config, seeded_weights
    from decoder_reference import dequantised, greedy_tokens

    config = Config()
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(config, Path(temporary))
        module, remarks = compile_decoder(Path(temporary))
        start = time.perf_counter()
        tokens = generate(module, PROMPT, arguments.tokens)
        seconds = time.perf_counter() - start
    expected, lead = greedy_tokens(
        dequantised(seeded_weights(config)),
        PROMPT,
        arguments.tokens,
        config.heads,
        config.cache_heads,
        config.layers,
    )
    print(f"{len(remarks)} matmuls by block32; {len(tokens)} tokens in {seconds * 1e3:.0f} ms")
    print(f"tokens    {tokens}\nreference {expected} (least lead {lead:.3f})")
    print("equal" if tokens == expected else "different")
    return 0 if tokens == expected else 1


if __name__ == "__main__":
    sys.exit(main())
