# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-pack-weights``: constant weights get the order of bytes that their kernels want.

Before::

    #x = affine_map<(m, n, k) -> (m, k)>
    #xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
    #w = affine_map<(m, n, k) -> (n, k)>
    #ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
    #y = affine_map<(m, n, k) -> (m, n)>
    util.global private @w = dense<56> : tensor<32x64xi8>
    func.func @f(%x: tensor<8x64xf8E4M3FN>, %xs: tensor<8x2xf8E8M0FNU>,
                 %ws: tensor<1x2xf8E8M0FNU>) -> tensor<8x32xf32> {
      %bytes = util.global.load @w : tensor<32x64xi8>
      %w = flow.tensor.bitcast %bytes : tensor<32x64xi8> -> tensor<32x64xf8E4M3FN>
      %zero = arith.constant dense<0.0> : tensor<8x32xf32>
      %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
          {block32.kernel = {target = "cpu", tiers = [
            {form = "stream", isa = "avx512", mma = [8, 2, 32], stages = 2,
             tile = [8, 128, 1024]}]}}
          ins(%x, %xs, %w, %ws : tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>,
                                 tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
          outs(%zero : tensor<8x32xf32>) -> tensor<8x32xf32>
      return %y : tensor<8x32xf32>
    }

After, with ``{target=cpu cpu-features=+avx512f,+avx512bw,+avx512vl architecture=x86_64}``::

    ...
      %w = util.global.load @w : tensor<32x64xi8>
      %0 = flow.tensor.bitcast %w : tensor<32x64xi8> -> tensor<32x64xf8E4M3FN>
      ...
      %expanded = tensor.expand_shape ... into tensor<2x16x64x1xi8>
      ...
      %transposed = linalg.transpose ins(%expanded : tensor<2x16x64x1xi8>)
          outs(...) permutation = [0, 2, 1, 3]
      %3 = flow.tensor.bitcast %transposed : tensor<2x64x16x1xi8> -> tensor<32x64xf8E4M3FN>
          attributes {block32.layout = "n16k1"}
      %4 = linalg.scaled_contract indexing_maps = [...]
          {block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "avx512",
           mma = [8, 32, 32], stages = 9 : i64, tile = [8, 128, 32], weight_layout = "n16k1"}]}}
          ins(%arg0, %arg1, %3, ...

IREE evaluates the transpose while it compiles. That is done where the target says that it pays, and
where the constant has no other readers. Parameters stay as they are, since their transpose would
run whenever a program is loaded, but where a ``block32.kernel`` of the user has the
``weight_layout``. A weight whose global says that it is stored so already (``block32.layout``) is
read by kernels for that order; whatever else reads it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, tensor

from block32.dialects import layout as layout_attribute
from block32.dialects.diagnostics import error_at
from block32.dialects.kernel import ATTRIBUTE as KERNEL_ATTRIBUTE
from block32.dialects.kernel import KernelConfig
from block32.lowering.common.tensors import bitcast
from block32.lowering.common.weight_layout import LAYOUTS, PLAIN, WeightLayout
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts, LayoutTiers, Target
from block32.passes import canonical
from block32.passes.base import Report
from block32.passes.canonical import CanonicalMatmul
from block32.passes.constants import read_codes
from block32.passes.select_kernel import PORTABLE, kernel_of
from block32.passes.symbols import symbol_of
from block32.passes.target_options import TargetPass
from block32.passes.walk import operations_named
from block32.passes.weight_sources import (
    Source,
    check_layout,
    constant_behind,
    layout_read_by,
    readers_of,
    rhs_position,
    source_of,
    stored_layout,
    weight_of,
)


@dataclass
class PackWeightsPass(TargetPass):
    """Repack constant weights, and check who reads weights that are stored in another order."""

    argument: ClassVar[str] = "block32-pack-weights"
    summary: ClassVar[str] = "give constant weights the order of bytes that their kernels want"

    def run(self, module: ir.Module, report: Report) -> None:
        """See the module's docstring.

        Raises:
            DiagnosticError: Something reads a weight in an order that it does not have, or asks
                for one that it cannot get.
        """
        _Packer(module, self.chosen_target(), self.device_facts(), report).run()


class _Packer:
    """One run over a module."""

    def __init__(self, module: ir.Module, target: Target, facts: DeviceFacts, report: Report):
        self._module = module
        self._symbols = ir.SymbolTable(module.operation)
        self._target = target
        self._facts = facts
        self._report = report
        self._chosen: dict[ScaledMatmul, LayoutTiers] = {}

    def run(self) -> None:
        """Check every reader of a weight that is stored in another order, and repack others."""
        matmuls = canonical.matmuls_of(self._module)
        self._check_readers(matmuls)
        candidates: dict[ir.Operation, list[CanonicalMatmul]] = {}
        for matmul in matmuls:
            stored, read = stored_layout(weight_of(matmul), self._symbols), layout_read_by(matmul)
            source = source_of(weight_of(matmul), self._symbols)
            if stored != PLAIN:
                self._read_as_stored(matmul, stored)
            elif read != PLAIN:
                self._pack_on_request(matmul, source, read)
            elif source is not None and not source.is_parameter:
                candidates.setdefault(source.op, []).append(matmul)
            check_layout(matmul, self._symbols)
        for constant, readers in candidates.items():
            self._pack_where_it_pays(constant, readers)

    def _check_readers(self, matmuls: list[CanonicalMatmul]) -> None:
        """Refuse what reads a weight that is stored in another order and is no matmul."""
        places = {(matmul.op, rhs_position(matmul)) for matmul in matmuls}
        for definition in operations_named(self._module, "util.global"):
            name = layout_attribute.of_global(definition)
            if name == PLAIN:
                continue
            for use in readers_of(definition, self._module, only_bitcasts=True):
                if (use.owner.operation, use.operand_number) not in places:
                    raise error_at(
                        use.owner,
                        f"reads @{symbol_of(definition)}, whose bytes are stored as '{name}'; "
                        "expected a block-scaled matmul that has it as its weight",
                    )

    def _read_as_stored(self, matmul: CanonicalMatmul, stored: str) -> None:
        """Choose kernels that read a weight as it is, where nobody asked for others."""
        if not self._is_default(matmul):
            return
        tiers = self._tiers(matmul)
        if tiers.layout != stored:
            others = f" or '{tiers.layout}'" if tiers.tiers else ""
            raise error_at(
                matmul.op,
                f"has a weight that is stored as '{stored}', which no kernel for it on "
                f"{self._target.name} reads; expected '{PLAIN}'{others}",
            )
        self._take(matmul, tiers)

    def _pack_on_request(self, matmul: CanonicalMatmul, source: Source | None, wanted: str) -> None:
        """Repack the weight for a kernel that a user asked for."""
        if source is None:
            raise error_at(
                matmul.op,
                f"asks for a weight in the layout '{wanted}', but its weight is known only at run "
                "time; expected a constant or a parameter",
            )
        self._pack(matmul, wanted)

    def _pack_where_it_pays(self, constant: ir.Operation, readers: list[CanonicalMatmul]) -> None:
        """Repack a constant for all of its readers, or for none: two copies would cost memory."""
        chosen = [self._tiers(matmul) for matmul in readers]
        if len({tiers.layout for tiers in chosen}) > 1 or not all(t.pays for t in chosen):
            return
        if not all(self._is_default(matmul) for matmul in readers):
            return
        places = {(matmul.op, rhs_position(matmul)) for matmul in readers}
        uses = readers_of(constant, self._module, only_bitcasts=False)
        if any((use.owner.operation, use.operand_number) not in places for use in uses):
            return
        for matmul, tiers in zip(readers, chosen, strict=True):
            self._pack(matmul, tiers.layout)
            self._take(matmul, tiers)

    def _tiers(self, matmul: CanonicalMatmul) -> LayoutTiers:
        problem = matmul.problem
        if problem not in self._chosen:
            self._chosen[problem] = self._target.choose_layout_tiers(problem, self._facts)
        return self._chosen[problem]

    def _is_default(self, matmul: CanonicalMatmul) -> bool:
        """Whether the kernel is the one that selection chooses, and not what a user asked for."""
        if KERNEL_ATTRIBUTE not in matmul.op.attributes:
            return True
        default = self._target.select(matmul.problem, self._facts).config or PORTABLE
        return kernel_of(matmul.op) == default

    def _take(self, matmul: CanonicalMatmul, tiers: LayoutTiers) -> None:
        """Let a matmul have other kernels, and say so."""
        config = KernelConfig(self._target.name, tiers.tiers)
        matmul.op.attributes[KERNEL_ATTRIBUTE] = config.build()
        self._report.remark(
            matmul.op, f"its weight is stored as '{tiers.layout}': {config.describe()}"
        )

    def _pack(self, matmul: CanonicalMatmul, name: str) -> None:
        """Put the transpose that gives the weight its layout before the matmul."""
        weight = weight_of(matmul)
        with ir.InsertionPoint(matmul.op), matmul.op.location:
            packed = _in_pieces(self._as_bytes(weight), LAYOUTS[name])
            result = bitcast(packed, weight.type)
            result.owner.attributes[layout_attribute.ATTRIBUTE] = layout_attribute.build(name)
            matmul.op.operands[rhs_position(matmul)] = result

    def _as_bytes(self, weight: ir.Value) -> ir.Value:
        """The weight as i8. IREE 3.13 evaluates no op on a constant of another 8-bit type."""
        weight_type = ir.RankedTensorType(weight.type)
        i8 = ir.IntegerType.get_signless(8)
        constant = constant_behind(weight, self._symbols)
        codes = None if constant is None else read_codes(constant)
        if codes is not None and weight_type.element_type != i8:
            content = ir.DenseElementsAttr.get(codes, type=i8, shape=weight_type.shape)
            return arith.constant(content.type, content)
        return bitcast(weight, ir.RankedTensorType.get(weight_type.shape, i8))


def _in_pieces(codes: ir.Value, layout: WeightLayout) -> ir.Value:
    """``[N / rows, K / bytes, rows, bytes]``."""
    codes_type = ir.RankedTensorType(codes.type)
    n, k = codes_type.shape
    shape = [n // layout.rows, layout.rows, layout.pieces_of_row(k), layout.row_bytes]
    expanded = tensor.expand_shape(
        ir.RankedTensorType.get(shape, codes_type.element_type), codes, [[0, 1], [2, 3]], [], shape
    )
    order = [0, 2, 1, 3]
    empty = tensor.empty([shape[axis] for axis in order], codes_type.element_type)
    return linalg.transpose(expanded, outs=[empty], permutation=order).results[0]
