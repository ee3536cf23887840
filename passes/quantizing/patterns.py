# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Names of layers as users give them: with ``*`` and ``?`` as in a shell, and no brackets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from block32.dialects.diagnostics import DiagnosticError


def split_patterns(text: str) -> list[str]:
    r"""Patterns separated by commas; ``\,`` is a comma and ``\\`` a backslash inside of one."""
    patterns = re.findall(r"(?:[^,\\]|\\.)+", text)
    return [re.sub(r"\\(.)", r"\1", pattern).strip() for pattern in patterns if pattern.strip()]


def join_patterns(patterns: Iterable[str]) -> str:
    """The text that ``split_patterns`` takes apart."""
    return ",".join(re.sub(r"([,\\])", r"\\\1", pattern) for pattern in patterns)


def names_matching(patterns: Iterable[str], names: Sequence[str], asked_by: str) -> set[str]:
    """The names that any of the patterns matches.

    Args:
        patterns: What the user gave.
        names: The layers that there are.
        asked_by: The command or the option, for errors.

    Raises:
        DiagnosticError: A pattern matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        # Brackets are letters: layers are often named as what indexes them, "layers[0].fc".
        shell_pattern = pattern.replace("[", "[[]")
        matching = {name for name in names if fnmatchcase(name, shell_pattern)}
        if not matching:
            known = ", ".join(sorted(names)[:8]) or "none"
            raise DiagnosticError(
                asked_by,
                f"the pattern '{pattern}' matches no linear layer",
                (f"layers are {known}{', ...' if len(names) > 8 else ''}",),
            )
        found |= matching
    return found
