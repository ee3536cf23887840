# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""JSON from files that nobody vouches for: every fault is one error, and no key comes twice."""

from __future__ import annotations

import json
from typing import Any, Final

#: Parsing makes up to 36 bytes of objects from a byte of text (measured; lists of empty lists), so
#: that 1 GB is not passed. Headers and indices of published checkpoints have 10 MB at the most.
MOST_BYTES: Final = 24 << 20


class JsonError(ValueError):
    """The text is no JSON as it is expected; the message goes after the file's name."""


def parse_json(content: bytes, what: str) -> dict[str, Any]:
    """The JSON object that a text is.

    Args:
        content: The text, UTF-8.
        what: Names it in errors: ``the header``.

    Raises:
        JsonError: It is too long, no UTF-8, no JSON, nested too deeply, no object, or an object
            in it has a key twice.
    """
    if len(content) > MOST_BYTES:
        raise JsonError(f"{what} has {len(content)} bytes; expected at most {MOST_BYTES}")
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise JsonError(f"{what} is no UTF-8: byte {error.start} is wrong") from error
    except RecursionError as error:
        raise JsonError(f"{what} is nested too deeply") from error
    except JsonError as error:
        raise JsonError(f"{what} {error}") from error
    except ValueError as error:
        raise JsonError(f"{what} is no JSON: {str(error)[:100].lower()}") from error
    if not isinstance(found, dict):
        raise JsonError(f"{what} is no JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"names '{shown(twice)}' twice")
    return found


def shown(name: str) -> str:
    """A name from a file as errors may show it: printable, and not too long."""
    text = name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 200 else f"{text[:200]}..."
