# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``.mlir`` files with RUN lines as pytest tests, in the form that LLVM's lit and FileCheck take.

    // REQUIRES: avx512bf16
    // RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s \
    // RUN:   | FileCheck %s --check-prefix=RAISE
    // RUN: not block32-opt --bad %s 2>&1 | FileCheck %s

``%s`` is the file, ``%S`` its folder, ``%t`` a temporary name of its own. ``lit_shell`` says what a
command may be, ``FEATURES`` what can be required. A file without a RUN line is no test.

Refused when the files are collected, because a check would pass on wrong output, or because the
two FileChecks (the filecheck package and LLVM's) differ: numeric substitutions, ``@LINE``,
``--implicit-check-not``, an unknown kind of check, and a CHECK-COUNT without a CHECK-NOT next
(n matches are also found where there are n + 1).
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.lit_shell import FileCheckCall, LitError, Shell, filecheck_call, parse

_DIRECTIVE = re.compile(r"^\s*//\s*(RUN|REQUIRES|UNSUPPORTED):(.*)$")
_SUBSTITUTION = re.compile(r"%(%|[A-Za-z]\b)")
_CHECK_KINDS = re.compile(r"NEXT|SAME|NOT|LABEL|DAG|EMPTY|COUNT-\d+")

SHELL = pytest.StashKey[Shell]()  # one for a session, in pytest's config


@cache
def _cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them, without underscores: ``avx512bf16``."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset(match[1].replace("_", "").split()) if match else frozenset()


def _has_cpu_flag(flag: str) -> Callable[[], bool]:
    return lambda: flag in _cpu_flags()


def _has_package(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


CPU_FLAGS = ("avx2", "avx512f", "avx512bf16", "avx512vnni", "avx512fp16", "amxbf16", "bf16")
PACKAGES = ("triton", "llvmlite", "safetensors", "torch", "onnx", "matplotlib")
FEATURES: dict[str, Callable[[], bool]] = {
    "x86": lambda: platform.machine().lower() in ("x86_64", "amd64"),
    "aarch64": lambda: platform.machine().lower() in ("aarch64", "arm64"),
    "linux": lambda: sys.platform == "linux",
    **{flag: _has_cpu_flag(flag) for flag in CPU_FLAGS},
    **{package: _has_package(package) for package in PACKAGES},
}


@dataclass(frozen=True)
class LitTest:
    """A test file: ``runs`` are its RUN lines with the number of the line each begins at."""

    path: Path
    runs: tuple[tuple[int, str], ...]
    requires: tuple[str, ...]
    unsupported: tuple[str, ...]

    def skip_reason(self) -> str | None:
        """Why the test does not run on this machine, or None if it does."""
        missing = [name for name in self.requires if not FEATURES[name]()]
        if missing:
            return f"requires {', '.join(missing)}"
        present = [name for name in self.unsupported if FEATURES[name]()]
        return f"unsupported with {', '.join(present)}" if present else None


def read(path: Path) -> LitTest | None:
    """Read a file's directives and check all that can be checked without running it.

    Returns None for a file without a RUN line.

    Raises:
        LitError: If the harness refuses the file; the message has its name and line.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found: dict[str, list[tuple[int, str]]] = {"RUN": [], "REQUIRES": [], "UNSUPPORTED": []}
    for number, line in enumerate(lines, 1):
        if match := _DIRECTIVE.match(line):
            found[match[1]].append((number, match[2].strip()))
    if not found["RUN"]:
        return None
    test = LitTest(
        path,
        _join_continued(path, found["RUN"]),
        _features(path, found["REQUIRES"]),
        _features(path, found["UNSUPPORTED"]),
    )
    calls: list[FileCheckCall] = []
    for number, run in test.runs:
        with _located(path, number):
            pipelines = parse(substitute(run, path, path.with_suffix(".tmp")))
        stages = [stage for pipeline in pipelines for stage in pipeline]
        calls += [filecheck_call(s.arguments) for s in stages if s.tool == "FileCheck"]
    all_prefixes = {prefix for call in calls for prefix in call.prefixes}
    for call in calls:
        if Path(call.check_file).exists():  # else it is made by an earlier command
            _refuse_checks(call, all_prefixes)
    return test


@contextmanager
def _located(path: Path, line: int) -> Iterator[None]:
    """Put ``file:line: error:`` before the message of a LitError."""
    try:
        yield
    except LitError as error:
        raise LitError(f"{path}:{line}: error: {error}") from None


def _join_continued(path: Path, runs: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    joined: list[tuple[int, str]] = []
    continued = False
    for number, text in runs:
        body = text.removesuffix("\\").rstrip()
        if continued:
            start, before = joined.pop()
            joined.append((start, f"{before} {body}"))
        else:
            joined.append((number, body))
        continued = text.endswith("\\")
    if continued:
        raise LitError(f"{path}:{runs[-1][0]}: error: expected another RUN line after '\\'")
    return tuple(joined)


def _features(path: Path, found: list[tuple[int, str]]) -> tuple[str, ...]:
    names: list[str] = []
    for number, text in found:
        for name in (part.strip() for part in text.split(",")):
            if name not in FEATURES:
                known = ", ".join(sorted(FEATURES))
                raise LitError(
                    f"{path}:{number}: error: unknown feature '{name}'; expected one of {known}"
                )
            names.append(name)
    return tuple(names)


def substitute(run: str, path: Path, temporary: Path) -> str:
    """Put in the values of %s, %S, %t and %%.

    Raises:
        LitError: For any other %-name.
    """
    values = {"s": str(path), "S": str(path.parent), "t": str(temporary), "%": "%"}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise LitError(f"unknown substitution '{match[0]}'; expected %s, %S, %t or %%")
        return values[match[1]]

    return _SUBSTITUTION.sub(value, run)


def _refuse_checks(call: FileCheckCall, all_prefixes: set[str]) -> None:
    """Refuse checks that LLVM's FileCheck reads otherwise, or that pass on wrong output.

    ``all_prefixes`` are those of all of the file's FileCheck calls.
    """
    path = Path(call.check_file)
    count_at = None  # the line of a CHECK-COUNT that the line before this one was
    for number, prefix, kind, pattern in _checks(path, call.prefixes):
        with _located(path, number):
            if kind and not _CHECK_KINDS.fullmatch(kind):
                name = f"{prefix}-{kind}"
                longer = [other for other in all_prefixes if len(other) > len(prefix)]
                if not any(f"{name}-".startswith(f"{other}-") for other in longer):
                    raise LitError(f"unknown kind of check '{name}'")
                continue
            if "[[#" in pattern:
                raise LitError("numeric substitutions are not supported")
            if "@LINE" in pattern:
                raise LitError("'@LINE' is not supported")
        if count_at is not None and kind != "NOT":
            break
        count_at = number if kind.startswith("COUNT") else None
    if count_at is not None:
        with _located(path, count_at):
            raise LitError(
                "expected a CHECK-NOT right after a CHECK-COUNT, which alone passes on more matches"
            )


def _checks(path: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[int, str, str, str]]:
    """The checks in a file: line, prefix, kind (``NEXT``, ..., empty for a plain one), pattern."""
    longest_first = sorted(map(re.escape, prefixes), key=len, reverse=True)
    check = re.compile(
        rf"(?:^|[^\w-])({'|'.join(longest_first)})(?:-([A-Z][A-Z0-9_-]*))?(?:\{{LITERAL\}})?:(.*)"
    )
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        match = check.search(line)
        if match and not re.search(r"\b(COM|RUN):", line[: match.start(1)]):
            yield number, match[1], match[2] or "", match[3]


def run(test: LitTest, shell: Shell) -> str | None:
    """Run all commands of a test. Returns what failed, with its output, or None."""
    with tempfile.TemporaryDirectory(prefix="block32-lit-") as folder:
        temporary = Path(folder) / f"{test.path.stem}.tmp"
        for number, text in test.runs:
            for pipeline in parse(substitute(text, test.path, temporary)):
                failure = shell.run(pipeline, Path(folder))
                if failure is not None:
                    return f"{test.path}:{number}: RUN failed\n{failure}"
    return None


class LitRunError(Exception):
    """A RUN line that failed; the message is the whole report."""


class LitFile(pytest.File):
    """Collects a ``.mlir`` file."""

    def collect(self):
        try:
            test = read(self.path)
        except LitError as error:
            raise self.CollectError(str(error)) from None
        if test is not None:
            yield LitItem.from_parent(self, name="run", test=test)


class LitItem(pytest.Item):
    """All RUN lines of a file, in order."""

    def __init__(self, *, test: LitTest, **arguments: object) -> None:
        super().__init__(**arguments)  # pyright: ignore[reportArgumentType]
        self.test = test

    def runtest(self) -> None:
        reason = self.test.skip_reason()
        if reason is not None:
            pytest.skip(reason)
        failure = run(self.test, self.config.stash[SHELL])
        if failure is not None:
            raise LitRunError(failure)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None):
        if isinstance(excinfo.value, LitRunError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, 0, self.path.name
