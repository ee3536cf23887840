# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MXFP8 linear layers for PyTorch: they run in plain PyTorch, and export to block32's kernels.

A layer holds its weight as bytes, since exporters take no float8 parameters. Its ``forward``
dequantises them; ``block32-raise`` finds that in the exported program and puts a kernel there.
Quantising an activation is an operator of its own, ``torch.ops.block32.quantize_mxfp8``, which
``block32-lower-torch`` turns into the composite that kernels know.
"""

# PyTorch is an extra that type checks go without.
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from block32.lowering.problem import BLOCK_K, ceil_div
from block32.runtime.quantizer import FORMATS, Loss, quantize_rows

#: (N, K) elements of a weight that share a scale.
BLOCKS: Final = ((1, BLOCK_K), (32, BLOCK_K))
#: What may be done to an activation: nothing (W8A16), or one scale a row and 32 K.
ACTIVATIONS: Final = ("none", "mxfp8")
#: What may be quantised at run time.
QUANTIZED_FROM: Final = (torch.float32, torch.bfloat16, torch.float16)

_LARGEST: Final = 448.0
_SMALLEST_NORMAL: Final = 1 << 23
_MANTISSA: Final = (1 << 23) - 1
#: Added to the bits of a block's largest magnitude, so that its exponent becomes the scale's.
_ADDENDS: Final = {
    "floor": 0,
    "rceil": _MANTISSA - (0b110 << 20),
    "ceil": _MANTISSA,
    "even": 1 << 19,
}
#: What a state may hold instead of bytes.
_BYTE_FLOATS: Final = {"weight": torch.float8_e4m3fn, "weight_scale": torch.float8_e8m0fnu}


def _check_rows(x: torch.Tensor, rule: str) -> None:
    """Refuse what ``quantize_mxfp8`` cannot take, when it runs and when it is exported."""
    if x.dtype not in QUANTIZED_FROM:
        raise ValueError(f"expected values of {_listed(QUANTIZED_FROM)} but got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"expected a matrix [M, K] but got {list(x.shape)}")
    _check_rule(rule)


def _check_rule(rule: str) -> None:
    if rule not in tuple(_ADDENDS):
        raise ValueError(f"expected a rule of {_listed(_ADDENDS)} but got '{rule}'")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


@torch.library.custom_op("block32::quantize_mxfp8", mutates_args=())
def quantize_mxfp8(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows: the bytes of ``block32.runtime.reference.quantize``.

    Args:
        x: ``[M, K]`` of f32, bf16 or f16.
        rule: ``rceil``, ``floor``, ``ceil`` or ``even``.

    Returns:
        Codes ``[M, K]`` as ``float8_e4m3fn``, scales ``[M, ceil(K/32)]`` as ``float8_e8m0fnu``.

    Raises:
        ValueError: x is of another type or no matrix, or there is no such rule.
    """
    _check_rows(x, rule)
    rows, k = x.shape
    blocks = ceil_div(k, BLOCK_K)
    padded = functional.pad(x.float(), (0, blocks * BLOCK_K - k)).reshape(rows, blocks, BLOCK_K)
    amax = torch.where(padded.isnan(), 0.0, padded.abs()).amax(dim=2)
    bits = amax.view(torch.int32).clamp(min=_SMALLEST_NORMAL) + _ADDENDS[rule]
    scales = ((bits >> 23) - 8).clamp(0, 254)
    scales = torch.where(amax.isinf(), 254, scales)
    # In f64, where every power of two from 2^-127 to 2^127 is a normal number.
    scaled = padded.double() * torch.exp2(127.0 - scales.double())[:, :, None]
    codes = scaled.clamp(-_LARGEST, _LARGEST).float().to(torch.float8_e4m3fn)
    codes = codes.reshape(rows, blocks * BLOCK_K)[:, :k].contiguous()
    return codes, scales.to(torch.uint8).view(torch.float8_e8m0fnu)


