# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Groups of rows, from the composite in a model to the result: compile, host, kernel.

Kernels come out of what goes into the vmfb. Weights of experts that no group asks for hold NaNs.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iree.compiler import ir

from block32.dialects.kernel import KernelTier
from block32.lowering.apple.grouped import first_slot, grid, group_of
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.target import AppleM5Target
from block32.lowering.problem import Grouping, ScaledMatmul, ceil_div
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.air_emulator.dispatch import Binding
from block32.tools.air_emulator.faults import AbiError
from block32.tools.air_emulator.host import HostProgram
from block32.tools.air_emulator.vmfb import load_kernels
from block32.tools.apple_cases import FLOATS, Case, compiled
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, compile_source
from tests.grouped import program

Array = npt.NDArray[Any]
OPTIONS = CompileOptions(target="apple-m5", flags=("--compile-to=hal",))
TARGET = AppleM5Target()


def _problem(experts: int, groups: int, n: int, k: int, **fields: Any) -> ScaledMatmul:
    return ScaledMatmul(None, n, k, grouping=Grouping(experts, groups), **fields)


W8A16: dict[str, Any] = {"lhs": "bf16", "lhs_scaled": False}

#: Problems with the tokens and the expert of each group; -1 and numbers too large are no experts.
CASES: dict[str, tuple[ScaledMatmul, list[int], list[int]]] = {
    "out of order": (_problem(4, 4, 128, 64, **W8A16), [3, 0, 5, 2], [2, 0, 3, 1]),
    "out of order, mxfp8": (_problem(4, 4, 128, 64), [3, 0, 5, 2], [2, 0, 3, 1]),
    "ragged": (_problem(4, 3, 70, 40, **W8A16, result="bf16"), [7, 0, 20], [1, 0, 3]),
    "ragged, mxfp8": (_problem(4, 3, 70, 40, rhs_block=(1, 32)), [7, 0, 20], [1, 0, 3]),
    "no expert": (_problem(2, 2, 70, 40, **W8A16), [16, 24], [0, -1]),
    "no expert, mxfp8": (_problem(2, 2, 70, 40), [16, 24], [0, -1]),
    "numbers too large": (_problem(2, 4, 33, 64), [1, 2, 3, 4], [2, 1, 2**31 - 1, -(2**31)]),
    "many experts": (
        _problem(16, 8, 96, 64),
        [1, 2, 3, 1, 2, 3, 1, 2],
        [15, 0, 7, 7, 3, 15, 1, 9],
    ),
    "several tiles": (_problem(3, 4, 65, 150, result="bf16"), [70, 0, 129, 1], [2, 0, 2, 0]),
    "one group": (_problem(1, 1, 40, 96, **W8A16), [65], [0]),
    "only empty groups": (_problem(2, 3, 40, 96), [0, 0, 0], [1, 0, -1]),
}


@cache
def _program(problem: ScaledMatmul) -> HostProgram:
    text = compile_source(program(problem).encode(), "model.mlir", OPTIONS)
    with ir.Context():
        return HostProgram(ir.Module.parse(text.decode()))


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where((codes & 0x7F) == 0x7F, 0x2A, codes).astype(np.uint8)


def _operands(
    problem: ScaledMatmul, offsets: list[int], experts: list[int], m: int
) -> dict[str, Array]:
    """Random operands by name; what no group asks for is NaN."""
    rng = np.random.default_rng(m)
    assert problem.grouping is not None
    count, n, k = problem.grouping.experts, problem.n, problem.k
    used = [e for e in experts if 0 <= e < count]
    arrays: dict[str, Array] = {"lhs": _codes(rng, (m, k))}
    if not problem.lhs_scaled:
        arrays["lhs"] = rng.standard_normal((m, k)).astype(FLOATS[problem.lhs])
    arrays["rhs"] = np.full((count, n, k), 0x7F, np.uint8)
    arrays["rhs"][used] = _codes(rng, (len(used), n, k))
    if problem.lhs_scaled:
        arrays["lhs_scale"] = rng.integers(118, 137, (m, problem.k_blocks), dtype=np.uint8)
    arrays["rhs_scale"] = np.full((count, *problem.rhs_scale_shape), 255, np.uint8)
    shape = (len(used), *problem.rhs_scale_shape)
    arrays["rhs_scale"][used] = rng.integers(118, 137, shape, dtype=np.uint8)
    arrays["offsets"] = np.array(offsets, np.int32)
    arrays["expert_ids"] = np.array(experts, np.int32)
    arrays["init"] = rng.standard_normal((m, n)).astype(FLOATS[problem.result])
    return arrays


