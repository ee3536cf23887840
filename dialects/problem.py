# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.problem``: what an executable's kernels compute, as an attribute.

``block32-outline`` writes it on the module of kernel declarations and ``block32-emit`` reads it, so
that each is a pass of its own and the IR between them says all that there is to know.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from iree.compiler import ir

from block32.dialects import builtin
from block32.dialects.block_scale import SCALE_RULES
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.problem import ELEMENT_BITS, Epilogue, Grouping, ScaledMatmul

ATTRIBUTE = "block32.problem"

#: What activations may be quantised from.
QUANTIZED_FROM: Final = ("f32", "bf16", "f16")


def build(problem: ScaledMatmul) -> ir.Attribute:
    """The problem as a dictionary attribute; a dynamic M and what is empty is left out."""
    fields = dataclasses.asdict(problem)
    epilogue = fields.pop("epilogue")
    changed = {
        f.name: epilogue[f.name]
        for f in dataclasses.fields(Epilogue)
        if epilogue[f.name] != f.default
    }
    if changed:
        fields["epilogue"] = changed
    return builtin.from_python({name: v for name, v in fields.items() if v not in (None, "")})


def parse(attribute: ir.Attribute) -> ScaledMatmul:
    """Read the attribute.

    Raises:
        BadAttributeError: A missing or unknown field, or fields that do not go together.
    """
    fields = builtin.to_python(attribute)
    if not isinstance(fields, dict):
        raise BadAttributeError(f"expected a dictionary but got {attribute}")
    fields.setdefault("m", None)
    try:
        epilogue = Epilogue(**fields.pop("epilogue", {}))
        fields["rhs_block"] = tuple(fields["rhs_block"])
        if "grouping" in fields:
            fields["grouping"] = Grouping(**fields["grouping"])
        problem = ScaledMatmul(epilogue=epilogue, **fields)
    except (KeyError, TypeError) as error:
        raise BadAttributeError(f"malformed problem: {error}") from error
    check(problem)
    return problem


def check(problem: ScaledMatmul) -> None:
    """Refuse fields that do not go together.

    Raises:
        BadAttributeError: What is wrong, and what would be right.
    """
    for name, element in (("lhs", problem.lhs), ("rhs", problem.rhs), ("result", problem.result)):
        if element not in ELEMENT_BITS:
            raise BadAttributeError(
                f"expected {name} to be one of {', '.join(ELEMENT_BITS)} but got {element}"
            )
    if problem.lhs_quantize:
        _check_quantize(problem)
    if problem.grouping is not None:
        _check_grouping(problem, problem.grouping)


def _check_quantize(problem: ScaledMatmul) -> None:
    if problem.lhs_quantize not in SCALE_RULES:
        rules = ", ".join(SCALE_RULES)
        raise BadAttributeError(
            f"expected lhs_quantize to be one of {rules} but got {problem.lhs_quantize}"
        )
    if problem.lhs_scaled or problem.lhs not in QUANTIZED_FROM:
        raise BadAttributeError(
            f"lhs_quantize takes an activation of {', '.join(QUANTIZED_FROM)} without scales "
            f"but lhs is {problem.lhs}{' with scales' if problem.lhs_scaled else ''}"
        )


def _check_grouping(problem: ScaledMatmul, grouping: Grouping) -> None:
    if grouping.experts < 1 or grouping.groups < 0:
        raise BadAttributeError(
            "expected at least one expert and no negative number of groups but got "
            f"{grouping.experts} experts and {grouping.groups} groups"
        )
    if problem.epilogue != Epilogue():
        raise BadAttributeError(
            "a grouped matmul takes no epilogue: it would leave out the rows of no group"
        )
