# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.problem``: what an executable's kernels compute, as an attribute.

``block32-outline`` writes it on the module of kernel declarations and ``block32-emit`` reads it, so
that each is a pass of its own and the IR between them says all that there is to know.
"""

from __future__ import annotations

import dataclasses

from iree.compiler import ir

from block32.dialects import builtin
from block32.dialects.diagnostics import BadAttributeError
from block32.lowering.problem import Epilogue, ScaledMatmul

ATTRIBUTE = "block32.problem"


def build(problem: ScaledMatmul) -> ir.Attribute:
    """The problem as a dictionary attribute; a dynamic M and an empty epilogue are left out."""
    fields = dataclasses.asdict(problem)
    epilogue = fields.pop("epilogue")
    changed = {
        f.name: epilogue[f.name]
        for f in dataclasses.fields(Epilogue)
        if epilogue[f.name] != f.default
    }
    if changed:
        fields["epilogue"] = changed
    return builtin.from_python({name: v for name, v in fields.items() if v is not None})


def parse(attribute: ir.Attribute) -> ScaledMatmul:
    """Read the attribute.

    Raises:
        BadAttributeError: A missing or unknown field.
    """
    fields = builtin.to_python(attribute)
    if not isinstance(fields, dict):
        raise BadAttributeError(f"expected a dictionary but got {attribute}")
    fields.setdefault("m", None)
    try:
        epilogue = Epilogue(**fields.pop("epilogue", {}))
        fields["rhs_block"] = tuple(fields["rhs_block"])
        return ScaledMatmul(epilogue=epilogue, **fields)
    except (KeyError, TypeError) as error:
        raise BadAttributeError(f"malformed problem: {error}") from error
