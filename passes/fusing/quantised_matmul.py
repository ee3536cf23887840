# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A quantisation whose codes and scales feed one matmul alone becomes a part of that matmul."""

from __future__ import annotations

import dataclasses

from iree.compiler import ir
from iree.compiler.dialects import tensor

from block32.dialects.composite import Composite, Quantize
from block32.dialects.kernel import ATTRIBUTE
from block32.lowering.composites import Composites
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts, Target
from block32.passes.canonical import OP_NAME, CanonicalMatmul, operands_of
from block32.passes.select_kernel import kernel_of
from block32.passes.symbols import callee_of


def fuse_quantisation(
    matmul: CanonicalMatmul,
    known: dict[str, Composite],
    composites: Composites,
    target: Target,
    facts: DeviceFacts,
) -> None:
    """Make one call of a matmul and what quantises its activation, if the target has a kernel.

    Args:
        matmul: The matmul, its epilogue taken in.
        known: The program's composites by symbol.
        composites: Defines the callee.
        target: The target.
        facts: What is known of its device.
    """
    quantize = _lone_quantisation(matmul, known)
    if quantize is None:
        return
    x = quantize.operands[0]
    problem = dataclasses.replace(
        matmul.problem,
        lhs=str(ir.RankedTensorType(x.type).element_type),
        lhs_scaled=False,
        lhs_quantize=_rule(quantize, known),
    )
    if not _is_wanted(matmul.op, problem, target, facts):
        return
    with ir.InsertionPoint(matmul.op), matmul.op.location:
        y = composites.matmul(problem, {**matmul.host_operands(), "lhs": x})
    if ATTRIBUTE in matmul.op.attributes:
        y.owner.operation.attributes[ATTRIBUTE] = matmul.op.attributes[ATTRIBUTE]
    matmul.op.results[0].replace_all_uses_with(y)
    matmul.op.erase()
    quantize.erase()


def _lone_quantisation(matmul: CanonicalMatmul, known: dict[str, Composite]) -> ir.Operation | None:
    """The call of ``quantize`` that gives this matmul its activation, and nothing else anything."""
    activation = _activation(matmul)
    if not activation or isinstance(activation[0].owner, ir.Block):
        return None
    call = activation[0].owner.operation
    if call.name != "util.call" or list(call.results) != activation:
        return None
    composite = known.get(callee_of(call))
    if not isinstance(composite, Quantize) or composite.element != matmul.problem.quantized().lhs:
        return None
    for result in call.results:
        _ask_activation(result, call.operands[0])
        if [use.owner.operation for use in result.uses] != [matmul.op]:
            return None
    # Outside a loop around the matmul, x is quantised once.
    return call if call.block == matmul.op.block else None


def _activation(matmul: CanonicalMatmul) -> list[ir.Value]:
    """Codes and scales of x, or nothing where x has no scales."""
    if matmul.op.name == OP_NAME:
        found = operands_of(matmul.op)
        return [found.lhs, found.lhs_scale] if found.lhs_scale is not None else []
    values = dict(zip(matmul.problem.argument_names, matmul.op.operands, strict=True))
    return [values["lhs"], values["lhs_scale"]] if "lhs_scale" in values else []


def _ask_activation(result: ir.Value, x: ir.Value) -> None:
    """Replace ``tensor.dim`` of the rows of codes or scales by that of the activation's."""
    for use in list(result.uses):
        dim = use.owner.operation
        if dim.name != "tensor.dim" or not _is_zero(dim.operands[1]):
            continue
        with ir.InsertionPoint(dim), dim.location:
            rows = tensor.dim(x, dim.operands[1])
        dim.results[0].replace_all_uses_with(rows)
        dim.erase()


def _is_wanted(op: ir.Operation, problem: ScaledMatmul, target: Target, facts: DeviceFacts) -> bool:
    """Whether the target has a kernel for ``problem``, or the user asks for one that quantises."""
    if ATTRIBUTE in op.attributes:
        forced = kernel_of(op)
        if forced.target == target.name:
            return all(tier.quantize != "none" for tier in forced.tiers)
    return target.select(problem, facts).config is not None


def _rule(quantize: ir.Operation, known: dict[str, Composite]) -> str:
    composite = known[callee_of(quantize)]
    assert isinstance(composite, Quantize)
    return composite.rule


def _is_zero(index: ir.Value) -> bool:
    if isinstance(index.owner, ir.Block) or index.owner.name != "arith.constant":
        return False
    return ir.IntegerAttr(index.owner.operation.attributes["value"]).value == 0
