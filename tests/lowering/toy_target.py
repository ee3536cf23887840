# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A target of scalar loops on the CPU: the smallest that uses all of the contract of targets.

It quantises up to ``FUSED_ROWS`` rows in the kernel and more in a launch of its own, and it
multiplies groups of rows. A workgroup computes one row of y.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.common import quantize_launch
from block32.lowering.common.index import Index, IndexValue
from block32.lowering.common.quantization import quantized_code, scale_byte
from block32.lowering.cpu import ops
from block32.lowering.kernel_context import KernelContext
from block32.lowering.portable.expand import decode
from block32.lowering.problem import BLOCK_K, ScaledMatmul
from block32.lowering.target import RESULT, DeviceFacts, KernelPlan, Launch, Selection, Target

FUSED_ROWS = 4
GEMM = "gemm"


class ToyTarget(Target):
    """See the module's docstring. K is a multiple of 32, operands are e4m3, scales 1 to 254."""

    name = "toy"
    quantizes = True
    groups = True

    def compile_flags(self) -> tuple[str, ...]:
        """IREE's CPU device."""
        return (
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
        )

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """Two tiers where x is quantised, else one."""
        del facts
        tiers = (KernelTier("tiled"),)
        if problem.epilogue.activation:
            return Selection(None, "no activations")
        if problem.lhs_quantize:
            fused = KernelTier("gemv", max_m=FUSED_ROWS, quantize="fused")
            tiers = (fused, KernelTier("tiled", quantize="separate"))
        return Selection(KernelConfig(self.name, tiers), "to test the contract")

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Every tier will do."""
        del problem, tier, facts
        return None

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch, or two where x is quantised."""
        if not problem.lhs_quantize:
            updates, writes = ((RESULT,), ()) if problem.grouping else ((), (RESULT,))
            return KernelPlan((Launch(GEMM, problem.operand_names, writes, updates),))
        reads = (*problem.operand_names, quantize_launch.CODES, quantize_launch.SCALES)
        gemm = Launch(GEMM, reads, (RESULT,))
        return KernelPlan((quantize_launch.LAUNCH, gemm), quantize_launch.buffers(problem))

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """One a row; none for a launch that the tier does not need."""
        if launch.name == quantize_launch.NAME and tier.quantize == "fused":
            return 0, 1, 1
        return m, 1, 1

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """The body is left as it is."""
        return "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>"

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Write the body of one launch."""
        if launch.name == quantize_launch.NAME:
            codes = _matrix(kernel, quantize_launch.CODES, problem.k)
            scales = _matrix(kernel, quantize_launch.SCALES, problem.k_blocks)
            _quantize_row(problem, kernel, codes, scales, kernel.workgroup_id())
        elif problem.grouping:
            _grouped_row(problem, kernel)
        else:
            _row(problem, tier, kernel)


def _matrix(kernel: KernelContext, name: str, columns: int, element: str = "i8") -> ir.Value:
    return kernel.memref(name, f"memref<?x{columns}x{element}>", (kernel.m,))


def _quantize_row(
    problem: ScaledMatmul, kernel: KernelContext, codes: ir.Value, scales: ir.Value, row: Index
) -> None:
    """Quantise the workgroup's row of x into row ``row`` of two buffers."""
    x = _matrix(kernel, "lhs", problem.k, problem.lhs)
    amax = ops.stack_buffer("memref<1xf32>")

    def load(k: Index) -> ir.Value:
        value = ops.load_scalar(x, [kernel.workgroup_id(), k])
        return value if problem.lhs == "f32" else arith.extf(ir.F32Type.get(), value)

    def largest(k: Index) -> None:
        bits = arith.andi(arith.bitcast(ops.i32(), load(k)), arith.constant(ops.i32(), 0x7FFFFFFF))
        magnitude = arith.bitcast(ir.F32Type.get(), bits)
        ops.store_scalar(arith.maximumf(ops.load_scalar(amax, [0]), magnitude), amax, [0])

    def block(number: Index) -> None:
        ops.store_scalar(arith.constant(ir.F32Type.get(), 0.0), amax, [0])
        ops.repeat(number * BLOCK_K, number * BLOCK_K + BLOCK_K, 1, largest)
        byte = scale_byte(ops.load_scalar(amax, [0]), problem.lhs_quantize, "f8E4M3FN")
        ops.store_scalar(arith.trunci(ops.i8(), byte), scales, [row, number])

        def encode(k: Index) -> None:
            code = arith.trunci(ops.i8(), quantized_code(load(k), byte, "f8E4M3FN"))
            ops.store_scalar(code, codes, [row, k])

        ops.repeat(number * BLOCK_K, number * BLOCK_K + BLOCK_K, 1, encode)

    ops.repeat(0, problem.k_blocks, 1, block)


