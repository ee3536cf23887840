# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel of this target computes: one matmul with everything that its code depends on.

Wider than ``lowering.problem.ScaledMatmul``: weights without scales, operands in either transpose,
and the grouped form are here too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from block32.lowering.apple.architecture import M5, Architecture
from block32.lowering.apple.atoms import OPERAND_TYPES, SimdgroupAtom, SmallAtom, decoded_types
from block32.lowering.apple.signature import BufferParameter, KernelError
from block32.lowering.common.epilogue import ACTIVATIONS
from block32.lowering.problem import BLOCK_K, Epilogue, Grouping, ceil_div

#: Rows of x are counted in i32, and a step past the end must not wrap.
LARGEST_EXTENT = 2**31 - 64

RESULT_TYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Matmul:
    """``y[M, N] = epilogue(x[M, K] @ w[N, K]^T)``, for one expert or many.

    Attributes:
        n: Columns of y.
        k: The reduction.
        lhs: MLIR name of x's element: bf16, f16, f32 or an fp8.
        rhs: MLIR name of w's element.
        m: Rows of y, or None where they come as push constant 0.
        result: MLIR name of y's element.
        lhs_transposed: x is stored [K, M].
        rhs_transposed: w is stored [K, N].
        lhs_scaled: x has an E8M0 byte a row and 32 K, [M, ceil(K/32)].
        rhs_block: (rows, 32) of w that share an E8M0 byte, rows 1 or 32; None without scales.
        grouping: Rows of x are grouped by expert, w is [experts, N, K]; None for one w.
        expert_scale: The result is multiplied by an f32 of the expert (grouped only).
        epilogue: What is done to the f32 accumulator before the store.
        architecture: The GPUs that the kernel is for.

    Raises:
        KernelError: A type, extent or combination that has no kernel here.
    """

    n: int
    k: int
    lhs: str = "bf16"
    rhs: str = "f8E4M3FN"
    m: int | None = None
    result: str = "f32"
    lhs_transposed: bool = False
    rhs_transposed: bool = False
    lhs_scaled: bool = False
    rhs_block: tuple[int, int] | None = None
    grouping: Grouping | None = None
    expert_scale: bool = False
    epilogue: Epilogue = dataclasses.field(default_factory=Epilogue)
    architecture: Architecture = M5

    def __post_init__(self) -> None:
        self._check_types()
        for name, extent in (("N", self.n), ("K", self.k), ("M", 1 if self.m is None else self.m)):
            if not 1 <= extent <= LARGEST_EXTENT:
                raise KernelError(
                    f"{name} = {extent} is outside what an i32 index holds; "
                    f"expected 1 to {LARGEST_EXTENT}"
                )
        if self.rhs_block is not None and self.rhs_block not in ((1, BLOCK_K), (BLOCK_K, BLOCK_K)):
            raise KernelError(f"weight blocks of {self.rhs_block}; expected (1, 32) or (32, 32)")
        if self.lhs_scaled and self.rhs_block is None:
            raise KernelError("x has block scales but w has none; expected scales on w too")
        if self.grouping and not (self.grouping.experts >= 1 <= self.grouping.groups):
            raise KernelError("a grouped matmul without experts or groups has nothing to compute")
        if not self.architecture.multiplies_fp8 and (self.lhs_transposed or self.rhs_transposed):
            raise KernelError(
                f"{self.architecture.name} has no kernels for transposed operands; "
                "expected x [M, K] and w [N, K]"
            )
        if self.grouping and (self.lhs_transposed or self.rhs_transposed):
            raise KernelError("grouped operands are [rows, K] and [experts, N, K], not transposed")
        if self.expert_scale and not self.grouping:
            raise KernelError("a scale for each expert belongs to a grouped matmul")

    def _check_types(self) -> None:
        for side, element in (("x", self.lhs), ("w", self.rhs)):
            if element not in OPERAND_TYPES:
                raise KernelError(
                    f"{side} of type {element} has no kernel on Apple GPUs; "
                    f"expected one of {', '.join(OPERAND_TYPES)}"
                )
        if self.result not in RESULT_TYPES:
            raise KernelError(
                f"a result of type {self.result} has no kernel on Apple GPUs; "
                f"expected one of {', '.join(RESULT_TYPES)}"
            )
        for name in ("bias", "residual"):
            element = getattr(self.epilogue, name)
            if element is not None and element not in RESULT_TYPES:
                raise KernelError(
                    f"a {name} of type {element}; expected one of {', '.join(RESULT_TYPES)}"
                )
        activation = self.epilogue.activation
        if activation is not None and activation not in ACTIVATIONS:
            raise KernelError(
                f"activation '{activation}'; expected one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def atom(self) -> SimdgroupAtom:
        """The matrix instruction of these operand types."""
        if self.architecture.multiplies_fp8:
            return SimdgroupAtom(self.lhs, self.rhs)
        return SmallAtom(*decoded_types(self.lhs, self.rhs))

    @property
    def is_scaled(self) -> bool:
        """Whether a scale is applied to every 32 K."""
        return self.rhs_block is not None

    @property
    def k_blocks(self) -> int:
        """Scales along K."""
        return ceil_div(self.k, BLOCK_K)

    @property
    def rhs_scale_rows(self) -> int:
        """Rows of w's scales, 0 without."""
        return 0 if self.rhs_block is None else ceil_div(self.n, self.rhs_block[0])

    def buffers(self) -> tuple[BufferParameter, ...]:
        """The bindings in order: operands, scales, groups, epilogue, result."""
        epilogue = self.epilogue
        optional = (
            ("lhs_scale", "i8", self.lhs_scaled),
            ("rhs_scale", "i8", self.is_scaled),
            ("offsets", "i32", self.grouping is not None),
            ("expert_ids", "i32", self.grouping is not None),
            ("expert_scale", "f32", self.expert_scale),
            ("row_scale", "f32", epilogue.row_scale),
            ("scale", "f32", epilogue.scale),
            ("bias", epilogue.bias or "", epilogue.bias is not None),
            ("residual", epilogue.residual or "", epilogue.residual is not None),
        )
        return (
            BufferParameter("lhs", OPERAND_TYPES[self.lhs].storage),
            BufferParameter("rhs", OPERAND_TYPES[self.rhs].storage),
            *(BufferParameter(name, element) for name, element, present in optional if present),
            BufferParameter("result", self.result, writable=True),
        )
