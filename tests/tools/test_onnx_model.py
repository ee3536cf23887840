# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""ONNX models with float8 weights, from the file to numbers on the CPU, against float64."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.dialects.diagnostics import DiagnosticError
from block32.passes.base import Remark
from block32.runtime import reference
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions
from block32.tools.onnx_model import import_onnx
from block32.tools.transform_spec import make_spec
from tests.numbers import random_codes

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
helper, T = onnx.helper, onnx.TensorProto

K, N, M = 96, 160, 5
DTYPES = {T.FLOAT: np.float32, T.FLOAT16: np.float16, T.BFLOAT16: ml_dtypes.bfloat16}


@dataclass
class Linear:
    """A model of one linear layer, and what it holds.

    Attributes:
        path: The file.
        codes: The weight as it is stored: ``[K, N]`` or ``[N, K]``.
        scales: Bytes, 32 elements of K each.
        k_axis: Which dimension of the weight is K.
        bias: ``[N]``, or None.
    """

    path: Path
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    k_axis: int
    bias: npt.NDArray[np.float32] | None = None

    def expected(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Float64, from the definition of ``DequantizeLinear``."""
        scales = np.repeat(reference.decode_scales(self.scales), 32, axis=self.k_axis)
        k = self.codes.shape[self.k_axis]
        weight = reference.decode(self.codes) * scales.take(range(k), axis=self.k_axis)
        weight = weight if self.k_axis == 0 else weight.T
        y = x.astype(np.float64) @ weight
        return y if self.bias is None else y + self.bias


def tensor(name: str, kind: int, values: npt.NDArray[Any]) -> Any:
    return helper.make_tensor(name, kind, list(values.shape), values.tobytes(), raw=True)


def save(path: Path, nodes: list[Any], constants: list[Any], rows: list[Any], kind: int) -> None:
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", kind, [*rows, K])],
        [helper.make_tensor_value_info("y", kind, [*rows, N])],
        constants,
    )
    has_e8m0 = any(c.data_type == getattr(T, "FLOAT8E8M0", -1) for c in constants)
    opset = helper.make_opsetid("", 24 if has_e8m0 else 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=12 if has_e8m0 else 10)
    onnx.save(model, path)


def linear_model(
    path: Path,
    *,
    node: str = "MatMul",
    k_axis: int = 0,
    scale_type: int = T.FLOAT,
    rows: tuple[Any, ...] = ("M",),
    seed: int = 0,
) -> Linear:
    """``DequantizeLinear`` with blocks of 32, then ``MatMul`` or ``Gemm`` with a bias."""
    rng = np.random.default_rng(seed)
    shape = (K, N) if k_axis == 0 else (N, K)
    scale_shape = tuple(K // 32 if axis == k_axis else size for axis, size in enumerate(shape))
    codes = random_codes(rng, shape, "f8E4M3FN") & np.uint8(0xBF)
    scales = rng.integers(118, 130, scale_shape, dtype=np.uint8)
    if scale_type == getattr(T, "FLOAT8E8M0", None):
        stored, kind = tensor("s", scale_type, scales), T.FLOAT
    else:
        values = reference.decode_scales(scales).astype(DTYPES[scale_type])
        stored, kind = tensor("s", scale_type, values), scale_type
    constants = [tensor("w", T.FLOAT8E4M3FN, codes), stored]
    extra = {"output_dtype": T.FLOAT} if stored.data_type not in DTYPES else {}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=k_axis, block_size=32, **extra)
    ]
    bias = None
    if node == "Gemm":
        bias = rng.standard_normal(N).astype(np.float32)
        constants.append(tensor("b", T.FLOAT, bias))
        nodes.append(helper.make_node("Gemm", ["x", "d", "b"], ["y"], name="fc", transB=k_axis))
    else:
        if k_axis:
            nodes.append(helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["x", "t" if k_axis else "d"], ["y"], name="fc"))
    save(path, nodes, constants, list(rows), kind)
    return Linear(path, codes, scales, k_axis, bias)


def explicit_model(path: Path, other: float | None = None) -> Linear:
    """The same written as Cast, Reshape and Mul, as older exporters do; one scale may be other."""
    rng = np.random.default_rng(1)
    codes = random_codes(rng, (K, N), "f8E4M3FN") & np.uint8(0xBF)
    scales = rng.integers(118, 130, (K // 32, N), dtype=np.uint8)
    values = reference.decode_scales(scales).astype(np.float32)
    if other is not None:
        values[1, 2] = other
    shapes = {"blocks": [K // 32, 32, N], "each": [K // 32, 1, N], "whole": [K, N]}
    constants = [tensor("w", T.FLOAT8E4M3FN, codes), tensor("s", T.FLOAT, values)]
    constants += [tensor(name, T.INT64, np.array(sizes)) for name, sizes in shapes.items()]
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=T.FLOAT),
        helper.make_node("Reshape", ["f", "blocks"], ["fb"]),
        helper.make_node("Reshape", ["s", "each"], ["sb"]),
        helper.make_node("Mul", ["fb", "sb"], ["db"]),
        helper.make_node("Reshape", ["db", "whole"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["y"], name="fc"),
    ]
    save(path, nodes, constants, ["M"], T.FLOAT)
    return Linear(path, codes, scales, 0)


def compile_model(path: Path) -> tuple[bytes, list[Remark]]:
    remarks: list[Remark] = []
    return block32.compile(path, target="cpu", on_remark=remarks.append), remarks


def check(model: Linear, kind: str = "f32", lead: tuple[int, ...] = (M,)) -> list[Remark]:
    """Compile, see that the layer got a kernel, run it, compare."""
    vmfb, remarks = compile_model(model.path)
    assert [r.severity for r in remarks] == ["remark"], remarks
    assert f"x{N}x{K}_" in remarks[0].message and ": cpu " in remarks[0].message
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    x = (np.random.default_rng(2).standard_normal((*lead, K)) / 64).astype(dtype)
    y = np.array(block32.load(vmfb)["main"](x))
    assert y.dtype == dtype
    comparison = reference.compare(y, model.expected(x), kind)  # type: ignore[arg-type]
    assert comparison.ok, comparison
    return remarks


@pytest.mark.parametrize("node", ["MatMul", "Gemm"])
@pytest.mark.parametrize("k_axis", [0, 1], ids=["KN", "NK"])
def test_dequantize_linear_with_blocks(tmp_path: Path, node: str, k_axis: int) -> None:
    (remark,) = check(linear_model(tmp_path / "m.onnx", node=node, k_axis=k_axis))
    assert remark.location == "fc", "an ONNX node is named in place of a line"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_16_bit_scales(tmp_path: Path, kind: str) -> None:
    scale_type = T.FLOAT16 if kind == "f16" else T.BFLOAT16
    check(linear_model(tmp_path / "m.onnx", scale_type=scale_type), kind)


@pytest.mark.skipif(not hasattr(T, "FLOAT8E8M0"), reason="an onnx without FLOAT8E8M0")
def test_e8m0_scales_which_the_importer_does_not_take(tmp_path: Path) -> None:
    check(linear_model(tmp_path / "m.onnx", scale_type=T.FLOAT8E8M0))


@pytest.mark.parametrize("lead", [(2, 3)])
def test_batches_become_rows(tmp_path: Path, lead: tuple[int, ...]) -> None:
    check(linear_model(tmp_path / "m.onnx", rows=("B", "S")), lead=lead)


def test_explicit_dequantisation(tmp_path: Path) -> None:
    check(explicit_model(tmp_path / "m.onnx"))


def test_what_iree_import_onnx_wrote(tmp_path: Path) -> None:
    """The same model, imported by hand: MLIR in place of the file."""
    model = linear_model(tmp_path / "m.onnx")
    model.path = tmp_path / "m.mlirbc"
    model.path.write_bytes(import_onnx(str(tmp_path / "m.onnx")))
    check(model)


def test_another_scale_than_a_power_of_two(tmp_path: Path) -> None:
    """The layer stays IREE's, with a warning that names the value."""
    model = explicit_model(tmp_path / "m.onnx", other=0.0123)
    vmfb, (remark,) = compile_model(model.path)
    assert remark.severity == "warning"
    assert "expected scales that are powers of two but got a constant with 0.0123 at [1, 0, 2]" in (
        remark.message
    )
    x = (np.random.default_rng(2).standard_normal((M, K)) / 64).astype(np.float32)
    y = np.array(block32.load(vmfb)["main"](x)).astype(np.float64)
    others = np.arange(N) != 2
    expected = model.expected(x)
    assert np.allclose(y[:, others], expected[:, others], rtol=1e-4, atol=1e-4)
    assert not np.allclose(y[:, 2], expected[:, 2], rtol=1e-4, atol=1e-4)


def test_blocks_along_n(tmp_path: Path) -> None:
    """They are no scales of K, and sizes that tiles of 32 do not divide are no trouble to IREE."""
    rng = np.random.default_rng(4)
    k, n = 40, 100
    codes = random_codes(rng, (k, n), "f8E4M3FN") & np.uint8(0xBF)
    scales = rng.integers(118, 130, (k, 4), dtype=np.uint8)
    values = reference.decode_scales(scales).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1, block_size=32),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, T.FLOAT, ["M", size])
        for name, size in (("x", k), ("y", n))
    ]
    constants = [tensor("w", T.FLOAT8E4M3FN, codes), tensor("s", T.FLOAT, values)]
    graph = helper.make_graph(nodes, "main", ends[:1], ends[1:], constants)
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "m.onnx")
    vmfb, remarks = compile_model(tmp_path / "m.onnx")
    assert "expected 32 elements of K to share a scale" in remarks[0].message
    x = rng.standard_normal((M, k)).astype(np.float32)
    y = np.array(block32.load(vmfb)["main"](x))
    weight = reference.decode(codes) * np.repeat(reference.decode_scales(scales), 32, 1)[:, :n]
    comparison = reference.compare(y, x.astype(np.float64) @ weight, "f32")
    assert comparison.ok, comparison


