# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix instruction's data: names, and which lane holds which element."""

from __future__ import annotations

import pytest

from block32.lowering.apple.air_intrinsics import CONVERGENT, INTRINSICS
from block32.lowering.apple.atoms import SimdgroupAtom, atoms
from block32.lowering.apple.signature import KernelError

#: Row, and columns of slots 0 to 3, of some lanes, written out from the published layout.
CORNERS = {
    0: (0, 0),
    1: (0, 4),
    2: (1, 0),
    7: (3, 4),
    8: (0, 8),
    15: (3, 12),
    16: (4, 0),
    31: (7, 12),
}


@pytest.mark.parametrize("atom", atoms(), ids=lambda atom: f"{atom.lhs}-{atom.rhs}")
def test_every_element_has_exactly_one_holder(atom: SimdgroupAtom) -> None:
    held = [atom.coordinates(lane, slot) for lane in range(32) for slot in range(8)]
    assert sorted(held) == [(row, column) for row in range(16) for column in range(16)]


@pytest.mark.parametrize(("lane", "corner"), CORNERS.items())
def test_lane_layout(lane: int, corner: tuple[int, int]) -> None:
    atom = SimdgroupAtom("bf16", "f8E4M3FN")
    row, column = corner
    expected = [(row + 8 * half, column + i) for half in range(2) for i in range(4)]
    assert [atom.coordinates(lane, slot) for slot in range(8)] == expected


def test_a_layout_that_is_no_bijection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimdgroupAtom, "first_row", staticmethod(lambda lane: (lane & 7) >> 1))
    with pytest.raises(KernelError, match="not a bijection"):
        SimdgroupAtom("bf16", "bf16")


def test_a_type_without_an_instruction_is_named() -> None:
    with pytest.raises(KernelError, match="takes f4E2M1FN; expected one of bf16, f16, f32"):
        SimdgroupAtom("bf16", "f4E2M1FN")


def test_name_and_signature_of_the_mixed_pair() -> None:
    atom = SimdgroupAtom("bf16", "f8E4M3FN")
    name = "air.simdgroup_matrix_16x16x16_multiply_accumulate.f.f.v8f32.v8bf16.v8f8e4m3fn.v8f32"
    assert atom.intrinsic == name
    known = INTRINSICS[name]
    assert (known.result, known.operands) == (
        "<8 x float>",
        ("<8 x bfloat>", "i1", "<8 x i8>", "i1", "<8 x float>"),
    )
    assert known.attributes == CONVERGENT and "readnone" not in known.attributes
