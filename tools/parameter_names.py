# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Names of parameters that IREE cannot write: it leaves out the escapes, and then reads others."""

from __future__ import annotations

import re
from typing import Final

from block32.dialects.diagnostics import DiagnosticError

#: A parameter in MLIR text, its scope and name as they are written.
_PARAMETER: Final = re.compile(
    rb'#flow\.parameter\.named<(?:"(?P<scope>(?:[^"\\]|\\.)*)"::)?"(?P<key>(?:[^"\\]|\\.)*)">'
)
#: What MLIR escapes in a string: a character for itself, or the two digits of a byte.
_ESCAPE: Final = re.compile(rb"\\([0-9A-Fa-f]{2}|.)")
_LETTERS: Final = {b"n": b"\n", b"t": b"\t"}


def needs_escapes(name: str) -> bool:
    """Whether a name needs escapes, without which IREE 3.13 writes those of parameters."""
    return '"' in name or "\\" in name or not name.isprintable()


def check_parameter_names(source: bytes, name: str) -> None:
    """Refuse a module in which a parameter has a name that would be lost on the way.

    Args:
        source: The module. Bytecode cannot have such names.
        name: Its file name.

    Raises:
        DiagnosticError: At the first of them.
    """
    for match in _PARAMETER.finditer(source):
        for part in filter(None, (match["scope"], match["key"])):
            if b"\\" in part and needs_escapes(_unescaped(part)):
                written = part.decode(errors="replace")
                before = source[: match.start()]
                line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
                raise DiagnosticError(
                    f"{name}:{line}:{column}",
                    f"the parameter name '{written}' has a quote, a backslash or an unprintable "
                    "character, which IREE 3.13 writes without escapes and cannot read again; "
                    "expected another name",
                )


def _unescaped(text: bytes) -> str:
    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes.fromhex(code.decode()) if len(code) == 2 else _LETTERS.get(code, code)

    return _ESCAPE.sub(replace, text).decode(errors="replace")
