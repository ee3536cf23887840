# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writing outputs whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
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


def check_outputs(
    outputs: Iterable[str | None],
    inputs: Iterable[str | os.PathLike[str] | None] = (),
    *,
    takes_stdout: bool = False,
) -> None:
    """Refuse outputs that cannot be written, before the work that they wait for.

    Args:
        outputs: Paths; None is an output that is not asked for.
        inputs: Paths of what is read; ``-`` is standard input, None what is not given.
        takes_stdout: Whether an output may be ``-``, standard output.

    Raises:
        DiagnosticError: An output leads to an input or another output, or into a folder where no
            file can be made.
    """
    taken = {os.path.realpath(path) for path in inputs if path and path != STDOUT}
    for path in outputs:
        if path is None or (path == STDOUT and takes_stdout):
            continue
        if path == STDOUT:
            raise DiagnosticError("<stdout>", "this output cannot go there; expected a file name")
        target = os.path.realpath(path)
        if target in taken and not Path(path).is_char_device():
            raise DiagnosticError(
                path, "this file is also an input or another output; expected another name"
            )
        taken.add(target)
        _check_writable(path)


def _check_writable(path: str) -> None:
    try:
        if not _is_written_in_place(path):
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except OSError as error:
        raise _cannot_write(path, error) from error


def _is_written_in_place(path: str | os.PathLike[str]) -> bool:
    """Whether an output is a device or a pipe, whose place no file may take.

    Raises:
        OSError: It is a folder, or a name that no file can have.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return Path(path).exists() and not Path(path).is_file()


@contextmanager
def replaced_at_end(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A neighbour of ``path`` to write to, which takes its name if all goes well.

    A link stays a link: the file that it leads to is replaced. A device or a pipe is written to.

    Raises:
        DiagnosticError: The output cannot be written; nothing is left behind.
    """
    temporary = None
    try:
        if _is_written_in_place(path):
            with Path(path).open("wb") as stream:
                yield stream
            return
        target = Path(os.path.realpath(path))
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=".block32-", delete=False
        ) as stream:
            temporary = Path(stream.name)
            yield cast(BinaryIO, stream)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise _cannot_write(os.fspath(path), error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _cannot_write(path: str, error: OSError) -> DiagnosticError:
    reason = (error.strerror or str(error)).lower()
    return DiagnosticError(path or "<output>", f"cannot write the output: {reason}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
