# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The check for Macs, as far as it goes without one: in the emulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llvmlite", reason="the apple extra (llvmlite) is not installed")
pytest.importorskip("flatbuffers", reason="the apple extra (flatbuffers) is not installed")

SCRIPT = Path(__file__).parents[2] / "examples" / "apple_check" / "apple_check.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_the_report_of_the_emulator(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = _run("--emulate", "--only", "1x64", "-o", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["device"] == "emulator" and "llvmlite" in report["machine"]
    assert len(report["outcomes"]) == 3
    assert all(outcome["passed"] and outcome["error"] < 1e-5 for outcome in report["outcomes"])


def test_nothing_run_is_no_success(tmp_path: Path) -> None:
    done = _run("--emulate", "--only", "no such case", "-o", str(tmp_path / "report.json"))
    assert done.returncode == 1 and "0 passed, 0 failed" in done.stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have the device")
def test_without_a_mac_it_says_so() -> None:
    done = _run()
    assert done.returncode == 1 and "no Metal device on this system; --emulate" in done.stdout
    assert "Traceback" not in done.stderr
