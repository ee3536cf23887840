# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 import checkpoint``: safetensors with block-scaled fp8 weights become ``.irpa``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from iree.compiler import ir
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.problem import RESULT_TYPES
from block32.passes.mark_weights import MarkWeightsPass
from block32.passes.quantizing.layers import parameters_of
from block32.passes.quantizing.patterns import names_matching
from block32.runtime.archive import NewEntry, write_archive
from block32.runtime.checkpoint.convert import BLOCKS, ImportedWeight, prepare
from block32.runtime.checkpoint.files import Checkpoint, open_checkpoint
from block32.runtime.checkpoint.layers import ScaledWeight, find_weights
from block32.runtime.checkpoint.parallel import Shard
from block32.runtime.safetensors import StoredTensor
from block32.tools.checkpoint_module import ACTIVATIONS, build_module
from block32.tools.checkpoint_report import print_table, render_json, summary
from block32.tools.output import check_outputs, replaced_at_end
from block32.tools.parameter_names import needs_escapes
from block32.tools.progress import progress_bar
from block32.tools.rewrite_model import import_model, run_pass

_EXAMPLES = """examples:
  block32 import checkpoint FOLDER --report
  block32 import checkpoint FOLDER -o layers.mlir --output-params=layers.irpa
  block32 compile layers.mlir --target=cpu -o layers.vmfb
  block32 run layers.vmfb --parameters=model=layers.irpa --dim=M=4 \\
      --function=model.layers.0.mlp.down_proj
  block32 import checkpoint FOLDER --model=model.mlir -o m.mlir --output-params=m.irpa
  block32 import checkpoint FOLDER -o r0.mlir --output-params=r0.irpa \\
      --shard='*.o_proj=columns:0/8' --shard='*.down_proj=columns:0/8' --shard=rows:0/8
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register ``block32 import checkpoint``."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="safetensors with block-scaled fp8 weights",
        description="Read a checkpoint whose linear layers have F8_E4M3 weights with power-of-two "
        "scales for blocks of 1x32, 32x32, 128x128 or another multiple, and write its parameters "
        "as .irpa with a module that has a function for each layer, or with a model of yours.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", help="a .safetensors file, an index of shards, or their folder")
    parser.add_argument("-o", dest="output", metavar="FILE", help="the module (MLIR)")
    parser.add_argument("--output-params", metavar="FILE", help="the parameters, .irpa")
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="MLIR whose parameters have the names of the checkpoint's tensors: its linear layers "
        "get the block-scaled weights",
    )
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default="mxfp8",
        help="quantise them at run time (default), take them as they are, or have codes and "
        "scales given",
    )
    parser.add_argument(
        "--type", choices=RESULT_TYPES, default="f32", help="of activations and results"
    )
    parser.add_argument(
        "--block",
        choices=("auto", *BLOCKS),
        default="auto",
        help="N x K that share a scale; auto is 32x32 where that is exact, and 1x32 elsewhere",
    )
    _add_selection(parser)
    parser.add_argument("--scope", default="model", help="of the module's parameters")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--report", action="store_true", help="print a table of the layers")
    shown.add_argument("--json", action="store_true", help="print the layers as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no summary and no progress")
    parser.set_defaults(handler=run)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that say which layers are imported, and which part of them."""
    parser.add_argument(
        "--shard",
        action="append",
        default=[],
        metavar="[PATTERN=]AXIS:RANK/WORLD",
        help="import one of WORLD parts of the layers' rows (N) or columns (K); may be given "
        "again, the first that matches a layer counts",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="import layers and tensors of this name alone (* and ? as in a shell); may be given "
        "again",
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="quantise weights anew whose scales are no powers of two; the report says the error",
    )


@dataclass(frozen=True)
class _Selection:
    """What of a checkpoint is imported: block-scaled weights, and tensors that are copied."""

    weights: list[ImportedWeight]
    others: list[StoredTensor]

    @property
    def size(self) -> int:
        """Bytes to read and write."""
        return sum(w.n * w.k for w in self.weights) + sum(t.entry.length for t in self.others)


def run(arguments: argparse.Namespace) -> int:
    """Import a checkpoint; returns the exit code.

    Raises:
        DiagnosticError: For the caller to print. No output is left behind.
    """
    _check_options(arguments)
    shards = [Shard.parse(text) for text in arguments.shard]
    checkpoint = open_checkpoint(Path(arguments.path))
    read = {tensor.entry.path for tensor in checkpoint.tensors.values()}
    check_outputs(
        [arguments.output, arguments.output_params], [*read, arguments.path, arguments.model]
    )
    _check_names(checkpoint.tensors.values())
    weights, others = _only(*find_weights(checkpoint), arguments.only)
    names_matching((s.pattern for s in shards), [w.layer for w in weights], "--shard")
    _warn_of_blocks(checkpoint, weights, arguments.quiet)
    model = import_model(arguments.model, arguments.quiet) if arguments.model else None
    if model:
        keys = parameters_of(model[0]).keys()
        weights = [weight for weight in weights if weight.name in keys]
        others = [tensor for tensor in others if tensor.name in keys]
    with _progress(arguments.quiet) as progress:
        task = progress.add_task(
            "reading scales", total=sum(w.scales.entry.length for w in weights)
        )
        prepared: list[ImportedWeight] = []
        for weight in weights:
            prepared.append(prepare(weight, shards, arguments.block, arguments.requantize))
            progress.advance(task, weight.scales.entry.length)
    selection = _Selection(prepared, others)
    if arguments.output:
        _write(selection, model, arguments)
    _tell(selection, arguments)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    outputs = [arguments.output, arguments.output_params]
    if any(outputs) != all(outputs):
        raise DiagnosticError("block32 import", "expected both -o and --output-params, or neither")
    if not any(outputs) and not (arguments.report or arguments.json):
        raise DiagnosticError(
            "block32 import",
            "nothing to do: expected -o and --output-params, --report or --json",
        )
    if arguments.model and arguments.activations == "given":
        raise DiagnosticError(
            "block32 import", "--activations=given is for functions of layers, without --model"
        )
    if needs_escapes(arguments.scope):
        raise DiagnosticError("--scope", "expected a printable name without quotes and backslashes")


