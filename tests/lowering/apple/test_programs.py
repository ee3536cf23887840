# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whole functions: from a model's arguments to its results, host and kernels, without a Mac."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir

from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.program import Entry, build_program
from block32.lowering.apple.select import matmul_of
from block32.lowering.apple.target import AppleM5Target
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.air_emulator.faults import AbiError, UnsupportedError
from block32.tools.air_emulator.host import HostProgram
from block32.tools.apple_cases import (
    FLOATS,
    Case,
    check,
    grouped_case,
    poisoned,
    random_operands,
)
from block32.tools.compiler import CompileOptions, compile_source, finish_module

Array = npt.NDArray[Any]

TARGET = AppleM5Target()
#: The module is taken as it is when its executables hold our kernels, ready to become a vmfb.
OPTIONS = CompileOptions(target="apple-m5", flags=("--compile-to=hal",))


def _load(text: bytes) -> HostProgram:
    with ir.Context():
        return HostProgram(ir.Module.parse(text.decode()))


def _program_of(problem: ScaledMatmul) -> HostProgram:
    config = TARGET.select(problem, DeviceFacts()).config
    assert config is not None
    with ir.Context(), ir.Location.unknown():
        module = build_standalone_module(KernelSpec(problem, TARGET, config.tiers))
        text = module.operation.get_asm(enable_debug_info=True)
    with ir.Context():
        module = ir.Module.parse(text)
        return _load(finish_module(module, "standalone", OPTIONS, phase="start"))


def _call(program: HostProgram, name: str, arguments: list[Array], element: str) -> Array:
    (view,) = program.call(name, arguments)
    return view.data.view(FLOATS[element]).reshape(view.shape)


EVERYTHING = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f16", activation="relu")

PROBLEMS = (
    ScaledMatmul(m=None, n=96, k=160),
    ScaledMatmul(m=None, n=130, k=100, rhs_block=(1, 32), result="bf16"),
    ScaledMatmul(m=None, n=40, k=72, epilogue=EVERYTHING),
    ScaledMatmul(m=None, n=48, k=64, lhs="bf16", lhs_scaled=False),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=ScaledMatmul.describe)
def test_rows_that_come_at_run_time(problem: ScaledMatmul) -> None:
    """Each M takes its tier and its grid; no rows launch nothing and give no rows."""
    program = _program_of(problem)
    names = list(problem.operand_names)
    for m in (1, 2, 33, 129):
        operands = random_operands(Case(matmul_of(problem), m=m), seed=m)
        arguments = [operands.arrays[name] for name in names]
        check(_call(program, "main", arguments, problem.result), operands)
        (dispatched,) = program.dispatched
        gemv = m == 1 and problem.n <= problem.k
        assert f"tier{0 if gemv or problem.n > problem.k else 1}" in dispatched.kernel
        assert dispatched.constants == (m,)
    arguments = [a[:0] if a.shape[:1] == (129,) else a for a in arguments]
    (view,) = program.call("main", arguments)
    assert view.shape == (0, problem.n) and program.dispatched == []


ENTRIES = {
    "grouped": grouped_case(4, 70, 40, [7, 0, 20], [1, 0, 3], expert_scale=True),
    "absent": grouped_case(2, 64, 48, [16, 24], [0, -1]),
    "mixture": grouped_case(
        3, 40, 64, [5, 1, 33], [2, 2, 0], lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(32, 32)
    ),
    "transposed": Case(Matmul(n=65, k=35, lhs_transposed=True, rhs_transposed=True), m=70),
    "unscaled": Case(Matmul(n=64, k=64, lhs="f16", result="bf16"), m=65),
    "vector": Case(Matmul(n=44, k=90), "gemv", 1),
}


@pytest.fixture(scope="module")
def entries() -> HostProgram:
    module = build_program({n: Entry(c.matmul, c.form) for n, c in ENTRIES.items()})
    return _load(finish_module(module, "entries", OPTIONS, phase="start"))


@pytest.mark.parametrize("name", ENTRIES)
def test_functions_of_single_kernels(entries: HostProgram, name: str) -> None:
    """What the check on a Mac calls, called the same way."""
    case = ENTRIES[name]
    operands, result = random_operands(case), case.matmul.result
    arguments = [operands.arrays[buffer.name] for buffer in case.matmul.buffers()[:-1]]
    if case.matmul.grouping:
        arguments.append(poisoned((case.m, case.matmul.n), result))
    check(_call(entries, name, arguments, result), operands)


def test_rows_of_no_group_come_back_as_they_were(entries: HostProgram) -> None:
    operands = random_operands(ENTRIES["absent"])
    operands.arrays["offsets"][:] = [0, 16, 16]
    y = np.full((40, 64), 7.0, np.float32)
    result = _call(entries, "absent", [*operands.arrays.values(), y], "f32")
    assert (result[16:] == 7.0).all() and not (result[:16] == 7.0).any()


