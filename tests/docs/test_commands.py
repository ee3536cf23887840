# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every command and program of the pages works, in the order in which it stands there.

Pages with a test of their own (``test_NAME.py``) are left to it. ``commands.py`` says how pages
mark what is not run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from block32.runtime.archive import NewEntry, write_archive
from tests.docs.commands import Block, blocks_of
from tests.docs.pages import ROOT, install_programs, run

README = ROOT / "README.md"
PAGES = [
    page
    for page in [*sorted((ROOT / "docs").glob("*.md")), README, ROOT / "CONTRIBUTING.md"]
    if not (ROOT / "tests" / "docs" / f"test_{page.stem}.py").exists() or page == README
]
#: Folders of the checkout that commands name.
LINKED = ("examples", "benchmarks", "docs", "lowering")
#: Packages without which a page's commands do not work.
NEEDED = {
    "onnx": ("onnx",),
    "torch": ("torch", "iree.turbine"),
    "tutorial": ("torch", "iree.turbine", "safetensors"),
    "apple": ("llvmlite", "flatbuffers"),
    "gfx950_estimate": ("tinygrad",),
}
PARAMETER_MODEL = """
util.global private @w = #flow.parameter.named<"model"::"w"> : tensor<96x64xf32>
func.func @main(%x: tensor<?x64xf32>) -> tensor<?x96xf32> {
  %w = util.global.load @w : tensor<96x64xf32>
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x64xf32>
  %zero = arith.constant 0.0 : f32
  %et = tensor.empty() : tensor<64x96xf32>
  %t = linalg.transpose ins(%w : tensor<96x64xf32>) outs(%et : tensor<64x96xf32>)
      permutation = [1, 0]
  %e = tensor.empty(%m) : tensor<?x96xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<?x96xf32>) -> tensor<?x96xf32>
  %y = linalg.matmul ins(%x, %t : tensor<?x64xf32>, tensor<64x96xf32>)
      outs(%f : tensor<?x96xf32>) -> tensor<?x96xf32>
  return %y : tensor<?x96xf32>
}
"""


def linear_model() -> str:
    """The model of the README, with a smaller weight."""
    (model,) = (block.code for block in blocks_of(README) if block.name == "linear.mlir")
    sizes = {"4096x1024": "256x128", "128x32xf8E8": "8x4xf8E8", "?x1024": "?x128"}
    sizes |= {"?x32xf8E8": "?x4xf8E8", "?x4096": "?x256"}
    for old, new in sizes.items():
        model = model.replace(old, new)
    return model


def write_linear(folder: Path, name: str = "model.mlir") -> None:
    (folder / name).write_text(linear_model())


def write_parameter_model(folder: Path) -> None:
    """A model as exporters write it, its weights, and an input."""
    rng = np.random.default_rng(0)
    (folder / "model.mlir").write_text(PARAMETER_MODEL)
    weight = rng.standard_normal((96, 64)).astype(np.float32).tobytes()
    with (folder / "model.irpa").open("wb") as stream:
        write_archive(stream, [NewEntry("w", len(weight), lambda: iter([weight]))])
    np.save(folder / "x.npy", rng.standard_normal((3, 64)).astype(np.float32))


def write_gfx950_module(folder: Path) -> None:
    write_linear(folder)
    run_command(folder, "block32 compile model.mlir --target=gfx950 --quiet -o model.vmfb")


#: What a page supposes that its reader has.
GIVEN: dict[str, Callable[[Path], None]] = {
    "apple": write_linear,
    "cpu": write_linear,
    "gfx950_estimate": write_gfx950_module,
    "models": write_parameter_model,
    "nvidia": write_linear,
    "passes": lambda folder: write_linear(folder, "in.mlir"),
    "spec": write_linear,
}


def prepare(folder: Path) -> None:
    """Programs under the names that pages call them by, and the checkout's folders."""
    install_programs(folder)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def run_command(folder: Path, command: str) -> None:
    run(folder, "sh", "-e", "-c", command)


def to_run(page: Path) -> list[Block]:
    """The blocks of a page that are run; those of the README's longest section have a test."""
    blocks = blocks_of(page)
    if page == README:
        section = re.search(r"^## Five minutes.*?(?=^## )", page.read_text(), re.M | re.S)
        assert section is not None
        blocks = [block for block in blocks if block.code not in section[0]]
    return [block for block in blocks if block.language in ("", "python") and not block.not_run]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_page_work(page: Path, tmp_path: Path) -> None:
    blocks = to_run(page)
    if not any(block.commands() for block in blocks):
        pytest.skip("nothing to run")
    missing = [n for n in NEEDED.get(page.stem, ()) if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    prepare(tmp_path)
    if page.stem in GIVEN:
        GIVEN[page.stem](tmp_path)
    for block in blocks:
        if block.language == "python":
            name = block.name or "program.py"
            (tmp_path / name).write_text(block.code)
            run_command(tmp_path, f"python {name}")
            continue
        for command in block.commands():
            run_command(tmp_path, command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_extras_that_a_page_names_exist(page: Path) -> None:
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for block in blocks_of(page):
        assert set(block.extras()) <= set(known), f"{page.name}:{block.line}"


def test_blocks_are_read_as_a_reader_does(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Save this\nas `a.py`:\n\n```python\nx = 1\n```\n\nRun\n\n```\n"
        "pip install 'block32[torch]'\nblock32 run \\\n    a.vmfb\n"
        "block32 run b.vmfb --device=hip  # needs an MI355X\n```\n\n"
        "<!-- not run: takes an hour -->\n```\nsleep 3600\n```\n\n```text\nno command\n```\n"
    )
    program, commands, slow, text = blocks_of(page)
    assert (program.language, program.name, program.code) == ("python", "a.py", "x = 1\n")
    assert commands.commands() == ["block32 run a.vmfb"]
    assert commands.extras() == ["torch"]
    assert (slow.not_run, text.language, text.line) == ("takes an hour", "text", 22)