def _check_names(tensors: Iterable[StoredTensor]) -> None:
    """Refuse tensors whose names parameters cannot have."""
    for tensor in tensors:
        if needs_escapes(tensor.name):
            raise DiagnosticError(
                os.fspath(tensor.entry.path),
                f"the tensor name '{tensor.name}' has a quote or a backslash, which a parameter "
                "of IREE cannot have",
            )


def _only(
    weights: list[ScaledWeight], others: list[StoredTensor], patterns: list[str]
) -> tuple[list[ScaledWeight], list[StoredTensor]]:
    """Those whose names match; all without patterns."""
    if not patterns:
        return weights, others
    names = [weight.layer for weight in weights] + [tensor.name for tensor in others]
    chosen = names_matching(patterns, names, "--only")
    layers = [weight for weight in weights if weight.layer in chosen]
    if not layers:
        raise DiagnosticError("--only", "the patterns leave no block-scaled layer")
    return layers, [tensor for tensor in others if tensor.name in chosen]


def _warn_of_blocks(checkpoint: Checkpoint, weights: list[ScaledWeight], quiet: bool) -> None:
    """Say where the configuration and the tensors' shapes differ: the shapes are right."""
    declared = checkpoint.declared
    if quiet or declared is None or declared.block is None:
        return
    different = [weight for weight in weights if weight.block != declared.block]
    if different:
        first = different[0]
        says, has = ("x".join(map(str, block)) for block in (declared.block, first.block))
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        print(
            f"{declared.path}: warning: says blocks of {says} but the scales of '{first.name}'"
            f"{more} are of {has}; the scales count",
            file=sys.stderr,
        )


def _write(
    selection: _Selection, model: tuple[ir.Module, str] | None, arguments: argparse.Namespace
) -> None:
    """Write the module and the archive, whole or not at all."""
    with _progress(arguments.quiet) as progress, ExitStack() as stack:
        task = progress.add_task("writing", total=selection.size)
        entries = _entries(selection, lambda size: progress.advance(task, size))
        if model:
            text = _marked_model(selection, *model, arguments.activations)
            entries = _read_by(model[0], entries, arguments)
        else:
            weights, options = selection.weights, (arguments.activations, arguments.type)
            text = build_module(weights, *options, arguments.scope)
        # Both files are whole before the first takes its name.
        stack.enter_context(replaced_at_end(arguments.output)).write(text)
        write_archive(stack.enter_context(replaced_at_end(arguments.output_params)), entries)


def _entries(selection: _Selection, on_progress: Callable[[int], None]) -> list[NewEntry]:
    entries: list[NewEntry] = []
    for weight in selection.weights:
        entries += weight.entries(on_progress)
    return entries + [_copied(tensor, on_progress) for tensor in selection.others]


def _copied(tensor: StoredTensor, on_progress: Callable[[int], None]) -> NewEntry:
    """A tensor as it is."""

    def chunks() -> Iterator[bytes]:
        for chunk in tensor.entry.chunks():
            yield chunk
            on_progress(len(chunk))

    return NewEntry(tensor.name, tensor.entry.length, chunks)


def _marked_model(selection: _Selection, module: ir.Module, name: str, activations: str) -> bytes:
    """The text of a model whose layers read the checkpoint's weights."""
    weights = ",".join(f"{w.code_key}:{w.n}x{w.k}:{w.block_rows}x32" for w in selection.weights)
    if not weights:
        raise DiagnosticError(
            name, "no parameter of the model has the name of a block-scaled weight"
        )
    return run_pass(module, name, MarkWeightsPass(weights=weights, activations=activations))


def _read_by(
    module: ir.Module, entries: list[NewEntry], arguments: argparse.Namespace
) -> list[NewEntry]:
    """The entries that a model reads.

    Raises:
        DiagnosticError: One is missing, or of another size than the model's type.
    """
    by_name = {entry.name: entry for entry in entries}
    parameters = parameters_of(module)
    for key, (_, type_) in parameters.items():
        if key not in by_name:
            raise DiagnosticError(
                arguments.path, f"the checkpoint has no tensor '{key}', which the model reads"
            )
        size = _bytes_of(type_)
        if by_name[key].length != size:
            raise DiagnosticError(
                arguments.path,
                f"expected {size} bytes for '{key}' ({type_} in the model) but got "
                f"{by_name[key].length}",
            )
    return [entry for entry in entries if entry.name in parameters]


def _bytes_of(type_: ir.Type) -> int | None:
    """Bytes of a tensor of a static shape and a type of whole bytes."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    size = getattr(type_.element_type, "width", 0) // 8
    for extent in type_.shape:
        size *= extent
    return size


def _tell(selection: _Selection, arguments: argparse.Namespace) -> None:
    """The report that was asked for, and warnings."""
    weights, others = selection.weights, selection.others
    if arguments.json:
        print(render_json(weights, others))
    elif arguments.report:
        print_table(weights, others)
    elif not arguments.quiet:
        print(summary(weights, others))
    for weight in weights:
        if weight.nan_scales:
            print(
                f"{weight.source.scales.entry.path}: warning: {weight.nan_scales} scales of "
                f"'{weight.source.name}' are NaN",
                file=sys.stderr,
            )


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return progress_bar(quiet, *columns, TimeRemainingColumn())
