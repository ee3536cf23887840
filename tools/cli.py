# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32``: the command line. Each command is a module of this package."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from threading import current_thread, main_thread
from typing import Final

from block32 import __version__
from block32.dialects.diagnostics import DiagnosticError

#: The commands' modules, in the order of ``block32 --help``.
COMMANDS: Final[tuple[str, ...]] = (
    "compile",
    "run",
    "spec",
    "doctor",
    "inspect",
    "quantize",
    "import_",
)

#: What ends a run from outside; Windows has no terminals that hang up.
_ENDINGS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

_EXAMPLES = """examples:
  block32 compile model.mlir --target=cpu -o model.vmfb
  block32 run model.vmfb --function=main --input=@x.npy
  block32 doctor model.vmfb
  block32 spec model.mlir --target=cpu -o spec.mlir
  block32 import checkpoint FOLDER -o layers.mlir --output-params=layers.irpa
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="block32",
        description="Compile and run models whose matmuls carry MX block-32 scales, through IREE.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"block32 {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        import_module(f"block32.tools.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    A user's mistake is one located line on stderr and exit code 1 (2 for a wrong command line).
    """
    if current_thread() is main_thread():
        # Like Ctrl-C: temporary files go, and so does a running iree-compile.
        for ending in _ENDINGS:
            # nohup ignores the end of its terminal.
            if signal.getsignal(ending) != signal.SIG_IGN:
                signal.signal(ending, signal.default_int_handler)
    try:
        parser = build_parser()
        arguments, rest = parser.parse_known_args(argv)
        if rest and not getattr(arguments, "takes_iree_flags", False):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.iree_flags = rest
        return arguments.handler(arguments)
    except DiagnosticError as error:
        print(error.render(), file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("block32: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