def test_an_argument_that_is_not_used_takes_any_array(tmp_path: Path) -> None:
    """What the importer drops of a function's types is no reason to refuse the call."""
    path = tmp_path / "m.onnx"
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "main",
        [helper.make_tensor_value_info(name, T.FLOAT, [2]) for name in ("unused", "x")],
        [helper.make_tensor_value_info("y", T.FLOAT, [2])],
    )
    onnx.save(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path
    )
    function = block32.load(compile_model(path)[0])["main"]
    x = np.array([-1.0, 3.0], np.float32)
    assert np.array(function(np.zeros(7, np.int32), x)).tolist() == [0.0, 3.0]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_model(tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.vmfb")]) == 0
    assert main(["run", str(tmp_path / "m.vmfb"), "--dim=M=2"]) == 0
    assert f"result 0: 2x{N}xf32" in capsys.readouterr().out


def test_a_spec_needs_the_operators_lowered_first(tmp_path: Path) -> None:
    linear_model(tmp_path / "m.onnx")
    source = import_onnx(str(tmp_path / "m.onnx"))
    with pytest.raises(DiagnosticError) as caught:
        make_spec(source, "m.mlirbc", CompileOptions(target="cpu"), output_name="s.mlir")
    assert (
        "block32-opt m.mlirbc --pass-pipeline='builtin.module(block32-lower-onnx)'"
        in (caught.value.notes[0])
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the model is not valid"),
        (b"not a model", "expected an ONNX model"),
        (None, "cannot read the model: no such file"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DiagnosticError, match=message) as caught:
        import_onnx(str(path))
    assert caught.value.location == str(path)


def test_a_type_that_the_importer_has_no_form_for(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "main",
        [helper.make_tensor_value_info("x", T.FLOAT4E2M1, [2])],
        [helper.make_tensor_value_info("y", T.FLOAT4E2M1, [2])],
    )
    path = tmp_path / "m.onnx"
    onnx.save(
        helper.make_model(graph, ir_version=12, opset_imports=[helper.make_opsetid("", 24)]), path
    )
    with pytest.raises(DiagnosticError, match="IREE's importer does not take the model: Unknown"):
        import_onnx(str(path))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(DiagnosticError, match=r"pip install 'block32\[onnx\]'"):
        import_onnx(str(tmp_path / "m.onnx"))
