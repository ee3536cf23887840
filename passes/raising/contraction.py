# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A scaled contraction of any spelling: its operands with the maps that index them.

The spellings differ in where the maps come from, in the order of the operands, and in whether K
and N are split into blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir

from block32.lowering.problem import RESULT_TYPES, SCALE_TYPE, VALUE_TYPES

#: What an activation without scales may be: quantised at run time, or taken as it is.
ACTIVATION_TYPES = ("f32", "bf16", "f16")

#: What people write when they mean a type that is served, and how to come to it. (FNUZ exponents
#: have a bias larger by one, no infinities, and their only NaN where the others have -0.)
TYPE_HINTS = {
    "f8E4M3": "f8E4M3 has infinities; MXFP8 values are f8E4M3FN",
    "f8E4M3FNUZ": "FNUZ types belong to older AMD chips (gfx94x); MXFP8 values are f8E4M3FN: "
    "take 1 off each scale byte and bitcast codes other than 0x7F, 0x80 and 0xFF",
    "f8E5M2FNUZ": "FNUZ types belong to older AMD chips (gfx94x); MXFP8 values are f8E5M2: "
    "take 1 off each scale byte and bitcast codes other than 0x80 and those above 0x7B, 0xFB",
    "f8E4M3B11FNUZ": "MXFP8 values are f8E4M3FN",
    "f8E3M4": "MXFP8 values are f8E4M3FN",
}


class NotServedError(Exception):
    """A contraction that looks like a block-scaled matmul and is none that we can rewrite."""


class ImpossibleError(NotServedError):
    """One that ends IREE's compiler, too: leaving it alone would only hide why."""


@dataclass(frozen=True)
class Operand:
    """A tensor and how the loops index it."""

    value: ir.Value
    map: ir.AffineMap

    @property
    def element(self) -> str:
        """The element type's MLIR name."""
        return str(ir.RankedTensorType(self.value.type).element_type)


@dataclass(frozen=True)
class ScaledContraction:
    """``result += (lhs * lhs_scale) * (rhs * rhs_scale)`` over loops given by affine maps.

    Attributes:
        lhs: The activation.
        lhs_scale: Its scales; None for a bf16, f16 or f32 activation.
        rhs: The weight.
        rhs_scale: Its scales.
        result: The map of the result.
        rule: The rule by which an activation without scales is quantised at run time; None where
            it is taken as it is.
        from_producers: Operands stand for what the program multiplies before the matmul, so that
            the matmul by itself does not say what is computed.
    """

    lhs: Operand
    lhs_scale: Operand | None
    rhs: Operand
    rhs_scale: Operand
    result: ir.AffineMap
    rule: str | None = None
    from_producers: bool = False

    def ordered(self) -> ScaledContraction:
        """The same with the operand that has the result's first loop of one as the left one."""
        lhs, rhs = loops_of(self.lhs.map), loops_of(self.rhs.map)
        loops = [loop for loop in loops_of(self.result) if not (loop in lhs and loop in rhs)]
        if not loops or loops[0] in lhs or self.lhs_scale is None:
            return self
        return ScaledContraction(self.rhs, self.rhs_scale, self.lhs, self.lhs_scale, self.result)


def loops_of(affine_map: ir.AffineMap) -> list[int]:
    """The number of the loop that indexes each dimension, all of them by one loop as it is.

    Raises:
        NotServedError: A dimension is indexed otherwise.
    """
    loops = []
    for expr in affine_map.results:
        if not isinstance(expr, ir.AffineDimExpr):
            raise NotServedError(f"expected operands indexed by plain loops but got {affine_map}")
        loops.append(expr.position)
    return loops


def is_on_tensors(op: ir.Operation) -> bool:
    """Whether all operands and the one result are ranked tensors, and not scalars or memrefs."""
    values = (*op.operands, *op.results)
    return len(op.results) == 1 and all(isinstance(v.type, ir.RankedTensorType) for v in values)


def check_activation_type(element: str) -> None:
    """Refuse an activation without scales that no kernel reads.

    Raises:
        NotServedError: The type is not one of ``ACTIVATION_TYPES``.
    """
    if element not in ACTIVATION_TYPES:
        raise NotServedError(
            f"expected an activation of {', '.join(ACTIVATION_TYPES)} but got {element}"
        )


def check_value_type(element: str) -> None:
    """Refuse an operand's element type that no kernel reads, with a hint where there is one.

    Raises:
        NotServedError: The type is not one of ``VALUE_TYPES``.
    """
    if element in VALUE_TYPES:
        return
    hint = TYPE_HINTS.get(element)
    reason = f"expected operands of {', '.join(VALUE_TYPES)} but got {element}"
    raise NotServedError(f"{reason} ({hint})" if hint else reason)


def check_scale_type(element: str) -> None:
    """Refuse scales that are no E8M0 bytes.

    Raises:
        NotServedError: The type is not f8E8M0FNU.
    """
    if element != SCALE_TYPE:
        raise NotServedError(f"expected scales of type {SCALE_TYPE} but got {element}")


def check_result_type(result: ir.RankedTensorType) -> None:
    """Refuse a result that no kernel stores.

    Raises:
        NotServedError: The element type is not one of ``RESULT_TYPES``, or N is not known.
    """
    element = str(result.element_type)
    if element not in RESULT_TYPES:
        raise NotServedError(f"expected a result of {', '.join(RESULT_TYPES)} but got {element}")
    if result.rank and result.is_dynamic_dim(result.rank - 1):
        raise NotServedError("expected static N and K")
