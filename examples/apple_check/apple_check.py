# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs block32's Apple kernels on a Mac, compares each with float64, and writes a report.

On a Mac with an M5 and macOS 26:

    python3.11 -m venv .venv
    .venv/bin/pip install 'block32[apple]'        # or: pip install -e '.[apple]' in a clone
    .venv/bin/python examples/apple_check/apple_check.py

With an M1 to M4 and macOS 14 or later add ``--target=apple-m1``. The report, ``apple_check.json``,
holds the machine, the versions, and for each kernel what happened: please send it to the project.
Xcode is not needed. On any other machine ``--emulate`` runs the same bitcode in block32's emulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from block32.lowering.apple.architecture import ARCHITECTURES, M5, Architecture
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.program import Entry
from block32.lowering.apple.signature import KernelError
from block32.lowering.problem import Epilogue
from block32.tools.air_emulator.vmfb import load_kernels
from block32.tools.apple_cases import (
    TOLERANCE,
    Case,
    Operands,
    error_of,
    execute,
    grouped_case,
    poisoned,
    random_operands,
)
from block32.tools.apple_program import compile_kernels
from block32.tools.output import write_atomically

Array = npt.NDArray[Any]

#: Runs a compiled case on its operands; gives y.
Runner = Callable[[bytes, Operands], Array]

DENSE = ((1, 64, 64), (16, 128, 192), (40, 96, 128), (100, 256, 64), (33, 130, 96), (129, 65, 40))
GEMV = ((64, 256), (200, 128), (64, 24), (200, 40), (5, 512))
MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True}
REPEATS = 10


def cases(architecture: Architecture) -> Iterator[Case]:
    """Every kernel form that there is for an architecture."""
    for case in every_case():
        try:
            matmul = dataclasses.replace(case.matmul, architecture=architecture)
        except KernelError:
            continue  # transposed operands on the older ones
        yield dataclasses.replace(case, matmul=matmul)


def every_case() -> Iterator[Case]:
    """Every kernel form, with whole and ragged shapes and every type."""
    for m, n, k in DENSE:
        yield Case(Matmul(n=n, k=k), "tiled", m)
    for n, k in GEMV:
        yield Case(Matmul(n=n, k=k), "gemv", 1)
    for lhs, rhs in (
        ("bf16", "bf16"),
        ("f16", "f8E4M3FN"),
        ("f32", "f8E4M3FN"),
        ("bf16", "f8E5M2"),
    ):
        yield Case(Matmul(n=70, k=50, lhs=lhs, rhs=rhs), "tiled", 40)
    yield Case(Matmul(n=70, k=50, lhs="f8E4M3FN", rhs="f8E4M3FN"), "tiled", 40)
    for result in ("bf16", "f16"):
        yield Case(Matmul(n=70, k=50, result=result), "tiled", 40)
    yield Case(Matmul(n=65, k=35, lhs_transposed=True, rhs_transposed=True), "tiled", 70)
    yield from block_scaled_cases()
    for activation in ("relu", "gelu", "silu"):
        epilogue = Epilogue(scale=True, bias="f32", residual="bf16", activation=activation)
        yield Case(Matmul(n=37, k=64, epilogue=epilogue), "tiled", 35)
    yield from grouped_cases()
    yield Case(Matmul(n=7680, k=3136), "tiled", 32)
    yield Case(Matmul(n=4096, k=4096), "gemv", 1)


def block_scaled_cases() -> Iterator[Case]:
    """Scales in words and in single bytes, for every M that counts, and the most extreme scales."""
    for rows in (1, 32):
        plain = Matmul(n=130, k=300, rhs_block=(rows, 32))
        scaled = Matmul(n=70, k=100, rhs_block=(rows, 32), **MXFP8)
        yield Case(plain, "tiled", 33)
        yield Case(plain, "gemv", 1)
        yield Case(scaled, "tiled", 40)
        yield Case(scaled, "gemv", 1)
        yield Case(Matmul(n=96, k=512, rhs_block=(rows, 32), **MXFP8), "tiled", 33, cancelling=True)
        yield Case(Matmul(n=96, k=512, rhs_block=(rows, 32), **MXFP8), "gemv", 1, cancelling=True)
    for m in (1, 3, 8, 33, 129):
        yield Case(Matmul(n=130, k=288, rhs_block=(32, 32), **MXFP8), "tiled", m)
    e5m2 = Matmul(n=96, k=160, lhs="f8E5M2", rhs="f8E5M2", lhs_scaled=True, rhs_block=(1, 32))
    yield Case(e5m2, "tiled", 40)


def grouped_cases() -> Iterator[Case]:
    """Empty groups, experts out of order, again and absent, with a scale each and block scales."""
    yield grouped_case(4, 128, 64, [3, 0, 5, 2], [2, 0, 3, 1], expert_scale=True)
    yield grouped_case(4, 70, 40, [7, 0, 20], [1, 0, 3])
    yield grouped_case(2, 64, 48, [16, 24], [0, -1], expert_scale=True)
    many = [1, 2, 3, 1, 2, 3, 1, 2], [15, 0, 7, 7, 3, 15, 1, 9]
    yield grouped_case(16, 96, 64, *many)
    for scaled in ({"rhs_block": (32, 32)}, {"rhs_block": (32, 32), **MXFP8}):
        yield grouped_case(4, 128, 64, [3, 0, 5, 2], [2, 0, 3, 1], **scaled)
        yield grouped_case(3, 70, 300, [70, 0, 129, 1], [2, 0, -1, 1], **scaled)
    yield grouped_case(8, 1856, 2688, [1, 1, 2, 0, 1, 1], [0, 3, 1, 4, 5, 2], rhs_block=(32, 32))


