# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is to be computed: a block-scaled matmul, with all that a kernel choice depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

#: K elements that share one scale, in every MX format (OCP Microscaling Formats 1.0, section 5).
BLOCK_K: Final = 32

#: Element type of scales in IR: E8M0, a power of two (OCP Microscaling Formats 1.0, section 5.4.1).
SCALE_TYPE: Final = "f8E8M0FNU"

#: Bits of each element type that a kernel may read or write, by its MLIR name.
ELEMENT_BITS: Final[dict[str, int]] = {
    "f4E2M1FN": 4,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
}

#: Element types of operands that carry block scales.
VALUE_TYPES: Final = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")

#: Element types of results.
RESULT_TYPES: Final = ("f32", "bf16", "f16")

#: What an epilogue may end with.
ACTIVATION_NAMES: Final = ("relu", "gelu", "gelu_tanh", "silu", "tanh")

#: Short names of the element types, for symbols and remarks.
SHORT_NAMES: Final[dict[str, str]] = {
    "f4E2M1FN": "e2m1",
    "f8E4M3FN": "e4m3",
    "f8E5M2": "e5m2",
    "bf16": "bf16",
    "f16": "f16",
    "f32": "f32",
}


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, for ``b > 0``."""
    return -(-a // b)


@dataclass(frozen=True)
class Epilogue:
    """Elementwise work on the f32 accumulator before the one rounding of the store.

    Applied in this order: ``row_scale`` (one f32 a row), ``scale`` (one f32 for the tensor),
    ``bias`` (one value a column), ``residual`` (one value an element), ``activation``.

    Attributes:
        row_scale: The result is multiplied by an f32 operand of shape [M].
        scale: The result is multiplied by an f32 operand of shape [1].
        bias: Element type of a [N] operand that is added, or None.
        residual: Element type of an [M, N] operand that is added, or None.
        activation: ``relu``, ``gelu`` (erf form), ``gelu_tanh``, ``silu``, ``tanh`` or None.
    """

    row_scale: bool = False
    scale: bool = False
    bias: str | None = None
    residual: str | None = None
    activation: str | None = None

    def operand_names(self) -> tuple[str, ...]:
        """The names of the extra operands that a kernel with this epilogue reads, in ABI order."""
        present = {
            "row_scale": self.row_scale,
            "scale": self.scale,
            "bias": self.bias is not None,
            "residual": self.residual is not None,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    def describe(self) -> str:
        """The steps for a remark, such as ``bias, gelu``; empty without any."""
        return ", ".join((*self.operand_names(), *filter(None, [self.activation])))


@dataclass(frozen=True)
class Grouping:
    """How the rows of a grouped matmul (mixture of experts) are divided: both numbers are static.

    Group g holds the rows ``offsets[g]`` up to ``offsets[g + 1]`` and is multiplied by the weight
    of ``expert_ids[g]``. Groups may be empty, and experts may come in any order, again, or never.

    Attributes:
        experts: Weights, the first dimension of w and of its scales.
        groups: Groups of rows, one fewer than there are offsets; there may be none.
    """

    experts: int
    groups: int


@dataclass(frozen=True)
class ScaledMatmul:
    """``y[M, N] = x[M, K] @ w[N, K]^T`` where 32 elements of K share a power-of-two scale.

    Attributes:
        m: Rows of x and y; None when they are known only at run time.
        n: Columns of y, rows of w.
        k: The reduction; any positive number, the last block of 32 may be short.
        lhs: Element type of x by its MLIR name (see ``ELEMENT_BITS``).
        rhs: Element type of w. ``f4E2M1FN`` is stored packed, ``[N, K/2]`` bytes, low nibble first.
        rhs_block: Block of w that shares a scale: (1, 32) or (32, 32), as (N, K).
        result: Element type of y: ``f32``, ``bf16`` or ``f16``; accumulation is f32 always.
        lhs_scaled: x has a scale byte a row and 32 K; False for a bf16/f16/f32 x (W8A16).
        epilogue: What is done to the accumulator before the store.
        lhs_quantize: The scale rule by which a bf16/f16/f32 x is quantised to f8E4M3FN, a scale a
            row and 32 K, before it is multiplied; empty where it is not. The result is that of
            the ``quantize`` composite followed by the matmul of ``quantized()``, bit for bit.
        grouping: Each group of rows has its own w, out of ``[experts, N, K]``; None for one w.
    """

    m: int | None
    n: int
    k: int
    lhs: str = "f8E4M3FN"
    rhs: str = "f8E4M3FN"
    rhs_block: tuple[int, int] = (32, 32)
    result: str = "f32"
    lhs_scaled: bool = True
    epilogue: Epilogue = dataclasses.field(default_factory=Epilogue)
    lhs_quantize: str = ""
    grouping: Grouping | None = None

    @property
    def k_blocks(self) -> int:
        """Scales along K: ``ceil(K / 32)``."""
        return ceil_div(self.k, BLOCK_K)

    @property
    def rhs_scale_shape(self) -> tuple[int, int]:
        """Shape of w's scales: (``ceil(N / rhs_block[0])``, ``ceil(K / 32)``)."""
        return ceil_div(self.n, self.rhs_block[0]), self.k_blocks

    @property
    def lhs_row_bytes(self) -> int:
        """Bytes of one row of x."""
        return ceil_div(self.k * ELEMENT_BITS[self.lhs], 8)

    @property
    def rhs_row_bytes(self) -> int:
        """Bytes of one row of w, as stored."""
        return ceil_div(self.k * ELEMENT_BITS[self.rhs], 8)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The kernel ABI: what a launch may read, in the order of the bindings."""
        scales = ("lhs_scale", "rhs_scale") if self.lhs_scaled else ("rhs_scale",)
        groups = ("offsets", "expert_ids") if self.grouping else ()
        return ("lhs", "rhs", *scales, *groups, *self.epilogue.operand_names())

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What a host function or a composite takes: the operands, and ``init`` where grouped.

        ``init`` is y before the call. Its rows that belong to no group are those of the result;
        a launch finds it in the result's own buffer, which it updates.
        """
        return (*self.operand_names, "init") if self.grouping else self.operand_names

    def quantized(self) -> ScaledMatmul:
        """The matmul after an x that ``lhs_quantize`` names a rule for has been quantised."""
        return dataclasses.replace(self, lhs="f8E4M3FN", lhs_scaled=True, lhs_quantize="")

    def describe(self) -> str:
        """A short name such as ``Mx4096x1024_e4m3_e4m3_32x32_f32``, unique without epilogue."""
        m = "M" if self.m is None else str(self.m)
        block = f"{self.rhs_block[0]}x{self.rhs_block[1]}"
        lhs = "_".join(filter(None, [SHORT_NAMES[self.lhs], self.lhs_quantize]))
        name = f"{m}x{self.n}x{self.k}_{lhs}_{SHORT_NAMES[self.rhs]}_{block}"
        name += f"_{SHORT_NAMES[self.result]}"
        if self.grouping:
            name += f"_{self.grouping.experts}experts_{self.grouping.groups}groups"
        return name
