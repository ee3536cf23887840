# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The instruction sets that kernels are written for, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from block32.lowering.common.weight_layout import WeightLayout
from block32.lowering.target import DeviceFacts

#: Activations that a bf16 operand holds exactly; f16 and f32 need f32 operands.
BF16_EXACT = ("f8E4M3FN", "f8E5M2", "f4E2M1FN", "bf16")

X86 = ("x86_64", "i386", "i686")
ARM = ("aarch64", "arm64")


@dataclass(frozen=True)
class InstructionSet:
    """What a kernel needs to know of a machine's vector unit.

    Attributes:
        name: For remarks and tables.
        architectures: Target triples' first parts that have it; empty for any.
        features: LLVM feature names that all have to be on.
        lanes: f32 elements of a vector register.
        registers: Vector registers.
        dot: ``bf16`` where an instruction adds products of bf16 pairs to f32 lanes, else ``f32``.
        dot_intrinsic: LLVM's name of that instruction.
        fused: f32 multiply and add is one instruction.
        widen: How an 8-bit float becomes an operand: ``table`` (two-register byte permutes),
            ``byte_table`` (look-ups in 16 bytes, see ``byte_tables.py``), ``f16`` (shift to f16 and
            convert) or ``integer`` (integer operations alone).
        rescale: How a sum is multiplied by 2^e for any e: ``scalef``, or ``two_factors`` of 2^e/2.
        masked_bytes: Loads of bytes take a mask.
        byte_products: An instruction adds four products of bytes to each 32-bit lane.
        widens_from_memory: A conversion from f16 costs less from memory than from a register (see
            ``staging.py``).
        tiles: An instruction multiplies tiles of bf16 pairs (see ``amx.py``).
        mmla: An instruction adds products of 2x4 and 4x2 bf16 to 2x2 f32 (``bfmmla``).
    """

    name: str
    architectures: tuple[str, ...]
    features: frozenset[str]
    lanes: int
    registers: int
    dot: str
    fused: bool
    widen: str
    rescale: str
    masked_bytes: bool
    byte_products: bool = False
    widens_from_memory: bool = False
    tiles: bool = False
    mmla: bool = False
    dot_intrinsic: str = ""

    @property
    def pair(self) -> int:
        """Neighbours along K that share one lane of an operand."""
        return 2 if self.dot == "bf16" else 1

    @property
    def word(self) -> int:
        """Neighbours along K that the tiled kernel multiplies in a step; they lie together."""
        return 4 if self.mmla else self.pair

    @property
    def word_type(self) -> str:
        """The MLIR type of a word: an f32, or the bits of as many bf16."""
        return {1: "f32", 2: "i32", 4: "i64"}[self.word]

    @property
    def words(self) -> int:
        """Words of a register."""
        return self.lanes * self.pair // self.word

    @property
    def layout(self) -> WeightLayout | None:
        """The order of a weight's bytes in which its operands need not be turned."""
        if self.tiles or self.mmla:
            return None
        return WeightLayout(16, 4 if self.widen == "table" else 1)

    @property
    def chunk(self) -> int:
        """Elements of K that the kernels take in one step: a register of codes, or one block."""
        return 64 if self.widen == "table" else 32

    def takes(self, lhs: str) -> bool:
        """Whether its operands hold an activation of element type ``lhs`` exactly."""
        return self.dot == "f32" or lhs in BF16_EXACT

    def is_on(self, facts: DeviceFacts) -> bool:
        """Whether a machine has it."""
        fits = not self.architectures or facts.architecture in self.architectures
        return fits and self.features <= facts.cpu_features


#: What every processor that LLVM knows can do.
_GENERIC = InstructionSet(
    "generic",
    architectures=(),
    features=frozenset(),
    lanes=4,
    registers=16,
    dot="f32",
    fused=False,
    widen="integer",
    rescale="two_factors",
    masked_bytes=False,
)
_NEON = replace(_GENERIC, name="neon", architectures=ARM, registers=32, fused=True, widen="f16")
_NEON_BF16 = replace(
    _NEON,
    name="neon_bf16",
    features=frozenset({"bf16"}),
    widen="byte_table",
    dot="bf16",
    dot_intrinsic="llvm.aarch64.neon.bfdot.v4f32.v8bf16",
    mmla=True,
)
_AVX2 = replace(
    _GENERIC,
    name="avx2",
    architectures=X86,
    features=frozenset({"avx2", "fma", "f16c"}),
    lanes=8,
    fused=True,
    widen="f16",
    widens_from_memory=True,
)
_AVX512 = replace(
    _AVX2,
    name="avx512",
    features=frozenset({"avx512f", "avx512bw", "avx512vl"}),
    lanes=16,
    registers=32,
    rescale="scalef",
    masked_bytes=True,
)
_AVX512_VBMI = replace(
    _AVX512,
    name="avx512_vbmi",
    features=_AVX512.features | {"avx512vbmi", "avx512vnni"},
    widen="table",
    widens_from_memory=False,
    byte_products=True,
)
_AVX512_BF16 = replace(
    _AVX512_VBMI,
    name="avx512_bf16",
    features=_AVX512_VBMI.features | {"avx512bf16"},
    dot="bf16",
    dot_intrinsic="llvm.x86.avx512bf16.dpbf16ps.512",
)
_AMX_BF16 = replace(
    _AVX512_BF16,
    name="amx_bf16",
    features=_AVX512_BF16.features | {"amx-tile", "amx-bf16"},
    tiles=True,
)

#: Best first; the last one runs anywhere.
INSTRUCTION_SETS = (
    _AMX_BF16,
    _AVX512_BF16,
    _AVX512_VBMI,
    _AVX512,
    _AVX2,
    _NEON_BF16,
    _NEON,
    _GENERIC,
)


def instruction_set(name: str) -> InstructionSet:
    """The instruction set of this name."""
    return next(isa for isa in INSTRUCTION_SETS if isa.name == name)
