# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The canonical forms of a block-scaled matmul: an op, or a call of a composite.

``linalg.scaled_contract`` says all of an activation with scales. What it cannot say is a call of
a composite (see ``dialects.composite``): an activation without scales, an epilogue, or a weight
for each batch.

The op's operands are A ``[M, K]``, its scales ``[M, ceil(K/32)]``, B ``[N, K]``, its scales
``[ceil(N/32) or N, ceil(K/32)]``; the maps say which block B has; the init is a zero fill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.dialects.composite import Composite, Matmul, of_function
from block32.lowering.common.index import constant
from block32.lowering.common.tensors import bitcast, generic, loop_index
from block32.lowering.composites import Composites
from block32.lowering.host import operand_types, result_type
from block32.lowering.problem import BLOCK_K, RESULT_TYPES, VALUE_TYPES, ScaledMatmul
from block32.passes.symbols import callee_of, symbol_of
from block32.passes.walk import operations_named

OP_NAME = "linalg.scaled_contract"
CALL_NAME = "util.call"


@dataclass(frozen=True)
class MatmulOperands:
    """The SSA operands of a block-scaled matmul in canonical layout.

    Attributes:
        lhs: x, ``[M, K]``; the rows of one batch after those of the other.
        lhs_scale: E8M0 scales of x, ``[M, ceil(K/32)]``; None for a bf16, f16 or f32 x.
        rhs: w, ``[N, K]``; ``[batches, N, K]`` where each batch has its own.
        rhs_scale: E8M0 scales of w, ``[ceil(N/rhs_block_n), ceil(K/32)]``, or so many for each
            batch.
        rhs_block_n: Rows of w that share a scale, 1 or 32.
    """

    lhs: ir.Value
    lhs_scale: ir.Value | None
    rhs: ir.Value
    rhs_scale: ir.Value
    rhs_block_n: int


def canonical_maps(rhs_block_n: int) -> ir.ArrayAttr:
    """The five indexing maps of the canonical op, over (m, n, k)."""
    m, n, k = (ir.AffineExpr.get_dim(i) for i in range(3))
    k_block = ir.AffineExpr.get_floor_div(k, BLOCK_K)
    n_block = n if rhs_block_n == 1 else ir.AffineExpr.get_floor_div(n, rhs_block_n)
    results = ([m, k], [m, k_block], [n, k], [n_block, k_block], [m, n])
    return ir.ArrayAttr.get(
        [ir.AffineMapAttr.get(ir.AffineMap.get(3, 0, exprs)) for exprs in results]
    )


def build(
    operands: MatmulOperands, element: ir.Type, composites: Composites | None = None
) -> ir.Value:
    """Build the canonical op with its zero fill, or the call, at the insertion point.

    Args:
        operands: The operands in canonical layout.
        element: The result's element type: f32, bf16 or f16.
        composites: Defines the callee of a call.

    Returns:
        y, ``[M, N]``.
    """
    if ir.RankedTensorType(operands.rhs.type).rank == 3:
        assert composites is not None
        return _build_batches(operands, element, composites)
    if operands.lhs_scale is None:
        assert composites is not None
        problem = _problem(operands, str(element))
        return composites.matmul(problem, _stored(problem, operands))
    lhs_type = ir.RankedTensorType(operands.lhs.type)
    rhs_type = ir.RankedTensorType(operands.rhs.type)
    m: int | ir.Value = lhs_type.shape[0]
    if lhs_type.is_dynamic_dim(0):
        m = tensor.dim(operands.lhs, constant(0))
    empty = tensor.empty([m, rhs_type.shape[0]], element)
    filled = linalg.fill(arith.constant(element, 0.0), outs=[empty])
    op = linalg.ScaledContractOp(
        [filled.type],
        [operands.lhs, operands.lhs_scale, operands.rhs, operands.rhs_scale],
        [filled],
        canonical_maps(operands.rhs_block_n),
    )
    linalg.fill_builtin_region(op.operation)  # pyright: ignore[reportAttributeAccessIssue]
    return op.results[0]