HEAD = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#wr = affine_map<(m, n, k) -> (n, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
"""


def _matmul(result: str, x: str, w: str, scales: str = "#ws", blocks: int = 1, m: int = 40) -> str:
    kinds = f"tensor<{m}x64xf8E4M3FN>, tensor<{m}x2xf8E8M0FNU>"
    rows = m if scales == "#wr" else 32
    weights = f"tensor<{rows}x64xf8E4M3FN>, tensor<{blocks}x2xf8E8M0FNU>"
    return f"""
  %{result} = linalg.scaled_contract indexing_maps = [#x, #xs, #w, {scales}, #y]
    ins(%{x}, %{x}s, %{w}, %{w}s : {kinds}, {weights})
    outs(%zero{rows} : tensor<{m}x{rows}xf32>) -> tensor<{m}x{rows}xf32>"""


ARGUMENTS = """%x: tensor<40x64xf8E4M3FN>, %xs: tensor<40x2xf8E8M0FNU>,
    %unused: tensor<3xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>,
    %v: tensor<32x64xf8E4M3FN>, %vs: tensor<1x2xf8E8M0FNU>,
    %u: tensor<40x64xf8E4M3FN>, %us: tensor<40x2xf8E8M0FNU>"""


def _model(body: str, results: str, kinds: str) -> HostProgram:
    model = f"""{HEAD}
func.func @main({ARGUMENTS}) -> ({kinds}) {{
  %zero32 = arith.constant dense<0.0> : tensor<40x32xf32>
  %zero40 = arith.constant dense<0.0> : tensor<40x40xf32>
{body}
  return {results} : {kinds}
}}
"""
    return _load(compile_source(model.encode(), "model.mlir", OPTIONS))


def _arguments(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    values: dict[str, Array] = {}
    for name, rows, scale_rows in (("x", 40, 40), ("w", 32, 1), ("v", 32, 1), ("u", 40, 40)):
        codes = rng.integers(0, 0x7F, (rows, 64), dtype=np.uint8)
        values[name] = codes | (rng.integers(0, 2, codes.shape, dtype=np.uint8) << 7)
        values[f"{name}s"] = rng.integers(120, 134, (scale_rows, 2), dtype=np.uint8)
    order = ("x", "xs", "unused", "w", "ws", "v", "vs", "u", "us")
    values["unused"] = np.zeros(3, np.float32)
    return {name: values[name] for name in order}


def _expected(a: dict[str, Array], x: str, w: str) -> Array:
    block = (1, 32) if a[f"{w}s"].shape[0] == a[w].shape[0] else (32, 32)
    return reference.scaled_matmul(a[x], a[f"{x}s"], a[w], a[f"{w}s"], rhs_block=block)


def test_weights_used_twice_layers_of_one_shape_and_an_unused_argument() -> None:
    body = _matmul("a", "x", "w") + _matmul("b", "x", "v") + _matmul("c", "u", "w")
    kind = "tensor<40x32xf32>"
    program = _model(body, "%a, %b, %c", ", ".join([kind] * 3))
    arguments = _arguments()
    results = program.call("main", list(arguments.values()))
    assert len({d.kernel for d in program.dispatched}) == 1 and len(program.dispatched) == 3
    for view, (x, w) in zip(results, (("x", "w"), ("x", "v"), ("u", "w")), strict=True):
        expected = _expected(arguments, x, w)
        y = view.data.view(np.float32).reshape(view.shape)
        assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_matrix_times_itself() -> None:
    """x is its own weight, with a scale a row."""
    body = _matmul("a", "x", "x", "#wr", 40)
    program = _model(body, "%a", "tensor<40x40xf32>")
    arguments = _arguments()
    y = _call(program, "main", list(arguments.values()), "f32")
    expected = _expected(arguments, "x", "x")
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_kernels_of_irees_own_are_named_and_not_run() -> None:
    body = _matmul("a", "x", "w") + "\n  %b = math.sin %a : tensor<40x32xf32>"
    program = _model(body, "%b", "tensor<40x32xf32>")
    with pytest.raises(UnsupportedError, match="is Metal source of IREE's own"):
        program.call("main", list(_arguments().values()))
    assert len(program.dispatched) == 1


def test_an_argument_of_another_shape_is_refused() -> None:
    program = _model(_matmul("a", "x", "w"), "%a", "tensor<40x32xf32>")
    arguments = _arguments()
    arguments["x"] = arguments["x"][:39]
    with pytest.raises(AbiError, match=r"has shape \(39, 64\); expected \(40, 64\)"):
        program.call("main", list(arguments.values()))


def test_every_epilogue_operand_has_a_place_of_its_own() -> None:
    """The ABI's order, with as few rows as columns so that no size gives a mistake away."""
    problem = dataclasses.replace(PROBLEMS[0], m=96, n=96, epilogue=EVERYTHING)
    operands = random_operands(Case(matmul_of(problem), m=96))
    arguments = [operands.arrays[name] for name in problem.operand_names]
    check(_call(_program_of(problem), "main", arguments, "f32"), operands)
