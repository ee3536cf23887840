# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The harness itself: what fails has to be seen to fail, and what is refused to be refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lit, lit_shell
from tests.fork_server import ForkServer
from tests.lit_shell import LitError, Shell, parse

pytest_plugins = ["pytester"]

INPUT = """
func.func @f(%arg0: f32) -> f32 {
  %0 = arith.addf %arg0, %arg0 : f32
  %1 = arith.mulf %0, %0 : f32
  return %1 : f32
}
"""
# The input without a tool in between, which the filecheck package reads in milliseconds.
CAT = "// RUN: cat %s.txt | FileCheck %s\n"


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    shell = Shell()
    yield shell
    shell.close()


def write(folder: Path, text: str) -> lit.LitTest:
    path = folder / "a.mlir"
    path.write_text(text)
    path.with_suffix(".mlir.txt").write_text(INPUT)
    test = lit.read(path)
    assert test is not None
    return test


def outcome(folder: Path, shell: Shell, text: str) -> str | None:
    return lit.run(write(folder, text), shell)


# ---- checks --------------------------------------------------------------------------------

PASSING = [
    "// CHECK: addf\n// CHECK-NEXT: mulf\n",
    "// CHECK-LABEL: @f\n// CHECK-SAME: f32\n// CHECK-NOT: divf\n// CHECK: return\n",
    "// CHECK: %[[SUM:.*]] = arith.addf\n// CHECK: mulf %[[SUM]], %[[SUM]]\n",
    "// CHECK-DAG: mulf\n// CHECK-DAG: addf\n",
    "// CHECK-COUNT-2: arith.\n// CHECK-NOT: arith.\n",
]
FAILING = [
    "// CHECK: subf\n",
    "// CHECK: addf\n// CHECK-NEXT: return\n",
    "// CHECK: mulf\n// CHECK: addf\n",
    "// CHECK-NOT: mulf\n",
    "// CHECK: %[[SUM:.*]] = arith.addf\n// CHECK: return %[[SUM]]\n",
    "// CHECK-COUNT-1: arith.\n// CHECK-NOT: arith.\n",
    "// CHECK-COUNT-3: arith.\n// CHECK-NOT: arith.\n",
    "// no check at all\n",
]


def one_line(checks: str) -> str:
    return checks.replace("\n", " ").replace("// ", "")


@pytest.mark.parametrize("checks", PASSING, ids=one_line)
def test_right_checks_pass(tmp_path: Path, shell: Shell, checks: str):
    assert outcome(tmp_path, shell, CAT + checks) is None


@pytest.mark.parametrize("checks", FAILING, ids=one_line)
def test_wrong_checks_fail(tmp_path: Path, shell: Shell, checks: str):
    report = outcome(tmp_path, shell, CAT + checks)
    assert report is not None
    assert f"{tmp_path}/a.mlir:1: RUN failed" in report
    assert "command: cat " in report
    assert "---- stdin" in report
    assert "---- stderr" in report


def test_failing_check_fails_the_pytest_run(pytester: pytest.Pytester):
    """Through pytest's own collection, beside a test that passes and one that is skipped."""
    root = Path(__file__).parent
    pytester.makeconftest((root / "conftest.py").read_text())
    pytester.makeini(f"[pytest]\npythonpath = {root.parent}\n")
    for name, body in {
        "good.mlir": CAT + PASSING[0],
        "bad.mlir": CAT + FAILING[0],
        "skipped.mlir": "// REQUIRES: x86, aarch64\n" + CAT + FAILING[0],
        "refused.mlir": CAT + "// CHECK-COUNT-2: arith.\n",
        "only_input.mlir": INPUT,
    }.items():
        (pytester.path / name).write_text(body)
        (pytester.path / f"{name}.txt").write_text(INPUT)
    result = pytester.runpytest_subprocess("--import-mode=importlib", "-rs")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*refused.mlir:2: error: expected a CHECK-NOT right after*"])
    (pytester.path / "refused.mlir").unlink()
    result = pytester.runpytest_subprocess("--import-mode=importlib", "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*bad.mlir:1: RUN failed", "*SKIPPED*requires *"])


