# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write ``mlp.mlir``: a three-layer MLP whose weights are MXFP8, from a seed.

    python examples/mlp/make_model.py

Each layer is ``linalg.scaled_contract`` on an activation that the ``quantize`` composite turns into
e4m3 codes and scales; ReLU stands between the layers. Rows are dynamic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from iree.compiler import ir
from iree.compiler.dialects import arith, func, linalg, tensor

from block32.lowering.common.tensors import bitcast
from block32.lowering.composites import Composites
from block32.passes import canonical
from block32.runtime import reference

MODEL = Path(__file__).parent / "mlp.mlir"
WIDTHS = (64, 128, 128, 32)
SEED = 32


@dataclass(frozen=True)
class Layer:
    """One linear layer: e4m3 codes [N, K] and a scale byte for each 32x32 block."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]


def layers() -> list[Layer]:
    """The weights: normal numbers, quantised by the reference quantiser."""
    rng = np.random.default_rng(SEED)
    return [
        Layer(*reference.quantize_weight(rng.normal(0, k**-0.5, (n, k)), block=(32, 32)))
        for k, n in pairwise(WIDTHS)
    ]


def build_model() -> ir.Module:
    """The module of one function ``mlp(x: [M, 64] f32) -> [M, 32] f32``; needs an open context."""
    f32, dynamic = ir.F32Type.get(), ir.ShapedType.get_dynamic_size()
    module = ir.Module.create()
    composites = Composites(ir.SymbolTable(module.operation))
    with ir.InsertionPoint(module.body):

        @func.FuncOp.from_py_func(ir.RankedTensorType.get([dynamic, WIDTHS[0]], f32), name="mlp")
        def mlp(x: ir.Value) -> ir.Value:
            for index, layer in enumerate(layers()):
                x = _linear(composites, _relu(x) if index else x, layer)
            return x

    return module


def _linear(composites: Composites, x: ir.Value, layer: Layer) -> ir.Value:
    codes, scales = composites.quantize(x)
    operands = canonical.MatmulOperands(
        lhs=codes,
        lhs_scale=scales,
        rhs=_constant(layer.codes, "f8E4M3FN"),
        rhs_scale=_constant(layer.scales, "f8E8M0FNU"),
        rhs_block_n=32,
    )
    return canonical.build(operands, ir.F32Type.get())


def _constant(codes: npt.NDArray[np.uint8], element: str) -> ir.Value:
    """Bytes as a constant of an 8-bit float type."""
    i8 = ir.IntegerType.get_signless(8)
    attribute = ir.DenseElementsAttr.get(codes, type=i8)
    value = arith.constant(ir.RankedTensorType.get(codes.shape, i8), attribute)
    return bitcast(value, ir.RankedTensorType.get(codes.shape, ir.Type.parse(element)))


def _relu(x: ir.Value) -> ir.Value:
    x_type = ir.RankedTensorType(x.type)
    identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(2))
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    rows = tensor.dim(x, arith.constant(ir.IndexType.get(), 0))
    empty = tensor.empty([rows, x_type.shape[1]], x_type.element_type)
    op = linalg.GenericOp(
        [x_type],
        [x],
        [empty],
        ir.ArrayAttr.get([identity] * 2),
        ir.ArrayAttr.get([parallel] * 2),
    )
    elements = [x_type.element_type] * 2
    block = op.regions[0].blocks.append(*elements, arg_locs=[ir.Location.unknown()] * 2)
    with ir.InsertionPoint(block):
        zero = arith.constant(x_type.element_type, 0.0)
        linalg.yield_([arith.maximumf(block.arguments[0], zero)])
    return op.results[0]


def main() -> None:
    """Write the model next to this file."""
    with ir.Context(), ir.Location.unknown():
        MODEL.write_text(str(build_model()))
    print(f"wrote {MODEL}")


if __name__ == "__main__":
    main()
