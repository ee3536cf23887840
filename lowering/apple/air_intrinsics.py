# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``air.*`` functions that kernels may call: LLVM 14 signatures and attributes, as data.

Read off modules that Apple's toolchain built for macOS 26, but for the fp8 operands of the matrix
instruction, which follow the grammar of its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.apple.architecture import M1, M5
from block32.lowering.apple.atoms import OPERAND_TYPES, SimdgroupAtom, SmallAtom, atoms, small_atoms
from block32.lowering.apple.metallib import Version
from block32.lowering.apple.signature import ELEMENT_TYPES

#: Lanes of a simdgroup execute these together. A matrix instruction must not be marked readnone:
#: LLVM would move it into divergent control flow.
CONVERGENT = frozenset({"convergent", "mustprogress", "nounwind", "willreturn"})

#: Functions of one lane, free of side effects.
PURE = frozenset({"mustprogress", "nofree", "nosync", "nounwind", "readnone", "willreturn"})


@dataclass(frozen=True)
class Intrinsic:
    """One function: its type in LLVM 14 spelling, and the attributes of its declaration."""

    name: str
    result: str
    operands: tuple[str, ...]
    attributes: frozenset[str]
    oldest_air: Version = M1.air

    @property
    def is_convergent(self) -> bool:
        """Whether all lanes of a simdgroup must call it together."""
        return "convergent" in self.attributes


def _matrix(atom: SimdgroupAtom) -> Intrinsic:
    def slots(llvm_type: str) -> str:
        return f"<{atom.slots} x {llvm_type}>"

    lhs, rhs = (ELEMENT_TYPES[OPERAND_TYPES[e].storage].llvm for e in (atom.lhs, atom.rhs))
    operands = (slots(lhs), "i1", slots(rhs), "i1", slots("float"))
    return Intrinsic(atom.intrinsic, slots("float"), operands, CONVERGENT, M5.air)


def _small_matrix(atom: SmallAtom) -> Intrinsic:
    count = atom.size * atom.size
    operands = (f"<{count} x {ELEMENT_TYPES[e].llvm}>" for e in (atom.lhs, atom.rhs, "f32"))
    return Intrinsic(atom.intrinsic, f"<{count} x float>", tuple(operands), CONVERGENT)


_FUNCTIONS = (
    Intrinsic("air.clz.i32", "i32", ("i32", "i1"), PURE),
    Intrinsic("air.exp.f32", "float", ("float",), PURE),
    Intrinsic("air.tanh.f32", "float", ("float",), PURE),
    Intrinsic("air.fabs.f32", "float", ("float",), PURE),
    Intrinsic("air.simd_shuffle_xor.f32", "float", ("float", "i16"), CONVERGENT),
    *(_matrix(atom) for atom in atoms()),
    *(_small_matrix(atom) for atom in small_atoms()),
)

#: Every function that a kernel may call, by name.
INTRINSICS = {function.name: function for function in _FUNCTIONS}
