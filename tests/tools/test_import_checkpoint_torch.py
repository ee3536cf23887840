# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A model of ``block32.torch`` layers, exported, reads the archive of an import as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import block32
from block32.runtime import reference
from tests.checkpoints import random_layer, save
from tests.tools.imports import import_checkpoint

torch = pytest.importorskip("torch", reason="needs block32[torch]")
aot = pytest.importorskip("iree.turbine.aot", reason="needs block32[torch]")


@pytest.mark.parametrize(("block", "option"), [((32, 32), "auto"), ((1, 32), "1x32")])
def test_an_exported_model_reads_the_archive(
    tmp_path: Path, block: tuple[int, int], option: str
) -> None:
    from block32.torch import MXLinear

    layer = random_layer(96, 64, (128, 128))
    bias = np.linspace(-50, 50, 96, dtype=np.float32)
    path = save(tmp_path / "m.safetensors", {**layer.tensors("0"), "0.bias": bias})
    assert import_checkpoint(path, tmp_path, f"--block={option}") == 0

    model = torch.nn.Sequential(MXLinear(64, 96, block=block)).eval()
    aot.externalize_module_parameters(model)
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    exported = aot.export(model, args=(torch.zeros(4, 64),), dynamic_shapes={"input": rows})
    exported.save_mlir(str(tmp_path / "model.mlir"))

    vmfb = block32.compile(tmp_path / "model.mlir", target="cpu")
    module = block32.load(vmfb, parameters={"model": tmp_path / "l.irpa"})
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    comparison = reference.compare(module["main"](x), layer.multiplied(x) + bias, "f32")
    assert comparison.ok, comparison
