# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 compile``: iree-compile with block32's passes in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iree.compiler import ir
from rich.console import Console
from rich.status import Status

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.targets import TARGETS
from block32.passes.base import Remark
from block32.passes.pipeline import PassFailedError, PipelinePass
from block32.tools.compiler import (
    EARLY_PHASES,
    CompileOptions,
    compile_early_phase,
    compile_source,
    reproduce_command,
    requested_phase,
)
from block32.tools.iree_compile import IreeCompileError
from block32.tools.onnx_model import read_argument
from block32.tools.output import check_outputs, write_atomically, write_output

_EXAMPLES = """examples:
  block32 compile model.mlir --target=cpu -o model.vmfb
  block32 compile model.mlirbc --target=cpu --cpu=znver4 -o model.vmfb
  block32 compile model.onnx --target=cpu -o model.vmfb
  block32 compile - --target=gfx950 -o model.vmfb < model.mlir
  block32 compile model.mlir --iree-opt-level=O2 --dump-ir-after-all=ir/ -o model.vmfb

Every other flag goes to iree-compile as it is; give values as --flag=value.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``compile`` command."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a model into a vmfb",
        description="Compile a model (.mlir, .mlirbc, .onnx or - for stdin) into a vmfb, and say "
        "for each block-scaled matmul which kernel it got and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_target_arguments(parser)
    parser.add_argument("-o", dest="output", default="-", metavar="FILE", help="default: stdout")
    parser.add_argument(
        "--dump-ir-after-all",
        nargs="?",
        const="-",
        metavar="DIR",
        help="write the IR after every pass, and before one that fails, to DIR (default: stderr)",
    )
    parser.add_argument("--quiet", action="store_true", help="print no remarks")
    parser.set_defaults(handler=run, takes_iree_flags=True)


def add_target_arguments(parser: argparse.ArgumentParser, default_cpu: str = "this one") -> None:
    """``--target`` and ``--cpu``, for the commands that compile."""
    parser.add_argument(
        "--target",
        metavar="NAME",
        help=f"one of {', '.join(TARGETS)}; by default what IREE's own flags say, or cpu",
    )
    parser.add_argument(
        "--cpu",
        metavar="NAME",
        help=f"CPU to compile for, as LLVM names it (default: {default_cpu})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile; returns the exit code.

    Raises:
        DiagnosticError: For the caller to print.
    """
    path, flags = split_input(arguments.iree_flags)
    check_outputs([arguments.output], [path], takes_stdout=True)
    source, name = read_argument(path)
    console = Console(stderr=True)
    dump = _Dump(arguments.dump_ir_after_all)
    with console.status("compiling") as status:
        options = CompileOptions(
            target=arguments.target,
            cpu=arguments.cpu,
            flags=tuple(flags),
            on_remark=remark_printer(arguments.quiet),
            on_phase=_show_phase(status, name),
            after_pass=dump.after,
        )
        output = _compile(source, name, path, options, dump)
    write_output(arguments.output, output)
    return 0


def _compile(source: bytes, name: str, path: str, options: CompileOptions, dump: _Dump) -> bytes:
    if requested_phase(options.flags) in EARLY_PHASES:
        return compile_early_phase(source, name, options)
    try:
        return compile_source(source, name, options)
    except PassFailedError as error:
        dump.before(error)
        raise explain_failure(error, path, options) from error
    except IreeCompileError as error:
        raise DiagnosticError(error.location, error.message) from error


def remark_printer(is_quiet: bool) -> Callable[[Remark], None]:
    """Prints remarks to stderr, or does nothing with them."""
    if is_quiet:
        return lambda _remark: None
    return lambda remark: print(remark.render(), file=sys.stderr)


def explain_failure(error: PassFailedError, path: str, options: CompileOptions) -> DiagnosticError:
    """The failure of a pass as an error: the pass, the place, and a command that reproduces it."""
    in_pass = f"in pass '{_name(error.failed)}'"
    reproduce = f"reproduce with: {reproduce_command(error, path, options)}"
    if error.diagnostic is not None:
        found = error.diagnostic
        return DiagnosticError(found.location, found.message, (*found.notes, in_pass, reproduce))
    cause = error.__cause__
    message = f"internal error {in_pass}: {type(cause).__name__}: {cause}"
    return DiagnosticError(path, message, (reproduce,))


def _name(current: PipelinePass) -> str:
    """The pass without its options: those are long, and the command that reproduces has them."""
    return current.describe().partition("{")[0]


def split_input(arguments: list[str], command: str = "block32 compile") -> tuple[str, list[str]]:
    """The input and the flags among the arguments that are meant for iree-compile.

    Args:
        arguments: What the command's own parser did not take.
        command: Names the command in errors.

    Raises:
        DiagnosticError: There is no input, or more than one.
    """
    inputs = [a for a in arguments if a == "-" or not a.startswith("-")]
    flags = [a for a in arguments if a not in inputs]
    if len(inputs) != 1:
        got = ", ".join(inputs) or "none"
        raise DiagnosticError(
            command,
            f"expected one input but got {got}",
            ("give the values of flags as --flag=value",),
        )
    return inputs[0], flags


def _show_phase(status: Status, name: str) -> Callable[[str], None]:
    return lambda phase: status.update(f"{name}: {phase}")


@dataclass
class _Dump:
    """Writes the IR after each pass, and before one that fails.

    Attributes:
        folder: Where to, ``-`` for stderr, or None for nowhere.
        count: Passes so far.
    """

    folder: str | None
    count: int = 0

    def after(self, current: PipelinePass, module: ir.Module) -> None:
        """Write the IR after a pass."""
        if self.folder is not None:
            text = module.operation.get_asm(enable_debug_info=True)
            self._write(f"after {current.describe()}", _name(current), text)

    def before(self, error: PassFailedError) -> None:
        """Write the IR that the failing pass was given."""
        if self.folder is not None:
            name = f"before-{_name(error.failed)}"
            self._write(f"before {error.failed.describe()}", name, error.ir_before)

    def _write(self, title: str, name: str, text: str) -> None:
        if self.folder is None or self.folder == "-":
            print(f"// ----- IR {title} -----\n{text}", file=sys.stderr)
            return
        _make_folder(self.folder)
        path = Path(self.folder) / f"{self.count:02}-{name}.mlir"
        write_atomically(path, text.encode())
        self.count += 1


def _make_folder(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DiagnosticError(folder, f"cannot make the folder for the IR: {reason}") from error
