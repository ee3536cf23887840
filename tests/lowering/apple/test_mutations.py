# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mistakes put into the kernels on purpose: each must show, or the tests of numbers are blind.

Each shows in its own way: by a named error of the emulator, or by the very numbers that the mistake
has to give, worked out here in float64. An accident of another kind does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir

from block32.lowering.apple import (
    builder,
    dense,
    grouped,
    llvm14,
    morton,
    operand_tiles,
    simdgroup_tile,
)
from block32.lowering.apple.air_math import expand_math
from block32.lowering.apple.air_printer import print_air
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.builder import Int, Pointer, Word, declare_callees
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.operand_tiles import OperandTiles
from block32.lowering.apple.signature import BufferParameter
from block32.lowering.apple.simdgroup_tile import SimdgroupTile
from block32.lowering.apple.tile_scales import BlockScales
from block32.runtime import reference
from block32.tools.air_emulator.dispatch import Kernel
from block32.tools.air_emulator.faults import OutOfBoundsError, RaceError
from block32.tools.apple_cases import (
    Case,
    Operands,
    check,
    compiled,
    error_of,
    execute,
    grouped_case,
    random_operands,
)

Array = npt.NDArray[Any]

#: One simdgroup, two tiles of 16 each way.
WHOLE = Case(Matmul(n=32, k=32), "tiled", 32)
EDGES = Case(Matmul(n=70, k=50), "tiled", 40)

#: As many scales on each side, so that no size gives a mistake away.
SCALED = Case(Matmul(n=40, k=100, lhs="f8E4M3FN", lhs_scaled=True, rhs_block=(1, 32)), "tiled", 40)

GROUPS = grouped_case(3, 40, 32, [5, 9], [1, 2])


def _gives(expected: Array, operands: Operands, kernel: Kernel | None = None) -> None:
    """Asserts that a mutant runs without a fault and gives exactly these wrong numbers."""
    y = execute(kernel or compiled(operands.case), operands)
    assert error_of(y, operands) > 1e-2, "the mistake does not show"
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.nanmax(np.abs(y - expected)) <= 1e-5 * np.nanmax(np.abs(expected))


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


@pytest.mark.parametrize("case", [WHOLE, EDGES, SCALED, GROUPS], ids=str)
def test_the_kernels_as_they_are_pass(case: Case) -> None:
    operands = random_operands(case)
    check(execute(compiled(case), operands), operands)
    if case.form == "tiled":
        unchanged = _with_text(case, lambda text: f"; unchanged\n{text}")
        check(execute(unchanged, operands), operands)


