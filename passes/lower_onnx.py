# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-lower-onnx``: float8 ``DequantizeLinear`` with blocks becomes linalg.

IREE 3.13 has no lowering of its own for it. This pass runs before IREE's input phase, on what
``iree-import-onnx`` wrote.

Before::

    func.func @f(%w: !torch.vtensor<[64,32],f8E4M3FN>) -> !torch.vtensor<[64,32],f32> {
      %s = torch.operator "onnx.Constant"() {torch.onnx.value = dense<0.5> : tensor<2x32xf32>}
          : () -> !torch.vtensor<[2,32],f32>
      %d = torch.operator "onnx.DequantizeLinear"(%w, %s)
          {torch.onnx.axis = 0 : si64, torch.onnx.block_size = 32 : si64}
          : (!torch.vtensor<[64,32],f8E4M3FN>, !torch.vtensor<[2,32],f32>)
          -> !torch.vtensor<[64,32],f32>
      return %d : !torch.vtensor<[64,32],f32>
    }

After::

    %1 = torch_c.to_builtin_tensor %arg0 : ... -> tensor<64x32xf8E4M3FN>
    %cst = arith.constant dense<126> : tensor<2x32xi8>
    %2 = flow.tensor.bitcast %cst : tensor<2x32xi8> -> tensor<2x32xf8E8M0FNU>
    ...
    %4 = linalg.generic {indexing_maps = [#map, #map1], ... -> tensor<2x32x32xf8E8M0FNU>
    %collapsed = tensor.collapse_shape %4 [[0, 1], [2]] : ... into tensor<64x32xf8E8M0FNU>
    ...
    %6 = linalg.generic {indexing_maps = [#map2, #map2, #map2], ...
    ^bb0(%in: f8E4M3FN, %in_0: f8E8M0FNU, %out: f32):
      %8 = arith.scaling_extf %in, %in_0 : f8E4M3FN, f8E8M0FNU to f32
      linalg.yield %8 : f32

Scales that are not known, or are no powers of two, are multiplied as they are, with a warning:
``block32-raise`` leaves the matmul that reads them to IREE's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.dialects.diagnostics import error_at
from block32.lowering.common.tensors import generic
from block32.lowering.problem import RESULT_TYPES, SCALE_TYPE, ceil_div
from block32.passes import constants
from block32.passes.base import Pass, Report
from block32.passes.torch_values import from_builtin, operator_name, tensor_type, to_builtin
from block32.passes.walk import operations_where

#: What the operator is called in the text or bytecode of a module that has one.
OPERATOR: Final = "onnx.DequantizeLinear"

_CODE_TYPES: Final = ("f8E4M3FN", "f8E5M2")


@dataclass
class LowerOnnxPass(Pass):
    """Write block-wise dequantisation of float8 values as linalg."""

    argument: ClassVar[str] = "block32-lower-onnx"
    summary: ClassVar[str] = "write ONNX's block-wise dequantisation of float8 values as linalg"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: A zero point other than 0, an axis that the input has not, or scales of
                another shape than ONNX asks for.
        """
        for op in operations_where(module, _is_blocked_float8):
            with ir.InsertionPoint(op), op.location:
                value = _lower(_Dequantize.read(op), report)
                result = from_builtin(value, op.results[0].type)
            op.results[0].replace_all_uses_with(result)
            op.erase()


@dataclass(frozen=True)
class _Dequantize:
    """The operator's operands and attributes.

    Attributes:
        op: The operator.
        codes: Type of the values, ``[d0, d1, ...]``, static.
        scales: Type of the scales: the same but for ``ceil(d / block)`` along the axis.
        result: Type of the result.
        axis: The dimension that is split into blocks.
        block: The number of elements of that dimension that share a scale.
    """

    op: ir.Operation
    codes: ir.RankedTensorType
    scales: ir.RankedTensorType
    result: ir.RankedTensorType
    axis: int
    block: int

    @classmethod
    def read(cls, op: ir.Operation) -> _Dequantize:
        """Read the operator.

        Raises:
            DiagnosticError: See the pass.
        """
        types = [tensor_type(v) for v in (op.operands[0], op.operands[1], op.results[0])]
        codes, scales, result = (t for t in types if t is not None)
        axis = _integer(op, "axis", 1)
        if not -codes.rank <= axis < codes.rank:
            raise error_at(
                op, f"has axis {axis}; expected {-codes.rank} to {codes.rank - 1} for its input"
            )
        axis %= codes.rank
        block = _integer(op, "block_size", 0)
        wanted = list(codes.shape)
        wanted[axis] = ceil_div(wanted[axis], block)
        if scales.shape != wanted:
            raise error_at(
                op,
                f"has blocks of {block} along axis {axis}; expected scales of shape "
                f"{_by(wanted)} but got {_by(scales.shape)}",
            )
        if len(op.operands) > 2 and not _is_zero(op.operands[2]):
            raise error_at(op, "has a zero point; expected none, or the constant 0, for float8")
        return cls(op, codes, scales, result, axis, block)


def _is_blocked_float8(op: ir.Operation) -> bool:
    """Whether IREE cannot lower the operator, and this pass can."""
    if operator_name(op) != OPERATOR:
        return False
    types = [tensor_type(value) for value in (*list(op.operands)[:2], *op.results)]
    if len(types) != 3 or any(t is None or not t.has_static_shape for t in types):
        return False
    codes, _, result = (str(t.element_type) for t in types if t is not None)
    return codes in _CODE_TYPES and result in RESULT_TYPES and _integer(op, "block_size", 0) > 0


def _lower(node: _Dequantize, report: Report) -> ir.Value:
    """Build ``codes * scales``."""
    codes = to_builtin(node.op.operands[0])
    scales = _repeated(node, _scales(node, report))
    empty = tensor.empty(node.result.shape, node.result.element_type)
    identity = ir.AffineMap.get_identity(node.codes.rank)
    op = generic([codes, scales], [empty], [identity] * 3, ["parallel"] * node.codes.rank)
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        code, scale, _ = op.regions[0].blocks[0].arguments
        linalg.yield_([_product(code, scale, node.result.element_type)])
    return op.results[0]


def _repeated(node: _Dequantize, scales: ir.Value) -> ir.Value:
    """The scale of each element.

    A map with ``floordiv`` would say the same, but where a matmul is left to IREE 3.13, that cannot
    tile such a map unless the tile's size and the block's divide each other.
    """
    axis, rank, shape = node.axis, node.codes.rank, node.codes.shape
    blocks = node.scales.shape[axis]
    block = min(node.block, shape[axis])
    element = ir.RankedTensorType(scales.type).element_type
    split = [*node.scales.shape[: axis + 1], block, *shape[axis + 1 :]]
    identity = ir.AffineMap.get_identity(rank + 1)
    source = [expr for i, expr in enumerate(identity.results) if i != axis + 1]
    maps = [ir.AffineMap.get(rank + 1, 0, source), identity]
    op = generic([scales], [tensor.empty(split, element)], maps, ["parallel"] * (rank + 1))
    with ir.InsertionPoint(op.regions[0].blocks[0]):
        linalg.yield_([op.regions[0].blocks[0].arguments[0]])
    groups = (
        [[i] for i in range(axis)] + [[axis, axis + 1]] + [[i + 1] for i in range(axis + 1, rank)]
    )
    whole = [*shape[:axis], blocks * block, *shape[axis + 1 :]]
    joined = tensor.collapse_shape(ir.RankedTensorType.get(whole, element), op.results[0], groups)
    if whole == list(shape):
        return joined
    wanted = ir.RankedTensorType.get(shape, element)
    zeros, ones = [0] * rank, [1] * rank
    return tensor.extract_slice(wanted, joined, [], [], [], zeros, shape, ones)


def _scales(node: _Dequantize, report: Report) -> ir.Value:
    """The scales as f8E8M0FNU where they are powers of two, else as they are."""
    value = node.op.operands[1]
    if str(node.scales.element_type) == SCALE_TYPE:
        return to_builtin(value)
    attribute = _constant(value)
    values = None if attribute is None else constants.read_floats(attribute)
    codes = None if values is None else constants.scale_bytes(values)
    if codes is not None:
        return constants.build_scales(codes)
    why = "are not known" if values is None else f"hold {constants.first_other(values)}"
    report.warn(
        node.op, f"is dequantised by IREE's own code: expected scales 2^n but its scales {why}"
    )
    return to_builtin(value)


def _product(code: ir.Value, scale: ir.Value, element: ir.Type) -> ir.Value:
    if str(scale.type) == SCALE_TYPE:
        return arith.scaling_extf(element, code, scale)
    f32 = ir.F32Type.get()
    wide = [v if v.type == f32 else arith.extf(f32, v) for v in (code, scale)]
    product = arith.mulf(*wide)
    return product if element == f32 else arith.truncf(element, product)


def _constant(value: ir.Value) -> ir.Attribute | None:
    """What an ``onnx.Constant`` or a literal holds."""
    if isinstance(value.owner, ir.Block):
        return None
    attributes = value.owner.operation.attributes
    name = next((n for n in ("torch.onnx.value", "value") if n in attributes), None)
    return attributes[name] if name else None


def _is_zero(zero_point: ir.Value) -> bool:
    """Whether a float8 constant is all zeros, read off its text: bindings have no such arrays."""
    attribute = _constant(zero_point)
    if attribute is None:
        return False
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        return ir.FloatAttr(attribute.get_splat_value()).value == 0.0
    content = constants.resource_bytes(attribute)
    return content is not None and not any(byte & 0x7F for byte in content)


def _integer(op: ir.Operation, name: str, default: int) -> int:
    key = f"torch.onnx.{name}"
    return ir.IntegerAttr(op.attributes[key]).value if key in op.attributes else default


def _by(shape: list[int]) -> str:
    return "x".join(map(str, shape))
