# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The example models compiled for gfx950: all linear layers get our kernels, which are right.

Every kernel of the vmfb that holds a linear layer runs in the executor.
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false
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
from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import KernelPlan
from block32.runtime import reference
from block32.tools.cli import main as block32_main
from block32.tools.gfx950_executor import hsaco_from_vmfb
from block32.tools.gfx950_launch import launch_matmul
from tests.lowering.gfx950.test_epilogue import ACTIVATIONS
from tests.numbers import random_codes

torch = pytest.importorskip("torch", reason="needs block32[examples]")
pytest.importorskip("iree.turbine", reason="needs block32[examples]")

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path[:0] = [str(EXAMPLES / "decoder"), str(EXAMPLES / "minilm")]

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
Spec = tuple[ScaledMatmul, tuple[KernelTier, ...]]


@dataclass
class CompiledModel:
    """A model's module, what was said of each matmul, and what its executables compute in order."""

    vmfb: bytes
    remarks: list[str]
    specs: list[Spec]


def compile_model(folder: Path, activations: str, monkeypatch: pytest.MonkeyPatch) -> CompiledModel:
    """Quantise ``model.mlir`` of a folder and compile it."""
    command = ["quantize", f"{folder}/model.mlir", f"--params={folder}/model.irpa", "--quiet"]
    command += [f"--output-params={folder}/mx.irpa", "-o", f"{folder}/mx.mlir"]
    assert block32_main([*command, f"--activations={activations}"]) == 0
    specs: dict[Spec, None] = {}
    plan = Gfx950Target.plan

    def noting_plan(
        target: Gfx950Target, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]
    ) -> KernelPlan:
        specs[problem, tiers] = None
        return plan(target, problem, tiers)

    monkeypatch.setattr(Gfx950Target, "plan", noting_plan)
    remarks: list[str] = []
    vmfb = block32.compile(
        folder / "mx.mlir", target="gfx950", on_remark=lambda r: remarks.append(r.message)
    )
    return CompiledModel(vmfb, remarks, list(specs))


def check_kernels(model: CompiledModel, rows: int) -> None:
    """Run every executable of a model, with ``rows`` where M is dynamic; compare with float64."""
    hsaco = hsaco_from_vmfb(model.vmfb)
    for number, (problem, tiers) in enumerate(model.specs):
        executable = f"block32_kernels_{number}_{problem.describe()}"
        m = rows if problem.m is None else problem.m
        operands = operands_of(problem, m)
        y = launch_matmul(hsaco, problem, tiers, operands, executable).y
        wanted = expected(problem, operands)
        error = np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, f"{problem.describe()} for M = {m}: relative error {error:.3g}"


def operands_of(problem: ScaledMatmul, m: int) -> dict[str, npt.NDArray[Any]]:
    """Random operands; sums are of the order of 1."""
    rng = np.random.default_rng(m)
    epilogue = problem.epilogue
    x = rng.normal(size=(m, problem.k))
    codes, scales = reference.quantize(x)
    return {
        "lhs": codes if problem.lhs_scaled else x.astype(DTYPES[problem.lhs]),
        "lhs_scale": scales,
        "rhs": random_codes(rng, (problem.n, problem.rhs_row_bytes), problem.rhs),
        "rhs_scale": rng.integers(112, 116, problem.rhs_scale_shape, dtype=np.uint8),
        "row_scale": rng.normal(size=m).astype(np.float32),
        "scale": np.array([0.75], np.float32),
        "bias": rng.normal(size=problem.n).astype(DTYPES[epilogue.bias or "f32"]),
        "residual": rng.normal(size=(m, problem.n)).astype(DTYPES[epilogue.residual or "f32"]),
    }


def expected(problem: ScaledMatmul, operands: dict[str, Any]) -> npt.NDArray[np.float64]:
    """The linear layer in float64."""
    x, x_scale = operands["lhs"], operands["lhs_scale"]
    if not problem.lhs_scaled:
        x, x_scale = reference.quantize(x) if problem.lhs_quantize else (x, None)
    y = reference.scaled_matmul(x, x_scale, operands["rhs"], operands["rhs_scale"])
    epilogue = problem.epilogue
    if epilogue.row_scale:
        y *= operands["row_scale"][:, None]
    if epilogue.scale:
        y *= operands["scale"]
    if epilogue.bias:
        y += operands["bias"].astype(np.float64)
    if epilogue.residual:
        y += operands["residual"].astype(np.float64)
    return ACTIVATIONS[epilogue.activation](y)


def check_remarks(model: CompiledModel, matmuls: int) -> None:
    """One line a matmul, and each of them ours."""
    assert len(model.remarks) == matmuls
    assert all(": gfx950 " in remark for remark in model.remarks), model.remarks


def test_decoder_with_an_f32_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prefill and decode: the 7 linear layers of a layer, and the head."""
    from decoder import export
    from decoder_model import Config

    export(Config(layers=1), tmp_path)
    model = compile_model(tmp_path, "none", monkeypatch)
    check_remarks(model, 2 * (7 + 1))
    assert not any(problem.lhs_scaled for problem, _ in model.specs)
    check_kernels(model, 5)


def test_decoder_with_a_quantised_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where one matmul reads the activation, its kernel or its launch quantises it."""
    from decoder import export
    from decoder_model import Config

    export(Config(layers=1), tmp_path)
    model = compile_model(tmp_path, "mxfp8", monkeypatch)
    check_remarks(model, 2 * (7 + 1))
    forms = {tier.quantize for problem, tiers in model.specs for tier in tiers}
    assert forms == {"none", "fused", "separate"}
    check_kernels(model, 9)


def test_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Six linear layers in each of 2 layers, with bias, GELU and residual in the kernel."""
    from encoder import Config, Encoder
    from pipeline import export

    config = Config(vocabulary=100, positions=32, width=64, inner_width=160, heads=2, layers=2)
    export(Encoder(config).eval(), config.positions, tmp_path)
    model = compile_model(tmp_path, "none", monkeypatch)
    check_remarks(model, 12)
    assert sum("with bias, gelu" in remark for remark in model.remarks) == 2
    assert sum("with bias, residual" in remark for remark in model.remarks) == 4
    check_kernels(model, 21)