def test_lane_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes 8 and 16 change places: loads and stores permute what the instruction sees."""
    monkeypatch.setattr(
        SimdgroupAtom, "first_row", staticmethod(lambda lane: ((lane & 7) >> 1) + ((lane & 8) >> 1))
    )
    monkeypatch.setattr(
        SimdgroupAtom,
        "first_column",
        staticmethod(lambda lane: ((lane & 1) << 2) + ((lane & 16) >> 1)),
    )
    SimdgroupAtom("bf16", "bf16")  # still a bijection
    operands = random_operands(WHOLE)
    _gives(_by_lanes(operands.x, operands.w), operands)


def _by_lanes(x: Array, w: Array) -> Array:
    """The matmul whose lanes load and store by the wrong map and multiply by the right one."""
    tile = np.indices((16, 16)).reshape(2, -1).T

    def place(lane: int, slot: int, bits: tuple[int, int]) -> tuple[int, int]:
        row = ((lane & 7) >> 1) + (4 if lane & bits[0] else 0) + 8 * (slot // 4)
        return row, ((lane & 1) << 2) + (8 if lane & bits[1] else 0) + slot % 4

    pairs = [(lane, slot) for lane in range(32) for slot in range(8)]
    wrong = {place(*pair, (8, 16)): place(*pair, (16, 8)) for pair in pairs}

    def seen(matrix: Array) -> Array:
        """What the instruction takes a loaded tile for."""
        out = np.empty_like(matrix)
        for row, column in tile:
            out[wrong[row, column]] = matrix[row, column]
        return out

    y = np.zeros((32, 32))
    for m in (0, 16):
        for n in (0, 16):
            product = np.zeros((16, 16))
            for k in (0, 16):
                product += seen(x[m : m + 16, k : k + 16]) @ seen(w[n : n + 16, k : k + 16]).T
            for row, column in tile:
                y[m + row, n + column] = product[wrong[row, column]]
    return y


def _tiles_not_transposed(x: Array, w: Array, transposes_x: bool) -> Array:
    """The matmul whose tiles of w are not transposed, and those of x are where that is wrong."""
    y = np.zeros((32, 32))
    for m in (0, 16):
        for n in (0, 16):
            for k in (0, 16):
                a, b = x[m : m + 16, k : k + 16], w[n : n + 16, k : k + 16]
                y[m : m + 16, n : n + 16] += (a.T if transposes_x else a) @ b
    return y


def _clear_flag(text: str) -> str:
    return text.replace("i1 true, <8 x float>", "i1 false, <8 x float>")


def test_transpose_flag() -> None:
    operands = random_operands(WHOLE)
    expected = _tiles_not_transposed(operands.x, operands.w, False)
    _gives(expected, operands, _with_text(WHOLE, _clear_flag))


def test_both_transpose_flags() -> None:
    kernel = _with_text(
        WHOLE, lambda text: _clear_flag(text).replace("i1 false, <8 x i8>", "i1 true, <8 x i8>")
    )
    operands = random_operands(WHOLE)
    _gives(_tiles_not_transposed(operands.x, operands.w, True), operands, kernel)


def test_clamp_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand_tiles, "clamp", lambda index, count: index)
    with pytest.raises(OutOfBoundsError, match=r"of buffer lhs, which has 4000"):
        execute(compiled(EDGES), random_operands(EDGES))


def test_clamp_by_one_row_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operand_tiles.clamp
    monkeypatch.setattr(operand_tiles, "clamp", lambda index, count: right(index, count + 1))
    with pytest.raises(OutOfBoundsError, match=r"offset 4000 of buffer lhs, which has 4000"):
        execute(compiled(EDGES), random_operands(EDGES))


def _shift_mask(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    right = OperandTiles._masked_tile
    monkeypatch.setattr(
        OperandTiles, "_masked_tile", lambda self, tile, k, count: right(self, tile, k, count + by)
    )


def test_edge_mask_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's element behind K lies behind x; nobody else's does."""
    _shift_mask(monkeypatch, 1)
    with pytest.raises(OutOfBoundsError, match=r"2 bytes at offset 4000 of buffer lhs"):
        execute(compiled(EDGES), random_operands(EDGES))


def test_edge_mask_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    _shift_mask(monkeypatch, -1)
    operands = random_operands(EDGES)
    _gives(operands.x[:, :49] @ operands.w[:, :49].T, operands)


@pytest.mark.parametrize(("loosened", "threadgroup"), [(Word, 0), (int, 1)], ids=["row", "column"])
def test_guard_of_stores(monkeypatch: pytest.MonkeyPatch, loosened: type, threadgroup: int) -> None:
    """One row or column too many is stored: behind y, by who owns the last ones."""
    right, right_less = SimdgroupTile._for_runs, builder.less

    def less(a: Int, b: Int) -> ir.Value:
        return right_less(a, b + 1 if isinstance(b, loosened) else b)

    def loose(self: SimdgroupTile, run: int, store: Callable[..., None]) -> None:
        with monkeypatch.context() as inner:
            inner.setattr(simdgroup_tile, "less", less)
            right(self, run, store)

    monkeypatch.setattr(SimdgroupTile, "_for_runs", loose)
    message = rf"threadgroup \({threadgroup}, 0, 0\).* at offset 11200 of buffer result"
    with pytest.raises(OutOfBoundsError, match=message):
        execute(compiled(EDGES), random_operands(EDGES))