def _build_batches(operands: MatmulOperands, element: ir.Type, composites: Composites) -> ir.Value:
    """A grouped matmul: the rows of a batch are a group, and batch b has the weight b.

    Every row is of a group, so that none keeps the zeros that the result starts as.
    """
    x = ir.RankedTensorType(operands.lhs.type)
    batches, n, _ = ir.RankedTensorType(operands.rhs.type).shape
    rows: int | ir.Value = (
        tensor.dim(operands.lhs, constant(0)) if x.is_dynamic_dim(0) else x.shape[0]
    )
    scales = {"lhs_scale": operands.lhs_scale} if operands.lhs_scale is not None else {}
    values = {
        "lhs": operands.lhs,
        "rhs": operands.rhs,
        **scales,
        "rhs_scale": operands.rhs_scale,
        "offsets": _equal_offsets(rows, batches),
        "expert_ids": _i32_constant(range(batches)),
        "init": linalg.fill(arith.constant(element, 0.0), outs=[tensor.empty([rows, n], element)]),
    }
    return composites.grouped_matmul(values, (operands.rhs_block_n, BLOCK_K))


def _equal_offsets(rows: int | ir.Value, batches: int) -> ir.Value:
    """Where each of so many equal divisions of the rows begins, and where the last ends."""
    if isinstance(rows, int):
        return _i32_constant(range(0, rows + 1, rows // batches) if rows else [0] * (batches + 1))
    i32 = ir.IntegerType.get_signless(32)
    rows_of_batch = arith.divui(rows, constant(batches))
    identity = ir.AffineMap.get_identity(1)
    op = generic([], [tensor.empty([batches + 1], i32)], [identity], ["parallel"])
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        linalg.yield_([arith.index_cast(i32, arith.muli(loop_index(0), rows_of_batch))])
    return op.results[0]


def _i32_constant(values: Iterable[int]) -> ir.Value:
    array = np.array(list(values), np.int32)
    return arith.constant(
        ir.RankedTensorType.get(array.shape, ir.IntegerType.get_signless(32)),
        ir.DenseElementsAttr.get(array),
    )


@dataclass(frozen=True)
class CanonicalMatmul:
    """A block-scaled matmul of the program: a canonical op, or a call of a composite."""

    op: ir.Operation
    problem: ScaledMatmul

    def host_operands(self) -> dict[str, ir.Value]:
        """The operands by ABI name as host functions take them: 4-bit values as packed bytes.

        Bitcasts are built at the insertion point.
        """
        if self.op.name == OP_NAME:
            return _stored(self.problem, operands_of(self.op))
        return dict(zip(self.problem.argument_names, self.op.operands, strict=True))


def matmuls_of(module: ir.Module) -> list[CanonicalMatmul]:
    """All block-scaled matmuls of a program in program order.

    Raises:
        DiagnosticError: A composite is malformed.
    """
    composites = composites_of(module)
    found: list[CanonicalMatmul] = []
    for op in operations_named(module, OP_NAME, CALL_NAME):
        if op.name == OP_NAME:
            if is_canonical(op):
                found.append(CanonicalMatmul(op, problem_of(op)))
            continue
        callee = composites.get(callee_of(op))
        if isinstance(callee, Matmul):
            found.append(CanonicalMatmul(op, callee.problem))
    return found


def composites_of(module: ir.Module) -> dict[str, Composite]:
    """The composites that a module defines, by symbol.

    Raises:
        DiagnosticError: One is malformed.
    """
    found: dict[str, Composite] = {}
    for op in module.body:
        composite = of_function(op)
        if composite is not None:
            found[symbol_of(op)] = composite
    return found


def is_canonical(op: ir.Operation | ir.OpView) -> bool:
    """Whether ``op`` is a block-scaled matmul in the form of an op."""
    operation = op.operation
    if operation.name != OP_NAME:
        return False
    maps = operation.attributes["indexing_maps"]
    if maps not in (canonical_maps(1), canonical_maps(32)):
        return False
    return is_zero_fill(operation.operands[4]) and _has_served_types(operation)


def _has_served_types(operation: ir.Operation) -> bool:
    """N and K known, element types that kernels read and write, and scales and result to match."""
    lhs, rhs, y = (ir.RankedTensorType(operation.operands[i].type) for i in (0, 2, 4))
    if not rhs.has_static_shape or 0 in rhs.shape or lhs.is_dynamic_dim(1):
        return False
    elements = {str(lhs.element_type), str(rhs.element_type)}
    if not elements <= set(VALUE_TYPES) or str(y.element_type) not in RESULT_TYPES:
        return False
    problem = problem_of(operation)
    types = operand_types(problem)
    scales = [operation.operands[i].type for i in (1, 3)]
    return scales == [types["lhs_scale"], types["rhs_scale"]] and y == result_type(problem)


def operands_of(op: ir.Operation | ir.OpView) -> MatmulOperands:
    """The operands of a canonical op."""
    lhs, lhs_scale, rhs, rhs_scale = list(op.operation.operands)[:4]
    block_n = 1 if op.operation.attributes["indexing_maps"] == canonical_maps(1) else 32
    return MatmulOperands(lhs, lhs_scale, rhs, rhs_scale, block_n)


def problem_of(op: ir.Operation | ir.OpView) -> ScaledMatmul:
    """What a canonical op computes."""
    result = ir.RankedTensorType(op.operation.results[0].type)
    return _problem(operands_of(op), str(result.element_type))


def _problem(operands: MatmulOperands, result: str) -> ScaledMatmul:
    lhs = ir.RankedTensorType(operands.lhs.type)
    rhs = ir.RankedTensorType(operands.rhs.type)
    return ScaledMatmul(
        m=None if lhs.is_dynamic_dim(0) else lhs.shape[0],
        n=rhs.shape[0],
        k=rhs.shape[1],
        lhs=str(lhs.element_type),
        rhs=str(rhs.element_type),
        rhs_block=(operands.rhs_block_n, BLOCK_K),
        result=result,
        lhs_scaled=operands.lhs_scale is not None,
    )


def _stored(problem: ScaledMatmul, operands: MatmulOperands) -> dict[str, ir.Value]:
    """Operands by ABI name, 4-bit values bitcast to packed bytes at the insertion point."""
    values = {
        "lhs": operands.lhs,
        "rhs": operands.rhs,
        "lhs_scale": operands.lhs_scale,
        "rhs_scale": operands.rhs_scale,
    }
    types = operand_types(problem)
    return {
        name: bitcast(value, types[name]) for name, value in values.items() if value is not None
    }


def is_zero_fill(value: ir.Value) -> bool:
    """Whether ``value`` is a ``linalg.fill`` of zero, or a splat constant of zero."""
    if isinstance(value.owner, ir.Block):
        return False
    producer = value.owner
    operation = producer.operation if isinstance(producer, ir.OpView) else producer
    if operation.name == "linalg.fill":
        return _is_zero_constant(operation.operands[0])
    return _is_zero_constant(value)


def _is_zero_constant(value: ir.Value) -> bool:
    """A scalar or splat zero; that of -0.0 differs only in the sign of an all-zero sum."""
    if isinstance(value.owner, ir.Block):
        return False
    operation = value.owner.operation if isinstance(value.owner, ir.OpView) else value.owner
    if operation.name != "arith.constant":
        return False
    attribute = operation.attributes["value"]
    if isinstance(attribute, ir.FloatAttr):
        return attribute.value == 0.0
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        splat = attribute.get_splat_value()
        return isinstance(splat, ir.FloatAttr) and splat.value == 0.0
    return False
