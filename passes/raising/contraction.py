# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A scaled contraction of any spelling, and its rewrite into canonical layout.

The spellings differ in where the maps come from and whether K and N are split into blocks. What
they share is here: which loop is M, N or K, how an operand's dimensions become rows and columns,
and which block its scales have.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.tensors import cast, loop_index
from block32.lowering.composites import Composites
from block32.lowering.problem import BLOCK_K, RESULT_TYPES, VALUE_TYPES, ceil_div
from block32.passes.canonical import MatmulOperands

SCALE_TYPE = "f8E8M0FNU"

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
        """The same with the operand that has the result's first loop as the left one."""
        loops = _dims(self.result)
        if not loops or loops[0] in _dims(self.lhs.map) or self.lhs_scale is None:
            return self
        return ScaledContraction(self.rhs, self.rhs_scale, self.lhs, self.lhs_scale, self.result)


@dataclass(frozen=True)
class _Loops:
    """Loop numbers by role, outermost first.

    A split K or N is (block, element of the block); several M are batches and rows.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]


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
    k = _extent(contraction.rhs, loops.k)
    if k == 0:
        raise ImpossibleError("expected K of at least 1 but got 0")
    n = _extent(contraction.rhs, loops.n)
    if n == 0:
        raise NotServedError("expected N of at least 1 but got 0")
    _extent(contraction.lhs, loops.k)
    contraction = _index_all_scales(contraction, loops, n, k)
    rhs_block = _scale_block(contraction.rhs_scale, loops.n, loops.k)
    if rhs_block[0] not in (1, BLOCK_K) and rhs_block[0] % BLOCK_K:
        raise NotServedError(
            f"expected 1x32 or 32x32 scales (or multiples) on the right operand but got "
            f"{_by(rhs_block)}"
        )
    lhs, lhs_scale = _activation(contraction, loops, composites)
    rhs_scale = _scale_matrix(contraction.rhs_scale, loops.n, loops.k)
    rows_per_scale = 1 if rhs_block[0] == 1 else BLOCK_K
    wanted = (ceil_div(n, rows_per_scale), ceil_div(k, BLOCK_K))
    repeats = (rhs_block[0] // rows_per_scale, rhs_block[1] // BLOCK_K)
    return MatmulOperands(
        lhs=lhs,
        lhs_scale=lhs_scale,
        rhs=_matrix(contraction.rhs.value, _dims(contraction.rhs.map), loops.n, loops.k),
        rhs_scale=cast(expand_scales(rhs_scale, wanted, repeats), wanted),
        rhs_block_n=rows_per_scale,
    )


def _activation(
    contraction: ScaledContraction, loops: _Loops, composites: Composites
) -> tuple[ir.Value, ir.Value | None]:
    """The activation ``[M, K]`` and its scales, which it has, gets at run time, or goes without."""
    lhs, scale = contraction.lhs, contraction.lhs_scale
    if scale is None:
        check_activation_type(lhs.element)
        x = _matrix(lhs.value, _dims(lhs.map), loops.m, loops.k)
        return composites.quantize(x, contraction.rule) if contraction.rule else (x, None)
    check_value_type(lhs.element)
    check_scale_type(scale.element)
    block = _scale_block(scale, loops.m, loops.k, is_split=False)
    if block != (1, BLOCK_K):
        raise NotServedError(f"expected 1x32 scales on the left operand but got {_by(block)}")
    x = _matrix(lhs.value, _dims(lhs.map), loops.m, loops.k)
    m, k = ir.RankedTensorType(x.type).shape
    return x, cast(_scale_matrix(scale, loops.m, loops.k), (m, ceil_div(k, BLOCK_K)))


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


def _by(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"


def _dims(affine_map: ir.AffineMap) -> list[int]:
    """Loop numbers of a projected permutation."""
    dims = []
    for expr in affine_map.results:
        if not isinstance(expr, ir.AffineDimExpr):
            raise NotServedError(f"expected operands indexed by plain loops but got {affine_map}")
        dims.append(expr.position)
    return dims


def _classify(contraction: ScaledContraction) -> _Loops:
    lhs, rhs = _dims(contraction.lhs.map), _dims(contraction.rhs.map)
    result = _dims(contraction.result)
    m = tuple(d for d in result if d in lhs and d not in rhs)
    n = tuple(d for d in result if d in rhs and d not in lhs)
    k = tuple(d for d in rhs if d in lhs and d not in result)
    if set(lhs) & set(rhs) & set(result):
        raise NotServedError("batched block-scaled matmuls are not served")
    if not m or len(n) not in (1, 2) or len(k) not in (1, 2) or [*m, *n] != result:
        raise NotServedError(
            "expected loops (m, n, k), with n and k whole or split into blocks of 32, "
            "and batches of the left operand before m"
        )
    for name, group, operand in (("k", k, contraction.rhs), ("n", n, contraction.rhs)):
        if len(group) == 2 and _loop_size(operand, group[1]) != BLOCK_K:
            raise NotServedError(f"expected the inner loop of a split {name} to be 32 long")
    return _Loops(m, n, k)


def _loop_size(operand: Operand, loop: int) -> int:
    position = _dims(operand.map).index(loop)
    tensor_type = ir.RankedTensorType(operand.value.type)
    if tensor_type.is_dynamic_dim(position):
        raise NotServedError("expected static N and K")
    return tensor_type.shape[position]


def _extent(operand: Operand, loops: tuple[int, ...]) -> int:
    """N or K: the product of a group's loops."""
    extent = 1
    for loop in loops:
        extent *= _loop_size(operand, loop)
    return extent


