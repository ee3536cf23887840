# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``apple-m1`` target: 8x8 matrix instructions on weights that are decoded in registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block32.lowering.apple import llvm14, operand_tiles, small_operand_tiles
from block32.lowering.apple.air_intrinsics import CONVERGENT, INTRINSICS
from block32.lowering.apple.air_legality import LegalityError, check
from block32.lowering.apple.air_parser import parse
from block32.lowering.apple.architecture import M1, M5
from block32.lowering.apple.atoms import SmallAtom, decoded_types, small_atoms
from block32.lowering.apple.library import build_metallib, compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.metallib import Version
from block32.lowering.apple.metallib import read as read_metallib
from block32.lowering.apple.program import Entry
from block32.lowering.apple.signature import KernelError
from block32.lowering.apple.small_operand_tiles import SmallOperandTiles
from block32.lowering.apple.target import AppleM1Target
from block32.lowering.problem import Epilogue, Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.runtime import reference
from block32.tools.air_emulator.faults import OutOfBoundsError
from block32.tools.air_emulator.vmfb import LoadedKernel, load_kernels
from block32.tools.apple_cases import (
    Case,
    compiled,
    error_of,
    execute,
    grouped_case,
    random_operands,
    run,
)
from block32.tools.apple_cases import check as check_numbers
from block32.tools.apple_program import compile_kernels
from block32.tools.cli import main
from tests.lowering.apple.test_target import MODEL

MXFP8: dict[str, Any] = {"lhs": "f8E4M3FN", "lhs_scaled": True, "rhs_block": (32, 32)}

#: Row and first column of some lanes, written out from the published layout.
CORNERS = {0: (0, 0), 1: (0, 2), 2: (1, 0), 7: (3, 2), 8: (0, 4), 15: (3, 6), 16: (4, 0)}


def _case(n: int, k: int, m: int, form: str = "tiled", **fields: Any) -> Case:
    return Case(Matmul(n=n, k=k, architecture=M1, **fields), form, m)


def _cases() -> Iterator[Case]:
    for m, n, k in ((1, 64, 64), (16, 128, 192), (100, 256, 64), (33, 130, 96), (129, 65, 40)):
        yield _case(n, k, m)
    for m, n, k in ((3, 1, 17), (65, 33, 15), (40, 70, 31), (8, 96, 129)):
        yield _case(n, k, m)
    for lhs, rhs in (
        ("f16", "f8E4M3FN"),
        ("f32", "f8E5M2"),
        ("f8E5M2", "f8E4M3FN"),
        ("bf16", "bf16"),
        ("bf16", "f16"),
        ("f16", "f8E5M2"),
    ):
        yield _case(70, 50, 40, lhs=lhs, rhs=rhs)
    for m in (1, 3, 8, 33, 129):
        yield _case(130, 300, m, **MXFP8)
        yield _case(40, 70, m, rhs_block=(1, 32))
    yield _case(97, 161, 40, lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(1, 32), result="bf16")
    yield _case(96, 160, 40, lhs="f8E5M2", rhs="f8E5M2", lhs_scaled=True, rhs_block=(1, 32))
    every = Epilogue(row_scale=True, scale=True, bias="bf16", residual="f16", activation="silu")
    yield _case(67, 64, 34, epilogue=every, **MXFP8)
    yield _case(70, 1000, 1, "gemv", **MXFP8)
    yield _case(44, 90, 1, "gemv")
    for fields in ({"expert_scale": True}, MXFP8, {"rhs_block": (32, 32)}):
        yield grouped_case(3, 70, 100, [70, 0, 5, 3], [2, 0, -1, 1], architecture=M1, **fields)


CASES = list(_cases())


@pytest.fixture(scope="module")
def kernels() -> dict[str, LoadedKernel]:
    entries = {f"f{i}": Entry(case.matmul, case.form) for i, case in enumerate(CASES)}
    return load_kernels(compile_kernels(entries))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_numbers(kernels: dict[str, LoadedKernel], index: int) -> None:
    """From the vmfb, in order and with lanes and threadgroups permuted: the same bits."""
    operands = random_operands(CASES[index], seed=index)
    y = execute(kernels[f"f{index}_kernel"], operands)
    check_numbers(y, operands)
    permuted = execute(kernels[f"f{index}_kernel"], operands, seed=index)
    np.testing.assert_array_equal(y.view(np.uint8), permuted.view(np.uint8))


@pytest.mark.parametrize("atom", small_atoms(), ids=lambda atom: atom.lhs)
def test_every_element_has_exactly_one_holder(atom: SmallAtom) -> None:
    held = [atom.coordinates(lane, slot) for lane in range(32) for slot in range(2)]
    assert sorted(held) == [(row, column) for row in range(8) for column in range(8)]


@pytest.mark.parametrize(("lane", "corner"), CORNERS.items())
def test_lane_layout(lane: int, corner: tuple[int, int]) -> None:
    row, column = corner
    atom = SmallAtom("bf16", "bf16")
    assert [atom.coordinates(lane, slot) for slot in range(2)] == [(row, column), (row, column + 1)]


def test_name_and_signature() -> None:
    name = "air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64bf16.v64bf16.v64f32"
    assert SmallAtom("bf16", "bf16").intrinsic == name
    known = INTRINSICS[name]
    assert (known.result, known.attributes) == ("<64 x float>", CONVERGENT)
    assert known.operands == ("<64 x bfloat>", "<64 x bfloat>", "<64 x float>")


