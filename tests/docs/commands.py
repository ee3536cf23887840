# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Code blocks of Markdown pages as a reader would use them: saved, and run in order.

- A block without a language is commands for a shell, ``python`` a program. Both are run.
- A paragraph before a block that says "as ``name``" or "into ``name``" saves it under that name.
- ``<!-- not run: REASON -->`` before a block leaves it out. At the end of one command,
  ``# needs ...`` does: an accelerator that tests have not.
- ``text`` and other languages are for reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- (?:not run|part of)[: ]([^>]*?)-->\s*$")
_NAME = re.compile(r"\b(?:as|into)\s+`([\w.-]+\.\w+)`")
_NEEDS = re.compile(r"\s+#\s+needs (.+)$")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: Where it starts.
        language: After the fence; empty for commands.
        code: What is in it.
        name: The file to save it as, or empty.
        not_run: Why it is not run, or empty.
    """

    line: int
    language: str
    code: str
    name: str = ""
    not_run: str = ""

    def commands(self) -> list[str]:
        """The commands to run, in order, continued lines as one."""
        found: list[str] = []
        for line in re.sub(r"\\\n\s*", "", self.code).splitlines():
            is_install = line.startswith("pip install")
            if line.strip() and not is_install and not _NEEDS.search(line):
                found.append(line)
        return found

    def extras(self) -> list[str]:
        """The extras of block32 that the commands install."""
        names = re.findall(r"block32\[([\w,-]+)\]", self.code)
        return [extra for name in names for extra in name.split(",")]


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page in order."""
    return blocks_in(page.read_text())


def blocks_in(text: str) -> list[Block]:
    """The code blocks of a Markdown text in order."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        before = text[end : match.start()]
        end = match.end()
        not_run = _NOT_RUN.search(before)
        paragraph = re.split(r"\n\s*\n", before.strip())[-1]
        name = _NAME.search(paragraph)
        found.append(
            Block(
                line=text.count("\n", 0, match.start()) + 1,
                language=match[1],
                code=match[2],
                name=name[1] if name else "",
                not_run=not_run[1].strip() if not_run else "",
            )
        )
    return found
