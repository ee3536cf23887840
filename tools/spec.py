# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 spec``: a model's kernels as a transform spec for an unmodified iree-compile."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from block32.passes.pipeline import PassFailedError
from block32.tools.compile import (
    add_target_arguments,
    explain_failure,
    remark_printer,
    split_input,
)
from block32.tools.compiler import CompileOptions
from block32.tools.onnx_model import read_argument
from block32.tools.output import check_outputs, write_output
from block32.tools.transform_spec import SPEC_FLAG, SpecResult, make_spec

_EXAMPLES = f"""examples:
  block32 spec model.mlir --target=cpu -o spec.mlir
  block32 spec model.mlir --target=cpu --cpu=znver4 -o spec.mlir
  block32 spec model.mlir --target=gfx950 -o spec.mlir

  iree-compile model.mlir --iree-hal-target-device=hip --iree-rocm-target=gfx950 \\
      {SPEC_FLAG}=spec.mlir -o model.vmfb

Every other flag is one of iree-compile's, as the model is going to be compiled with; give values
as --flag=value. The spec's first lines hold the whole iree-compile command.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``spec`` command."""
    parser = subparsers.add_parser(
        "spec",
        help="write a model's kernels as a transform spec for iree-compile",
        description="Write a transform spec that makes an unmodified iree-compile use the kernels "
        "of block32 compile for an MLIR model (.mlir, .mlirbc or - for stdin).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_target_arguments(parser, default_cpu="what every CPU of the architecture has")
    parser.add_argument("-o", dest="output", default="-", metavar="FILE", help="default: stdout")
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not try the spec on the model before it is written",
    )
    parser.add_argument("--quiet", action="store_true", help="print no remarks and notes")
    parser.set_defaults(handler=run, takes_iree_flags=True)


def run(arguments: argparse.Namespace) -> int:
    """Write the spec; returns the exit code.

    Raises:
        DiagnosticError: For the caller to print.
    """
    path, flags = split_input(arguments.iree_flags, "block32 spec")
    check_outputs([arguments.output], [path], takes_stdout=True)
    source, name = read_argument(path)
    with Console(stderr=True).status(f"{name}: spec"):
        result = _make(source, name, path, arguments, flags)
    if result.needed_flags and not arguments.quiet:
        needed = shlex.join(result.needed_flags)
        print(f"block32 spec: note: iree-compile needs {needed} with this spec", file=sys.stderr)
    write_output(arguments.output, result.text.encode())
    return 0


def _make(
    source: bytes, name: str, path: str, arguments: argparse.Namespace, flags: list[str]
) -> SpecResult:
    options = CompileOptions(
        target=arguments.target,
        cpu=arguments.cpu,
        flags=tuple(flags),
        on_remark=remark_printer(arguments.quiet),
    )
    output_name = "spec.mlir" if arguments.output == "-" else Path(arguments.output).name
    try:
        return make_spec(source, name, options, output_name=output_name, check=arguments.check)
    except PassFailedError as error:
        raise explain_failure(error, path, options) from error
