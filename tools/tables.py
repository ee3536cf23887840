# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables for a page of the documentation or for a terminal, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

#: Columns of text that a table may take where the terminal does not say how many it has.
LEAST_WIDTH = 110


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], is_markdown: bool) -> None:
    """Print rows of cells under ``headings``."""
    if is_markdown:
        print("| " + " | ".join(headings) + " |")
        print("|" + "---|" * len(headings))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return
    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    console.print(table)
