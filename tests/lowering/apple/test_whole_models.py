# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models from PyTorch, quantised and compiled for Apple GPUs: every kernel of theirs, by itself.

What IREE compiles to Metal source (attention, norms, the quantisation of activations) cannot run
here. Each of our kernels is taken out of the vmfb, with the problem that the passes gave it, and
executed on random operands against float64.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from iree.compiler import ir

from block32.dialects import problem as problem_attribute
from block32.dialects.kernel import ATTRIBUTE, KernelConfig, KernelTier
from block32.lowering.apple.select import matmul_of
from block32.lowering.problem import ScaledMatmul
from block32.passes.pipeline import PipelinePass
from block32.tools.air_emulator.vmfb import load_kernels
from block32.tools.apple_cases import Case, check, execute, random_operands
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, compile_source

pytest.importorskip("torch", reason="needs block32[examples]")
pytest.importorskip("iree.turbine", reason="needs block32[examples]")

EXAMPLES = Path(__file__).parents[3] / "examples"

#: The epilogues that each model's matmuls have, and how many different matmuls have them.
DECODER = {"": 7, "residual": 4, "silu": 2}
ENCODER = {"bias": 1, "bias, residual": 2, "bias, gelu": 1}


def _export_decoder(folder: Path) -> None:
    from decoder import export  # pyright: ignore[reportMissingImports]
    from decoder_model import Config  # pyright: ignore[reportMissingImports]

    export(Config(vocabulary=96, width=64, inner_width=160, heads=4, layers=1), folder)


def _export_encoder(folder: Path) -> None:
    from encoder import Config, Encoder  # pyright: ignore[reportMissingImports]
    from pipeline import export  # pyright: ignore[reportMissingImports]

    config = Config(vocabulary=50, positions=64, width=96, inner_width=224, heads=4, layers=1)
    export(Encoder(config), config.positions, folder)


MODELS = {
    "decoder": (_export_decoder, DECODER),
    "minilm": (_export_encoder, ENCODER),
}


#: The problem and the tier of each kernel by its name.
Kernels = dict[str, tuple[ScaledMatmul, KernelTier]]


def _compile(path: Path) -> tuple[bytes, Kernels]:
    """The vmfb, and what the passes wanted each of its kernels to compute."""
    wanted: Kernels = {}

    def collect(after: PipelinePass, module: ir.Module) -> None:
        if after.describe().partition("{")[0] == "block32-outline":
            module.operation.walk(lambda op: _collect(op, wanted))

    options = CompileOptions(target="apple-m5", after_pass=collect)
    return compile_source(path.read_bytes(), str(path), options), wanted


def _collect(op: ir.Operation, wanted: Kernels) -> ir.WalkResult:
    if op.name == "builtin.module" and problem_attribute.ATTRIBUTE in op.attributes:
        problem = problem_attribute.parse(op.attributes[problem_attribute.ATTRIBUTE])
        tiers = KernelConfig.parse(op.attributes[ATTRIBUTE]).tiers
        for function, tier in zip(op.regions[0].blocks[0], tiers, strict=True):
            name = ir.StringAttr(function.operation.attributes["sym_name"]).value
            wanted[name] = problem, tier
    return ir.WalkResult.ADVANCE


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its parameters, exported once."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(EXAMPLES / request.param))
        for name in ("decoder", "pipeline", "encoder"):
            patch.delitem(sys.modules, name, raising=False)
        MODELS[request.param][0](folder)
    (folder / "name").write_text(request.param)
    return folder


@pytest.mark.parametrize("activations", ["none", "mxfp8"])
def test_every_kernel_of_a_model(folder: Path, activations: str) -> None:
    """Every linear layer has a kernel, every epilogue of the model is in one, all are right."""
    quantised = folder / f"{activations}.mlir"
    command = ["quantize", f"{folder}/model.mlir", f"--params={folder}/model.irpa", "--quiet"]
    command += [f"--output-params={folder}/{activations}.irpa", "-o", str(quantised)]
    assert main([*command, f"--activations={activations}"]) == 0
    vmfb, wanted = _compile(quantised)
    kernels = load_kernels(vmfb)
    assert kernels.keys() == wanted.keys()
    epilogues = Counter(problem.epilogue.describe() for problem in {p for p, _ in wanted.values()})
    assert epilogues == MODELS[(folder / "name").read_text()][1]
    for name, (problem, tier) in wanted.items():
        assert problem.lhs_scaled == (activations == "mxfp8")
        for m in [1] if problem.m == 1 or tier.max_m == 1 else [2, 33]:
            operands = random_operands(Case(matmul_of(problem), tier.form, m), seed=m)
            check(execute(kernels[name], operands), operands)
