# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 inspect``: what the kernels of a compiled module are made of.

Apple kernels are shown by ``apple_inspect``; what follows is for gfx950.
For each kernel its registers, LDS and spills, of the loop that holds most matrix instructions the
mix of instructions, and an estimate of a launch. ``--execute`` runs kernels in the executor against
float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from block32.dialects.diagnostics import DiagnosticError
from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import select
from block32.lowering.gfx950.machine import SIMDS, WAVE_LANES
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.problem import SHORT_NAMES, VALUE_TYPES, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.runtime.vmfb import read_vmfb
from block32.tools.apple_inspect import holds_metal
from block32.tools.apple_inspect import inspect as inspect_metal
from block32.tools.gfx950_estimate import Estimate, estimate
from block32.tools.gfx950_executor import (
    DamagedCodeError,
    ExecutionError,
    Kernel,
    hsacos_from_vmfb,
    parse_code_object,
)
from block32.tools.gfx950_executor.mutate import instructions
from block32.tools.gfx950_inspect_launch import (
    FOOTNOTE,
    InspectedLaunch,
    launch_table,
    tier_of,
)
from block32.tools.gfx950_launch import FLOAT_TYPES, launch_matmul
from block32.tools.gfx950_listing import KernelFacts, Mix, facts_of
from block32.tools.numbers import at_least

_EXAMPLES = """examples:
  block32 inspect model.vmfb
  block32 inspect model.vmfb --json > kernels.json
  block32 inspect model.vmfb --kernel gemm_tier0 --disassemble
  block32 inspect model.vmfb --kernel gemm_tier0 --execute --m 4
"""

#: Largest relative error (Frobenius norm) that ``--execute`` accepts, by result type.
_TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``inspect`` command."""
    parser = subparsers.add_parser(
        "inspect",
        help="list a module's kernels and their instruction mix",
        description="List the kernels of a vmfb. gfx950: registers, LDS, spills, occupancy, and "
        "the instructions of the loop that holds most matrix instructions, and an in-order "
        "estimate of a launch, which ranks kernels and predicts no hardware. Apple (or a "
        ".metallib): versions, hashes, and the instructions of the hot loop.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "module", metavar="FILE", help="a .vmfb for gfx950, apple-m5 or apple-m1, or a .metallib"
    )
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name holds TEXT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--disassemble", action="store_true", help="print the decoded instructions")
    parser.add_argument(
        "--execute",
        action="store_true",
        help="run the kernels' matmuls on random data in the executor, against float64",
    )
    parser.add_argument(
        "--m",
        type=at_least(1),
        metavar="ROWS",
        help="rows of x for --execute and the estimate of a launch, where M is dynamic",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of --execute's data and schedule"
    )
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Inspect a module; returns the exit code.

    Raises:
        DiagnosticError: The file cannot be read, holds no gfx950 code, a kernel is wrong, or two
            options exclude each other.
    """
    if args.disassemble and (args.json or args.execute):
        raise DiagnosticError("--disassemble", "expected neither --json nor --execute with it")
    data = _bytes_of(args.module)
    if holds_metal(data):
        if args.execute:
            raise DiagnosticError(args.module, "--execute is for gfx950 kernels")
        return inspect_metal(args.module, data, args.kernel, args.json, args.disassemble)
    kernels = [
        (hsaco, kernel)
        for hsaco, kernel in load_kernels(args.module)
        if not args.kernel or args.kernel in kernel.name
    ]
    if not kernels:
        raise DiagnosticError(args.module, f"no kernel's name holds '{args.kernel}'")
    try:
        return _execute(args, kernels) if args.execute else _describe(args, kernels)
    except ExecutionError as error:  # code that cannot be decoded
        raise DiagnosticError(args.module, error.message) from error
    except ImportError as error:  # nothing here that decodes
        raise DiagnosticError("block32", str(error)) from error


