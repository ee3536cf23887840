# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run every kind of gfx950 kernel and compare it with float64: on an MI350/MI355X, or without one.

On the card each case runs in the IREE runtime, several times over, and has to give the same bits
every time. Without ``--device`` it runs in the executor of gfx950 machine code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree import runtime
from iree.compiler import ir
from iree.compiler.tools import compile_str

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.target import Gfx950Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import EXECUTABLE_PREFIX, KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.tools.gfx950_executor import hsaco_from_vmfb
from block32.tools.gfx950_launch import launch_matmul
from block32.tools.inspect import expected, random_operands

#: Largest relative error (Frobenius norm) that counts as right, by result type.
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3}

#: Calls on the card, which all have to give the same bits.
REPEATS = 20

_TILED = KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2)
_PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=3)

#: Kernels by what they are: each is run with each of ``PROBLEMS``.
KERNELS: dict[str, KernelTier] = {
    "tiled": _TILED,
    "tiled, 3 stages, M fastest": replace(_TILED, tile=(64, 64, 128), stages=3, order="m"),
    "tiled, 8 waves": replace(_TILED, tile=(128, 128, 128), warps=8),
    "tiled 128x256x256": replace(_TILED, tile=(128, 256, 256)),
    "tiled 32x32x64": replace(_TILED, tile=(64, 64, 128), mma=(32, 32, 64)),
    "tiled, split-K": replace(_TILED, splits=3),
    "tiled, split-K, second launch": replace(_TILED, splits=3, reduce="second_launch"),
    "packed, 1 panel": replace(_PACKED, tile=(32, 32, 256), k_pack=1),
    "packed, 2 panels": _PACKED,
    "packed, 4 panels": replace(_PACKED, tile=(4, 32, 128), k_pack=4),
    "packed, split-K": replace(_PACKED, splits=4),
    "packed, split-K, second launch": replace(_PACKED, splits=4, reduce="second_launch"),
}

#: Whole and ragged sizes, all element types, both kinds of weight scales.
PROBLEMS = (
    ScaledMatmul(m=8, n=256, k=2048, result="bf16"),
    ScaledMatmul(m=33, n=130, k=1312, result="f32", rhs_block=(1, 32)),
    ScaledMatmul(m=3, n=96, k=1040, lhs="f8E5M2", rhs="f4E2M1FN", result="f16"),
    ScaledMatmul(m=5, n=37, k=333, rhs="f8E5M2"),
)


@dataclass(frozen=True)
class Case:
    """One kernel on one problem."""

    name: str
    problem: ScaledMatmul
    tiers: tuple[KernelTier, ...]


def cases() -> Iterator[Case]:
    """Every kernel on every problem, and the tiers that selection takes for a dynamic M."""
    for problem in PROBLEMS:
        for name, tier in KERNELS.items():
            yield Case(name, problem, (tier,))
    problem = ScaledMatmul(m=None, n=512, k=1024)
    config = Gfx950Target().select(problem, DeviceFacts()).config
    assert config is not None
    for m in (1, 9, 33, 257):
        yield Case(f"selected, M = {m}", ScaledMatmul(m=m, n=512, k=1024), config.tiers)


def compile_case(case: Case) -> bytes:
    """The vmfb of a case; M is dynamic where there are several tiers."""
    problem = replace(case.problem, m=None) if len(case.tiers) > 1 else case.problem
    target = Gfx950Target()
    with ir.Context(), ir.Location.unknown():
        text = str(build_standalone_module(KernelSpec(problem, target, case.tiers)))
    vmfb = compile_str(text, extra_args=list(target.compile_flags()))
    assert vmfb is not None
    return vmfb


def run_in_executor(
    case: Case, vmfb: bytes, operands: dict[str, npt.NDArray[np.uint8]]
) -> npt.NDArray[Any]:
    """The result, from the executor."""
    problem = replace(case.problem, m=None) if len(case.tiers) > 1 else case.problem
    hsaco = hsaco_from_vmfb(vmfb)
    return launch_matmul(hsaco, problem, case.tiers, operands, EXECUTABLE_PREFIX).y


def run_on_device(device: str) -> Callable[..., npt.NDArray[Any]]:
    """A function like ``run_in_executor`` for the card; it fails if two calls differ."""

    def run(
        case: Case, vmfb: bytes, operands: dict[str, npt.NDArray[np.uint8]]
    ) -> npt.NDArray[Any]:
        config = runtime.Config(device)
        module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
        function = runtime.load_vm_module(module, config)["main"]
        arguments = [
            operands["lhs"].view(_DTYPES[case.problem.lhs]),
            operands["rhs"].view(_DTYPES[case.problem.rhs]),
            operands["lhs_scale"].view(ml_dtypes.float8_e8m0fnu),
            operands["rhs_scale"].view(ml_dtypes.float8_e8m0fnu),
        ]
        results = [np.asarray(function(*arguments).to_host()) for _ in range(REPEATS)]
        if any(result.tobytes() != results[0].tobytes() for result in results):
            raise AssertionError(f"two of {REPEATS} calls differ")
        return results[0]

    return run


_DTYPES: dict[str, Any] = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f4E2M1FN": np.int8,
}


def check(case: Case, run: Callable[..., npt.NDArray[Any]]) -> str:
    """``right`` or what is wrong."""
    assert case.problem.m is not None
    operands = random_operands(case.problem, case.problem.m, seed=0)
    if case.problem.rhs == "f4E2M1FN" and case.problem.k % 2:
        operands["rhs"][:, -1] &= 0x0F
    y = run(case, compile_case(case), operands).astype(np.float64)
    wanted = expected(case.problem, operands)
    error = float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
    is_right = error <= TOLERANCE[case.problem.result]
    return "right" if is_right else f"wrong: relative error {error:.3g}"


def main() -> int:
    """Check all cases; 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", help="an IREE device such as hip; default: the executor")
    parser.add_argument("--only", default="", help="cases whose line holds this text")
    arguments = parser.parse_args()
    run = run_on_device(arguments.device) if arguments.device else run_in_executor
    failed = count = 0
    for case in cases():
        name = f"{case.problem.describe()}: {case.name}"
        if arguments.only not in name:
            continue
        try:
            verdict = check(case, run)
        except Exception as error:  # a case that cannot run must not hide the others
            verdict = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        print(f"{name}: {verdict}", flush=True)
        failed += verdict != "right"
        count += 1
    print(f"{count - failed} of {count} right")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
