# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Progress bars on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(quiet: bool, *columns: ProgressColumn) -> Progress:
    """A bar that is gone at its end; none where stderr is no terminal, which would keep it.

    Args:
        quiet: Show none at all.
        columns: What stands in a line; by default task, bar, percentage and time left.
    """
    console = Console(stderr=True)
    disable = quiet or not console.is_terminal
    return Progress(*columns, console=console, disable=disable, transient=True)
