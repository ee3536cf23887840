# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tensors of a checkpoint are block-scaled weights, and which scales belong to them.

Types and shapes decide, names only pair: the scales of ``x.weight`` are ``x.weight_scale`` or
``x.weight_scale_inv`` (which is multiplied, too, for all that its name says). A U8 scale holds E8M0
bytes where its weight is F8_E4M3, two-dimensional, and its shape is one scale a block.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, NoReturn

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.problem import ceil_div
from block32.runtime.checkpoint.config import Declared
from block32.runtime.checkpoint.files import Checkpoint
from block32.runtime.safetensors import StoredTensor

WEIGHT_DTYPE: Final = "F8_E4M3"
#: Scales that are E8M0 bytes, and scales that are numbers.
BYTE_DTYPES: Final = ("F8_E8M0", "U8")
NUMBER_DTYPES: Final = ("F32", "BF16")
#: What checkpoints are known to have where no configuration says more, as (rows, columns).
KNOWN_BLOCKS: Final = ((1, 32), (32, 32), (128, 128))

_SCALE_SUFFIXES: Final = ("_scale", "_scale_inv")
_BIAS_DTYPES: Final = ("F32", "BF16", "F16")
#: 8-bit and smaller floats that are no weights of ours, and what to say of them.
_OTHER_FLOATS: Final = ("F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@dataclass(frozen=True)
class ScaledWeight:
    """The weight of a linear layer.

    Attributes:
        codes: ``[N, K]`` e4m3 codes.
        scales: One scale a block.
        block: Rows and columns of the weight that share a scale.
        bias: ``[N]``, where there is one.
    """

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    bias: StoredTensor | None

    @property
    def name(self) -> str:
        """The name of the weight."""
        return self.codes.name

    @property
    def layer(self) -> str:
        """The name of the layer: the weight's without ``.weight``, if that leaves something."""
        return self.name.removesuffix(".weight") or self.name

    @property
    def n(self) -> int:
        """Rows of the weight, columns of the layer's result."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """The reduction."""
        return self.codes.shape[1]

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Scales along N and along K."""
        return ceil_div(self.n, self.block[0]), ceil_div(self.k, self.block[1])

    def refuse(self, message: str, *notes: str) -> NoReturn:
        """Raise an error that names the weight's file."""
        raise DiagnosticError(os.fspath(self.codes.entry.path), message, notes)


def find_weights(checkpoint: Checkpoint) -> tuple[list[ScaledWeight], list[StoredTensor]]:
    """The block-scaled weights of a checkpoint, and its other tensors, in order.

    Raises:
        DiagnosticError: A weight without scales, scales without a weight, scales under both names
            or of another type or shape, a float type that is not served, or no weight at all.
    """
    tensors = checkpoint.tensors
    taken: set[str] = set()
    weights: list[ScaledWeight] = []
    for tensor in tensors.values():
        if tensor.dtype in _OTHER_FLOATS:
            _refuse(
                tensor,
                f"'{tensor.name}' is {tensor.describe()}; expected weights of {WEIGHT_DTYPE}",
            )
        if tensor.dtype == WEIGHT_DTYPE:
            weight = _read_weight(tensor, tensors, checkpoint.declared)
            weights.append(weight)
            taken |= {part.name for part in (tensor, weight.scales, weight.bias) if part}
    rest = [tensor for tensor in tensors.values() if tensor.name not in taken]
    for tensor in rest:
        _check_is_no_scale(tensor, tensors)
    if not weights:
        method = checkpoint.declared.method if checkpoint.declared else ""
        raise DiagnosticError(
            os.fspath(checkpoint.path),
            f"no weight of {WEIGHT_DTYPE} with scales is in the checkpoint"
            + (f", whose configuration says '{method}'" if method else ""),
            ("'block32 quantize' gives the layers of an f32 or bf16 model MX weights",),
        )
    return weights, rest


def _read_weight(
    codes: StoredTensor, tensors: dict[str, StoredTensor], declared: Declared | None
) -> ScaledWeight:
    names = [codes.name + suffix for suffix in _SCALE_SUFFIXES]
    found = [tensors[name] for name in names if name in tensors]
    if not found:
        _refuse(codes, f"the weight '{codes.name}' has no scales; expected {' or '.join(names)}")
    if len(found) > 1:
        _refuse(codes, f"the weight '{codes.name}' has both {' and '.join(names)}; expected one")
    (scales,) = found
    if len(codes.shape) != 2 or 0 in codes.shape:
        _refuse(codes, f"expected [N, K] as shape of '{codes.name}' but got {list(codes.shape)}")
    if scales.dtype not in (*BYTE_DTYPES, *NUMBER_DTYPES):
        _refuse(
            scales,
            f"the scales '{scales.name}' are {scales.dtype}; expected F8_E8M0, U8 bytes, or F32",
        )
    block = _block_of(codes, scales, declared)
    return ScaledWeight(codes, scales, block, _bias_of(codes, tensors))


def _block_of(
    codes: StoredTensor, scales: StoredTensor, declared: Declared | None
) -> tuple[int, int]:
    """The block that the shapes of weight and scales imply.

    Powers of two never give one shape and two meanings, but for a weight of a single block. A
    declared block comes first, because others might.
    """
    n, k = codes.shape
    shape = scales.shape
    if len(shape) == 3 and shape[-1] == 1:
        shape = shape[:-1]
    blocks = [*([declared.block] if declared and declared.block else []), *KNOWN_BLOCKS]
    for block in dict.fromkeys(blocks):
        if shape == (ceil_div(n, block[0]), ceil_div(k, block[1])):
            return block
    shapes = [
        f"[{ceil_div(n, rows)}, {ceil_div(k, columns)}] ({rows}x{columns})"
        for rows, columns in dict.fromkeys(blocks)
    ]
    _refuse(
        scales,
        f"the scales '{scales.name}' have shape {list(scales.shape)}; expected one of "
        f"{', '.join(shapes)} for '{codes.name}' {list(codes.shape)}",
    )


def _bias_of(codes: StoredTensor, tensors: dict[str, StoredTensor]) -> StoredTensor | None:
    bias = tensors.get(f"{codes.name.removesuffix('.weight')}.bias")
    if bias is None or not codes.name.endswith(".weight"):
        return None
    if bias.shape != codes.shape[:1] or bias.dtype not in _BIAS_DTYPES:
        _refuse(
            bias,
            f"expected '{bias.name}' to be F32, BF16 or F16 [{codes.shape[0]}] but got "
            f"{bias.describe()}",
        )
    return bias


def _check_is_no_scale(tensor: StoredTensor, tensors: dict[str, StoredTensor]) -> None:
    """Refuse the scales of a weight that is missing, or that is no fp8 one."""
    for suffix in _SCALE_SUFFIXES:
        base = tensor.name.removesuffix(suffix)
        if base == tensor.name:
            continue
        if base in tensors:
            weight = tensors[base]
            _refuse(
                tensor,
                f"'{tensor.name}' scales '{base}', which is {weight.describe()}; expected "
                f"{WEIGHT_DTYPE}",
            )
        if base.endswith("weight") or tensor.dtype == "F8_E8M0":
            _refuse(tensor, f"the scales '{tensor.name}' belong to '{base}', which is missing")


def _refuse(tensor: StoredTensor, message: str) -> NoReturn:
    raise DiagnosticError(os.fspath(tensor.entry.path), message)