@quantize_mxfp8.register_fake
def _(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rows(x, rule)
    rows, k = x.shape
    return (
        x.new_empty((rows, k), dtype=torch.float8_e4m3fn),
        x.new_empty((rows, ceil_div(k, BLOCK_K)), dtype=torch.float8_e8m0fnu),
    )


class MXLinear(nn.Module):
    """``y = x @ weight^T + bias`` with an MXFP8 weight ``[N, K]``.

    ``weight`` holds e4m3 codes, uint8 ``[N, K]``; ``weight_scale`` E8M0 bytes, uint8
    ``[ceil(N / block[0]), ceil(K / 32)]``. Checkpoints with float8 tensors of these names, or with
    ``weight_scale_inv``, load by their bytes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block: tuple[int, int] = (32, 32),
        activation: str = "none",
        rule: str = "rceil",
    ):
        """A layer of zeros; load a state, or make it with ``from_linear``.

        Args:
            in_features: K.
            out_features: N.
            bias: Whether there is one, a parameter.
            block: Elements of the weight that share a scale, (32, 32) or (1, 32).
            activation: ``none`` multiplies activations as they are, ``mxfp8`` quantises them.
            rule: How the scales of activations are chosen.

        Raises:
            ValueError: A size below 1, or a block, activation or rule of another kind.
        """
        super().__init__()
        _check(in_features, out_features, block, activation, rule)
        self.in_features = in_features
        self.out_features = out_features
        self.block: tuple[int, int] = (block[0], block[1])
        self.activation = activation
        self.rule = rule
        scale_shape = (ceil_div(out_features, block[0]), ceil_div(in_features, BLOCK_K))
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.uint8))
        self.register_buffer("weight_scale", torch.full(scale_shape, 127, dtype=torch.uint8))
        # In f32, which IREE 3.13 takes as an inline constant, and bf16 it does not.
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=torch.float32)) if bias else None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        block: tuple[int, int] = (32, 32),
        activation: str = "none",
        rule: str = "rceil",
    ) -> MXLinear:
        """A layer with the weight of ``linear``, quantised by ``rule``, and its bias.

        Raises:
            ValueError: The weight has a NaN or an infinity, or an argument is of another kind.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"expected an nn.Linear but got {type(linear).__name__}")
        has_bias = linear.bias is not None
        layer = cls(
            linear.in_features,
            linear.out_features,
            has_bias,
            block=block,
            activation=activation,
            rule=rule,
        )
        layer._fill(linear)
        return layer

    def _fill(self, linear: nn.Linear) -> Loss:
        """Take over a layer's numbers; returns what quantising the weight lost."""
        if not linear.weight.is_floating_point() or linear.weight.is_meta:
            kind = "no" if linear.weight.is_meta else linear.weight.dtype
            raise ValueError(f"expected a weight of real numbers but it has {kind} values")
        weight = linear.weight.detach().float().cpu().numpy()
        if not np.isfinite(weight).all():
            found = "a NaN" if np.isnan(weight).any() else "an infinity"
            raise ValueError(f"expected a finite weight but it has {found}")
        codes, scales, loss = quantize_rows(weight, self.block[0], self.rule, FORMATS["mxfp8"])
        device = linear.weight.device
        self.weight = torch.from_numpy(codes.copy()).to(device)
        self.weight_scale = torch.from_numpy(scales.copy()).to(device)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().float().clone(), requires_grad=False)
        self.train(linear.training)
        return loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` of f32, bf16 or f16 to ``[..., N]`` of the same type.

        Raises:
            ValueError: x is of integers, or its last size is not K.
        """
        if not x.is_floating_point() or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"expected floats of [..., {self.in_features}] but got {x.dtype} of {list(x.shape)}"
            )
        if self.activation == "none":
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return functional.linear(x, self.dequantized(x.dtype), bias)
        codes, scales = quantize_mxfp8(x.reshape(-1, self.in_features), self.rule)
        rows = _scaled(codes, scales, (1, BLOCK_K))
        bias = None if self.bias is None else self.bias.float()
        y = functional.linear(rows, self.dequantized(torch.float32), bias).to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight ``[N, K]`` as numbers."""
        codes = self.weight.view(torch.float8_e4m3fn)
        scales = self.weight_scale.view(torch.float8_e8m0fnu)
        return _scaled(codes, scales, self.block).to(dtype)

    def extra_repr(self) -> str:
        """What ``print`` says of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, block={self.block}, activation={self.activation}"
        )

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Take float8 tensors by their bytes: copying them into bytes would round their values."""
        inverse = state_dict.pop(prefix + "weight_scale_inv", None)
        if inverse is not None:
            if prefix + "weight_scale" in state_dict:
                raise ValueError(
                    f"'{prefix}weight_scale' and '{prefix}weight_scale_inv' are both there"
                )
            state_dict[prefix + "weight_scale"] = inverse
        for name, wanted in _BYTE_FLOATS.items():
            tensor = state_dict.get(prefix + name)
            if tensor is None or tensor.dtype == torch.uint8:
                continue
            if tensor.dtype != wanted:
                raise ValueError(
                    f"expected torch.uint8 or {wanted} in '{prefix + name}' but got {tensor.dtype}"
                )
            state_dict[prefix + name] = tensor.view(torch.uint8)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _check(k: int, n: int, block: tuple[int, int], activation: str, rule: str) -> None:
    if min(k, n) < 1:
        raise ValueError(f"expected sizes of at least 1 but got {k} and {n}")
    if not isinstance(block, (tuple, list)) or tuple(block) not in BLOCKS:
        raise ValueError(f"expected a block of (1, 32) or (32, 32) but got {block}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {_listed(ACTIVATIONS)} but got '{activation}'")
    _check_rule(rule)


def _scaled(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Codes ``[N, K]`` times the scale of each one's block, f32: exact, but for subnormal results.

    Only views, conversions and one product, which is what ``block32-raise`` looks through.
    """
    n, k = codes.shape
    rows, columns = scales.shape
    wide = scales.to(torch.float32)[:, None, :, None].expand(rows, block[0], columns, block[1])
    return codes.to(torch.float32) * wide.reshape(rows * block[0], columns * block[1])[:n, :k]


@dataclass(frozen=True)
class Converted:
    """A layer that ``convert_linear`` swapped.

    Attributes:
        name: Its name in the module.
        shape: (N, K).
        error: Relative error of the weight: the Frobenius norm of what was lost.
    """

    name: str
    shape: tuple[int, int]
    error: float


@dataclass(frozen=True)
class Conversion:
    """What ``convert_linear`` did.

    Attributes:
        layers: The layers that were swapped.
        kept: Names of linear layers that stay as they were.
    """

    layers: list[Converted] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{layer.name}: {layer.shape[0]}x{layer.shape[1]}, error {layer.error:.4f}"
            for layer in self.layers
        ]
        return "\n".join([*lines, *(f"{name}: kept" for name in self.kept)])


def convert_linear(
    module: nn.Module,
    *,
    keep: Sequence[str] = (),
    block: tuple[int, int] = (32, 32),
    activation: str = "none",
    rule: str = "rceil",
) -> Conversion:
    """Swap every ``nn.Linear`` inside a module for an ``MXLinear``, in place.

    A layer that is used under two names stays one layer. All weights are looked at before the
    first is swapped.

    Args:
        module: The model; it is no linear layer itself.
        keep: Patterns of names, such as ``"lm_head"`` or ``"layers.*.gate"``, that stay.
        block: Elements of a weight that share a scale, (32, 32) or (1, 32).
        activation: ``none`` multiplies activations as they are, ``mxfp8`` quantises them.
        rule: How scales are chosen.

    Returns:
        The error of each layer's weight, and what was kept.

    Raises:
        ValueError: A pattern matches no layer, there is nothing to swap, a weight is not finite,
            or an argument is of another kind.
    """
    if isinstance(module, nn.Linear):
        raise ValueError("expected a module around the linear layer; use MXLinear.from_linear")
    if not isinstance(module, nn.Module):
        raise ValueError(f"expected an nn.Module but got {type(module).__name__}")
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise ValueError(f"expected a list of patterns as keep but got '{keep}'")
    found = list(_linear_layers(module))
    names = [name for name, _, _ in found]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"'{pattern}' matches no linear layer of: {', '.join(names)}")
    swapped = [f for f in found if not any(fnmatchcase(f[0], pattern) for pattern in keep)]
    if not swapped:
        raise ValueError("expected linear layers to swap but there are none")
    made: dict[nn.Linear, MXLinear] = {}
    conversion = Conversion(kept=[name for name in names if name not in {f[0] for f in swapped}])
    for name, _, linear in swapped:
        if linear in made:
            continue
        n, k = linear.out_features, linear.in_features
        try:
            layer = MXLinear(
                k, n, linear.bias is not None, block=block, activation=activation, rule=rule
            )
            loss = layer._fill(linear)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from error
        made[linear] = layer
        conversion.layers.append(Converted(name, (n, k), loss.relative()))
    for name, parent, linear in swapped:
        setattr(parent, name.rpartition(".")[2], made[linear])
    for encoder in module.modules():
        _leave_fast_path(encoder)
    return conversion


def _leave_fast_path(encoder: nn.Module) -> None:
    """Have PyTorch's encoders call their layers, if one is an ``MXLinear``.

    Outside training they hand their weights to a kernel of their own instead, which takes floats
    alone. The two attributes serve no other purpose than to decide on that (PyTorch 2.13).
    """
    if not any(isinstance(layer, MXLinear) for layer in encoder.modules()):
        return
    if isinstance(encoder, nn.TransformerEncoderLayer):
        encoder.activation_relu_or_gelu = 0
    elif isinstance(encoder, nn.TransformerEncoder):
        encoder.use_nested_tensor = False


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Name, parent and layer; subclasses of ``nn.Linear`` may compute something else: not them."""
    for prefix, parent in module.named_modules():
        # Not named_children, which leaves out the second name of a layer that has two.
        for name, child in parent._modules.items():
            if type(child) is nn.Linear:
                yield (f"{prefix}.{name}" if prefix else name), parent, child
