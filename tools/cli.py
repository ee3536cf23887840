# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32``: the command line. Each command is a module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from block32 import __version__
from block32.tools.program import exit_code_of

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
    return exit_code_of(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_iree_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.iree_flags = rest
    return arguments.handler(arguments)


if __name__ == "__main__":
    sys.exit(main())
