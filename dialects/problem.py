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
from block32.lowering.problem import (
    ACTIVATION_NAMES,
    BLOCK_K,
    ELEMENT_BITS,
    RESULT_TYPES,
    VALUE_TYPES,
    Epilogue,
    Grouping,
    ScaledMatmul,
)

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
    """Refuse fields of the wrong kind, and fields that do not go together.

    Raises:
        BadAttributeError: What is wrong, and what would be right.
    """
    _check_sizes(problem)
    _check_flag("lhs_scaled", problem.lhs_scaled)
    _check_choice("lhs", problem.lhs, tuple(ELEMENT_BITS))
    _check_choice("rhs", problem.rhs, VALUE_TYPES)
    _check_choice("result", problem.result, RESULT_TYPES)
    _check_epilogue(problem.epilogue)
    if problem.lhs_quantize != "":
        _check_quantize(problem)
    elif problem.lhs_scaled != (problem.lhs in VALUE_TYPES):
        allowed = VALUE_TYPES if problem.lhs_scaled else QUANTIZED_FROM
        scales = "with" if problem.lhs_scaled else "without"
        raise BadAttributeError(
            f"expected lhs {scales} scales to be one of {', '.join(allowed)} but got {problem.lhs}"
        )
    if problem.grouping is not None:
        _check_grouping(problem, problem.grouping)


def _check_sizes(problem: ScaledMatmul) -> None:
    if problem.m is not None:
        _check_size("m", problem.m, 0)
    _check_size("n", problem.n, 1)
    _check_size("k", problem.k, 1)
    if problem.rhs_block not in ((1, BLOCK_K), (BLOCK_K, BLOCK_K)):
        raise BadAttributeError(
            f"expected rhs_block to be [1, 32] or [32, 32] but got {list(problem.rhs_block)}"
        )


def _check_epilogue(epilogue: Epilogue) -> None:
    _check_flag("row_scale", epilogue.row_scale)
    _check_flag("scale", epilogue.scale)
    for name in ("bias", "residual"):
        if getattr(epilogue, name) is not None:
            _check_choice(name, getattr(epilogue, name), RESULT_TYPES)
    if epilogue.activation is not None:
        _check_choice("activation", epilogue.activation, ACTIVATION_NAMES)


def _check_size(name: str, value: object, least: int) -> None:
    # A bool is an int to Python, and no size.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadAttributeError(f"expected {name} to be an integer from {least} on, got {value}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadAttributeError(f"expected {name} to be true or false but got {value}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadAttributeError(
            f"expected {name} to be one of {', '.join(choices)} but got {value}"
        )


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
    for name, value in (("experts", grouping.experts), ("groups", grouping.groups)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadAttributeError(f"expected {name} to be an integer but got {value}")
    if grouping.experts < 1 or grouping.groups < 0:
        raise BadAttributeError(
            "expected at least one expert and no negative number of groups but got "
            f"{grouping.experts} experts and {grouping.groups} groups"
        )
    if problem.epilogue != Epilogue():
        raise BadAttributeError(
            "a grouped matmul takes no epilogue: it would leave out the rows of no group"
        )
