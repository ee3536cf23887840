# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is to be computed: a block-scaled matmul, with all that a kernel choice depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

#: K elements that share one scale, in every MX format (OCP Microscaling Formats 1.0, section 5).
BLOCK_K: Final = 32

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
        return ("lhs", "rhs", *scales, *self.epilogue.operand_names())

    def describe(self) -> str:
        """A short name such as ``Mx4096x1024_e4m3_e4m3_32x32_f32``, unique without epilogue."""
        m = "M" if self.m is None else str(self.m)
        block = f"{self.rhs_block[0]}x{self.rhs_block[1]}"
        types = f"{SHORT_NAMES[self.lhs]}_{SHORT_NAMES[self.rhs]}"
        return f"{m}x{self.n}x{self.k}_{types}_{block}_{SHORT_NAMES[self.result]}"
