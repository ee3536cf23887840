# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 run``: run a function of a vmfb on files or generated inputs, and time it."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.load import Call, Function, Module, load
from block32.runtime.signature import Signature
from block32.tools.numbers import at_least
from block32.tools.output import check_outputs, write_atomically
from block32.tools.values import (
    InputError,
    describe_result,
    encode_result,
    random_value,
    read_input,
    with_dims,
)

_EXAMPLES = """examples:
  block32 run model.vmfb                                   inputs at random, by the signature
  block32 run model.vmfb --dim=M=16 --repeat=100           ... with 16 rows, timed
  block32 run model.vmfb --input=@x.npy --output=@y.npy
  block32 run model.vmfb --input=@x.bin:4x4096xf8E4M3FN --input=4x128xf8E8M0FNU=random(7)
  block32 run model.vmfb --function=other --device=hip --full

inputs, the n-th for the n-th argument:
  @x.npy                 an array; 8-bit floats and bf16 go by their bytes
  @x.npy:f8E4M3FN        ... of that type
  @x.bin:4x4096xbf16     raw bytes, little endian
  4x64xf32=random(SEED)  normal; 8-bit floats: finite codes; E8M0 scales: bytes around 127
  4x64xf32=zeros  4xf32=1,2,3,4  i32=5     the type may be left out: random(3), zeros, 5
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``run`` command."""
    parser = subparsers.add_parser(
        "run",
        help="run a function of a vmfb",
        description="Run a function of a vmfb and print, save or time what it gives. Inputs that "
        "are not given are generated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("module", metavar="FILE", help="the vmfb")
    parser.add_argument(
        "--function", metavar="NAME", help="default: main, or the only one that there is"
    )
    parser.add_argument(
        "--device", default="local-task", metavar="URI", help="hip, cuda, ... (default: the CPU)"
    )
    parser.add_argument(
        "--input", action="append", default=[], metavar="VALUE", help="see below; once an argument"
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="M=SIZE",
        help="size of the dynamic dimensions of generated inputs; INPUT.DIM=SIZE for one of them",
    )
    parser.add_argument(
        "--output", action="append", default=[], metavar="@FILE", help="save the n-th result"
    )
    parser.add_argument(
        "--parameters",
        action="append",
        default=[],
        metavar="[SCOPE=]FILE",
        help="external parameters: .irpa, .safetensors or .gguf",
    )
    parser.add_argument(
        "--repeat", type=at_least(1), metavar="N", help="time N runs after one to warm up"
    )
    parser.add_argument("--full", action="store_true", help="print results whole")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the function; returns the exit code.

    Raises:
        DiagnosticError: For the caller to print.
    """
    outputs = [_output_path(output) for output in arguments.output]
    dims = parse_dims(arguments.dim)
    parameters = parse_parameters(arguments.parameters)
    check_outputs(outputs, [arguments.module, *parameters.values()])
    module = load(arguments.module, arguments.device, parameters=parameters)
    function = choose_function(module, arguments.function)
    call = function.bind(*make_inputs(function.signature, arguments.input, dims))
    results = _as_tuple(call.run().fetch())
    if len(outputs) > len(results):
        raise DiagnosticError(
            f"--output=@{outputs[len(results)]}",
            f"the function has {len(results)} results but {len(outputs)} are to be saved",
        )
    console = Console()
    for path, result in zip(outputs, results, strict=False):
        write_atomically(path, encode_result(result, path))
    for number, result in enumerate(results):
        if number < len(outputs):
            head = describe_result(result, full=False).partition("\n")[0]
            print(f"result {number}: {head}, saved to {outputs[number]}")
        else:
            print(f"result {number}: {describe_result(result, arguments.full)}")
    if arguments.repeat:
        console.print(timing_table(function, module.device, measure(call, arguments.repeat)))
    return 0


def choose_function(module: Module, name: str | None) -> Function:
    """The function of this name; without a name ``main``, or the only one.

    Raises:
        CallError: There is none of this name.
        DiagnosticError: There are several, and none is named.
    """
    if name is not None:
        return module[name]
    names = list(module)
    if "main" in names or len(names) != 1:
        if "main" not in names and names:
            raise DiagnosticError(
                module.source, f"expected --function=NAME, one of: {', '.join(names)}"
            )
        return module["main"]
    return module[names[0]]


@dataclass
class Dims:
    """Sizes of dynamic dimensions from ``--dim``.

    Attributes:
        rows: For every dynamic dimension, or None.
        single: By argument and position, before ``rows``.
    """

    rows: int | None = None
    single: dict[tuple[int, int], int] = field(default_factory=dict)

    def of_argument(self, argument: int, rank: int) -> dict[int, int]:
        """The sizes for one argument, by position."""
        sizes = {position: self.rows for position in range(rank) if self.rows is not None}
        single = {
            position: size for (number, position), size in self.single.items() if number == argument
        }
        return {**sizes, **single}

    def check(self, signature: Signature) -> None:
        """Refuse sizes that the arguments of a function have no room for.

        Raises:
            DiagnosticError: There is no such argument or dimension, or its size is known.
        """
        for (number, position), size in self.single.items():
            shape = signature.arguments[number].shape if number < len(signature.arguments) else ()
            if position >= len(shape or ()) or (shape or ())[position] is not None:
                raise DiagnosticError(
                    f"--dim={number}.{position}={size}",
                    f"expected INPUT.DIM of a dynamic dimension of {signature}",
                )


def parse_dims(options: list[str]) -> Dims:
    """Read ``M=4`` and ``INPUT.DIM=4``.

    Raises:
        DiagnosticError: Another form.
    """
    dims = Dims()
    for option in options:
        match = re.fullmatch(r"(?:M|(\d+)\.(\d+))=(\d+)", option)
        if not match:
            raise DiagnosticError(f"--dim={option}", "expected M=SIZE or INPUT.DIM=SIZE")
        if match[1] is None:
            dims.rows = int(match[3])
        else:
            dims.single[int(match[1]), int(match[2])] = int(match[3])
    return dims


def make_inputs(signature: Signature, given: list[str], dims: Dims) -> list[Any]:
    """One value an argument: those given, and the rest at random.

    Raises:
        DiagnosticError: Too many are given, one cannot be read, or one that is missing has a
            dynamic dimension without a size.
    """
    if len(given) > len(signature.arguments):
        raise DiagnosticError(
            f"--input={given[len(signature.arguments)]}",
            f"the function has {len(signature.arguments)} arguments but got {len(given)} inputs",
            (f"the function is {signature}",),
        )
    dims.check(signature)
    values: list[Any] = []
    for number, expected in enumerate(signature.arguments):
        sizes = dims.of_argument(number, len(expected.shape or ()))
        where = f"--input={given[number]}" if number < len(given) else f"input {number}"
        try:
            if number < len(given):
                values.append(read_input(given[number], expected, sizes, number))
            else:
                values.append(random_value(with_dims(expected, sizes), number))
        except InputError as error:
            raise DiagnosticError(where, str(error)) from error
        except MemoryError as error:
            raise DiagnosticError(where, "too large for the memory of this machine") from error
    return values


def measure(call: Call, repeat: int) -> list[float]:
    """Seconds of each of ``repeat`` runs, inputs and results staying on the device."""
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        call.run()
        seconds.append(time.perf_counter() - start)
    return seconds


def timing_table(function: Function, device: str, seconds: list[float]) -> Table:
    """The runs in one row: how many, the median, the least and the most, in milliseconds."""
    table = Table("function", "device", "runs", "median ms", "min ms", "max ms")
    times = (statistics.median(seconds), min(seconds), max(seconds))
    table.add_row(
        function.signature.name,
        device,
        str(len(seconds)),
        *(f"{1000 * value:.4g}" for value in times),
    )
    return table


def _as_tuple(results: Any) -> tuple[Any, ...]:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def _output_path(option: str) -> str:
    if not option.startswith("@") or len(option) == 1:
        raise DiagnosticError(f"--output={option}", "expected @FILE, such as @y.npy or @y.bin")
    return option[1:]


def parse_parameters(options: list[str]) -> dict[str, str]:
    """Read ``[SCOPE=]FILE``: files by their scope.

    Raises:
        DiagnosticError: There is no file, or a second one of a scope.
    """
    found: dict[str, str] = {}
    for option in options:
        scope, _, path = option.rpartition("=")
        if not path:
            raise DiagnosticError(f"--parameters={option}", "expected [SCOPE=]FILE")
        if scope in found:
            raise DiagnosticError(
                f"--parameters={option}", f"the scope '{scope}' already has {found[scope]}"
            )
        found[scope] = path
    return found