# ---- commands ------------------------------------------------------------------------------

COMMANDS_THAT_PASS = [
    "iree-opt %s | FileCheck %s",
    "cat %s > %t && cat %t | FileCheck %s --check-prefixes=CHECK",
    "FileCheck %s < %s.txt",
    "FileCheck --check-prefix=CHECK --input-file=%s.txt %s",
    "not iree-opt --no-such-flag %s 2>&1 | FileCheck %s --check-prefix=FLAG",
    "not test -e %t",
    "echo '100%% | a && b' | FileCheck %s --check-prefix=ECHO",
]
COMMANDS_THAT_FAIL = [
    "iree-opt --no-such-flag %s",
    "iree-opt --no-such-flag %s 2>&1 | FileCheck %s --check-prefix=FLAG",
    "not iree-opt %s | FileCheck %s",
    "not cat %s.txt",
    "cat %s.nothing && cat %s",
    "cat %s && cat %s.nothing",
    "test -e %t",
]
CHECKS = "// CHECK: addf\n// FLAG: {{[Uu]}}nknown command line argument\n// ECHO: 100% | a && b\n"


@pytest.mark.parametrize("command", COMMANDS_THAT_PASS)
def test_commands_that_pass(tmp_path: Path, shell: Shell, command: str):
    assert outcome(tmp_path, shell, f"// RUN: {command}\n{CHECKS}{INPUT}") is None


@pytest.mark.parametrize("command", COMMANDS_THAT_FAIL)
def test_commands_that_fail(tmp_path: Path, shell: Shell, command: str):
    report = outcome(tmp_path, shell, f"// RUN: {command}\n{CHECKS}{INPUT}")
    assert report is not None
    assert "RUN failed" in report


def test_continued_lines_and_several_runs(tmp_path: Path, shell: Shell):
    runs = "// RUN: cat %s.txt \\\n// RUN:   | FileCheck %s\n// RUN: test -e %t\n"
    test = write(tmp_path, runs + PASSING[0])
    assert [number for number, _ in test.runs] == [1, 3]
    report = lit.run(test, shell)
    assert report is not None
    assert "a.mlir:3: RUN failed" in report


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CAT + "// CHECK: [[#N:]]\n", "2: error: numeric substitutions are not supported"),
        (CAT + "// CHECK: a [[#N+1]]\n", "2: error: numeric substitutions are not supported"),
        (CAT + "// CHECK: [[@LINE+1]]\n", "2: error: '@LINE' is not supported"),
        (CAT + "// CHECK: a\n// CHECK-NXT: b\n", "3: error: unknown kind of check 'CHECK-NXT'"),
        (CAT + "// CHECK-COUNT-2: a\n// CHECK: b\n", "2: error: expected a CHECK-NOT right after"),
        (CAT + "// CHECK-COUNT-2: a\n", "2: error: expected a CHECK-NOT right after"),
        (
            "// RUN: FileCheck %s --implicit-check-not=a\n",
            "1: error: FileCheck's option '--implicit-check-not=a' is not supported",
        ),
        ("// RUN: FileCheck\n", "1: error: expected FileCheck to have one file of checks"),
        ("// RUN: not --crash iree-opt %s\n", "1: error: 'not --crash' is not supported"),
        ("// RUN: iree-opt %s || true\n", r"1: error: '\|\|' is not supported"),
        ("// RUN: iree-opt %s; true\n", "1: error: ';' is not supported"),
        ("// RUN: bash -c true\n", "1: error: unknown tool 'bash'; expected one of FileCheck, "),
        ("// RUN: cat %q\n", "1: error: unknown substitution '%q'"),
        ("// RUN: cat 'a\n", "1: error: unbalanced quotes"),
        ("// RUN: cat %s |\n", "1: error: expected a command"),
        ("// RUN: cat %s >\n", "1: error: expected a file name after '>'"),
        ("// RUN: cat %s \\\n", r"1: error: expected another RUN line after '\\'"),
        ("// REQUIRES: avx513\n" + CAT, "1: error: unknown feature 'avx513'; expected one of"),
    ],
    ids=lambda text: text.split("\n")[-2][3:] if "\n" in text else "",
)
def test_refused_at_collection(tmp_path: Path, text: str, error: str):
    with pytest.raises(LitError, match=f"a.mlir:{error}"):
        write(tmp_path, text)