def _call(program: HostProgram, arrays: dict[str, Array]) -> Array:
    (view,) = program.call("main", list(arrays.values()))
    return view.data.view(arrays["init"].dtype).reshape(view.shape)


def _check(problem: ScaledMatmul, arrays: dict[str, Array], y: Array) -> None:
    """Against float64; rows of no group are those of init, bit for bit."""
    names = ("rhs", "rhs_scale", "offsets", "expert_ids", "init")
    expected = reference.grouped_matmul(
        arrays["lhs"],
        arrays.get("lhs_scale"),
        *(arrays[name] for name in names),
        rhs_block=problem.rhs_block,
    )
    assert y.shape == expected.shape and not np.isnan(y.astype(np.float64)).any()
    tolerance = {"f32": 1e-5, "bf16": 2.0**-8}[problem.result]
    first, end = arrays["offsets"][[0, -1]]
    inside = slice(first, end)
    error = np.abs(y[inside].astype(np.float64) - expected[inside])
    assert error.size == 0 or error.max() <= tolerance * np.abs(expected[inside]).max()
    outside = np.ones(len(y), bool)
    outside[inside] = False
    np.testing.assert_array_equal(y[outside], arrays["init"][outside])


@pytest.mark.parametrize("margin", [0, 3], ids=["every row in a group", "rows of no group"])
@pytest.mark.parametrize("name", CASES)
def test_a_model(name: str, margin: int) -> None:
    problem, tokens, experts = CASES[name]
    offsets = [margin, *(margin + int(end) for end in np.cumsum(tokens))]
    arrays = _operands(problem, offsets, experts, offsets[-1] + 2 * margin or 1)
    program = _program(problem)
    before = {name: array.copy() for name, array in arrays.items()}
    _check(problem, arrays, _call(program, arrays))
    (dispatched,) = program.dispatched
    assert "grouped" not in dispatched.kernel and dispatched.kernel.startswith("gemm_tier0")
    assert dispatched.grid[1] == len(arrays["lhs"]) // 64 + len(tokens)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array.view(np.uint8), before[key].view(np.uint8))


def test_rows_that_disagree_are_named_before_anything_is_launched() -> None:
    problem, tokens, experts = CASES["out of order, mxfp8"]
    arrays = _operands(problem, [0, *map(int, np.cumsum(tokens))], experts, 10)
    arrays["lhs_scale"] = arrays["lhs_scale"][:-1]
    program = _program(problem)
    with pytest.raises(AbiError, match="to have the same number of rows"):
        _call(program, arrays)
    assert program.dispatched == []


def test_no_rows_are_no_launch() -> None:
    problem, _, experts = CASES["out of order, mxfp8"]
    program = _program(problem)
    arrays = _operands(problem, [0] * 5, experts, 0)
    assert _call(program, arrays).shape == (0, 128) and program.dispatched == []


def test_no_groups_are_no_launch() -> None:
    problem = _problem(4, 0, 48, 64)
    program = _program(problem)
    arrays = _operands(problem, [0], [], 6)
    np.testing.assert_array_equal(_call(program, arrays), arrays["init"])
    assert program.dispatched == []


def test_rows_known_when_compiled_are_no_constant() -> None:
    problem, tokens, experts = CASES["ragged, mxfp8"]
    problem = dataclasses.replace(problem, m=27)
    program = _program(problem)
    arrays = _operands(problem, [0, *map(int, np.cumsum(tokens))], experts, 27)
    _check(problem, arrays, _call(program, arrays))
    assert program.dispatched[0].constants == ()


@pytest.mark.parametrize("offsets", [[0, 1000, 2000, 3000], [3, 1, 9, 2], [-5, 2, 4, 27]])
def test_no_table_of_offsets_makes_it_write_outside(offsets: list[int]) -> None:
    """Undefined rows are allowed, by the emulator's bounds nothing else."""
    problem, _, experts = CASES["ragged, mxfp8"]
    program = _program(problem)
    arrays = _operands(problem, offsets, experts, 27)
    assert _call(program, arrays).shape == (27, 70)