@pytest.mark.parametrize("step", [0, 1])
def test_morton_bit(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """One mask of the bit gathering loses a bit: two threadgroups of 4 x 4 own one tile."""
    steps = list(morton._COMPACTION)
    shift, mask = steps[step]
    steps[step] = (shift, mask & ~2)
    monkeypatch.setattr(morton, "_COMPACTION", tuple(steps))
    case = Case(Matmul(n=256, k=16), "tiled", 256)
    with pytest.raises(RaceError, match=r"of result, which threadgroup \(\d+, 0, 0\).* wrote"):
        execute(compiled(case), random_operands(case))


def test_morton_axes_swapped_on_an_oblong_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tiles in a row only the first is there when they are taken for a column."""
    right = morton.tile_position
    monkeypatch.setattr(dense.morton, "tile_position", lambda *a: tuple(reversed(right(*a))))
    operands = random_operands(Case(Matmul(n=256, k=16), "tiled", 64))
    expected = operands.expected.copy()
    expected[:, 64:] = np.nan
    _gives(expected, operands)


@pytest.mark.parametrize("first", [0, 2], ids=["operands", "scales"])
def test_argument_order(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Two bindings change places in the kernel, not on the host."""
    right = Matmul.buffers

    def swapped(self: Matmul) -> tuple[BufferParameter, ...]:
        buffers = list(right(self))
        buffers[first : first + 2] = buffers[first + 1], buffers[first]
        return tuple(buffers)

    operands = random_operands(SCALED)
    monkeypatch.setattr(Matmul, "buffers", swapped)
    kernel = compiled(SCALED)
    monkeypatch.undo()
    values = [reference.decode(operands.arrays[name], "e4m3") for name in ("lhs", "rhs")]
    scales = [_spread(operands.arrays[name], 100) for name in ("lhs_scale", "rhs_scale")]
    (values if first == 0 else scales).reverse()
    x, w = (value * scale for value, scale in zip(values, scales, strict=True))
    _gives(x @ w.T, operands, kernel)


def _spread(codes: Array, k: int) -> Array:
    """Scale bytes as factors of K elements."""
    return np.repeat(np.exp2(codes.astype(float) - 127), 32, axis=1)[:, :k]


def test_scale_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a word takes the first one's scales."""
    right = BlockScales.at
    monkeypatch.setattr(BlockScales, "at", lambda self, block: right(self, 0))
    operands = random_operands(SCALED)
    x, w = (
        reference.decode(operands.arrays[side], "e4m3")
        * np.exp2(operands.arrays[f"{side}_scale"][:, :1].astype(float) - 127)
        for side in ("lhs", "rhs")
    )
    _gives(x @ w.T, operands)


def test_group_offset_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group stores from row 0 on: other groups' rows are written twice."""
    right = SimdgroupTile.store
    monkeypatch.setattr(
        SimdgroupTile, "store", lambda self, acc, row0, expert: right(self, acc, 0, expert)
    )
    with pytest.raises(RaceError, match=r"of result, which threadgroup \(0, [01], 0\)"):
        execute(compiled(GROUPS), random_operands(GROUPS))


def _by_groups(operands: Operands, firsts: list[int], experts: list[int]) -> Array:
    """The result whose groups, of 5 and 9 rows, start at these rows of x and use these experts."""
    parts = [
        operands.x[first : first + count] @ operands.w[expert].T
        for first, count, expert in zip(firsts, (5, 9), experts, strict=True)
    ]
    return np.concatenate(parts)


def test_group_offset_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "rows_from", lambda buffer, first, columns: buffer)
    operands = random_operands(GROUPS)
    _gives(_by_groups(operands, [0, 0], [1, 2]), operands)


@pytest.mark.parametrize(
    ("wrong", "experts"), [(lambda e: e & 0, [0, 0]), (lambda e: e - 1, [0, 1])]
)
def test_expert_offset(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Word], Word], experts: list[int]
) -> None:
    right = grouped.part_of_expert

    def part(buffer: Pointer, expert: Word, rows: int, columns: int) -> Pointer:
        return right(buffer, wrong(expert), rows, columns)

    monkeypatch.setattr(grouped, "part_of_expert", part)
    operands = random_operands(GROUPS)
    _gives(_by_groups(operands, [0, 5], experts), operands)


def test_bound_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is one too large is taken for an expert."""
    right = grouped.less
    monkeypatch.setattr(grouped, "less", lambda a, b: right(a, b + 1 if b == 3 else b))
    case = grouped_case(3, 40, 32, [5, 9], [1, 3])
    message = r"threadgroup \(0, 1, 0\).* of buffer rhs, which has 3840"
    with pytest.raises(OutOfBoundsError, match=message):
        execute(compiled(case), random_operands(case))


def test_slot_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot a tile and none for each group: a group that begins in another's tile is left out."""
    monkeypatch.setattr(grouped, "first_slot", lambda offset, group: offset >> 6)
    operands = random_operands(GROUPS)
    expected = operands.expected.copy()
    expected[:5] = np.nan
    _gives(expected, operands)
