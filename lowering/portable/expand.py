# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A block-scaled matmul as plain linalg, right for every scale byte on every device.

Values and scales are taken apart as integers, so no fp8 type reaches a back end that cannot
convert it. A scale of 2^-127 would be a denormal that many devices flush to zero. So the two
exponents are added as integers, and the sum is applied to the product in two factors, each a
normal number; blocks with a very small scale are summed apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.lowering.common.epilogue import apply_epilogue
from block32.lowering.common.index import constant
from block32.lowering.common.tensors import bitcast, blocked, generic, loop_index
from block32.lowering.portable import grouped
from block32.lowering.portable.quantize import quantize
from block32.lowering.problem import ScaledMatmul

_NAN_SCALE = 255
_F32_NAN_BITS = 0x7FC00000
#: Blocks whose exponents sum to less than this are summed apart, with this much added to them.
#: An ordinary term is then at least 2^-60 * 2^-32 (the smallest e5m2 product): a normal number.
_SMALL_EXPONENT = -60
_SMALL_SHIFT = 64


@dataclass(frozen=True)
class Float8:
    """How the bits of a small float format are laid out.

    Attributes:
        exponent_bits: Width of the exponent.
        mantissa_bits: Width of the mantissa.
        bias: Exponent bias.
        nan_codes: First magnitude code (without sign) that is NaN, or None where there is none.
        infinity_code: The magnitude code of infinity, or None.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_codes: int | None
    infinity_code: int | None

    @property
    def sign_shift(self) -> int:
        """Position of the sign bit."""
        return self.exponent_bits + self.mantissa_bits


#: OCP 8-bit floating point specification 1.0, table 1; OCP MX 1.0, table 5 for f4E2M1FN.
FORMATS = {
    "f8E4M3FN": Float8(4, 3, 7, nan_codes=0x7F, infinity_code=None),
    "f8E5M2": Float8(5, 2, 15, nan_codes=0x7D, infinity_code=0x7C),
    "f4E2M1FN": Float8(2, 1, 1, nan_codes=None, infinity_code=None),
}


def expand(problem: ScaledMatmul, operands: dict[str, ir.Value]) -> ir.Value:
    """Build the matmul at the insertion point.

    Args:
        problem: The matmul.
        operands: Tensors by ABI name, with the types of ``host.operand_types``.

    Returns:
        y, ``[M, N]`` of the result type.
    """
    if problem.lhs_quantize:
        codes, scales = quantize(operands["lhs"], problem.lhs_quantize, problem.quantized().lhs)
        return expand(problem.quantized(), {**operands, "lhs": codes, "lhs_scale": scales})
    if problem.grouping and not problem.grouping.groups:
        return operands["init"]
    lhs, rhs, rhs_scale = (operands[name] for name in ("lhs", "rhs", "rhs_scale"))
    inputs = {"lhs": blocked(_codes(lhs, problem.lhs, problem.k) if problem.lhs_scaled else lhs)}
    if problem.lhs_scaled:
        inputs["lhs_scale"] = _as_bytes(operands["lhs_scale"])
    if problem.grouping:
        inputs["expert"] = grouped.row_experts(problem, operands)
        weight = blocked(_codes(grouped.stacked(rhs), problem.rhs, problem.k))
        weight_scale = _as_bytes(grouped.stacked(rhs_scale))
    else:
        weight = blocked(_codes(rhs, problem.rhs, problem.k))
        weight_scale = _row_scales(_as_bytes(rhs_scale), problem)
    ordinary, small = _contract(problem, inputs, weight, weight_scale)
    return _finish(problem, ordinary, small, {**operands, **inputs})


def _as_bytes(value: ir.Value) -> ir.Value:
    tensor_type = ir.RankedTensorType(value.type)
    i8 = ir.IntegerType.get_signless(8)
    if tensor_type.element_type == i8:
        return value
    return bitcast(value, ir.RankedTensorType.get(tensor_type.shape, i8))


def _codes(value: ir.Value, element: str, k: int) -> ir.Value:
    """One code a byte, ``[rows, K]``: packed 4-bit values are taken apart, low nibble first."""
    stored = _as_bytes(value)
    if element != "f4E2M1FN":
        return stored
    i8 = ir.IntegerType.get_signless(8)
    stored_type = ir.RankedTensorType(stored.type)
    rows = (
        tensor.dim(stored, constant(0)) if stored_type.is_dynamic_dim(0) else stored_type.shape[0]
    )
    empty = tensor.empty([rows, k], i8)
    op = generic([], [empty], [ir.AffineMap.get_identity(2)], ["parallel", "parallel"])
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        column = loop_index(1)
        byte = tensor.extract(stored, [loop_index(0), arith.divui(column, constant(2))])
        shift = arith.muli(arith.remui(column, constant(2)), constant(4))
        nibble = arith.shrui(byte, arith.index_cast(i8, shift))
        linalg.yield_([arith.andi(nibble, arith.constant(i8, 0xF))])
    return op.results[0]


def _row_scales(scale: ir.Value, problem: ScaledMatmul) -> ir.Value:
    """One scale byte a row and 32 K, ``[N, ceil(K/32)]``, from the scales of larger blocks."""
    if problem.rhs_block[0] == 1:
        return scale
    element = ir.RankedTensorType(scale.type).element_type
    empty = tensor.empty([problem.n, problem.k_blocks], element)
    op = generic([], [empty], [ir.AffineMap.get_identity(2)], ["parallel", "parallel"])
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        row = arith.divui(loop_index(0), constant(problem.rhs_block[0]))
        linalg.yield_([tensor.extract(scale, [row, loop_index(1)])])
    return op.results[0]


def _contract(
    problem: ScaledMatmul, inputs: dict[str, ir.Value], weight: ir.Value, weight_scale: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The sums over (K block, element of the block) of ordinary and of small terms, as f32.

    The terms of a block whose scales multiply to less than ``2^_SMALL_EXPONENT`` are summed
    apart, ``2^_SMALL_SHIFT`` times too large: each may be below the normal numbers where their
    sum is not.
    """
    if not problem.grouping:
        inputs = {**inputs, "rhs": weight, "rhs_scale": weight_scale}
    m, n, block, element = (ir.AffineExpr.get_dim(i) for i in range(4))
    indices = {
        "lhs": [m, block, element],
        "lhs_scale": [m, block],
        "expert": [m],
        "rhs": [n, block, element],
        "rhs_scale": [n, block],
    }
    maps = [ir.AffineMap.get(4, 0, indices[name]) for name in inputs]
    maps += [ir.AffineMap.get(4, 0, [m, n])] * 2
    f32 = ir.F32Type.get()
    lhs = inputs["lhs"]
    lhs_type = ir.RankedTensorType(lhs.type)
    rows = tensor.dim(lhs, constant(0)) if lhs_type.is_dynamic_dim(0) else lhs_type.shape[0]
    # Zeros of two signs: equal ones would become one tensor that starts both sums, and IREE's GPU
    # back ends cannot bufferize the copy that this asks for.
    zeros = [
        linalg.fill(arith.constant(f32, zero), outs=[tensor.empty([rows, problem.n], f32)])
        for zero in (0.0, -0.0)
    ]
    iterators = ["parallel", "parallel", "reduction", "reduction"]
    op = generic(list(inputs.values()), zeros, maps, iterators)
    body = op.regions[0].blocks[0]
    with ir.InsertionPoint(body):
        *arguments, ordinary, small = body.arguments
        values = dict(zip(inputs, arguments, strict=True))
        if problem.grouping:
            values["rhs"], values["rhs_scale"] = grouped.gather_weight(
                problem, values["expert"], weight, weight_scale
            )
        x = decode(values["lhs"], problem.lhs) if problem.lhs_scaled else _as_f32(values["lhs"])
        product = arith.mulf(x, decode(values["rhs"], problem.rhs))
        scales = [values[name] for name in ("lhs_scale", "rhs_scale") if name in values]
        term, is_small = _scaled_term(product, scales)
        linalg.yield_(
            [
                arith.select(is_small, ordinary, arith.addf(ordinary, term)),
                arith.select(is_small, arith.addf(small, term), small),
            ]
        )
    return op.results[0], op.results[1]


