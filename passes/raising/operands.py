# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operands of a scaled contraction in canonical layout.

Which loop is a batch, M, N or K, which block the scales have, and with that how the dimensions of
each operand become rows and columns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod

from iree.compiler import ir

from block32.lowering.common.tensors import cast
from block32.lowering.composites import Composites
from block32.lowering.problem import BLOCK_K, ceil_div
from block32.passes.canonical import MatmulOperands
from block32.passes.raising.contraction import (
    ImpossibleError,
    NotServedError,
    Operand,
    ScaledContraction,
    check_activation_type,
    check_scale_type,
    check_value_type,
    loops_of,
)
from block32.passes.raising.layout import (
    arranged,
    collapse,
    repeat_scales,
    without_constant_indices,
    without_unit_loop,
)


@dataclass(frozen=True)
class _Loops:
    """Loop numbers by role, outermost first.

    A split K or N is (block, element of the block). The loops of batches index the weight, too;
    batches that share a weight are rows, and so among several M.
    """

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]

    def groups(self, *groups: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The batches, where there are any, before other groups of loops."""
        return [self.batch, *groups] if self.batch else list(groups)


def canonical_operands(contraction: ScaledContraction, composites: Composites) -> MatmulOperands:
    """Bring the operands into canonical layout, building reshapes and transposes where needed.

    Args:
        contraction: What to compute.
        composites: Quantises the activation where the contraction says so.

    Raises:
        NotServedError: Another element type, loop structure or scale block than we serve.
    """
    contraction = _drop_unit_batches(contraction.ordered())
    check_value_type(contraction.rhs.element)
    check_scale_type(contraction.rhs_scale.element)
    loops = _classify(contraction)
    batches = _batches(contraction.rhs, loops)
    k = _extent(contraction.rhs, loops.k)
    if k == 0:
        raise ImpossibleError("expected K of at least 1 but got 0")
    n = _extent(contraction.rhs, loops.n)
    if n == 0:
        raise NotServedError("expected N of at least 1 but got 0")
    _extent(contraction.lhs, loops.k)
    contraction = _index_all_scales(contraction, loops, n, k)
    rhs_block = _scale_block(contraction.rhs_scale, loops, loops.n)
    if rhs_block[0] not in (1, BLOCK_K) and rhs_block[0] % BLOCK_K:
        raise NotServedError(
            f"expected 1x32 or 32x32 scales (or multiples) on the right operand but got "
            f"{_by(rhs_block)}"
        )
    lhs, lhs_scale = _activation(contraction, loops, composites)
    rhs, rhs_scale = contraction.rhs, _scale_matrix(contraction.rhs_scale, loops, loops.n)
    rows_per_scale = 1 if rhs_block[0] == 1 else BLOCK_K
    wanted = (*batches, ceil_div(n, rows_per_scale), ceil_div(k, BLOCK_K))
    repeats = (*(1 for _ in batches), rhs_block[0] // rows_per_scale, rhs_block[1] // BLOCK_K)
    return MatmulOperands(
        lhs=lhs,
        lhs_scale=lhs_scale,
        rhs=arranged(rhs.value, loops_of(rhs.map), loops.groups(loops.n, loops.k)),
        rhs_scale=cast(repeat_scales(rhs_scale, wanted, repeats), wanted),
        rhs_block_n=rows_per_scale,
    )


def _activation(
    contraction: ScaledContraction, loops: _Loops, composites: Composites
) -> tuple[ir.Value, ir.Value | None]:
    """The activation ``[M, K]`` and its scales, which it has, gets at run time, or goes without.

    The rows of all batches follow each other.
    """
    lhs, scale = contraction.lhs, contraction.lhs_scale
    if scale is None:
        check_activation_type(lhs.element)
        x = _rows(arranged(lhs.value, loops_of(lhs.map), loops.groups(loops.m, loops.k)))
        return composites.quantize(x, contraction.rule) if contraction.rule else (x, None)
    check_value_type(lhs.element)
    check_scale_type(scale.element)
    block = _scale_block(scale, loops, loops.m, is_split=False)
    if block != (1, BLOCK_K):
        raise NotServedError(f"expected 1x32 scales on the left operand but got {_by(block)}")
    x = _rows(arranged(lhs.value, loops_of(lhs.map), loops.groups(loops.m, loops.k)))
    m, k = ir.RankedTensorType(x.type).shape
    return x, cast(_rows(_scale_matrix(scale, loops, loops.m)), (m, ceil_div(k, BLOCK_K)))


def _rows(value: ir.Value) -> ir.Value:
    """``[rows, K]``, or ``[batches, rows, K]`` as ``[batches * rows, K]``."""
    return collapse(value, [ir.RankedTensorType(value.type).rank - 1, 1])


def _by(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"


def _classify(contraction: ScaledContraction) -> _Loops:
    lhs, rhs = loops_of(contraction.lhs.map), loops_of(contraction.rhs.map)
    result = loops_of(contraction.result)
    batch = tuple(d for d in result if d in lhs and d in rhs)
    m = tuple(d for d in result if d in lhs and d not in rhs)
    n = tuple(d for d in result if d in rhs and d not in lhs)
    k = tuple(d for d in rhs if d in lhs and d not in result)
    if not m or len(n) not in (1, 2) or len(k) not in (1, 2) or [*batch, *m, *n] != result:
        raise NotServedError(
            "expected loops (m, n, k), with n and k whole or split into blocks of 32, "
            "and batches before m"
        )
    for name, group, operand in (("k", k, contraction.rhs), ("n", n, contraction.rhs)):
        if len(group) == 2 and _loop_size(operand, group[1]) != BLOCK_K:
            raise NotServedError(f"expected the inner loop of a split {name} to be 32 long")
    return _Loops(batch, m, n, k)


def _batches(rhs: Operand, loops: _Loops) -> tuple[int, ...]:
    """The number of batches that have a weight of their own; nothing where all share one."""
    if not loops.batch:
        return ()
    count = prod(_loop_size(rhs, loop, "a static number of weights") for loop in loops.batch)
    if count == 0:
        raise NotServedError("expected a weight for at least one batch but got 0")
    return (count,)


def _loop_size(operand: Operand, loop: int, wanted: str = "static N and K") -> int:
    position = loops_of(operand.map).index(loop)
    tensor_type = ir.RankedTensorType(operand.value.type)
    if tensor_type.is_dynamic_dim(position):
        raise NotServedError(f"expected {wanted}")
    return tensor_type.shape[position]


def _extent(operand: Operand, loops: tuple[int, ...]) -> int:
    """N or K: the product of a group's loops."""
    extent = 1
    for loop in loops:
        extent *= _loop_size(operand, loop)
    return extent


def _scale_block(
    scale: Operand, loops: _Loops, rows: tuple[int, ...], is_split: bool = True
) -> tuple[int, int]:
    """Rows and K elements of the operand that share a scale, from the scale's map.

    Args:
        scale: The scales and their map.
        loops: All loops by role.
        rows: Those over the operand's rows.
        is_split: Two loops over rows are (block of 32, element), and not (batch, row).
    """
    k, row_block, k_block = loops.k, 0, 0
    seen: set[int] = set()
    for expr in scale.map.results:
        if isinstance(expr, ir.AffineConstantExpr) and expr.value == 0:
            continue
        loop, divisor = _loop_and_divisor(expr)
        seen.add(loop)
        inner = 1
        if (loop == k[0] and len(k) == 2) or (loop == rows[0] and len(rows) == 2 and is_split):
            inner = BLOCK_K
        if loop == k[0]:
            k_block = divisor * inner
        elif loop == rows[0]:
            row_block = divisor * inner
        elif loop in rows[1:] and rows[0] in seen and divisor == 1:
            row_block = 1
        elif loop not in loops.batch or divisor != 1:
            raise NotServedError(f"unsupported scale map {scale.map}")
    if not row_block or not k_block:
        raise NotServedError(f"expected a scale for every 32 of K and row block, got {scale.map}")
    if not seen.issuperset(loops.batch):
        raise NotServedError(f"expected scales for each batch, got {scale.map}")
    if k_block % BLOCK_K:
        raise NotServedError(f"expected 32 elements of K to share a scale but got {k_block}")
    return row_block, k_block


def _index_all_scales(
    contraction: ScaledContraction, loops: _Loops, n: int, k: int
) -> ScaledContraction:
    """Scales that are read at a constant 0, for there is one block, read at that block's index.

    A program that reshapes scales reads a dimension of size 1 so, and the maps would not say
    which blocks they have.
    """
    rhs_scale = _index_scales(contraction.rhs_scale, loops.n, round_up_to_block(n), loops.k, k)
    lhs_scale = contraction.lhs_scale
    if lhs_scale is not None:
        lhs_scale = _index_scales(lhs_scale, loops.m, 1, loops.k, k)
    return dataclasses.replace(contraction, lhs_scale=lhs_scale, rhs_scale=rhs_scale)


def _index_scales(
    scale: Operand, rows: tuple[int, ...], row_block: int, k_loops: tuple[int, ...], k: int
) -> Operand:
    """One scale operand with an index for rows and for K, in place of constants."""
    exprs = list(scale.map.results)
    shape = ir.RankedTensorType(scale.value.type).shape
    is_constant = [isinstance(expr, ir.AffineConstantExpr) for expr in exprs]
    used = {
        _loop_and_divisor(expr)[0]
        for expr, constant_zero in zip(exprs, is_constant, strict=True)
        if not constant_zero
    }
    for group, block in ((rows, row_block), (k_loops, round_up_to_block(k))):
        if used & set(group):
            continue
        free = [
            axis
            for axis, expr in enumerate(exprs)
            if isinstance(expr, ir.AffineConstantExpr) and shape[axis] == 1
        ]
        if not free:
            continue
        is_split = len(group) == 2 and block > 1
        loop = ir.AffineExpr.get_dim(group[0])
        is_whole = is_split or block == 1
        exprs[free[0]] = loop if is_whole else ir.AffineExpr.get_floor_div(loop, block)
    return Operand(scale.value, ir.AffineMap.get(scale.map.n_dims, 0, exprs))


def round_up_to_block(size: int) -> int:
    """The least multiple of 32 that is not below ``size``."""
    return ceil_div(size, BLOCK_K) * BLOCK_K


def _loop_and_divisor(expr: ir.AffineExpr) -> tuple[int, int]:
    if isinstance(expr, ir.AffineDimExpr):
        return expr.position, 1
    if isinstance(expr, ir.AffineFloorDivExpr):
        loop, divisor = expr.lhs, expr.rhs
        if isinstance(loop, ir.AffineDimExpr) and isinstance(divisor, ir.AffineConstantExpr):
            return loop.position, divisor.value
    raise NotServedError(f"unsupported scale index {expr}")


def _scale_matrix(scale: Operand, loops: _Loops, rows: tuple[int, ...]) -> ir.Value:
    """The scales as [row blocks, K blocks], or that for each batch."""
    value = without_constant_indices(scale)
    indices = [
        _loop_and_divisor(expr)[0]
        for expr in scale.map.results
        if not isinstance(expr, ir.AffineConstantExpr)
    ]
    present_rows = tuple(loop for loop in rows if loop in indices)
    return arranged(value, indices, loops.groups(present_rows, loops.k[:1]))


def _drop_unit_batches(contraction: ScaledContraction) -> ScaledContraction:
    """Take batch loops away from a weight of one batch: they are loops of M then."""
    rhs, rhs_scale = contraction.rhs, contraction.rhs_scale
    batch = set(loops_of(contraction.result)) & set(loops_of(contraction.lhs.map))
    for loop in batch & set(loops_of(rhs.map)):
        rhs, rhs_scale = without_unit_loop(rhs, loop), without_unit_loop(rhs_scale, loop)
    if batch & set(loops_of(rhs.map)):
        return contraction
    return dataclasses.replace(contraction, rhs=rhs, rhs_scale=rhs_scale)
