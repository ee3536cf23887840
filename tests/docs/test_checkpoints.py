# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The commands of docs/checkpoints.md work, in the order in which they stand there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, install_programs, run

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
LAYER = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint and the model of the page, in which all commands have run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    install_programs(folder)
    (model,) = blocks(PAGE, "mlir")
    (folder / "model.mlir").write_text(model)
    (program,) = blocks(PAGE, "python")
    (folder / "make.py").write_text(program)
    run(folder, "python", "make.py")
    for commands in blocks(PAGE, ""):
        run(folder, "sh", "-e", "-c", commands)
    return folder


def test_the_commands_write_what_they_name(folder: Path) -> None:
    for name in ("layers", "m"):
        assert (folder / f"{name}.vmfb").stat().st_size > 0
    for rank in ("r0", "r1"):
        text = (folder / f"{rank}.mlir").read_text()
        assert f"@{LAYER}.up_proj(%arg0: tensor<?x128xf32>) -> tensor<?x128xf32>" in text
        assert f"@{LAYER}.down_proj(%arg0: tensor<?x128xf32>) -> tensor<?x128xf32>" in text


def test_the_report(folder: Path) -> None:
    report = json.loads(run(folder, "block32", "import", "checkpoint", "tiny", "--json"))
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert list(layers) == [f"{LAYER}.up_proj", f"{LAYER}.down_proj"]
    assert layers[f"{LAYER}.up_proj"]["source"]["block"] == "128x128"
    assert layers[f"{LAYER}.up_proj"]["block"] == "32x32"
    assert [tensor["name"] for tensor in report["copied"]] == ["model.norm.weight"]


def test_help_has_examples(folder: Path) -> None:
    shown = run(folder, "block32", "import", "checkpoint", "--help")
    assert "block32 import checkpoint FOLDER -o layers.mlir --output-params=layers.irpa" in shown
    assert "checkpoint" in run(folder, "block32", "import", "--help")
