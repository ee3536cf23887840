# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs ``python -m MODULE`` many times without paying for its imports each time.

One process imports the compiler's bindings once and forks for each request, so a command that
aborts (an assertion of the compiler) takes nothing else with it, and what the compiler writes
to the file descriptors, past Python, is caught as well. The process starts no threads, which
is what makes its forks safe; pytest's own process could not promise that.

The client is ``ForkServer``; the server is this file run as a script.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

_PRELOAD = ("iree.compiler.ir", "iree.compiler.dialects.linalg", "block32.passes")


class ForkServer:
    """The client side. ``run`` returns exit codes as ``subprocess`` does: -N for a signal N."""

    def __init__(self, env: dict[str, str], modules: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(
        self,
        module: str,
        arguments: list[str],
        *,
        cwd: Path,
        streams: tuple[Path, Path, Path],
        timeout: int,
    ) -> int:
        """Run ``python -m module arguments...`` with stdin, stdout and stderr from and to files.

        Raises:
            RuntimeError: If the server itself has ended.
        """
        assert self._process.stdin and self._process.stdout
        request = {
            "module": module,
            "arguments": arguments,
            "cwd": str(cwd),
            "streams": [str(stream) for stream in streams],
            "timeout": timeout,
        }
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError("the process that runs block32 for tests has ended")
        return int(reply)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _redirect(streams: list[str]) -> None:
    stdin, stdout, stderr = streams
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.dup2(os.open(stdout, write), 1)
    os.dup2(1 if stderr == stdout else os.open(stderr, write), 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run_module(module: str, arguments: list[str]) -> int:
    """Run as ``python -m`` would; the exit code that the interpreter would give."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it runs anew, as __main__
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _child(request: dict[str, object]) -> None:
    code = 1
    try:
        signal.alarm(int(str(request["timeout"])))  # ends the process inside C++, too
        streams, arguments = request["streams"], request["arguments"]
        assert isinstance(streams, list) and isinstance(arguments, list)
        os.chdir(str(request["cwd"]))
        _redirect(streams)
        code = _run_module(str(request["module"]), arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _serve(modules: list[str]) -> None:
    sys.path.pop(0)  # this file's folder, which `python -m` would not search
    for module in (*_PRELOAD, *modules):
        # What cannot be imported says so in the test that runs it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _child(json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
