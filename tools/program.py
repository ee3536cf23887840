# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How block32's programs end: their exit codes, and what a user sees of an error."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Sequence
from threading import current_thread, main_thread
from typing import Final

from block32.dialects.diagnostics import DiagnosticError

#: What ends a run from outside; Windows has no terminals that hang up.
_ENDINGS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


def exit_code_of(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a program; returns its exit code.

    Args:
        run: The program, from its arguments to its exit code.
        argv: The arguments; those of the process by default.

    A user's mistake is one located line on stderr and exit code 1. A run that is ended from outside
    takes its temporary files and its iree-compile with it, and gives 130.
    """
    if current_thread() is main_thread():
        # Like Ctrl-C: temporary files go, and so does a running iree-compile.
        for ending in _ENDINGS:
            # nohup ignores the end of its terminal.
            if signal.getsignal(ending) != signal.SIG_IGN:
                signal.signal(ending, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr does it: a terminal without a character that is printed gets an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = sys.argv[1:] if argv is None else argv
        _check_encoding(arguments)
        return run(arguments)
    except DiagnosticError as error:
        print(error.render(), file=sys.stderr)
        return 1
    except MemoryError:
        print("block32: error: the memory of this machine does not suffice", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("block32: interrupted", file=sys.stderr)
        return 130


def _check_encoding(argv: Sequence[str]) -> None:
    """Refuse bytes that are no UTF-8, which Python keeps as surrogates: IREE aborts on them."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise DiagnosticError("block32", f"expected UTF-8 but got {argument!r}") from error
