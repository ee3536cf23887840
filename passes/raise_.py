# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-raise``: every block-scaled matmul becomes a ``linalg.scaled_contract``.

Before::

    util.global private @x_scale = dense<127> : tensor<4x2xi8>
    util.global private @w_scale = dense<127> : tensor<1x2xi8>
    func.func @f(%x: tensor<4x64xf8E4M3FN>, %w: tensor<64x32xf8E4M3FN>) -> tensor<4x32xf32> {
      %zero = arith.constant dense<0.0> : tensor<4x32xf32>
      %y = linalg.matmul
          {block32.lhs = {block = [1, 32], scale = @x_scale},
           block32.rhs = {block = [32, 32], scale = @w_scale}}
          ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<64x32xf8E4M3FN>)
          outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
      return %y : tensor<4x32xf32>
    }

After::

    %x_scale = util.global.load @x_scale : tensor<4x2xi8>
    %0 = flow.tensor.bitcast %x_scale : tensor<4x2xi8> -> tensor<4x2xf8E8M0FNU>
    %w_scale = util.global.load @w_scale : tensor<1x2xi8>
    %1 = flow.tensor.bitcast %w_scale : tensor<1x2xi8> -> tensor<1x2xf8E8M0FNU>
    %2 = tensor.empty() : tensor<32x64xf8E4M3FN>
    %transposed = linalg.transpose ins(%arg1 : ...) outs(%2 : ...) permutation = [1, 0]
    ...
    %5 = linalg.scaled_contract indexing_maps = [#map, #map1, #map2, #map3, #map4]
        ins(%arg0, %0, %transposed, %1 : ...) outs(%4 : tensor<4x32xf32>) -> tensor<4x32xf32>

Batches that share a weight are rows. Where each has its own, the matmul becomes a call of a
grouped matmul, whose groups are the batches.

A marked matmul (one with a ``block32.`` attribute) that cannot be raised is an error, and so is one
that asks for a kernel. Other ops
that look like a block-scaled matmul and cannot be served get a warning and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.dialects.diagnostics import error_at
from block32.dialects.kernel import ATTRIBUTE as KERNEL_ATTRIBUTE
from block32.lowering.common.tensors import cast, dynamic_sizes
from block32.lowering.composites import Composites
from block32.passes import canonical
from block32.passes.base import Pass, Report
from block32.passes.raising import (
    dequantized_matmul,
    marked_matmul,
    scaled_contract,
    scaled_generic,
)
from block32.passes.raising.contraction import (
    ImpossibleError,
    NotServedError,
    ScaledContraction,
    check_result_type,
    is_on_tensors,
)
from block32.passes.raising.operands import canonical_operands
from block32.passes.walk import operations_where

_CANDIDATES = (
    *dequantized_matmul.OP_NAMES,
    scaled_contract.OP_NAME,
    scaled_generic.OP_NAME,
)


@dataclass
class RaisePass(Pass):
    """Turn every recognised spelling into the canonical op."""

    argument: ClassVar[str] = "block32-raise"
    summary: ClassVar[str] = "turn block-scaled matmuls of every spelling into scaled_contract"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A matmul that is marked or asks for a kernel cannot be raised.
        """
        symbols = ir.SymbolTable(module.operation)
        for op in candidates(module):
            try:
                raise_op(op, symbols)
            except NotServedError as reason:
                leave_alone(op, reason, report)


def candidates(module: ir.Module) -> list[ir.Operation]:
    """Ops that may be block-scaled matmuls: collected first, since raising erases them."""
    return operations_where(
        module, lambda op: op.name in _CANDIDATES or marked_matmul.is_marked(op)
    )


def raise_op(op: ir.Operation, symbols: ir.SymbolTable) -> bool:
    """Turn a candidate into the canonical op.

    Returns:
        Whether it is a block-scaled matmul, and so canonical now.

    Raises:
        NotServedError: It looks like one, and there is no canonical op for it.
    """
    if canonical.is_canonical(op):
        return True
    contraction = match(op, symbols)
    if contraction is None:
        return False
    check_result_type(ir.RankedTensorType(op.results[0].type))
    with ir.InsertionPoint(op), op.location:
        composites = Composites(symbols)
        operands = canonical_operands(contraction, composites)
        value = _build_with_init(operands, op, composites)
    op.results[0].replace_all_uses_with(value)
    op.erase()
    return True


def leave_alone(op: ir.Operation, reason: NotServedError, report: Report) -> None:
    """Report that a candidate stays as it is.

    Raises:
        DiagnosticError: It is marked or has a kernel chosen for it, and must not stay; or IREE
            cannot compile it.
    """
    if isinstance(reason, ImpossibleError):
        raise error_at(op, f"cannot be compiled: {reason}") from reason
    if marked_matmul.is_marked(op) or KERNEL_ATTRIBUTE in op.attributes:
        raise error_at(op, f"cannot be raised: {reason}") from reason
    report.warn(op, f"looks like a block-scaled matmul and is left alone: {reason}")


def match(op: ir.Operation, symbols: ir.SymbolTable) -> ScaledContraction | None:
    """Read a candidate of any spelling; None for an op of another kind.

    Raises:
        NotServedError: It looks like a block-scaled matmul and cannot be one of ours.
    """
    contraction = marked_matmul.match(op, symbols)
    if contraction is None and not is_on_tensors(op):
        return None
    if contraction is None:
        contraction = scaled_contract.match(op)
    if contraction is None:
        contraction = scaled_generic.match(op)
    if contraction is None:
        contraction = dequantized_matmul.match(op, symbols)
    return contraction


def _build_with_init(
    operands: canonical.MatmulOperands, op: ir.Operation, composites: Composites
) -> ir.Value:
    """The canonical op; an init that is no zero is added to the f32 result before one rounding."""
    init = op.operands[len(op.operands) - 1]
    is_zero = canonical.is_zero_fill(init)
    element = ir.RankedTensorType(op.results[0].type).element_type
    product = canonical.build(operands, element if is_zero else ir.F32Type.get(), composites)
    if KERNEL_ATTRIBUTE in op.attributes:
        product.owner.operation.attributes[KERNEL_ATTRIBUTE] = op.attributes[KERNEL_ATTRIBUTE]
    product = _restore_shape(product, init)
    return product if is_zero else _add(product, init)


def _add(product: ir.Value, init: ir.Value) -> ir.Value:
    """``init + product`` in f32, rounded to init's type."""
    init_type = ir.RankedTensorType(init.type)
    element = init_type.element_type
    rank = init_type.rank
    identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(rank))
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    op = linalg.GenericOp(
        [init_type],
        [product],
        [init],
        ir.ArrayAttr.get([identity] * 2),
        ir.ArrayAttr.get([parallel] * rank),
    )
    f32 = ir.F32Type.get()
    block = op.regions[0].blocks.append(f32, element, arg_locs=[ir.Location.unknown()] * 2)
    with ir.InsertionPoint(block):
        previous = block.arguments[1]
        if element != f32:
            previous = arith.extf(f32, previous)
        total: ir.Value = arith.addf(previous, block.arguments[0])
        linalg.yield_([total if element == f32 else arith.truncf(element, total)])
    return op.results[0]