@pytest.mark.parametrize(
    ("types", "multiplied"),
    [
        (("bf16", "f8E4M3FN"), "bf16"),
        (("f8E5M2", "f16"), "f16"),
        (("f8E4M3FN", "f8E5M2"), "bf16"),
        (("bf16", "f16"), "f32"),
        (("f32", "f8E4M3FN"), "f32"),
    ],
)
def test_operands_are_decoded_to_one_type(types: tuple[str, str], multiplied: str) -> None:
    assert decoded_types(*types) == (multiplied, multiplied)


@pytest.mark.parametrize("lhs", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("rhs", "name"), [("f8E4M3FN", "e4m3"), ("f8E5M2", "e5m2")])
def test_every_code_of_a_weight_is_decoded_exactly(lhs: str, rhs: str, name: str) -> None:
    """A row of ones and zeros picks one column of w; a NaN or an infinity makes its row NaN."""
    case = _case(256, 32, 32, lhs=lhs, rhs=rhs)
    operands = random_operands(case)
    operands.arrays["lhs"][:] = np.eye(32)
    operands.arrays["rhs"][:] = np.arange(256, dtype=np.uint8)[:, None]
    y = execute(compiled(case), operands)
    values = reference.decode(np.arange(256, dtype=np.uint8), name)  # type: ignore[arg-type]
    finite = np.isfinite(values)
    expected = np.broadcast_to(values[finite].astype(np.float32), (32, finite.sum()))
    np.testing.assert_array_equal(y[:, finite], expected)
    assert np.isnan(y[:, ~finite]).all()


def test_the_library_is_for_macos_14(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    model.write_text(MODEL)
    assert main(["compile", str(model), "--target=apple-m1", "-o", str(output)]) == 0
    assert "apple-m1 tiled 64x64x32" in capsys.readouterr().err
    assert main(["inspect", str(output)]) == 0
    listed = capsys.readouterr().out
    assert "AIR 2.6, Metal 3.1, macOS 14.0" in listed and "matrix" in listed
    library = read_metallib(build_metallib([compile_matmul(CASES[0].matmul, "tiled", "gemm")]))
    assert library.os_version == Version(14, 0) and library.format_patch == 7
    text = llvm14.disassemble(library.functions[0].bitcode)
    assert 'target triple = "air64-apple-macosx14.0.0"' in text
    assert "16x16x16" not in text and "simdgroup_matrix_8x8" in text


def test_the_large_instruction_is_refused_in_older_air() -> None:
    """What an M1 would fail to load is named here."""
    text = llvm14.disassemble(compile_matmul(Matmul(n=64, k=64), "tiled", "gemm").bitcode)
    old = text.replace(M5.triple, M1.triple).replace("i32 2, i32 8, i32 0", "i32 2, i32 6, i32 0")
    old = old.replace('!"Metal", i32 4, i32 0', '!"Metal", i32 3, i32 1')
    with pytest.raises(LegalityError, match=r"16x16x16.* needs AIR 2.8; apple-m1 has 2.6"):
        check(parse(old), M1)


def test_selection() -> None:
    target, facts = AppleM1Target(), DeviceFacts()
    config = target.select(ScaledMatmul(None, 64, 64), facts).config
    assert config is not None and config.target == "apple-m1"
    assert [tier.form for tier in config.tiers] == ["gemv", "tiled"]
    assert config.tiers[1].mma == (8, 8, 8)
    grouped = ScaledMatmul(None, 64, 64, grouping=Grouping(2, 3))
    config = target.select(grouped, facts).config
    assert config is not None and [tier.form for tier in config.tiers] == ["grouped"]
    reason = target.verify(grouped, config.tiers[0].__class__("gemv"), facts)
    assert reason is not None and "expected grouped" in reason


@pytest.mark.parametrize("side", ["lhs_transposed", "rhs_transposed"])
def test_transposed_operands_are_refused(side: str) -> None:
    with pytest.raises(KernelError, match="apple-m1 has no kernels for transposed operands"):
        Matmul(n=64, k=64, architecture=M1, **{side: True})  # type: ignore[arg-type]


def test_a_type_without_an_instruction_is_named() -> None:
    with pytest.raises(KernelError, match="does not take f8E4M3FN; expected one of bf16, f16, f32"):
        SmallAtom("bf16", "f8E4M3FN")


def test_mutation_of_the_places_along_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """x and w disagree which k an instruction takes where: the last one goes with the first."""
    right = SmallOperandTiles._operand

    def shifted(self: SmallOperandTiles, first: Any, second: Any, number: int) -> Any:
        is_x = not isinstance(self.operand.rows, int)  # M is known at run time only
        return right(self, first, second, (number + 1) % 4 if is_x else number)

    monkeypatch.setattr(SmallOperandTiles, "_operand", shifted)
    operands = random_operands(_case(32, 32, 32))
    y = execute(compiled(operands.case), operands)
    k = np.arange(32)
    moved = k // 4 * 4 + (k + 1) % 4
    expected = operands.x[:, moved] @ operands.w.T
    assert error_of(y, operands) > 1e-2
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_mutation_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operand_tiles.clamp
    monkeypatch.setattr(small_operand_tiles, "clamp", lambda index, count: right(index, count + 1))
    with pytest.raises(OutOfBoundsError, match="of buffer lhs, which has 4000"):
        run(_case(70, 50, 40))
