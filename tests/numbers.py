# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random block-scaled operands, and running compiled modules: what all tests of numbers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree import runtime

from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference

CODES = npt.NDArray[np.uint8]

_ELEMENTS = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f4E2M1FN": "e2m1"}
_DTYPES = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f4E2M1FN": np.uint8,
}


@dataclass
class Operands:
    """The operands of a ``ScaledMatmul`` as raw bytes, in the shapes of the kernel ABI."""

    problem: ScaledMatmul
    m: int
    lhs: CODES
    rhs: CODES
    lhs_scale: CODES
    rhs_scale: CODES

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The operands as the compiled function takes them."""
        scale = ml_dtypes.float8_e8m0fnu
        return [
            self.lhs.view(_DTYPES[self.problem.lhs]),
            self.rhs.view(_DTYPES[self.problem.rhs]),
            self.lhs_scale.view(scale),
            self.rhs_scale.view(scale),
        ]

    def expected(self) -> npt.NDArray[np.float64]:
        """The float64 reference."""
        return reference.scaled_matmul(
            self.lhs,
            self.lhs_scale,
            self.rhs,
            self.rhs_scale,
            rhs_block=self.problem.rhs_block,
            lhs_element=_ELEMENTS[self.problem.lhs],  # type: ignore[arg-type]
            rhs_element=_ELEMENTS[self.problem.rhs],  # type: ignore[arg-type]
        )


def random_operands(problem: ScaledMatmul, m: int | None = None, seed: int = 0) -> Operands:
    """Random finite codes and scale bytes near 127 for ``m`` rows (the problem's M by default)."""
    rng = np.random.default_rng(seed)
    rows = problem.m if m is None else m
    assert rows is not None
    return Operands(
        problem,
        rows,
        lhs=random_codes(rng, (rows, problem.lhs_row_bytes), problem.lhs),
        rhs=random_codes(rng, (problem.n, problem.rhs_row_bytes), problem.rhs),
        lhs_scale=rng.integers(118, 136, (rows, problem.k_blocks), dtype=np.uint8),
        rhs_scale=rng.integers(118, 136, problem.rhs_scale_shape, dtype=np.uint8),
    )


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> CODES:
    """Any finite codes of an fp8 type, of all magnitudes; any bytes for packed fp4."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    magnitude = codes & 0x7F
    if element == "f8E4M3FN":
        codes[magnitude == 0x7F] = 0x2A
    elif element == "f8E5M2":
        codes[magnitude >= 0x7C] = 0x2A
    return codes


def run_function(vmfb: bytes, function: str, *arguments: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Call a function of a compiled module on the CPU; its one result as an array."""
    (result,) = run_function_results(vmfb, function, *arguments)
    return result


def run_function_results(
    vmfb: bytes, function: str, *arguments: npt.NDArray[Any]
) -> list[npt.NDArray[Any]]:
    """Call a function of a compiled module on the CPU; its results as arrays."""
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    loaded = runtime.load_vm_module(module, config)
    results = loaded[function](*arguments)
    results = results if isinstance(results, tuple) else (results,)
    return [np.array(result.to_host()) for result in results]
