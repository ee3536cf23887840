# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mistakes put into the kernels on purpose: each must show, or the tests of numbers are blind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from iree.compiler import ir

from block32.lowering.apple import dense, grouped, llvm14, morton, simdgroup_tile
from block32.lowering.apple.air_math import expand_math
from block32.lowering.apple.air_printer import print_air
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.builder import Word, declare_callees, less
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import BufferParameter
from block32.lowering.apple.simdgroup_tile import OperandTiles, SimdgroupTile
from block32.lowering.apple.tile_scales import BlockScales
from block32.tools.air_emulator.dispatch import Kernel
from block32.tools.air_emulator.faults import AirError, OutOfBoundsError, RaceError
from block32.tools.apple_cases import (
    Case,
    Operands,
    compiled,
    error_of,
    execute,
    grouped_case,
    random_operands,
)

SCALED = Matmul(n=70, k=100, lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(32, 32))
EDGES = Case(Matmul(n=70, k=50), "tiled", 40)


def _is_caught(case: Case, kernel: Kernel | None = None, operands: Operands | None = None) -> bool:
    """Whether running the case faults or gives other numbers than the reference."""
    operands = operands or random_operands(case)
    try:
        return error_of(execute(kernel or compiled(case), operands), operands) > 1e-3
    except AirError:
        return True


def _with_text(case: Case, change: Callable[[str], str]) -> Kernel:
    """The kernel of a case from text that was changed on the way to LLVM."""
    signature, module = dense.build(case.matmul, "kernel")
    with module.context, ir.Location.unknown():
        expand_math(module)
        declare_callees(module)
    text = print_air(module, signature)
    changed = change(text)
    assert changed != text
    return Kernel(llvm14.encode(changed), "kernel")


@pytest.mark.parametrize("case", [EDGES, Case(SCALED, "tiled", 40)], ids=str)
def test_the_kernels_as_they_are_pass(case: Case) -> None:
    assert not _is_caught(case)
    assert not _is_caught(case, _with_text(case, lambda text: f"; unchanged\n{text}"))


def test_lane_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Still a bijection, but lanes 8 and 16 swap their places."""
    monkeypatch.setattr(
        SimdgroupAtom, "first_row", staticmethod(lambda lane: ((lane & 7) >> 1) + ((lane & 8) >> 1))
    )
    monkeypatch.setattr(
        SimdgroupAtom,
        "first_column",
        staticmethod(lambda lane: ((lane & 1) << 2) + ((lane & 16) >> 1)),
    )
    SimdgroupAtom("bf16", "bf16")
    assert _is_caught(EDGES)


def test_transpose_flag() -> None:
    kernel = _with_text(
        EDGES, lambda text: text.replace("i1 true, <8 x float>", "i1 false, <8 x float>")
    )
    assert _is_caught(EDGES, kernel)


def test_both_transpose_flags() -> None:
    def swap(text: str) -> str:
        text = text.replace("i1 true, <8 x float>", "i1 false, <8 x float>")
        return text.replace("i1 false, <8 x i8>", "i1 true, <8 x i8>")

    assert _is_caught(EDGES, _with_text(EDGES, swap))


def test_clamp_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simdgroup_tile, "clamp", lambda index, count: index)
    with pytest.raises(OutOfBoundsError):
        execute(compiled(EDGES), random_operands(EDGES))


def test_clamp_by_one_row_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = simdgroup_tile.clamp
    monkeypatch.setattr(simdgroup_tile, "clamp", lambda index, count: right(index, count + 1))
    with pytest.raises(OutOfBoundsError):
        execute(compiled(EDGES), random_operands(EDGES))


def test_mask_of_the_last_k(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OperandTiles._masked_tile
    monkeypatch.setattr(
        OperandTiles, "_masked_tile", lambda self, tile, k, count: right(self, tile, k, count + 1)
    )
    assert _is_caught(EDGES)


def test_guard_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simdgroup_tile, "less", _less_or_equal)
    assert _is_caught(EDGES)


def _less_or_equal(a: Word, b: Word | int) -> object:
    return less(a, b + 1)


@pytest.mark.parametrize("step", [0, 1])
def test_morton_bit(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """One mask of the bit gathering loses a bit; the grid is 4 x 4 tiles."""
    steps = list(morton._COMPACTION)
    shift, mask = steps[step]
    steps[step] = (shift, mask & ~2)
    monkeypatch.setattr(morton, "_COMPACTION", tuple(steps))
    case = Case(Matmul(n=256, k=16), "tiled", 256)
    assert _is_caught(case)


def test_morton_axes_swapped_on_an_oblong_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    right = morton.tile_position
    monkeypatch.setattr(dense.morton, "tile_position", lambda *a: tuple(reversed(right(*a))))
    assert _is_caught(Case(Matmul(n=256, k=16), "tiled", 64))


def test_argument_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two scales change places in the kernel, not on the host."""
    right = Matmul.buffers

    def swapped(self: Matmul) -> tuple[BufferParameter, ...]:
        lhs, rhs, lhs_scale, rhs_scale, *rest = right(self)
        return (lhs, rhs, rhs_scale, lhs_scale, *rest)

    case = Case(SCALED, "tiled", 40)
    operands = random_operands(case)
    bindings = [b.name for b in SCALED.buffers()]
    monkeypatch.setattr(Matmul, "buffers", swapped)
    kernel = compiled(case)
    monkeypatch.undo()
    assert [b.name for b in SCALED.buffers()] == bindings
    assert _is_caught(case, kernel, operands)


def test_group_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group stores from row 0 on: other groups' rows are written twice."""
    right = SimdgroupTile.store
    monkeypatch.setattr(
        SimdgroupTile, "store", lambda self, acc, row0, expert: right(self, acc, 0, expert)
    )
    case = grouped_case(3, 40, 32, [5, 9], [0, 2])
    with pytest.raises(RaceError):
        execute(compiled(case), random_operands(case))


def test_expert_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group uses expert 0."""
    right = grouped.wide
    monkeypatch.setattr(grouped, "wide", lambda value: right(value & 0))
    case = grouped_case(3, 40, 32, [5, 9], [1, 2])
    assert _is_caught(case)


def test_scale_block(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockScales.at
    monkeypatch.setattr(BlockScales, "at", lambda self, block: right(self, 0))
    assert _is_caught(Case(SCALED, "tiled", 40))
