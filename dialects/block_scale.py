# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.lhs`` and ``block32.rhs``: the block scales of a ``linalg.matmul`` operand.

``{block = [32, 32], scale = @w_scale}``: the operand holds raw fp8 or fp4 values, and a
``util.global`` or a dense constant holds one E8M0 byte for each block.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir

from block32.dialects import builtin
from block32.dialects.diagnostics import BadAttributeError

LHS_ATTRIBUTE = "block32.lhs"
RHS_ATTRIBUTE = "block32.rhs"

#: How an activation may be quantised at run time; rules in the OCP MX specification and docs.
SCALE_RULES = ("rceil", "floor", "even", "ceil")

_KNOWN_FIELDS = frozenset({"block", "scale", "rule"})


@dataclass(frozen=True)
class BlockScale:
    """The block scales of one operand.

    Attributes:
        block: (rows, K) elements that share a scale: (1, 32) or (32, 32).
        scale: A ``FlatSymbolRefAttr`` of a global, a ``DenseElementsAttr`` of scale bytes, the
            string ``"dynamic"`` (quantised at run time), or None (the operand is dequantised).
        rule: How ``"dynamic"`` chooses scales.
    """

    block: tuple[int, int]
    scale: ir.Attribute | str | None
    rule: str = "rceil"

    @classmethod
    def parse(cls, attribute: ir.Attribute) -> BlockScale:
        """Read the attribute.

        Raises:
            BadAttributeError: The attribute is not of this module's form.
        """
        if not isinstance(attribute, ir.DictAttr):
            raise BadAttributeError(f"expected a dictionary but got {attribute}")
        fields = {entry.name: entry.attr for entry in attribute}
        unknown = sorted(set(fields) - _KNOWN_FIELDS)
        if unknown:
            raise BadAttributeError(f"unknown field '{unknown[0]}'; expected block, scale or rule")
        if "block" not in fields:
            raise BadAttributeError("missing field 'block'; expected [1, 32] or [32, 32]")
        rule = builtin.to_python(fields["rule"]) if "rule" in fields else "rceil"
        if rule not in SCALE_RULES:
            raise BadAttributeError(
                f"unknown rule {rule}; expected one of {', '.join(SCALE_RULES)}"
            )
        return cls(_parse_block(fields["block"]), _parse_scale(fields.get("scale")), rule)

    def build(self) -> ir.Attribute:
        """The attribute."""
        fields: dict[str, object] = {"block": list(self.block)}
        if self.scale is not None:
            fields["scale"] = self.scale
        if self.rule != "rceil":
            fields["rule"] = self.rule
        return builtin.from_python(fields)


def _parse_block(attribute: ir.Attribute) -> tuple[int, int]:
    block = builtin.to_python(attribute)
    if block not in ([1, 32], [32, 32]):
        raise BadAttributeError(f"unsupported block {block}; expected [1, 32] or [32, 32]")
    return block[0], block[1]


def _parse_scale(attribute: ir.Attribute | None) -> ir.Attribute | str | None:
    if attribute is None or isinstance(attribute, ir.FlatSymbolRefAttr):
        return attribute
    if isinstance(attribute, ir.DenseElementsAttr | ir.DenseResourceElementsAttr):
        return attribute
    if isinstance(attribute, ir.StringAttr) and attribute.value == "dynamic":
        return "dynamic"
    raise BadAttributeError(
        f'unsupported scale {attribute}; expected a symbol, a dense constant or "dynamic"'
    )