def _scale_block(
    scale: Operand, rows: tuple[int, ...], k: tuple[int, ...], is_split: bool = True
) -> tuple[int, int]:
    """Rows and K elements of the operand that share a scale, from the scale's map.

    Args:
        scale: The scales and their map.
        rows: The loops over the operand's rows.
        k: The loops over K.
        is_split: Two loops over rows are (block of 32, element), and not (batch, row).
    """
    row_block, k_block = 0, 0
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
        else:
            raise NotServedError(f"unsupported scale map {scale.map}")
    if not row_block or not k_block:
        raise NotServedError(f"expected a scale for every 32 of K and row block, got {scale.map}")
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


def _matrix(
    value: ir.Value, dims: list[int], rows: tuple[int, ...], columns: tuple[int, ...]
) -> ir.Value:
    """The tensor as [rows, columns]: collapse split dimensions, transpose if columns come first."""
    if dims == [*rows, *columns]:
        return _collapse(value, len(rows), len(columns))
    if dims == [*columns, *rows]:
        return transpose(_collapse(value, len(columns), len(rows)))
    raise NotServedError("expected the blocks of N and K to be neighbours in memory")


def _scale_matrix(scale: Operand, rows: tuple[int, ...], k: tuple[int, ...]) -> ir.Value:
    """The scales as [row blocks, K blocks]."""
    value = _without_ones(scale)
    loops = [
        _loop_and_divisor(expr)[0]
        for expr in scale.map.results
        if not isinstance(expr, ir.AffineConstantExpr)
    ]
    present_rows = tuple(loop for loop in rows if loop in loops)
    return _matrix(value, loops, present_rows, k[:1])


def _without_ones(scale: Operand) -> ir.Value:
    """The scales without the dimensions of size 1 that are always read at 0."""
    exprs = list(scale.map.results)
    ones = [i for i, e in enumerate(exprs) if isinstance(e, ir.AffineConstantExpr)]
    shape = ir.RankedTensorType(scale.value.type).shape
    if any(shape[axis] != 1 for axis in ones):
        raise NotServedError(f"unsupported scale map {scale.map}")
    if not ones:
        return scale.value
    groups: list[list[int]] = []
    leading: list[int] = []
    for axis in range(len(exprs)):
        if axis not in ones:
            groups.append([*leading, axis])
            leading = []
        elif groups:
            groups[-1].append(axis)
        else:
            leading.append(axis)
    return _collapse_groups(scale.value, groups)