def _describe(args: argparse.Namespace, kernels: list[tuple[bytes, Kernel]]) -> int:
    """Print kernels as a listing, a table or JSON; the exit code."""
    if args.disassemble:
        for hsaco, kernel in kernels:
            print("\n".join([f"{kernel.name}:", *disassemble(hsaco, kernel.name)]))
        return 0
    inspected = [Inspected.create(hsaco, kernel, args.m) for hsaco, kernel in kernels]
    if args.json:
        json.dump([kernel.as_json() for kernel in inspected], sys.stdout, indent=2)
        print()
    else:
        _print_inspected(inspected)
    return 0


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""  # `load_kernels` says why


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A kernel's facts, and what the in-order model says of its loop and of a launch."""

    facts: KernelFacts
    estimate: Estimate | None
    launch: InspectedLaunch | None

    @classmethod
    def create(cls, hsaco: bytes, kernel: Kernel, rows: int | None = None) -> Inspected:
        """Read a kernel. The model puts a workgroup's waves on the four SIMDs in turn.

        A launch is estimated for ``rows`` rows, by default the most that the kernel serves.
        """
        facts = facts_of(hsaco, kernel)
        code = instructions(hsaco, kernel.name)
        loop = estimate(code, max(1, facts.threads // WAVE_LANES // SIMDS))
        named = parse_kernel_name(kernel.name)
        chosen = tier_of(named.problem, named.tier, facts.threads) if named else None
        if named is None or chosen is None:
            return cls(facts, loop, None)
        tier, most_rows = chosen
        launch = InspectedLaunch.create(code, facts, tier, named.problem, rows or most_rows)
        return cls(facts, loop, launch)

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        values = dict(vars(self.facts))
        for name in ("whole", "loop"):
            mix: Mix | None = values[name]
            if mix is not None:
                values[name] = {**vars(mix), "per_32_mfma_clocks": _per_mfma(mix)}
        values["estimate"] = vars(self.estimate) if self.estimate else None
        values["launch"] = self.launch.as_json() if self.launch else None
        return values


def load_kernels(path: str) -> list[tuple[bytes, Kernel]]:
    """The gfx950 kernels of a vmfb, each with its code object.

    Raises:
        DiagnosticError: The file cannot be read, is damaged, or holds none.
    """
    try:
        hsacos = hsacos_from_vmfb(Path(path))
        return [
            (hsaco, kernel)
            for hsaco in hsacos
            for kernel in parse_code_object(hsaco).kernels.values()
        ]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DiagnosticError(path, f"cannot read the module: {reason}") from error
    except DamagedCodeError as error:
        raise DiagnosticError(path, error.message, ("compile or copy the module again",)) from error
    except ExecutionError as error:
        read_vmfb(path)  # says what is wrong with a file that is no module
        raise DiagnosticError(
            path,
            "no gfx950 code in this module",
            (
                error.message,
                "'block32 compile --target=gfx950' makes a module that can be inspected",
            ),
        ) from error


def _per_mfma(mix: Mix) -> float | None:
    return round(mix.count / mix.mfma_units, 2) if mix.mfma_clocks else None


def _print_inspected(inspected: list[Inspected]) -> None:
    console = Console()
    registers = Table(title="kernels", title_justify="left")
    registers.add_column("kernel", overflow="fold")
    for column in ("threads", "VGPR", "AGPR", "SGPR", "LDS", "spills V/S", "scratch", "waves/SIMD"):
        registers.add_column(column, justify="right")
    loops = Table(title="loops with most matrix instructions", title_justify="left")
    loops.add_column("kernel", overflow="fold")
    for column in (
        "all",
        "MFMA",
        "clocks",
        "per 32 clocks",
        "VALU",
        "SALU",
        "waits",
        "bytes",
        "busy*",
    ):
        loops.add_column(column, justify="right")
    loops.add_column("memory and LDS", overflow="fold")
    for entry in inspected:
        kernel = entry.facts
        registers.add_row(
            kernel.name,
            *map(str, (kernel.threads, kernel.vgprs, kernel.agprs, kernel.sgprs)),
            str(kernel.lds_bytes),
            f"{kernel.vgpr_spills}/{kernel.sgpr_spills}",
            str(kernel.scratch_bytes),
            str(kernel.occupancy),
        )
        mix = kernel.loop or kernel.whole
        loops.add_row(
            kernel.name + ("" if kernel.loop else " (no loop: whole kernel)"),
            *_mix_cells(mix),
            f"{entry.estimate.busy:.2f}" if entry.estimate else "-",
            _widths(mix),
        )
    console.print(registers)
    console.print(loops)
    launches = [(entry.facts.name, entry.launch) for entry in inspected if entry.launch]
    if launches:
        console.print(launch_table(launches))
    console.print(
        "* busy: share of the time that the matrix unit works, in an in-order model: an estimate"
    )
    if launches:
        console.print(FOOTNOTE)


def _mix_cells(mix: Mix) -> list[str]:
    per_mfma = _per_mfma(mix)
    return [
        str(mix.count),
        str(mix.classes["mfma"]),
        str(mix.mfma_clocks),
        "-" if per_mfma is None else f"{per_mfma:.2f}",
        str(mix.classes["valu"]),
        str(mix.classes["salu"]),
        str(mix.classes["wait"] + mix.classes["barrier"]),
        str(mix.loaded_bytes),
    ]


def _widths(mix: Mix) -> str:
    return ", ".join(f"{count}x {what}" for what, count in sorted(mix.widths.items()))


def disassemble(hsaco: bytes, kernel: str) -> list[str]:
    """A line an instruction: address, mnemonic, and the fields that are not zero.

    Registers are source codes as the ISA document numbers them, from 256 on vector registers.
    """
    lines = []
    for instruction in instructions(hsaco, kernel):
        fields = [f"{name}={value}" for name, value in instruction.fields.items() if value]
        if instruction.literal is not None:
            fields.append(f"literal={instruction.literal:#x}")
        lines.append(f"  {instruction.pc:#06x}: {instruction.name} {' '.join(fields)}".rstrip())
    return lines


_NAME = re.compile(
    r"gemm_tier(?P<tier>\d+)(?P<suffix>_.*?(?P<m>M|\d+)x(?P<n>\d+)x(?P<k>\d+)"
    r"_(?P<lhs>[a-z0-9]+)_(?P<rhs>[a-z0-9]+)_(?P<rows>\d+)x32_(?P<result>[a-z0-9]+))$"
)


@dataclasses.dataclass(frozen=True)
class NamedKernel:
    """What the name of a kernel says.

    Attributes:
        problem: The matmul.
        tier: Which of its tiers.
        suffix: What the name has of its executable's symbol.
    """

    problem: ScaledMatmul
    tier: int
    suffix: str


def parse_kernel_name(name: str) -> NamedKernel | None:
    """The matmul that a kernel computes, from its name; None where the name does not say."""
    match = _NAME.match(name)
    if match is None:
        return None
    elements = {short: element for element, short in SHORT_NAMES.items()}
    types = [elements.get(match[part]) for part in ("lhs", "rhs", "result")]
    if None in types:
        return None
    lhs, rhs, result = types
    assert lhs and rhs and result
    problem = ScaledMatmul(
        m=None if match["m"] == "M" else int(match["m"]),
        n=int(match["n"]),
        k=int(match["k"]),
        lhs=lhs,
        rhs=rhs,
        rhs_block=(int(match["rows"]), 32),
        result=result,
        lhs_scaled=lhs in VALUE_TYPES,
    )
    return NamedKernel(problem, int(match["tier"]), match["suffix"])


def _execute(args: argparse.Namespace, kernels: list[tuple[bytes, Kernel]]) -> int:
    """Run every matmul that a kernel's name tells; the exit code."""
    named = [(hsaco, kernel, parse_kernel_name(kernel.name)) for hsaco, kernel in kernels]
    results = [
        execute_kernel(hsaco, parsed, args)
        for hsaco, kernel, parsed in named
        if parsed and not has_epilogue(kernel, parsed)
    ]
    if not results:
        reason = "no kernel here says in its name all that it computes (an epilogue is not in it)"
        raise DiagnosticError(args.module, reason)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    else:
        table = Table()
        for column in ("kernel", "rows", "relative error", "instructions", "verdict"):
            table.add_column(column, overflow="fold")
        for result in results:
            table.add_row(*map(str, result.values()))
        Console().print(table)
    return 0 if all(result["verdict"] == "right" for result in results) else 1


def has_epilogue(kernel: Kernel, named: NamedKernel) -> bool:
    """Whether a kernel reads operands that its name does not tell."""
    selection = select.select(named.problem, DeviceFacts())
    if selection.config is None:
        return False
    launch = Gfx950Target().plan(named.problem, selection.config.tiers).launches[0]
    pointers = sum(argument.kind == "global_buffer" for argument in kernel.arguments)
    return pointers > len(launch.bindings)


def execute_kernel(hsaco: bytes, kernel: NamedKernel, args: argparse.Namespace) -> dict[str, Any]:
    """Run one tier's launches on random data.

    Raises:
        DiagnosticError: The kernel was not made by this version's selection, or breaks a rule.
    """
    problem = kernel.problem
    selection = select.select(problem, DeviceFacts())
    tiers = selection.config.tiers if selection.config else ()
    if kernel.tier >= len(tiers):
        raise DiagnosticError(
            args.module, f"tier {kernel.tier} is not one that this version chooses for the shape"
        )
    rows = rows_for(problem, tiers, kernel.tier, args.m)
    operands = random_operands(problem, rows, args.seed)
    executable = "block32_kernels" + kernel.suffix
    try:
        outcome = launch_matmul(hsaco, problem, tiers, operands, executable, args.seed)
    except ExecutionError as error:
        raise DiagnosticError(args.module, str(error)) from error
    wanted = expected(problem, operands)
    error_norm = np.linalg.norm(outcome.y.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    count = sum(sum(report.instructions.values()) for report in outcome.reports.values())
    return {
        "kernel": f"gemm_tier{kernel.tier}{kernel.suffix}",
        "rows": rows,
        "relative_error": float(f"{error_norm:.3g}"),
        "instructions": count,
        "verdict": "right" if error_norm <= _TOLERANCE[problem.result] else "wrong",
    }


def rows_for(
    problem: ScaledMatmul, tiers: tuple[KernelTier, ...], tier: int, wanted: int | None
) -> int:
    """How many rows to run a tier with: those asked for, or the fewest that it serves.

    Raises:
        DiagnosticError: The tier does not serve the rows that were asked for.
    """
    least = 1 + (tiers[tier - 1].max_m or 0) if tier else 1
    most = tiers[tier].max_m
    if problem.m is not None:
        least = most = problem.m
    rows = least if wanted is None else wanted
    if rows < least or (most is not None and rows > most):
        limit = "any more" if most is None else most
        raise DiagnosticError("--m", f"tier {tier} serves {least} to {limit} rows but got {rows}")
    return rows


def random_operands(problem: ScaledMatmul, rows: int, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Random codes below infinity and NaN, and scale bytes near 127, by ABI name."""
    rng = np.random.default_rng(seed)
    if not problem.lhs_scaled:
        lhs = rng.normal(size=(rows, problem.k)).astype(FLOAT_TYPES[problem.lhs])
    else:
        lhs = rng.integers(0, 256, (rows, problem.lhs_row_bytes), dtype=np.uint8)
    rhs = rng.integers(0, 256, (problem.n, problem.rhs_row_bytes), dtype=np.uint8)
    for codes, element in ((lhs, problem.lhs), (rhs, problem.rhs)):
        if element.startswith("f8"):
            codes &= 0xBF  # magnitudes up to 1.875 in e4m3, so that f16 results do not overflow
    scales = {
        "lhs_scale": rng.integers(120, 132, (rows, problem.k_blocks), dtype=np.uint8),
        "rhs_scale": rng.integers(120, 132, problem.rhs_scale_shape, dtype=np.uint8),
    }
    if not problem.lhs_scaled:
        del scales["lhs_scale"]
    return {"lhs": lhs, "rhs": rhs, **scales}


def expected(
    problem: ScaledMatmul, operands: dict[str, npt.NDArray[Any]]
) -> npt.NDArray[np.float64]:
    """The float64 reference."""
    return reference.scaled_matmul(
        operands["lhs"],
        operands.get("lhs_scale"),
        operands["rhs"],
        operands["rhs_scale"],
        rhs_block=problem.rhs_block,
        lhs_element=SHORT_NAMES[problem.lhs] if problem.lhs_scaled else "e4m3",  # type: ignore[arg-type]
        rhs_element=SHORT_NAMES[problem.rhs],  # type: ignore[arg-type]
    )
