# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The command language of RUN lines: a small part of a shell, read and run without one.

A line is ``command && command ...``, a command is ``stage | stage ...``, a stage is a tool with
arguments, ``> FILE``, ``2> FILE``, ``2>&1`` and ``< FILE``. Every stage has to exit with zero (with
``not`` in front: with another code, but not by a crash). ``||`` and ``;`` would hide a failure and
are refused, as is any tool that is not listed here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import filecheck.main

from tests.fork_server import ForkServer

ROOT = Path(__file__).resolve().parent.parent
PYTHON_TOOLS = {"block32": "block32.tools.cli", "block32-opt": "block32.tools.opt"}
IREE_TOOLS = {"iree-opt", "iree-compile"}
SYSTEM_TOOLS = {"cat", "cmp", "cp", "diff", "echo", "head", "mkdir", "printf", "rm", "test"}
TIMEOUT_S = 600  # only so that a test which hangs ends at some time
FILECHECK_VARIABLE = "BLOCK32_FILECHECK"  # the path of LLVM's FileCheck, to use it instead

_TOKEN = re.compile(
    r"""\s+
    |(?P<operator>2>&1|2>|&&|\|\||[|><;&])
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s|&<>;'"\\])+)""",
    re.VERBOSE,
)
_FILECHECK_FLAGS = {"match-full-lines", "strict-whitespace", "enable-var-scope", "allow-empty"}
_FILECHECK_VALUES = {"check-prefix", "check-prefixes", "input-file"}


class LitError(Exception):
    """A test that is written in a way which the harness refuses."""


@dataclass
class Stage:
    """One tool of a pipeline."""

    arguments: list[str] = field(default_factory=list)
    negated: bool = False
    stdin: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    merge_stderr: bool = False

    @property
    def tool(self) -> str:
        return self.arguments[0]

    def __str__(self) -> str:
        text = ("not " if self.negated else "") + shlex.join(self.arguments)
        for operator, name in (("<", self.stdin), (">", self.stdout), ("2>", self.stderr)):
            text += f" {operator} {shlex.quote(name)}" if name else ""
        return text + (" 2>&1" if self.merge_stderr else "")


@dataclass(frozen=True)
class FileCheckCall:
    """What a FileCheck stage reads: its file of checks, and the prefixes it looks for."""

    check_file: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """The stage that failed, and all that is known about it."""

    pipeline: list[Stage]
    stage: Stage
    code: int
    stdin: bytes
    stdout: bytes
    stderr: bytes

    def __str__(self) -> str:
        lines = ["command: " + " | ".join(str(stage) for stage in self.pipeline)]
        if self.stage.negated and self.code == 0:
            lines.append(f"expected '{self.stage.tool}' to fail but it exited with 0")
        elif self.code < 0:
            lines.append(f"'{self.stage.tool}' was ended by signal {-self.code}")
        else:
            lines.append(f"'{self.stage.tool}' exited with {self.code}")
        for name in ("stdin", "stdout", "stderr"):
            text = getattr(self, name).decode(errors="replace").rstrip()
            if text:
                lines += [f"---- {name}", _clip(text)]
        return "\n".join(lines)


def _clip(text: str, limit: int = 300) -> str:
    lines = text.split("\n")
    if len(lines) <= limit:
        return text
    return "\n".join([*lines[:limit], f"... {len(lines) - limit} more lines"])


def parse(line: str) -> list[list[Stage]]:
    """Read a RUN line, already substituted: the pipelines to run one after the other.

    Raises:
        LitError: For what is not of this language.
    """
    pipelines = [[Stage()]]
    tokens = _tokens(line)
    for kind, token in tokens:
        stage = pipelines[-1][-1]
        if kind == "word":
            stage.arguments.append(token)
        elif token == "|":
            pipelines[-1].append(Stage())
        elif token == "&&":
            pipelines.append([Stage()])
        elif token == "2>&1":
            stage.merge_stderr = True
        elif token in (">", "2>", "<"):
            kind, name = next(tokens, ("", ""))
            if kind != "word":
                raise LitError(f"expected a file name after '{token}'")
            setattr(stage, {">": "stdout", "2>": "stderr", "<": "stdin"}[token], name)
        else:
            raise LitError(f"'{token}' is not supported; use '&&' or another RUN line")
    for pipeline in pipelines:
        for stage in pipeline:
            _check_stage(stage)
    return pipelines


def _tokens(line: str):
    position = 0
    while position < len(line):
        match = _TOKEN.match(line, position)
        if match is None:
            raise LitError(f"unbalanced quotes in '{line}'")
        position = match.end()
        if match["operator"]:
            yield "operator", match["operator"]
        elif match["word"]:
            yield "word", shlex.split(match["word"])[0]


