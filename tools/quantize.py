# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 quantize``: an f32 or bf16 model and its parameters become MXFP8 or MXFP4."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from block32.dialects.block_scale import SCALE_RULES
from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN
from block32.passes.quantize_weights import BLOCKS, QuantizeWeightsPass
from block32.passes.quantizing.patterns import join_patterns
from block32.passes.quantizing.weights import DTYPES, QuantizedWeight
from block32.runtime.archive import NewEntry, read_index, write_archive
from block32.runtime.entry import Entry
from block32.runtime.quantizer import FORMATS
from block32.tools.output import check_outputs, replaced_at_end
from block32.tools.progress import progress_bar
from block32.tools.quantize_report import render_report
from block32.tools.rewrite_model import import_model, run_pass

_EXAMPLES = """examples:
  block32 quantize model.mlir --params=model.irpa -o q.mlir --output-params=q.irpa
  block32 quantize model.mlir --params=model.irpa -o q.mlir --output-params=q.irpa \\
      --block=1x32 --format=mxfp4 --keep='lm_head*' --report=q.html
  block32 compile q.mlir --target=cpu -o q.vmfb
  block32 run q.vmfb --parameters=model=q.irpa --function=main --input=@x.npy
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``quantize`` command."""
    parser = subparsers.add_parser(
        "quantize",
        help="give the linear layers of a model MX weights",
        description="Quantise the weights of a model's linear layers (constants or parameters of "
        "two dimensions) and mark their matmuls, so that block32 compile finds them. The model is "
        "any that iree-compile imports to linalg: MLIR text or bytecode, or - for stdin.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("input", help="MLIR file, or - for stdin")
    parser.add_argument("-o", dest="output", required=True, metavar="FILE", help="the new model")
    parser.add_argument("--params", metavar="FILE", help="parameters: .irpa or .safetensors")
    parser.add_argument("--output-params", metavar="FILE", help="the new parameters, .irpa")
    parser.add_argument(
        "--block", choices=tuple(BLOCKS), default="32x32", help="N x K that share a scale"
    )
    parser.add_argument(
        "--rule", choices=SCALE_RULES, default="rceil", help="how scales are chosen"
    )
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="mxfp8", help="element type of the weights"
    )
    parser.add_argument(
        "--layout",
        choices=(PLAIN, *LAYOUTS),
        default=PLAIN,
        help="the order of the weights' bytes, for one kind of processor (see docs/cpu.md)",
    )
    parser.add_argument(
        "--activations",
        choices=("mxfp8", "none"),
        default="mxfp8",
        help="quantise activations at run time, or take them as they are",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave layers of this name alone (* and ? as in a shell); may be given again",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write what each layer lost, as .html or .json"
    )
    parser.add_argument("--quiet", action="store_true", help="print no table and no progress")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantise; returns the exit code.

    Raises:
        DiagnosticError: For the caller to print. No output is left behind.
    """
    _check_report_name(arguments.report)
    _check_patterns(arguments.keep)
    check_outputs(
        [arguments.output, arguments.output_params, arguments.report],
        [arguments.input, arguments.params],
    )
    text, name, weights = _rewrite_model(arguments)
    parameters = [weight for weight in weights if weight.key is not None]
    if parameters and not (arguments.params and arguments.output_params):
        raise DiagnosticError(
            name,
            f"the model's weights are parameters, such as '{parameters[0].key}'; expected --params "
            "and --output-params",
        )
    with ExitStack() as stack:
        # All files are whole before the first takes its name.
        model = stack.enter_context(replaced_at_end(arguments.output))
        model.write(text)
        if parameters:
            archive = stack.enter_context(replaced_at_end(arguments.output_params))
            _write_parameters(archive, parameters, arguments)
        if arguments.report:
            report = stack.enter_context(replaced_at_end(arguments.report))
            page = render_report(weights, is_json=arguments.report.endswith(".json"))
            report.write(page.encode())
    if not arguments.quiet:
        _print_table(weights)
    return 0


def _check_report_name(path: str | None) -> None:
    if path is not None and Path(path).suffix not in (".html", ".json"):
        raise DiagnosticError(path, "expected a report that ends in .html or .json")


def _check_patterns(patterns: list[str]) -> None:
    """Refuse an empty pattern, such as a shell variable that is not set: it would keep nothing."""
    if not all(pattern.strip() for pattern in patterns):
        raise DiagnosticError(
            "block32 quantize", "the pattern '' of --keep is empty; expected the name of a layer"
        )


def _rewrite_model(arguments: argparse.Namespace) -> tuple[bytes, str, list[QuantizedWeight]]:
    """The new model's text, the model's name, and its weights."""
    module, name = import_model(arguments.input, arguments.quiet)
    quantize = QuantizeWeightsPass(
        block=arguments.block,
        rule=arguments.rule,
        format=arguments.format,
        layout=arguments.layout,
        activations=arguments.activations,
        keep=join_patterns(arguments.keep),
    )
    return run_pass(module, name, quantize), name, quantize.weights


def _write_parameters(
    stream: BinaryIO, weights: list[QuantizedWeight], arguments: argparse.Namespace
) -> None:
    """Quantise one parameter after the other into the new archive; copy the others.

    Raises:
        DiagnosticError: Parameters are missing, of another size, not finite, or the disk is full.
    """
    entries = read_index(Path(arguments.params))
    _check_entries(entries, weights, arguments.params)
    replaced = {weight.key for weight in weights if not weight.keeps_original}
    new = [
        NewEntry(name, entry.length, entry.chunks)
        for name, entry in entries.items()
        if name not in replaced
    ]
    with progress_bar(arguments.quiet) as progress:
        task = progress.add_task("quantising", total=len(weights))

        def advance() -> None:
            progress.advance(task)

        for weight in weights:
            new += _quantized_entries(weight, entries[str(weight.key)], arguments.params, advance)
        _check_unique(new, arguments.params)
        write_archive(stream, new)


def _check_unique(entries: list[NewEntry], path: str) -> None:
    """Refuse parameters of one name: a runtime would find one of them for both."""
    counts = Counter(entry.name for entry in entries)
    taken = next((name for name, count in counts.items() if count > 1), None)
    if taken is not None:
        raise DiagnosticError(
            path,
            f"the new archive would hold two parameters '{taken}'; expected a name that is free",
            ("rename the one that the archive has, or leave its layer alone with --keep",),
        )


def _check_entries(entries: dict[str, Entry], weights: list[QuantizedWeight], path: str) -> None:
    missing = [str(weight.key) for weight in weights if weight.key not in entries]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DiagnosticError(
            path,
            f"the archive has no parameter '{missing[0]}'{others}, which the model reads",
            (f"it has {', '.join(sorted(entries)[:8]) or 'none'}",),
        )
    for weight in weights:
        length = entries[str(weight.key)].length
        if length != weight.bytes_before:
            raise DiagnosticError(
                path,
                f"expected {weight.bytes_before} bytes for '{weight.key}' "
                f"({weight.shape[0]}x{weight.shape[1]}x{weight.element}) but got {length}",
            )


def _quantized_entries(
    weight: QuantizedWeight, entry: Entry, path: str, on_done: Callable[[], None]
) -> list[NewEntry]:
    """The codes and the scales of a weight: quantised when the codes' turn comes."""
    scales: list[bytes] = []

    def codes() -> Iterator[bytes]:
        stored = np.frombuffer(entry.read(), DTYPES[weight.element]).reshape(weight.shape)
        try:
            for slab, slab_scales in weight.quantize(stored):
                scales.append(slab_scales.tobytes())
                yield slab.tobytes()
        except ValueError as error:
            raise DiagnosticError(path, f"the parameter '{weight.key}' holds {error}") from error
        on_done()

    def kept_scales() -> Iterator[bytes]:
        yield from scales

    return [
        NewEntry(weight.code_key, int(np.prod(weight.code_shape)), codes),
        NewEntry(weight.scale_key, int(np.prod(weight.scale_shape)), kept_scales),
    ]


def _print_table(weights: list[QuantizedWeight]) -> None:
    """A line a layer on stdout, and the sums."""
    width = max(len(weight.name) for weight in weights)
    print(f"{'layer':{width}}  {'N':>6}  {'K':>6}  {'error':>8}  {'clipped':>8}  {'bytes':>21}")
    for weight in weights:
        change = f"{weight.bytes_before} -> {weight.bytes_after}"
        print(
            f"{weight.name:{width}}  {weight.n:6}  {weight.k:6}  {weight.loss.relative():8.2%}  "
            f"{weight.loss.clipped:8}  {change:>21}"
        )
    before = sum(weight.bytes_before for weight in weights)
    after = sum(weight.bytes_after for weight in weights)
    print(f"{len(weights)} weights, {before} -> {after} bytes")
