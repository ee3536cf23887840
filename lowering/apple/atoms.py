# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The simdgroup matrix instructions as rows of data: shape, operand types, lane layout.

Sources: the 16x16x16 form, its operand tokens and its lane layout were read off modules built by
Apple's and Modular's compilers. Those show fp8 operands and mixed pairs by the grammar of the name;
that bf16 with e4m3 is accepted on an M5 rests on a third party's measurements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from block32.lowering.apple.builder import Int
from block32.lowering.apple.signature import SIMDGROUP_SIZE, KernelError


@dataclass(frozen=True)
class OperandType:
    """How an operand's element is spelled in the instruction's name, and how it is stored."""

    token: str
    storage: str


#: Operand types of the 16x16x16 form by MLIR name. In AIR an fp8 value is an ``i8``.
OPERAND_TYPES = {
    "bf16": OperandType("bf16", "bf16"),
    "f16": OperandType("f16", "f16"),
    "f32": OperandType("f32", "f32"),
    "f8E4M3FN": OperandType("f8e4m3fn", "i8"),
    "f8E5M2": OperandType("f8e5m2", "i8"),
}


@dataclass(frozen=True)
class SimdgroupAtom:
    """``D[m, n] = A[m, k] @ B[k, n] + C[m, n]``, executed by 32 lanes together.

    Every operand is a square tile with the same layout: a lane holds two runs of four neighbours
    of one row, ``run_rows`` rows apart. A transpose flag makes the instruction read the tile's
    transpose.

    Attributes:
        size: Rows, columns and depth of the tiles.
        lhs: MLIR name of A's element.
        rhs: MLIR name of B's element.
        run: Neighbours in a row that a lane holds.
        run_rows: Distance of a lane's two runs in rows.
    """

    lhs: str
    rhs: str
    size: int = 16
    run: int = 4
    run_rows: int = 8

    def __post_init__(self) -> None:
        for element in (self.lhs, self.rhs):
            if element not in OPERAND_TYPES:
                raise KernelError(
                    f"no simdgroup matrix instruction takes {element}; "
                    f"expected one of {', '.join(OPERAND_TYPES)}"
                )
        holders = Counter(
            self.coordinates(lane, slot)
            for lane in range(SIMDGROUP_SIZE)
            for slot in range(self.slots)
        )
        tile = {(row, column) for row in range(self.size) for column in range(self.size)}
        if set(holders) != tile or set(holders.values()) != {1}:
            raise KernelError("lane layout is not a bijection onto the tile")

    @property
    def slots(self) -> int:
        """Elements of each operand that a lane holds."""
        return self.size * self.size // SIMDGROUP_SIZE

    @property
    def lane_elements(self) -> int:
        """Length of an operand's vector in AIR."""
        return self.slots

    @property
    def intrinsic(self) -> str:
        """Name of the AIR function. Its ``.f.f`` is the operands' class, not the flags."""
        lhs, rhs = OPERAND_TYPES[self.lhs].token, OPERAND_TYPES[self.rhs].token
        shape = f"{self.size}x{self.size}x{self.size}"
        slots = f"v{self.slots}"
        return (
            f"air.simdgroup_matrix_{shape}_multiply_accumulate.f.f."
            f"{slots}f32.{slots}{lhs}.{slots}{rhs}.{slots}f32"
        )

    @staticmethod
    def first_row(lane: Int) -> Int:
        """Row of a lane's first run; the other one lies ``run_rows`` below."""
        return ((lane & 7) >> 1) + ((lane & 16) >> 2)

    @staticmethod
    def first_column(lane: Int) -> Int:
        """Column where both runs of a lane start."""
        return ((lane & 1) << 2) + (lane & 8)

    def coordinates(self, lane: int, slot: int) -> tuple[int, int]:
        """Row and column of the element that ``lane`` holds in ``slot``."""
        row, column = self.first_row(lane), self.first_column(lane)
        assert isinstance(row, int) and isinstance(column, int)
        return row + self.run_rows * (slot // self.run), column + slot % self.run


@dataclass(frozen=True)
class SmallAtom(SimdgroupAtom):
    """The 8x8x8 instruction of M1 and later: bf16, f16 and f32 operands, and no transpose flags.

    In AIR an operand is a vector of all 64 elements, of which a lane's first two are its own: two
    neighbours of one row.
    """

    size: int = 8
    run: int = 2
    run_rows: int = 0

    def __post_init__(self) -> None:
        for element in (self.lhs, self.rhs):
            if element not in SMALL_OPERAND_TYPES:
                raise KernelError(
                    f"the 8x8 simdgroup matrix instruction does not take {element}; "
                    f"expected one of {', '.join(SMALL_OPERAND_TYPES)}"
                )
        super().__post_init__()

    @property
    def lane_elements(self) -> int:
        """Length of an operand's vector in AIR."""
        return self.size * self.size

    @property
    def intrinsic(self) -> str:
        """Name of the AIR function."""
        types = ("f32", self.lhs, self.rhs, "f32")
        return "air.simdgroup_matrix_8x8_multiply_accumulate." + ".".join(
            f"v{self.lane_elements}{element}" for element in types
        )

    @staticmethod
    def first_row(lane: Int) -> Int:
        """Row of a lane's run."""
        return ((lane & 6) >> 1) + ((lane & 16) >> 2)

    @staticmethod
    def first_column(lane: Int) -> Int:
        """Column where a lane's run starts."""
        return ((lane & 1) << 1) + ((lane & 8) >> 1)


#: Operand types of the 8x8x8 form.
SMALL_OPERAND_TYPES = ("bf16", "f16", "f32")


def decoded_types(lhs: str, rhs: str) -> tuple[str, str]:
    """What the 8x8x8 form multiplies operands of these types as: both as one type, exactly."""
    wide = {element for element in (lhs, rhs) if element in SMALL_OPERAND_TYPES}
    if len(wide) > 1:
        return "f32", "f32"
    element = wide.pop() if wide else "bf16"
    return element, element


def atoms() -> tuple[SimdgroupAtom, ...]:
    """Every operand pair of the 16x16x16 form."""
    return tuple(SimdgroupAtom(lhs, rhs) for lhs in OPERAND_TYPES for rhs in OPERAND_TYPES)


def small_atoms() -> tuple[SmallAtom, ...]:
    """Every operand pair of the 8x8x8 form that kernels use."""
    return tuple(SmallAtom(element, element) for element in SMALL_OPERAND_TYPES)
