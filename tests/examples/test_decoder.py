# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The decoder example: prefill and decode in one module give the float64 reference's tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs block32[examples]")
pytest.importorskip("iree.turbine", reason="needs block32[examples]")

SCRIPT = Path(__file__).parents[2] / "examples" / "decoder" / "decoder.py"


def test_greedy_tokens_are_those_of_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tokens=12"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.endswith("equal\n")
    assert done.stdout.startswith("30 matmuls by block32")
