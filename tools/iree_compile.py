# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running the wheel's ``iree-compile`` as a process.

A process of its own, because the compiler aborts on some inputs: the caller gets an error then, and
not the end of its interpreter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from iree.compiler.tools.binaries import find_tool

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.target import DeviceFacts

_LOCATED_ERROR = re.compile(
    r"^(?P<location>.+?:\d+(?::\d+)?): error: (?P<message>.+)$", re.MULTILINE
)
_PROBE = b"func.func @probe() { return }\n"


class IreeCompileError(DiagnosticError):
    """``iree-compile`` refused its input or broke.

    Attributes:
        stderr: All that it printed.
    """

    def __init__(self, location: str, message: str, stderr: str):
        """See the class's attributes."""
        super().__init__(location, message)
        self.stderr = stderr


def run_iree_compile(
    arguments: Sequence[str],
    *,
    stdin: bytes | None = None,
    input_name: str = "<stdin>",
    shows_messages: bool = False,
) -> bytes:
    """Run ``iree-compile`` and give back what it wrote to its standard output.

    Args:
        arguments: Its command line, without the program.
        stdin: What it reads where the command line names ``-``.
        input_name: Names the input in errors that have no location.
        shows_messages: Pass on what it prints though it succeeds: warnings, and what flags such
            as ``--mlir-print-ir-after`` ask for.

    Raises:
        IreeCompileError: It exited with an error, or was killed.
        DiagnosticError: It is not installed.
    """
    command = [find_iree_compile(), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    stderr = done.stderr.decode(errors="replace")
    if done.returncode == 0:
        if shows_messages:
            sys.stderr.write(stderr)
        return done.stdout
    raise _explain(stderr, done.returncode, input_name)


def find_iree_compile() -> str:
    """The program in the installed compiler package.

    Raises:
        DiagnosticError: It is not there.
    """
    try:
        return find_tool("iree-compile")
    except ValueError as error:
        raise DiagnosticError(
            "block32", "the program iree-compile is missing; install iree-base-compiler again"
        ) from error


def _explain(stderr: str, code: int, input_name: str) -> IreeCompileError:
    """The first located error, or the first line that says anything."""
    located = _LOCATED_ERROR.search(stderr)
    if located:
        location = re.sub(r"^(-|<stdin>):", f"{input_name}:", located["location"])
        location = re.sub(r"^<unknown>:0$", input_name, location)
        return IreeCompileError(location, located["message"].strip(), stderr)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if code < 0 or code >= 128:
        reason = f"iree-compile was ended by signal {-code if code < 0 else code - 128}"
        assertion = next((line for line in lines if "LLVM ERROR" in line), "")
        return IreeCompileError(input_name, f"{reason}: {assertion}".rstrip(": "), stderr)
    message = lines[0] if lines else f"iree-compile exited with {code}"
    return IreeCompileError(input_name, re.sub(r"^(error|iree-compile): *", "", message), stderr)


@lru_cache(maxsize=32)
def device_facts(flags: tuple[str, ...]) -> DeviceFacts:
    """What IREE makes of the user's target flags: CPU features, architecture or chip.

    Read off a probe that is compiled with the same flags up to the phase where IREE writes the
    devices into the module.

    Raises:
        IreeCompileError: IREE refuses the flags.
    """
    probe = run_iree_compile(
        ["-", "--compile-to=preprocessing", *flags], stdin=_PROBE, input_name="<target flags>"
    ).decode(errors="replace")
    return facts_of(probe)


def facts_of(devices: str) -> DeviceFacts:
    """What the attributes of devices say, in IR: CPU features, architecture or chip."""
    features = re.search(r'cpu_features = "([^"]*)"', devices)
    triple = re.search(r'target_triple = "([^"-]*)', devices)
    chip = re.search(r'#iree_gpu\.target<arch = "([^"]*)"', devices)
    enabled: set[str] = set()
    for item in features[1].split(",") if features else ():
        if item.startswith("-"):
            enabled.discard(item[1:])
        else:
            enabled.add(item.removeprefix("+"))
    architecture = chip[1] if chip else triple[1] if triple else ""
    return DeviceFacts(frozenset(enabled), architecture)


class FileContent(bytes):
    """The bytes of a file: whoever needs them may also read the file.

    Attributes:
        path: The file.
    """

    path: str

    @classmethod
    def read(cls, path: str) -> FileContent:
        """Read a file.

        Raises:
            OSError: It cannot be read.
        """
        content = cls(Path(path).read_bytes())
        content.path = path
        return content


def read_input(path: str, stdin: bytes | None = None) -> bytes:
    """The bytes of an input file, or ``stdin`` for ``-``.

    Raises:
        DiagnosticError: The file cannot be read or is empty.
    """
    if path == "-":
        content = stdin or b""
    else:
        try:
            content = FileContent.read(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DiagnosticError(path, f"cannot read the input: {reason.lower()}") from error
    if not content.strip():
        name = "<stdin>" if path == "-" else path
        raise DiagnosticError(f"{name}:1:1", "expected an MLIR module but the input is empty")
    return content
