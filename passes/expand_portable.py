# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-expand-portable``: matmuls without a kernel become plain linalg.

Before::

    %y = linalg.scaled_contract indexing_maps = [...]
        {block32.kernel = {target = "portable", tiers = [{form = "portable"}]}}
        ins(%x, %xs, %w, %ws : ...) outs(%zero : ...)

After: ``linalg.generic`` over (M, N, K/32, 32) on integer codes, which IREE's own code generation
handles on every device, and which is right for every scale byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from block32.dialects.kernel import ATTRIBUTE, KernelConfig
from block32.lowering.portable.expand import expand
from block32.passes import canonical
from block32.passes.base import Pass, Report
from block32.passes.walk import operations_named


@dataclass
class ExpandPortablePass(Pass):
    """Rewrite every canonical op whose form is ``portable``, or that has no kernel at all."""

    argument: ClassVar[str] = "block32-expand-portable"
    summary: ClassVar[str] = "rewrite matmuls without a kernel as plain linalg"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring."""
        del report
        for op in operations_named(module, canonical.OP_NAME):
            if canonical.is_canonical(op) and _is_portable(op):
                with ir.InsertionPoint(op), op.location:
                    operands = canonical.host_operands(op)
                    value = expand(canonical.problem_of(op), operands)
                op.results[0].replace_all_uses_with(value)
                op.erase()


def _is_portable(op: ir.Operation) -> bool:
    if ATTRIBUTE not in op.attributes:
        return True
    config = KernelConfig.parse(op.attributes[ATTRIBUTE])
    return all(tier.form == "portable" for tier in config.tiers)
