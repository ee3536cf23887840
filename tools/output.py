# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writing outputs whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from block32.dialects.diagnostics import DiagnosticError

#: The path that means standard output.
STDOUT = "-"


def write_output(path: str, content: bytes) -> None:
    """Write to a file as ``write_atomically`` does, or to standard output where ``path`` is ``-``.

    Raises:
        DiagnosticError: It cannot be written.
        BrokenPipeError: Nobody reads standard output.
    """
    if path != STDOUT:
        write_atomically(path, content)
        return
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _cannot_write("<stdout>", error) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        DiagnosticError: It cannot be written; nothing is left behind.
    """
    with replaced_at_end(path) as stream:
        stream.write(content)


def check_distinct(*paths: str | None) -> None:
    """Refuse outputs that would take each other's place; None is an output that is not asked for.

    Raises:
        DiagnosticError: Two paths lead to one file.
    """
    seen: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        target = Path(path).resolve()
        # A device, such as /dev/null, takes any number of outputs.
        if target in seen and (target.is_file() or not target.exists()):
            raise DiagnosticError(path, "two outputs go to this file; expected another name")
        seen.add(target)


@contextmanager
def replaced_at_end(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A neighbour of ``path`` to write to, which takes its name if all goes well.

    A link stays a link: the file that it leads to is replaced. A device or a pipe is written to.

    Raises:
        DiagnosticError: The output cannot be written; nothing is left behind.
    """
    temporary = None
    try:
        if Path(path).exists() and not Path(path).is_file():
            with Path(path).open("wb") as stream:
                yield stream
            return
        target = Path(path).resolve()
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=".block32-", delete=False
        ) as stream:
            temporary = Path(stream.name)
            yield cast(BinaryIO, stream)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise _cannot_write(os.fspath(path) or "<output>", error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _cannot_write(path: str, error: OSError) -> DiagnosticError:
    reason = (error.strerror or str(error)).lower()
    return DiagnosticError(path, f"cannot write the output: {reason}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