def _drop_unit_batches(contraction: ScaledContraction) -> ScaledContraction:
    """Take batch loops of one iteration away from the weight: they are loops of M then."""
    rhs, rhs_scale = contraction.rhs, contraction.rhs_scale
    for loop in set(_plain_dims(contraction.result)) & set(_plain_dims(contraction.lhs.map)):
        rhs, rhs_scale = _without_unit_loop(rhs, loop), _without_unit_loop(rhs_scale, loop)
    return dataclasses.replace(contraction, rhs=rhs, rhs_scale=rhs_scale)


def _plain_dims(affine_map: ir.AffineMap) -> list[int]:
    return [e.position for e in affine_map.results if isinstance(e, ir.AffineDimExpr)]


def _without_unit_loop(operand: Operand, loop: int) -> Operand:
    """The operand without its dimension of size 1 that ``loop`` indexes, if it has one."""
    exprs = list(operand.map.results)
    axes = [
        i for i, e in enumerate(exprs) if isinstance(e, ir.AffineDimExpr) and e.position == loop
    ]
    shape = ir.RankedTensorType(operand.value.type).shape
    if len(axes) != 1 or shape[axes[0]] != 1 or len(exprs) < 2:
        return operand
    (axis,) = axes
    kept = exprs[:axis] + exprs[axis + 1 :]
    first = min(axis, len(exprs) - 2)
    groups = [[i] for i in range(first)] + [[first, first + 1]]
    groups += [[i] for i in range(first + 2, len(exprs))]
    value = _collapse_groups(operand.value, groups)
    return Operand(value, ir.AffineMap.get(operand.map.n_dims, 0, kept))


def _collapse(value: ir.Value, first: int, second: int) -> ir.Value:
    """The first so many dimensions as one, and the others as one."""
    if first == second == 1:
        return value
    groups = [list(range(first)), list(range(first, first + second))]
    return _collapse_groups(value, groups)


def _collapse_groups(value: ir.Value, groups: list[list[int]]) -> ir.Value:
    source = ir.RankedTensorType(value.type)
    shape = []
    for group in groups:
        sizes = [source.shape[i] for i in group]
        if any(source.is_dynamic_dim(i) for i in group):
            shape.append(ir.ShapedType.get_dynamic_size())
            continue
        product = 1
        for size in sizes:
            product *= size
        shape.append(product)
    collapsed = ir.RankedTensorType.get(shape, source.element_type)
    return tensor.collapse_shape(collapsed, value, groups)


def transpose(value: ir.Value) -> ir.Value:
    """``linalg.transpose`` of a matrix; IREE evaluates it at compile time for constants."""
    source = ir.RankedTensorType(value.type)
    sizes: list[int | ir.Value] = [
        tensor.dim(value, constant(i)) if source.is_dynamic_dim(i) else source.shape[i]
        for i in (1, 0)
    ]
    empty = tensor.empty(sizes, source.element_type)
    return linalg.transpose(value, outs=[empty], permutation=[1, 0]).result[0]


def expand_scales(scale: ir.Value, wanted: tuple[int, int], repeats: tuple[int, int]) -> ir.Value:
    """Repeat each scale of a coarser grid over the blocks that it covers: exact.

    Args:
        scale: E8M0 scales, ``[ceil(rows / block), ceil(K / block)]``.
        wanted: The shape of the finer grid.
        repeats: Fine blocks in a coarse block, along rows and K.
    """
    if repeats == (1, 1):
        return scale
    element = ir.RankedTensorType(scale.type).element_type
    empty = tensor.empty(list(wanted), element)
    identity = ir.AffineMap.get_identity(2)
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    op = linalg.GenericOp(
        [empty.type],
        [],
        [empty],
        ir.ArrayAttr.get([ir.AffineMapAttr.get(identity)]),
        ir.ArrayAttr.get([parallel, parallel]),
    )
    block = op.regions[0].blocks.append(element, arg_locs=[ir.Location.unknown()])
    with ir.InsertionPoint(block):
        indices = [
            arith.divui(loop_index(axis), constant(repeat)) for axis, repeat in enumerate(repeats)
        ]
        linalg.yield_([tensor.extract(scale, indices)])
    return op.results[0]