def _check_stage(stage: Stage) -> None:
    while stage.arguments[:1] == ["not"]:
        stage.arguments.pop(0)
        stage.negated = not stage.negated
        if stage.arguments[:1] == ["--crash"]:
            raise LitError("'not --crash' is not supported: no tool may crash")
    if not stage.arguments:
        raise LitError("expected a command")
    if stage.tool == "FileCheck":
        filecheck_call(stage.arguments)
    elif stage.tool not in {*PYTHON_TOOLS, *IREE_TOOLS, *SYSTEM_TOOLS}:
        known = ", ".join(sorted({*PYTHON_TOOLS, *IREE_TOOLS, *SYSTEM_TOOLS, "FileCheck", "not"}))
        raise LitError(f"unknown tool '{stage.tool}'; expected one of {known}")


def filecheck_call(arguments: list[str]) -> FileCheckCall:
    """Read FileCheck's arguments, refusing options that one of the two FileChecks lacks."""
    files: list[str] = []
    prefixes: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-"):
            files.append(argument)
        elif name in _FILECHECK_VALUES:
            value = value if equals else next(rest, "")
            if name != "input-file":
                prefixes += value.split(",")
        elif name not in _FILECHECK_FLAGS and not argument.startswith("-D"):
            raise LitError(f"FileCheck's option '{argument}' is not supported")
    if len(files) != 1:
        raise LitError(f"expected FileCheck to have one file of checks but got {files}")
    return FileCheckCall(files[0], tuple(prefixes) or ("CHECK",))


class Shell:
    """Runs parsed RUN lines. It starts the server for block32's own tools when one is needed."""

    def __init__(self) -> None:
        path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._server: ForkServer | None = None

    def close(self) -> None:
        """End the server, if it runs."""
        if self._server is not None:
            self._server.close()

    def run(self, pipeline: list[Stage], folder: Path) -> Failure | None:
        """Run a pipeline in ``folder``, which also takes the output of its stages.

        Returns None if all stages did what they should, else the first that did not.
        """
        previous = Path(os.devnull)
        for number, stage in enumerate(pipeline):
            stdin = folder / stage.stdin if stage.stdin else previous
            stdout = folder / (stage.stdout or f".stdout{number}")
            stderr = folder / (stage.stderr or f".stderr{number}")
            stderr = stdout if stage.merge_stderr else stderr
            code = self._run_tool(stage.arguments, folder, (stdin, stdout, stderr))
            # The wrappers of IREE's tools pass a signal on as a code of 128 and above.
            crashed = code < 0 or code >= 128
            if crashed or (code != 0) != stage.negated:
                read = b"" if stdin == Path(os.devnull) else stdin.read_bytes()
                error = b"" if stderr == stdout else stderr.read_bytes()
                return Failure(pipeline, stage, code, read, stdout.read_bytes(), error)
            previous = Path(os.devnull) if stage.stdout else stdout
        return None

    def _run_tool(self, arguments: list[str], folder: Path, streams: tuple[Path, Path, Path]):
        tool, rest = arguments[0], arguments[1:]
        if tool == "FileCheck":
            if FILECHECK_VARIABLE in os.environ:
                return self._spawn([os.environ[FILECHECK_VARIABLE], *rest], folder, streams)
            return _run_filecheck(arguments, folder, streams)
        if tool in PYTHON_TOOLS:
            return self._run_module(PYTHON_TOOLS[tool], rest, folder, streams)
        program = shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)
        if program is None:
            streams[1].touch()
            streams[2].write_text(f"{tool} is not installed\n")
            return 127
        return self._spawn([program, *rest], folder, streams)

    def _run_module(
        self, module: str, arguments: list[str], folder: Path, streams: tuple[Path, Path, Path]
    ) -> int:
        if not hasattr(os, "fork"):
            return self._spawn([sys.executable, "-m", module, *arguments], folder, streams)
        if self._server is None:
            self._server = ForkServer(self._env, list(PYTHON_TOOLS.values()))
        return self._server.run(module, arguments, cwd=folder, streams=streams, timeout=TIMEOUT_S)

    def _spawn(self, command: list[str], folder: Path, streams: tuple[Path, Path, Path]) -> int:
        stdin, stdout, stderr = streams
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(stdout.open("wb"))
            merge = stderr == stdout
            error = subprocess.STDOUT if merge else stack.enter_context(stderr.open("wb"))
            source = stack.enter_context(stdin.open("rb"))
            try:
                return subprocess.run(
                    command,
                    stdin=source,
                    stdout=output,
                    stderr=error,
                    cwd=folder,
                    env=self._env,
                    timeout=TIMEOUT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return -9


def _run_filecheck(arguments: list[str], folder: Path, streams: tuple[Path, Path, Path]) -> int:
    """Run the filecheck package in this process: it is pure Python and takes milliseconds."""
    output, error = io.StringIO(), io.StringIO()
    before = sys.stdin
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(error),
            streams[0].open(encoding="utf-8", errors="replace") as sys.stdin,
        ):
            filecheck.main.main(list(arguments))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as problem:
        error.write(f"{type(problem).__name__}: {problem}\n")
        code = 2
    finally:
        sys.stdin = before
    streams[1].write_text(output.getvalue())
    if streams[2] != streams[1]:
        streams[2].write_text(error.getvalue())
    else:
        streams[1].write_text(output.getvalue() + error.getvalue())
    return code