def _as_f32(value: ir.Value) -> ir.Value:
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def decode(code: ir.Value, element: str) -> ir.Value:
    """The f32 value of an i8 code of a small float format, by integer arithmetic; exact."""
    layout = FORMATS[element]
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    bits = arith.andi(arith.extui(i32, code), _i32((2 << layout.sign_shift) - 1))
    magnitude = arith.andi(bits, _i32((1 << layout.sign_shift) - 1))
    mantissa = arith.andi(magnitude, _i32((1 << layout.mantissa_bits) - 1))
    subnormal_unit = 2.0 ** (1 - layout.bias - layout.mantissa_bits)
    subnormal = arith.mulf(arith.uitofp(f32, mantissa), arith.constant(f32, subnormal_unit))
    # Exponent and mantissa move up as one: only the bias between the formats is added.
    shifted = arith.shli(magnitude, _i32(23 - layout.mantissa_bits))
    normal = arith.bitcast(f32, arith.addi(shifted, _i32((127 - layout.bias) << 23)))
    is_normal = _compare("uge", magnitude, 1 << layout.mantissa_bits)
    value = arith.select(is_normal, normal, subnormal)
    if layout.infinity_code is not None:
        infinity = arith.constant(f32, float("inf"))
        value = arith.select(_compare("eq", magnitude, layout.infinity_code), infinity, value)
    if layout.nan_codes is not None:
        value = arith.select(_compare("uge", magnitude, layout.nan_codes), _f32_nan(), value)
    is_negative = _compare("uge", bits, 1 << layout.sign_shift)
    return arith.select(is_negative, arith.negf(value), value)


