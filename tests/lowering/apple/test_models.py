# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Small models through the whole pipeline and the host's ops: plain activations, layers in a row.

All have bf16 activations and e4m3 weights with 32x32 scales (W8A16), the form of this target that
needs no quantisation.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir

from block32.tools.air_emulator.host import HostProgram
from block32.tools.compiler import CompileOptions, compile_source

OPTIONS = CompileOptions(target="apple-m5", flags=("--compile-to=hal",))

HEAD = """
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
"""

#: A result of zeros for a number of rows that comes at run time.
ZEROS = """
  %c0 = arith.constant 0 : index
  %f0 = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c0 : tensor<?x{k}xbf16>
  %empty = tensor.empty(%m) : tensor<?x{n}xf32>
  %zero = linalg.fill ins(%f0 : f32) outs(%empty : tensor<?x{n}xf32>) -> tensor<?x{n}xf32>
"""


def _bytes(values: npt.NDArray[np.uint8]) -> str:
    """A dense attribute of i8."""
    rows = ", ".join(str(row) for row in values.view(np.int8).tolist())
    return f"dense<[{rows}]> : tensor<{values.shape[0]}x{values.shape[1]}xi8>"


class _Weight:
    """E4M3 bytes [N, K] and their scales, with the values in float64."""

    def __init__(self, n: int, k: int, seed: int):
        rng = np.random.default_rng(seed)
        self.n, self.k = n, k
        self.codes = rng.integers(0, 0x70, (n, k), dtype=np.uint8)
        self.codes |= rng.integers(0, 2, (n, k), dtype=np.uint8) << 7
        self.scales = rng.integers(110, 120, (-(-n // 32), -(-k // 32)), dtype=np.uint8)
        values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        blocks = np.arange(n)[:, None] // 32, np.arange(k) // 32
        self.values = values * np.exp2(self.scales[blocks].astype(float) - 127)

    def matmul(self, result: str, m: str, x: str = "x", w: str = "w", zero: str = "zero") -> str:
        """The op that multiplies by this weight."""
        kind = f"tensor<{m}x{self.n}xf32>"
        operands = f"tensor<{m}x{self.k}xbf16>, tensor<{self.n}x{self.k}xf8E4M3FN>"
        return f"""
  %{result} = linalg.matmul indexing_maps = [#x, #w, #y]
      {{block32.rhs = {{block = [32, 32], scale = {_bytes(self.scales)}}}}}
      ins(%{x}, %{w} : {operands}) outs(%{zero} : {kind}) -> {kind}"""


def _program(arguments: str, result: str, body: str) -> HostProgram:
    text = f"{HEAD}\nfunc.func @main({arguments}) -> {result} {{{body}\n}}\n"
    output = compile_source(text.encode(), "model.mlir", OPTIONS)
    with ir.Context():
        return HostProgram(ir.Module.parse(output.decode()))


def _activations(*shape: int, seed: int = 0) -> npt.NDArray[np.generic]:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def _call(program: HostProgram, element: type, *arguments: npt.NDArray) -> npt.NDArray:
    (view,) = program.call("main", list(arguments))
    return view.data.view(element).reshape(view.shape).astype(np.float64)


def _close(y: npt.NDArray, expected: npt.NDArray, tolerance: float = 1e-5) -> bool:
    return y.shape == expected.shape and bool(
        np.abs(y - expected).max() <= tolerance * np.abs(expected).max()
    )


def test_plain_activations_of_any_number_of_rows() -> None:
    """50 rows, the first of them alone on the same weights, and none."""
    weight = _Weight(128, 1040, seed=1)
    x = _activations(50, 1040)
    program = _program(
        "%x: tensor<?x1040xbf16>, %w: tensor<128x1040xf8E4M3FN>",
        "tensor<?x128xf32>",
        ZEROS.format(n=128, k=1040)
        + weight.matmul("out", "?")
        + "\n  return %out : tensor<?x128xf32>",
    )
    expected = x.astype(np.float64) @ weight.values.T
    many = _call(program, np.float32, x, weight.codes)
    assert [d.kernel.split("_")[1] for d in program.dispatched] == ["tier1"]
    one = _call(program, np.float32, x[:1], weight.codes)
    assert [d.kernel.split("_")[1] for d in program.dispatched] == ["tier0"]
    assert _close(many, expected) and _close(one, expected[:1]) and _close(one, many[:1])
    assert _call(program, np.float32, x[:0], weight.codes).shape == (0, 128)
    assert program.dispatched == []


def test_three_layers_in_a_row() -> None:
    """Each layer's relu and rounding to bf16 happen in its kernel: nothing else is dispatched."""
    weights = [_Weight(96, 64, 1), _Weight(80, 96, 2), _Weight(40, 80, 3)]
    body = ZEROS.format(n=96, k=64)
    previous = "x"
    for i, weight in enumerate(weights):
        kind, narrow = f"tensor<?x{weight.n}xf32>", f"tensor<?x{weight.n}xbf16>"
        body += f"""
  %e{i} = tensor.empty(%m) : {kind}
  %z{i} = linalg.fill ins(%f0 : f32) outs(%e{i} : {kind}) -> {kind}
  %b{i} = tensor.empty(%m) : {narrow}"""
        body += weight.matmul(f"y{i}", "?", previous, f"w{i}", f"z{i}")
        body += f"""
  %a{i} = linalg.generic {{indexing_maps = [affine_map<(m, n) -> (m, n)>,
        affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}}
      ins(%y{i} : {kind}) outs(%b{i} : {narrow}) {{
    ^bb0(%v: f32, %o: bf16):
      %r = arith.maximumf %v, %f0 : f32
      %t = arith.truncf %r : f32 to bf16
      linalg.yield %t : bf16
  }} -> {narrow}"""
        previous = f"a{i}"
    arguments = ", ".join(
        ["%x: tensor<?x64xbf16>"]
        + [f"%w{i}: tensor<{w.n}x{w.k}xf8E4M3FN>" for i, w in enumerate(weights)]
    )
    program = _program(arguments, "tensor<?x40xbf16>", f"{body}\n  return %a2 : tensor<?x40xbf16>")
    for m in (1, 5, 70):
        x = _activations(m, 64, seed=m)
        y = _call(program, ml_dtypes.bfloat16, x, *(weight.codes for weight in weights))
        expected = x
        for weight in weights:
            sums = np.maximum(expected.astype(np.float64) @ weight.values.T, 0)
            expected = sums.astype(ml_dtypes.bfloat16)
        assert len(program.dispatched) == 3
        assert _close(y, expected.astype(np.float64), 2.0**-7)


CASTS = {
    "tiny and cast to dynamic": (
        (2, 32),
        "\n  %d = tensor.cast %x : tensor<2x32xbf16> to tensor<?x32xbf16>",
        "?",
        "\n  %back = tensor.cast %out : tensor<?x{n}xf32> to tensor<2x{n}xf32>",
    ),
    "a batch of one, collapsed": (
        (1, 70, 96),
        "\n  %d = tensor.collapse_shape %x [[0, 1], [2]]"
        " : tensor<1x70x96xbf16> into tensor<70x96xbf16>",
        "70",
        "\n  %back = tensor.expand_shape %out [[0, 1], [2]] output_shape [1, 70, {n}]"
        " : tensor<70x{n}xf32> into tensor<1x70x{n}xf32>",
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_other_views_of_the_rows(name: str) -> None:
    shape, before, m, after = CASTS[name]
    weight = _Weight(33, shape[-1], seed=4)
    kind = f"tensor<{m}x33xf32>"
    body = f"""{before}
  %c0 = arith.constant 0 : index
  %f0 = arith.constant 0.0 : f32
  %m = tensor.dim %d, %c0 : tensor<{m}x{weight.k}xbf16>
  %empty = tensor.empty({"%m" if m == "?" else ""}) : {kind}
  %zero = linalg.fill ins(%f0 : f32) outs(%empty : {kind}) -> {kind}"""
    body += weight.matmul("out", m, "d") + after.format(n=33)
    by = "x".join
    outer = f"tensor<{by(map(str, (*shape[:-1], 33)))}xf32>"
    program = _program(
        f"%x: tensor<{by(map(str, shape))}xbf16>, %w: tensor<33x{weight.k}xf8E4M3FN>",
        outer,
        f"{body}\n  return %back : {outer}",
    )
    x = _activations(*shape)
    y = _call(program, np.float32, x, weight.codes)
    assert _close(y, x.astype(np.float64) @ weight.values.T)
    assert len(program.dispatched) == 1