def _restore_shape(value: ir.Value, init: ir.Value) -> ir.Value:
    """Undo the collapse of batches or of a split N: ``[M, N]`` in the shape of the init."""
    have, wanted = ir.RankedTensorType(value.type), ir.RankedTensorType(init.type)
    if have.rank == wanted.rank:
        return cast(value, wanted.shape)
    wanted = ir.RankedTensorType.get(wanted.shape, have.element_type)
    n_rank = _rank_of_columns(wanted, have.shape[1])
    m_rank = wanted.rank - n_rank
    groups = [list(range(m_rank)), list(range(m_rank, wanted.rank))]
    is_dynamic = any(wanted.is_dynamic_dim(axis) for axis in groups[0])
    rows = ir.ShapedType.get_dynamic_size() if is_dynamic else prod(wanted.shape[:m_rank])
    value = cast(value, (rows, have.shape[1]))
    return tensor.expand_shape(wanted, value, groups, dynamic_sizes(init), list(wanted.shape))


def _rank_of_columns(wanted: ir.RankedTensorType, n: int) -> int:
    """How many of the last dimensions make up N: two where it is split in blocks of 32."""
    is_whole = not wanted.is_dynamic_dim(wanted.rank - 1) and wanted.shape[-1] == n
    return 1 if is_whole else 2
