# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls: operands, their float64 result, and cases that every target's tests share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree.compiler import ir
from iree.compiler.dialects import func

from block32.lowering.composites import Composites
from block32.lowering.host import operand_types
from block32.lowering.problem import Grouping, ScaledMatmul
from block32.runtime import reference
from tests.numbers import random_codes

DTYPES = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f4E2M1FN": np.uint8,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
}
SHORT = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f4E2M1FN": "e2m1"}
Arrays = dict[str, npt.NDArray]


def program(problem: ScaledMatmul, calls: int = 1) -> str:
    """A function that calls the composite, each time with the last result as its init."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        composites = Composites(module)
        types = operand_types(problem)
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(*types.values(), name="main")
            def main(*arguments: ir.Value) -> ir.Value:
                operands = dict(zip(types, arguments, strict=True))
                y = composites.matmul(problem, operands)
                for _ in range(calls - 1):
                    y = composites.matmul(problem, {**operands, "init": y})
                return y

        return str(module)


def operands(problem: ScaledMatmul, offsets: list[int], ids: list[int], m: int) -> Arrays:
    """Random operands as raw bytes and values, by name in the order of the ABI."""
    rng = np.random.default_rng(m)
    assert problem.grouping is not None
    experts, n = problem.grouping.experts, problem.n
    found: Arrays = {}
    if problem.lhs in SHORT:
        found["lhs"] = random_codes(rng, (m, problem.lhs_row_bytes), problem.lhs)
    else:
        found["lhs"] = rng.standard_normal((m, problem.k)).astype(DTYPES[problem.lhs])
    found["rhs"] = random_codes(rng, (experts, n, problem.rhs_row_bytes), problem.rhs)
    if problem.lhs_scaled:
        found["lhs_scale"] = rng.integers(118, 136, (m, problem.k_blocks), dtype=np.uint8)
    shape = (experts, *problem.rhs_scale_shape)
    found["rhs_scale"] = rng.integers(118, 136, shape, dtype=np.uint8)
    found["offsets"] = np.array(offsets, np.int32)
    found["expert_ids"] = np.array(ids, np.int32)
    found["init"] = rng.standard_normal((m, n)).astype(DTYPES[problem.result])
    return found


def viewed(problem: ScaledMatmul, arrays: Arrays) -> list[npt.NDArray]:
    """The operands as the compiled function takes them."""
    types = {"lhs": DTYPES[problem.lhs], "rhs": DTYPES[problem.rhs]}
    types |= dict.fromkeys(("lhs_scale", "rhs_scale"), ml_dtypes.float8_e8m0fnu)
    return [a.view(types.get(name, a.dtype)) for name, a in arrays.items()]


def compare(problem: ScaledMatmul, got: npt.NDArray, arrays: Arrays) -> reference.Comparison:
    """How far a result is from the reference."""
    want = expected(problem, arrays)
    return reference.compare(got, want, problem.result)  # type: ignore[arg-type]


def expected(problem: ScaledMatmul, arrays: Arrays) -> npt.NDArray:
    """The float64 reference."""
    x, x_scale, lhs = arrays["lhs"], arrays.get("lhs_scale"), problem.lhs
    if problem.lhs_quantize:
        x, x_scale = reference.quantize(x, problem.lhs_quantize)  # type: ignore[arg-type]
        lhs = "f8E4M3FN"
    return reference.grouped_matmul(
        x,
        x_scale,
        *(arrays[name] for name in ("rhs", "rhs_scale", "offsets", "expert_ids", "init")),
        rhs_block=problem.rhs_block,
        lhs_element=SHORT.get(lhs, "e4m3"),  # type: ignore[arg-type]
        rhs_element=SHORT[problem.rhs],  # type: ignore[arg-type]
    )


def grouped(n: int, k: int, experts: int, groups: int, **fields: object) -> ScaledMatmul:
    """A grouped matmul of any number of rows."""
    return ScaledMatmul(None, n, k, grouping=Grouping(experts, groups), **fields)  # type: ignore[arg-type]


W8A16 = {"lhs": "bf16", "lhs_scaled": False, "result": "bf16"}
#: Problems, tokens of each group, and experts.
CASES = {
    "out of order": (grouped(128, 64, 4, 4), [3, 0, 5, 2], [2, 0, 3, 1]),
    "ragged": (grouped(70, 40, 4, 3, rhs_block=(1, 32)), [7, 0, 20], [1, 0, 3]),
    "no expert": (grouped(70, 40, 4, 2), [16, 24], [0, -1]),
    "many": (grouped(33, 96, 16, 8, **W8A16), [1, 3, 2, 1, 2, 3, 1, 2], [9, 0, 15, 9, 3, 2, 9, 1]),
    "fp4": (grouped(40, 42, 3, 3, rhs="f4E2M1FN", result="f16"), [2, 1, 4], [2, 2, 0]),
    "e5m2": (grouped(12, 72, 2, 2, lhs="f8E5M2", rhs="f8E5M2", rhs_block=(1, 32)), [5, 3], [1, 0]),
    "quantised": (
        grouped(48, 64, 4, 3, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil"),
        [3, 6, 2],
        [3, 1, 3],
    ),
}
