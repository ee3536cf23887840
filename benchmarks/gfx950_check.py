# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run every kind of gfx950 kernel and compare it with float64: on an MI350/MI355X, or without one.

On the card each case runs in the IREE runtime, several times over, and has to give the same bits
every time. Without ``--device`` it runs in the executor of gfx950 machine code.
"""

from __future__ import annotations

import argparse
import math
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
from block32.lowering.problem import Epilogue, Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.gfx950_executor import hsaco_from_vmfb
from block32.tools.gfx950_launch import FLOAT_TYPES, launch_matmul
from block32.tools.inspect import expected, random_operands

#: Largest relative error (Frobenius norm) that counts as right, by result type.
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3}

#: Calls on the card, which all have to give the same bits.
REPEATS = 20

_TILED = KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2)
_PACKED = KernelTier("packed", tile=(8, 16, 256), k_pack=2, warps=2, stages=3)


def _unscaled(m: int, n: int, k: int, lhs: str, **fields: Any) -> ScaledMatmul:
    return ScaledMatmul(m=m, n=n, k=k, lhs=lhs, lhs_scaled=False, **fields)


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

_UNSCALED = KernelTier("packed", tile=(16, 32, 128), warps=4, stages=2)
_GROUPING = Grouping(experts=4, groups=5)

#: What else a kernel can do: epilogues, an x without scales or quantised on the way, groups.
OTHERS: dict[str, tuple[ScaledMatmul, KernelTier]] = {
    "epilogue, tiled": (
        ScaledMatmul(
            m=33,
            n=130,
            k=512,
            epilogue=Epilogue(row_scale=True, scale=True, bias="bf16", activation="gelu"),
        ),
        _TILED,
    ),
    "epilogue, packed, split-K": (
        ScaledMatmul(m=7, n=64, k=2048, epilogue=Epilogue(residual="f16", activation="silu")),
        replace(_PACKED, splits=2),
    ),
    "bf16 x": (_unscaled(5, 130, 1312, "bf16"), _UNSCALED),
    "f16 x": (_unscaled(33, 64, 1040, "f16"), replace(_UNSCALED, tile=(32, 32, 128))),
    "f32 x": (_unscaled(70, 64, 1024, "f32"), replace(_UNSCALED, tile=(64, 64, 128))),
    "bf16 x, quantised in the kernel": (
        _unscaled(5, 64, 1312, "bf16", lhs_quantize="rceil"),
        replace(_PACKED, quantize="fused"),
    ),
    "f32 x, quantised before": (
        _unscaled(70, 64, 1312, "f32", lhs_quantize="rceil"),
        replace(_TILED, quantize="separate"),
    ),
    "groups, tiled": (ScaledMatmul(m=90, n=130, k=512, grouping=_GROUPING), _TILED),
    "groups, packed": (ScaledMatmul(m=12, n=64, k=1040, grouping=_GROUPING), _PACKED),
    "groups, bf16 x": (_unscaled(40, 64, 512, "bf16", grouping=_GROUPING), _UNSCALED),
}


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
    for name, (problem, tier) in OTHERS.items():
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
        dtypes = {"lhs": _DTYPES[case.problem.lhs], "rhs": _DTYPES[case.problem.rhs]}
        dtypes |= dict.fromkeys(("lhs_scale", "rhs_scale"), ml_dtypes.float8_e8m0fnu)
        arguments = [
            operands[name].view(dtypes.get(name, operands[name].dtype))
            for name in case.problem.argument_names
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
    **FLOAT_TYPES,
}

_erf = np.vectorize(math.erf)
_ACTIVATIONS: dict[str | None, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    None: lambda y: y,
    "gelu": lambda y: y / 2 * (1 + _erf(y / math.sqrt(2))),
    "silu": lambda y: y / (1 + np.exp(-np.maximum(y, -700))),
}


def operands_of(problem: ScaledMatmul) -> dict[str, npt.NDArray[Any]]:
    """Random arguments by ABI name."""
    assert problem.m is not None
    m, n, epilogue, grouping = problem.m, problem.n, problem.epilogue, problem.grouping
    operands = random_operands(problem, m, seed=0)
    rng = np.random.default_rng(1)
    if problem.rhs == "f4E2M1FN" and problem.k % 2:
        operands["rhs"][:, -1] &= 0x0F
    operands["row_scale"] = rng.normal(size=m).astype(np.float32)
    operands["scale"] = np.array([0.01], np.float32)
    operands["bias"] = rng.normal(size=n).astype(FLOAT_TYPES[epilogue.bias or "f32"])
    operands["residual"] = rng.normal(size=(m, n)).astype(FLOAT_TYPES[epilogue.residual or "f32"])
    if grouping:
        for name in ("rhs", "rhs_scale"):
            weights = [random_operands(problem, m, seed)[name] for seed in range(grouping.experts)]
            operands[name] = np.stack(weights)
        # An empty group, one without an expert, and rows of no group at both ends.
        operands["offsets"] = np.array([1, m // 3, m // 3, m // 2, m - 2, m - 1], np.int32)
        operands["expert_ids"] = np.array([2, 0, -1, 3, 2], np.int32)
        operands["init"] = rng.normal(size=(m, n)).astype(FLOAT_TYPES[problem.result])
    return operands


def expected_of(problem: ScaledMatmul, operands: dict[str, Any]) -> npt.NDArray[np.float64]:
    """The float64 reference."""
    if problem.lhs_quantize:
        codes, scales = reference.quantize(operands["lhs"])
        operands, problem = {**operands, "lhs": codes, "lhs_scale": scales}, problem.quantized()
    if problem.grouping:
        names = ("lhs", "lhs_scale", "rhs", "rhs_scale", "offsets", "expert_ids", "init")
        return reference.grouped_matmul(*(operands.get(name) for name in names))  # type: ignore[arg-type]
    y, epilogue = expected(problem, operands), problem.epilogue
    for name, is_factor in (("row_scale", True), ("scale", True), ("bias", False)):
        if name in epilogue.operand_names():
            values = operands[name].astype(np.float64)
            values = values[:, None] if name == "row_scale" else values
            y = y * values if is_factor else y + values
    if epilogue.residual:
        y = y + operands["residual"].astype(np.float64)
    return _ACTIVATIONS[epilogue.activation](y)


def check(case: Case, run: Callable[..., npt.NDArray[Any]]) -> str:
    """``right`` or what is wrong."""
    operands = operands_of(case.problem)
    y = run(case, compile_case(case), operands).astype(np.float64)
    wanted = expected_of(case.problem, operands)
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