def test_other_prefixes_are_no_unknown_kinds(tmp_path: Path):
    write(
        tmp_path,
        CAT + "// RUN: FileCheck %s --check-prefix=CHECK-AVX\n"
        "// CHECK: a\n// CHECK-AVX: b\n// CHECK-AVX-NEXT: c\n// COM: CHECK-NXT: d\n",
    )


def test_file_without_a_run_line_is_no_test(tmp_path: Path):
    (tmp_path / "a.mlir").write_text(INPUT)
    assert lit.read(tmp_path / "a.mlir") is None


def test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(lit.FEATURES, "here", lambda: True)
    monkeypatch.setitem(lit.FEATURES, "away", lambda: False)
    reasons = {
        "REQUIRES: here": None,
        "REQUIRES: here, away": "requires away",
        "UNSUPPORTED: away": None,
        "UNSUPPORTED: away, here": "unsupported with here",
    }
    for directive, reason in reasons.items():
        assert write(tmp_path, f"// {directive}\n{CAT}").skip_reason() == reason


def test_quoted_operators_are_text():
    (pipeline,) = parse("""block32-opt --pass-pipeline='a(b{c="d|e"})' "x > y" 2>&1 | cat""")
    assert [stage.arguments for stage in pipeline] == [
        ["block32-opt", '--pass-pipeline=a(b{c="d|e"})', "x > y"],
        ["cat"],
    ]
    assert [stage.merge_stderr for stage in pipeline] == [True, False]


# ---- the server ----------------------------------------------------------------------------

PROGRAM = """
import os, sys
print(sys.argv[1:], sys.stdin.read(), __name__, flush=True)
os.write(2, b"from a descriptor")
exec(sys.argv[1])
"""


@pytest.fixture
def run_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "in").write_text("input")
    server = ForkServer({"PYTHONPATH": str(tmp_path)}, [])
    streams = (tmp_path / "in", tmp_path / "out", tmp_path / "err")

    def run(statement: str) -> tuple[int, str, str]:
        code = server.run("program", [statement], cwd=tmp_path, streams=streams, timeout=60)
        return code, streams[1].read_text(), streams[2].read_text()

    yield run
    server.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the server needs fork")
def test_server_runs_a_module_as_python_does(run_program):
    assert run_program("0") == (0, "['0'] input __main__\n", "from a descriptor")
    for statement, expected in {
        "sys.exit(3)": 3,
        "sys.exit(None)": 0,
        "sys.exit('a message')": 1,
        "os.abort()": -6,
        "1 / 0": 1,
    }.items():
        code, _, error = run_program(statement)
        assert code == expected
        assert ("a message" in error) == ("message" in statement)
        assert ("ZeroDivisionError" in error) == ("/" in statement)


@pytest.mark.skipif(sys.platform == "win32", reason="the server needs fork")
def test_own_tools_run_in_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a module of the standard library in place of block32-opt, twice in one server."""
    monkeypatch.setitem(lit_shell.PYTHON_TOOLS, "block32-opt", "json.tool")
    text = (
        "// RUN: echo '[17]' | block32-opt | FileCheck %s\n"
        "// RUN: echo '[17' | not block32-opt 2>&1 | FileCheck %s --check-prefix=ERROR\n"
        "// CHECK: {{^}}[\n// CHECK-NEXT: 17\n// ERROR: Expecting\n"
    )
    shell = Shell()
    try:
        assert outcome(tmp_path, shell, text) is None
        report = outcome(tmp_path, shell, "// RUN: echo '[17' | block32-opt\n")
    finally:
        shell.close()
    assert report is not None
    assert "'block32-opt' exited with 1" in report
    assert "Expecting" in report
