# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Apple kernels on random operands against float64: for tests, and for the check on a Mac.

The reference is plain NumPy on ``runtime.reference``'s tables, and shares no code with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from block32.lowering.apple import dense, gemv, grouped
from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.common.index import as_integer
from block32.lowering.problem import Grouping
from block32.runtime import reference
from block32.tools.air_emulator.dispatch import Binding, Kernel
from block32.tools.air_emulator.vmfb import LoadedKernel

Array = npt.NDArray[Any]

FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
FP8 = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}

#: Largest error over the largest value of y, for results that are rounded once to each type.
TOLERANCE = {"f32": 1e-5, "bf16": 2.0**-8, "f16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """A matmul to run, with what comes only at run time.

    Attributes:
        matmul: What is computed.
        form: The kernel form.
        m: Rows of x (of all groups together).
        tokens: Rows of each group, in a grouped matmul.
        experts: Expert of each group.
        cancelling: Scales of x and w are the smallest and the largest there are: 1 together.
    """

    matmul: Matmul
    form: str = "tiled"
    m: int = 1
    tokens: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    cancelling: bool = False

    def __str__(self) -> str:
        mm = self.matmul
        parts = [self.form, f"{self.m}x{mm.n}x{mm.k}", mm.lhs, mm.rhs, mm.result]
        parts += [f"scaled{mm.rhs_block[0]}"] if mm.rhs_block else []
        parts += [f"{side}T" for side in ("lhs", "rhs") if getattr(mm, f"{side}_transposed")]
        parts += ["-".join(map(str, self.experts))] if self.experts else []
        parts += ["cancelling"] if self.cancelling else []
        parts += [mm.epilogue.activation] if mm.epilogue.activation else []
        return "_".join(parts)


def grouped_case(
    expert_count: int, n: int, k: int, tokens: Sequence[int], experts: Sequence[int], **kwargs: Any
) -> Case:
    """A grouped case; more fields of ``Matmul`` as keywords."""
    matmul = Matmul(n=n, k=k, grouping=Grouping(expert_count, len(tokens)), **kwargs)
    return Case(matmul, "grouped", sum(tokens), tuple(tokens), tuple(experts))


@dataclass
class Operands:
    """The arrays of a case by buffer name, and x and w as float64."""

    case: Case
    arrays: dict[str, Array]
    x: Array
    w: Array
    expected: Array = field(init=False)
    peak: float = field(init=False)

    def __post_init__(self) -> None:
        before = _before_activation(self)
        activation = self.case.matmul.epilogue.activation
        self.expected = reference_activation(activation, before) if activation else before
        # Errors are relative to the sums: an activation may compress those to nothing.
        self.peak = float(np.nanmax(np.abs(before))) if before.size else 0.0


def random_values(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> Array:
    """Stored elements: fp8 as bytes, finite codes of all magnitudes."""
    if element in FP8:
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        largest = 0x7E if element == "f8E4M3FN" else 0x7B
        return (codes & 0x80) | np.minimum(codes & 0x7F, largest)
    return rng.standard_normal(shape).astype(FLOATS[element])


def decode(array: Array, element: str) -> Array:
    """Stored elements as float64."""
    if element in FP8:
        return reference.decode(array, FP8[element])  # type: ignore[arg-type]
    return array.astype(np.float64)


def _scaled(values: Array, scales: Array, rows: int) -> Array:
    """Values times their scales; ``rows`` share a scale, along the last axis 32 do."""
    factors = reference.decode_scales(scales)
    wide = np.repeat(np.repeat(factors, rows, axis=-2), 32, axis=-1)
    return values * wide[..., : values.shape[-2], : values.shape[-1]]


def _scales(rng: np.random.Generator, shape: tuple[int, ...], byte: int | None) -> Array:
    """Scale bytes around 1, or all the same."""
    if byte is not None:
        return np.full(shape, byte, np.uint8)
    return rng.integers(118, 137, shape, dtype=np.uint8)


def random_operands(case: Case, seed: int = 0) -> Operands:
    """Operands of a case from a seed."""
    rng = np.random.default_rng(seed)
    mm, m = case.matmul, case.m
    experts = (mm.grouping.experts,) if mm.grouping else ()
    lhs = random_values(rng, (m, mm.k), mm.lhs)
    rhs = random_values(rng, (*experts, mm.n, mm.k), mm.rhs)
    x, w = decode(lhs, mm.lhs), decode(rhs, mm.rhs)
    arrays: dict[str, Array] = {
        "lhs": np.ascontiguousarray(lhs.T) if mm.lhs_transposed else lhs,
        "rhs": np.ascontiguousarray(rhs.T) if mm.rhs_transposed else rhs,
    }
    if mm.lhs_scaled:
        arrays["lhs_scale"] = _scales(rng, (m, mm.k_blocks), 0 if case.cancelling else None)
        x = _scaled(x, arrays["lhs_scale"], 1)
    if mm.rhs_block:
        shape = (*experts, mm.rhs_scale_rows, mm.k_blocks)
        arrays["rhs_scale"] = _scales(rng, shape, 254 if case.cancelling else None)
        w = _scaled(w, arrays["rhs_scale"], mm.rhs_block[0])
    if mm.grouping:
        arrays["offsets"] = np.concatenate([[0], np.cumsum(case.tokens)]).astype(np.uint32)
        arrays["expert_ids"] = np.array(case.experts, np.int32)
    if mm.expert_scale:
        arrays["expert_scale"] = rng.uniform(0.5, 2.0, *experts).astype(np.float32)
    epilogue = mm.epilogue
    if epilogue.row_scale:
        arrays["row_scale"] = rng.uniform(0.5, 2.0, m).astype(np.float32)
    if epilogue.scale:
        arrays["scale"] = rng.uniform(0.5, 2.0, 1).astype(np.float32)
    spread = np.sqrt(mm.k)
    if epilogue.bias:
        arrays["bias"] = (spread * rng.standard_normal(mm.n)).astype(FLOATS[epilogue.bias])
    if epilogue.residual:
        values = spread * rng.standard_normal((m, mm.n))
        arrays["residual"] = values.astype(FLOATS[epilogue.residual])
    return Operands(case, arrays, x, w)


def _before_activation(operands: Operands) -> Array:
    case, arrays = operands.case, operands.arrays
    mm = case.matmul
    if mm.grouping:
        y = np.full((case.m, mm.n), np.nan)
        starts = np.concatenate([[0], np.cumsum(case.tokens)])
        for start, count, expert in zip(starts, case.tokens, case.experts, strict=False):
            rows = slice(start, start + count)
            if not 0 <= expert < mm.grouping.experts:
                y[rows] = 0.0
                continue
            scale = np.float64(arrays["expert_scale"][expert]) if mm.expert_scale else 1.0
            y[rows] = operands.x[rows] @ operands.w[expert].T * scale
    else:
        y = operands.x @ operands.w.T
    return _epilogue(y, mm, arrays)


def _epilogue(y: Array, matmul: Matmul, arrays: dict[str, Array]) -> Array:
    epilogue = matmul.epilogue
    if epilogue.row_scale:
        y = y * arrays["row_scale"][:, None].astype(np.float64)
    if epilogue.scale:
        y = y * np.float64(arrays["scale"][0])
    if epilogue.bias:
        y = y + arrays["bias"].astype(np.float64)
    if epilogue.residual:
        y = y + arrays["residual"].astype(np.float64)
    return y


def reference_activation(name: str, x: Array) -> Array:
    """An activation in float64."""
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "tanh":
        return np.tanh(x)
    if name == "silu":
        return x * 0.5 * (1.0 + np.tanh(x / 2))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / np.sqrt(2.0)))


def grid(case: Case) -> tuple[int, int, int]:
    """The grid that the host computes for a case."""
    if case.form == "gemv":
        return gemv.grid(case.matmul, case.m)
    if case.form == "grouped":
        x, y, z = grouped.grid(case.matmul, case.m)
        return as_integer(x), as_integer(y), z
    return dense.grid(case.matmul, case.m)


def poisoned(shape: tuple[int, ...], element: str) -> Array:
    """An output full of NaNs, so that what nobody writes shows."""
    return np.full(shape, np.nan, np.float32).astype(FLOATS[element])


def execute(
    kernel: Kernel | LoadedKernel,
    operands: Operands,
    seed: int | None = None,
    threadgroups: Iterable[tuple[int, int, int]] | None = None,
) -> Array:
    """Runs a kernel in the emulator; gives y."""
    case = operands.case
    y = poisoned((case.m, case.matmul.n), case.matmul.result)
    names = [buffer.name for buffer in case.matmul.buffers()][:-1]
    bindings = [Binding(operands.arrays[name]) for name in names]
    kernel.dispatch(
        [*bindings, Binding(y, output=True)],
        grid(case),
        constants=[case.m] if case.matmul.m is None else [],
        threadgroups=threadgroups,
        seed=seed,
    )
    return y


def compiled(case: Case, name: str = "kernel") -> Kernel:
    """The kernel of a case, from its bitcode."""
    return Kernel(compile_matmul(case.matmul, case.form, name).bitcode, name)


def run(case: Case, seed: int | None = None) -> tuple[Operands, Array]:
    """Compiles and runs a case on random operands."""
    operands = random_operands(case)
    return operands, execute(compiled(case), operands, seed)


def error_of(y: Array, operands: Operands) -> float:
    """Largest difference from the reference over the largest sum; infinite for a wrong NaN."""
    expected = operands.expected
    actual = y.astype(np.float64)
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return np.inf
    return float(np.nanmax(np.abs(actual - expected)) / operands.peak) if operands.peak else 0.0


def check(y: Array, operands: Operands) -> None:
    """Asserts that y is as near to the reference as its type allows."""
    error, tolerance = error_of(y, operands), TOLERANCE[operands.case.matmul.result]
    assert error <= tolerance, f"relative error {error:.3g} above {tolerance:.3g}"
