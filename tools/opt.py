# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-opt``: run passes over a module, for reading and testing them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import Field

from iree.compiler import ir

from block32.passes.base import Report
from block32.passes.pipeline import PassFailedError, PipelinePass, parse_pipeline, run_pipeline
from block32.passes.registry import PASSES
from block32.tools.compiler import parse_module
from block32.tools.onnx_model import read_argument
from block32.tools.output import write_output
from block32.tools.program import exit_code_of

_EXAMPLES = """examples:
  block32-opt --pass-pipeline='builtin.module(block32-raise)' model.mlir
  block32-opt --pass-pipeline='builtin.module(block32-raise,block32-select-kernel{target=cpu})' -
  block32-opt --pass-pipeline='builtin.module(block32-raise,cse)' model.mlir -o out.mlir
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line; its help lists the passes with their options."""
    passes = "\n".join(
        f"  {p.argument:28} {p.summary}" + _options_help(p.option_fields()) for p in PASSES
    )
    parser = argparse.ArgumentParser(
        prog="block32-opt",
        description="Run block32's passes, and those that the IREE wheel registers, on a module.",
        epilog=f"passes:\n{passes}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("input", nargs="?", default="-", help="MLIR or ONNX file, or - for stdin")
    parser.add_argument("--pass-pipeline", default="builtin.module()", metavar="PIPELINE")
    parser.add_argument("-o", dest="output", default="-", metavar="FILE")
    parser.add_argument("--print-ir-after-all", action="store_true", help="to stderr")
    parser.add_argument("--mlir-print-debuginfo", action="store_true", help="print locations")
    return parser


def _options_help(fields: tuple[Field[object], ...]) -> str:
    return "".join(f"\n      {f.name.replace('_', '-')}=<{f.type}>" for f in fields)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code_of(_run, argv)


def _run(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    report = Report()
    try:
        source, name = read_argument(arguments.input)
        passes = parse_pipeline(arguments.pass_pipeline, PASSES)
        module = parse_module(source, name)
        after = _print_after if arguments.print_ir_after_all else _ignore
        run_pipeline(module, passes, report, after)
        text = module.operation.get_asm(enable_debug_info=arguments.mlir_print_debuginfo)
        write_output(arguments.output, text.encode())
    except PassFailedError as error:
        if error.diagnostic is None:
            raise
        raise error.diagnostic from error
    finally:
        for remark in report.remarks:
            print(remark.render(), file=sys.stderr)
    return 0


def _ignore(_pass: PipelinePass, _module: ir.Module) -> None:
    return None


def _print_after(current: PipelinePass, module: ir.Module) -> None:
    print(f"// ----- IR after {current.describe()} -----\n{module}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
