# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How block32's programs end: their exit codes, and what a user sees of an error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Final

from block32.dialects.diagnostics import DiagnosticError

#: What ends a run from outside; Windows has no terminals that hang up.
_ENDINGS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


def exit_code_of(run: Callable[[], int]) -> int:
    """Run a program; returns its exit code.

    A user's mistake is one located line on stderr and exit code 1. A run that is ended from outside
    takes its temporary files and its iree-compile with it, and gives 130.
    """
    if current_thread() is main_thread():
        # Like Ctrl-C: temporary files go, and so does a running iree-compile.
        for ending in _ENDINGS:
            # nohup ignores the end of its terminal.
            if signal.getsignal(ending) != signal.SIG_IGN:
                signal.signal(ending, signal.default_int_handler)
    try:
        return run()
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