def test_the_command_line_selects_and_compiles_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vmfb's own bytes, with schedules permuted: the same bits."""
    problem, tokens, experts = CASES["many experts"]
    model, output = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    model.write_text(program(problem))
    assert main(["compile", str(model), "--target=apple-m5", "-o", str(output)]) == 0
    assert "apple-m5 grouped 64x64x32 (grouped, simdgroup matrices" in capsys.readouterr().err
    ((name, kernel),) = load_kernels(output.read_bytes()).items()
    assert "16experts_8groups" in name
    offsets = [0, *map(int, np.cumsum(tokens))]
    arrays = _operands(problem, offsets, experts, offsets[-1])
    results: list[Array] = []
    for seed in (None, 1, 2, 3):
        y = np.full((offsets[-1], problem.n), np.nan, np.float32)
        bindings = [Binding(array) for key, array in arrays.items() if key != "init"]
        kernel.dispatch([*bindings, Binding(y, output=True)], (2, 8, 1), [offsets[-1]], seed=seed)
        results.append(y)
    _check(problem, arrays, results[0])
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint8), other.view(np.uint8))


def test_a_spec_is_refused_with_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spec ends before the phase where the kernels get into their executables."""
    model, output = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(program(CASES["ragged"][0]))
    assert main(["spec", str(model), "--target=apple-m5", "-o", str(output)]) == 1
    error = capsys.readouterr().err
    assert "block32 compile puts this target's binaries into the vmfb" in error
    assert not output.exists()


@pytest.mark.parametrize(
    ("grouping", "form", "reason"),
    [
        (Grouping(4, 3), "tiled", "no form 'tiled' for groups of rows; expected grouped"),
        (None, "grouped", "no form 'grouped' for one weight; expected tiled or gemv"),
    ],
)
def test_forms_of_the_other_kind_are_refused(
    grouping: Grouping | None, form: str, reason: str
) -> None:
    problem = ScaledMatmul(None, 64, 64, grouping=grouping)
    answer = TARGET.verify(problem, KernelTier(form), DeviceFacts())
    assert answer is not None and reason in answer


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    before=st.integers(0, 200),
    after=st.integers(0, 200),
)
def test_every_tile_has_a_slot_of_its_own(tokens: list[int], before: int, after: int) -> None:
    offsets = [before, *(before + int(end) for end in np.cumsum(tokens))]
    groups, m = len(tokens), offsets[-1] + after
    matmul = Matmul(n=64, k=64, grouping=Grouping(1, groups))
    slots = grid(matmul, m)[1]
    assert isinstance(slots, int)
    owners = {}
    for slot in range(slots):
        group = group_of(slot, groups, offsets.__getitem__)  # type: ignore[arg-type]
        assert isinstance(group, int)
        owners[slot] = group, slot - first_slot(offsets[group], group)
    tiles = {(g, t) for g, count in enumerate(tokens) for t in range(ceil_div(count, 64))}
    owned = [owner for owner in owners.values() if owner in tiles]
    assert set(owned) == tiles and len(owned) == len(tiles)


def test_weights_beyond_4_gib() -> None:
    """The last of 70000 experts; the others' pages are never touched."""
    matmul = Matmul(n=64, k=1024, rhs_block=(32, 32), grouping=Grouping(70000, 1))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 1024)).astype(ml_dtypes.bfloat16)
    w, scales = np.zeros((70000, 64, 1024), np.uint8), np.zeros((70000, 2, 32), np.uint8)
    assert w.nbytes > 2**32
    w[-1], scales[-1] = _codes(rng, (64, 1024)), rng.integers(118, 137, (2, 32))
    y = np.full((3, 64), np.nan, np.float32)
    arrays = [x, w, scales, np.array([0, 3], np.int32), np.array([69999], np.int32)]
    kernel = compiled(Case(matmul, "grouped"))
    kernel.dispatch([*map(Binding, arrays), Binding(y, output=True)], (1, 1, 1), constants=[3])
    expected = reference.scaled_matmul(x, None, w[-1], scales[-1])
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_activations_beyond_4_gib() -> None:
    """The last rows of 2^22 and more, of 1024 bytes; the other pages are never touched."""
    m, rows = 2**22 + 100, 5
    matmul = Matmul(n=1, k=1024, lhs="f8E4M3FN", grouping=Grouping(1, 1))
    rng = np.random.default_rng(0)
    x, w = np.zeros((m, 1024), np.uint8), _codes(rng, (1, 1, 1024))
    x[-rows:] = _codes(rng, (rows, 1024))
    y = np.full((m, 1), np.nan, np.float32)
    arrays = [x, w, np.array([m - rows, m], np.int32), np.array([0], np.int32)]
    compiled(Case(matmul, "grouped")).dispatch(
        [*map(Binding, arrays), Binding(y, output=True)],
        (1, m // 64 + 1, 1),
        constants=[m],
        threadgroups=[(0, (m - rows) // 64, 0)],
    )
    expected = reference.decode(x[-rows:], "e4m3") @ reference.decode(w[0], "e4m3").T
    assert np.abs(y[-rows:] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.isnan(y[:-rows]).all()