@dataclass(frozen=True)
class Outcome:
    """What happened to one case.

    Attributes:
        case: The kernel, as a short name.
        passed: Whether y is as near to the reference as its type allows.
        error: Largest error over the largest sum; None where nothing came back.
        milliseconds: Median time of a call, with the host's share; None where it was not timed.
        failure: The exception, where there was one.
    """

    case: str
    passed: bool
    error: float | None = None
    milliseconds: float | None = None
    failure: str | None = None


def run_on_metal(vmfb: bytes, operands: Operands) -> Array:
    """Runs the program's one function on the Metal device, through IREE's runtime."""
    return _function(vmfb)(*_arguments(operands)).to_host()


def _function(vmfb: bytes) -> Any:
    from iree import runtime

    config = runtime.Config("metal")
    return runtime.load_vm_module(
        runtime.VmModule.copy_buffer(config.vm_instance, vmfb), config
    ).kernel


def _arguments(operands: Operands) -> list[Array]:
    """The function's arguments: bytes as i8, then in the grouped form the y to update."""
    matmul = operands.case.matmul
    arrays = [operands.arrays[buffer.name] for buffer in matmul.buffers()[:-1]]
    signless = {np.dtype(np.uint8): np.int8, np.dtype(np.uint32): np.int32}
    arguments = [array.view(signless.get(array.dtype, array.dtype)) for array in arrays]
    if matmul.grouping:
        arguments.append(poisoned((operands.case.m, matmul.n), matmul.result))
    return arguments


def run_in_the_emulator(vmfb: bytes, operands: Operands) -> Array:
    """Runs the bitcode in the vmfb on the CPU; of large grids only some threadgroups."""
    (kernel,) = load_kernels(vmfb).values()
    return execute(kernel, operands)


def check(case: Case, runner: Runner, timed: bool) -> Outcome:
    """Compiles and runs one case; whatever goes wrong becomes part of the report."""
    try:
        vmfb = compile_kernels({"kernel": Entry(case.matmul, case.form)})
        operands = random_operands(case)
        error = error_of(runner(vmfb, operands), operands)
        milliseconds = _time(vmfb, operands) if timed else None
    except Exception as failure:
        return Outcome(str(case), False, failure=f"{type(failure).__name__}: {failure}")
    passed = error <= TOLERANCE[case.matmul.result]
    return Outcome(str(case), passed, float(error), milliseconds)


def _time(vmfb: bytes, operands: Operands) -> float:
    """Median time of a call on the device, in milliseconds."""
    function, arguments = _function(vmfb), _arguments(operands)
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(*arguments).to_host()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def machine() -> dict[str, str]:
    """The chip, the system and the versions that matter."""
    facts = {"system": platform.platform(), "python": platform.python_version()}
    for name in ("block32", "iree-base-compiler", "iree-base-runtime", "llvmlite"):
        facts[name] = _version(name)
    if sys.platform == "darwin":
        commands = {
            "chip": ["sysctl", "-n", "machdep.cpu.brand_string"],
            "macos": ["sw_vers", "-productVersion"],
        }
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            facts[name] = done.stdout.strip()
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> int:
    """Runs every case; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulate", action="store_true", help="run in block32's emulator instead")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name has TEXT")
    parser.add_argument(
        "--target", choices=list(ARCHITECTURES), default=M5.name, help="the GPUs to compile for"
    )
    parser.add_argument("-o", dest="report", default="apple_check.json", metavar="FILE")
    arguments = parser.parse_args()
    if not arguments.emulate and sys.platform != "darwin":
        print("apple_check: error: no Metal device on this system; --emulate runs without one")
        return 1
    facts = machine()
    print("\n".join(f"{name:20} {value}" for name, value in facts.items()))
    runner = run_in_the_emulator if arguments.emulate else run_on_metal
    outcomes: list[Outcome] = []
    for case in cases(ARCHITECTURES[arguments.target]):
        if arguments.only not in str(case):
            continue
        outcome = check(case, runner, timed=not arguments.emulate)
        outcomes.append(outcome)
        detail = outcome.failure or f"error {outcome.error:.2e}"
        if outcome.milliseconds is not None:
            detail += f", {outcome.milliseconds:.3f} ms"
        print(f"{'pass' if outcome.passed else 'FAIL'}  {outcome.case:55} {detail}", flush=True)
    failed = sum(not outcome.passed for outcome in outcomes)
    report = {
        "device": "emulator" if arguments.emulate else "metal",
        "target": arguments.target,
        "machine": facts,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_atomically(arguments.report, (json.dumps(report, indent=2) + "\n").encode())
    print(f"{len(outcomes) - failed} passed, {failed} failed; report in {arguments.report}")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