def _row(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """A row of y from codes that are given, were written before, or are made here."""
    row: Index = kernel.workgroup_id()
    if problem.lhs_quantize and tier.quantize == "fused":
        codes = ops.stack_buffer(f"memref<1x{problem.k}xi8>")
        scales = ops.stack_buffer(f"memref<1x{problem.k_blocks}xi8>")
        _quantize_row(problem, kernel, codes, scales, 0)
        row = 0
    else:
        names = ("lhs", "lhs_scale")
        if problem.lhs_quantize:
            names = (quantize_launch.CODES, quantize_launch.SCALES)
        codes = _matrix(kernel, names[0], problem.k)
        scales = _matrix(kernel, names[1], problem.k_blocks)
    weights = kernel.memref("rhs", f"memref<1x{problem.n}x{problem.k}xi8>")
    blocks, k_blocks = problem.rhs_scale_shape
    weight_scales = kernel.memref("rhs_scale", f"memref<1x{blocks}x{k_blocks}xi8>")
    _multiply(problem, kernel, (codes, scales, row), (weights, weight_scales, 0))


def _multiply(
    problem: ScaledMatmul,
    kernel: KernelContext,
    x: tuple[ir.Value, ir.Value, Index],
    w: tuple[ir.Value, ir.Value, Index],
) -> None:
    """The workgroup's row of y: codes, scales and row of x; weights, scales and expert of w."""
    y = _matrix(kernel, RESULT, problem.n, problem.result)
    total = ops.stack_buffer("memref<1xf32>")

    def column(n: Index) -> None:
        ops.store_scalar(arith.constant(ir.F32Type.get(), 0.0), total, [0])

        def term(k: Index) -> None:
            value = decode(ops.load_scalar(x[0], [x[2], k]), "f8E4M3FN")
            weight = decode(ops.load_scalar(w[0], [w[2], n, k]), "f8E4M3FN")
            factor = _factor(ops.load_scalar(x[1], [x[2], k // BLOCK_K]))
            scale = _factor(ops.load_scalar(w[1], [w[2], n // problem.rhs_block[0], k // BLOCK_K]))
            product = arith.mulf(arith.mulf(value, factor), arith.mulf(weight, scale))
            ops.store_scalar(arith.addf(ops.load_scalar(total, [0]), product), total, [0])

        ops.repeat(0, problem.k, 1, term)
        value = ops.load_scalar(total, [0])
        if problem.epilogue.bias:
            bias = kernel.memref("bias", f"memref<{problem.n}xf32>")
            value = arith.addf(value, ops.load_scalar(bias, [n]))
        ops.store_scalar(value, y, [kernel.workgroup_id(), n])

    ops.repeat(0, problem.n, 1, column)


def _factor(byte: ir.Value) -> ir.Value:
    bits = arith.shli(arith.extui(ops.i32(), byte), arith.constant(ops.i32(), 23))
    return arith.bitcast(ir.F32Type.get(), bits)


def _grouped_row(problem: ScaledMatmul, kernel: KernelContext) -> None:
    """The workgroup's row of y, if it is a row of a group."""
    grouping = problem.grouping
    assert grouping is not None
    offsets = kernel.memref("offsets", f"memref<{grouping.groups + 1}xi32>")
    ids = kernel.memref("expert_ids", f"memref<{grouping.groups}xi32>")
    weights = kernel.memref("rhs", f"memref<{grouping.experts}x{problem.n}x{problem.k}xi8>")
    blocks, k_blocks = problem.rhs_scale_shape
    scales = kernel.memref("rhs_scale", f"memref<{grouping.experts}x{blocks}x{k_blocks}xi8>")
    x = (_matrix(kernel, "lhs", problem.k), _matrix(kernel, "lhs_scale", problem.k_blocks))
    row = kernel.workgroup_id()
    position = arith.index_cast(ops.i32(), row.value)

    def group(number: Index) -> None:
        first, end = (ops.load_scalar(offsets, [number + i]) for i in range(2))
        inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, position, first),
            arith.cmpi(arith.CmpIPredicate.slt, position, end),
        )
        with ops.when(inside):
            _row_of_group(ops.load_scalar(ids, [number]))

    def _row_of_group(expert: ir.Value) -> None:
        experts = arith.constant(ops.i32(), grouping.experts)
        is_expert = arith.cmpi(arith.CmpIPredicate.ult, expert, experts)
        number = IndexValue(arith.index_cast(ir.IndexType.get(), expert))
        ops.choose(
            is_expert,
            lambda: _multiply(problem, kernel, (*x, row), (weights, scales, number)),
            lambda: _zeros(problem, kernel),
        )

    ops.repeat(0, grouping.groups, 1, group)


def _zeros(problem: ScaledMatmul, kernel: KernelContext) -> None:
    y = _matrix(kernel, RESULT, problem.n, problem.result)
    zero = arith.constant(ir.Type.parse(problem.result), 0.0)
    row = kernel.workgroup_id()
    ops.repeat(0, problem.n, 1, lambda n: ops.store_scalar(zero, y, [row, n]))