def _scaled_term(product: ir.Value, scales: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """``product`` times 2^(byte - 127) for each scale, and whether it is small and so shifted.

    NaN where a byte is 255.
    """
    i32 = ir.IntegerType.get_signless(32)
    bytes_ = [arith.extui(i32, scale) for scale in scales]
    exponent, largest = bytes_[0], bytes_[0]
    for byte in bytes_[1:]:
        exponent, largest = arith.addi(exponent, byte), arith.maxui(largest, byte)
    exponent = arith.subi(exponent, _i32(127 * len(scales)))
    is_small = _compare("slt", exponent, _SMALL_EXPONENT)
    shifted = arith.addi(exponent, _i32(_SMALL_SHIFT))
    exponent = arith.select(is_small, shifted, exponent)
    first = arith.shrsi(exponent, _i32(1))
    second = arith.subi(exponent, first)
    scaled = arith.mulf(arith.mulf(product, _power_of_two(first)), _power_of_two(second))
    is_nan = _compare("eq", largest, _NAN_SCALE)
    return arith.select(is_nan, _f32_nan(), scaled), is_small


def _power_of_two(exponent: ir.Value) -> ir.Value:
    """``2^exponent`` as f32, for exponents of normal numbers (-126..127)."""
    bits = arith.shli(arith.addi(exponent, _i32(127)), _i32(23))
    return arith.bitcast(ir.F32Type.get(), bits)


def _compare(predicate: str, value: ir.Value, constant_value: int) -> ir.Value:
    return arith.cmpi(getattr(arith.CmpIPredicate, predicate), value, _i32(constant_value))


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _f32_nan() -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), _i32(_F32_NAN_BITS))


def _finish(
    problem: ScaledMatmul, ordinary: ir.Value, small: ir.Value, operands: dict[str, ir.Value]
) -> ir.Value:
    """The two sums as one, then the epilogue, rounded once to the result type.

    A grouped matmul has no epilogue; rows without an expert or a group are put in instead.
    """
    element = ir.Type.parse(problem.result)
    f32 = ir.F32Type.get()
    sum_type = ir.RankedTensorType(ordinary.type)
    is_dynamic = sum_type.is_dynamic_dim(0)
    rows = tensor.dim(ordinary, constant(0)) if is_dynamic else sum_type.shape[0]
    empty = tensor.empty([rows, sum_type.shape[1]], element)
    m, n = (ir.AffineExpr.get_dim(i) for i in range(2))
    indices = {
        "row_scale": [m],
        "scale": [ir.AffineExpr.get_constant(0)],
        "bias": [n],
        "residual": [m, n],
        "expert": [m],
        "init": [m, n],
    }
    names = ("expert", "init") if problem.grouping else problem.epilogue.operand_names()
    identity = ir.AffineMap.get_identity(2)
    maps = [identity, identity, *(ir.AffineMap.get(2, 0, indices[name]) for name in names)]
    inputs = [ordinary, small, *(operands[name] for name in names)]
    op = generic(inputs, [empty], [*maps, identity], ["parallel", "parallel"])
    block = op.regions[0].blocks[0]
    with ir.InsertionPoint(block):
        ordinary_sum, small_sum, *extra, _ = block.arguments
        unshifted = arith.mulf(small_sum, arith.constant(f32, 2.0**-_SMALL_SHIFT))
        total: ir.Value = arith.addf(ordinary_sum, unshifted)
        values = dict(zip(names, extra, strict=True))
        if not problem.grouping:
            accessors = {name: partial(_as_f32, value) for name, value in values.items()}
            total = apply_epilogue(total, problem.epilogue, accessors)
        rounded = total if problem.result == "f32" else arith.truncf(element, total)
        if problem.grouping:
            rounded = grouped.choose_row(values["expert"], rounded, values["init"])
        linalg.yield_([rounded])
    return op.results[0]
