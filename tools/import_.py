# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 import``: a model's weights from other programs. Each kind is a module of its own."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final

#: The kinds' modules, in the order of ``block32 import --help``.
KINDS: Final[tuple[str, ...]] = ("import_checkpoint",)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``import`` command and its kinds."""
    parser = subparsers.add_parser(
        "import",
        help="take the weights of a checkpoint",
        description="Bring what other programs wrote into the form that block32 compile takes.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for kind in KINDS:
        import_module(f"block32.tools.{kind}").add_parser(kinds)
