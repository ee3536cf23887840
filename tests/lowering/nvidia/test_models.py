# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The example models compiled for NVIDIA cards: every linear layer gets a kernel of ours.

Compiled only; what the kernels compute is checked form by form.
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path

import pytest

import block32
from block32.tools.cli import main as block32_main

torch = pytest.importorskip("torch", reason="needs block32[examples]")
pytest.importorskip("iree.turbine", reason="needs block32[examples]")

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path[:0] = [str(EXAMPLES / "decoder"), str(EXAMPLES / "minilm")]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a decoder of one layer: ``model.mlir`` and its parameters."""
    from decoder import export
    from decoder_model import Config

    folder = tmp_path_factory.mktemp("decoder")
    export(Config(layers=1), folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder of two layers."""
    from encoder import Config, Encoder
    from pipeline import export

    folder = tmp_path_factory.mktemp("encoder")
    config = Config(vocabulary=100, positions=32, width=64, inner_width=160, heads=2, layers=2)
    export(Encoder(config).eval(), config.positions, folder)
    return folder


def compile_remarks(folder: Path, target: str, activations: str = "mxfp8") -> list[str]:
    """Quantise the model of a folder and compile it; what the compile says of each matmul."""
    command = ["quantize", f"{folder}/model.mlir", f"--params={folder}/model.irpa", "--quiet"]
    command += [f"--output-params={folder}/mx.irpa", "-o", f"{folder}/mx.mlir"]
    assert block32_main([*command, f"--activations={activations}"]) == 0
    remarks: list[str] = []
    block32.compile(
        folder / "mx.mlir", target=target, on_remark=lambda remark: remarks.append(remark.message)
    )
    return remarks


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_decoder(decoder: Path, target: str):
    """Prefill and decode: the 7 linear layers of a layer, and the head."""
    remarks = compile_remarks(decoder, target)
    assert len(remarks) == 2 * (7 + 1)
    assert all(f": {target} " in remark for remark in remarks), remarks
    # Codes that several layers read are made once, by a step of its own.
    alone = sum("; x is quantised (rceil) by " in remark for remark in remarks)
    assert 0 < alone < len(remarks)


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_encoder(encoder: Path, target: str):
    """Six linear layers in each of 2 layers, with bias, GELU and residual in the kernel."""
    remarks = compile_remarks(encoder, target)
    assert len(remarks) == 12
    assert all(f": {target} " in remark for remark in remarks), remarks
    assert sum("with bias, gelu" in remark for remark in remarks) == 2
    assert sum("with bias, residual" in remark for remark in remarks) == 4


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_activations_that_are_not_quantised(decoder: Path, encoder: Path, target: str):
    """The models' f32 meets the weights as it is."""
    for folder, count in ((decoder, 16), (encoder, 12)):
        remarks = compile_remarks(folder, target, "none")
        assert len(remarks) == count
        assert all("_f32_e4m3_32x32_f32" in remark for remark in remarks), remarks
        assert all(f": {target} " in remark for remark in remarks), remarks
