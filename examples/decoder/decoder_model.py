# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A small decoder in PyTorch: grouped-query attention, RMSNorm, SwiGLU, a cache as arguments."""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder, and the seed of its weights."""

    vocabulary: int = 256
    width: int = 128
    inner_width: int = 320
    heads: int = 8
    cache_heads: int = 2
    layers: int = 2
    seed: int = 2

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads


def seeded_weights(config: Config) -> dict[str, npt.NDArray[np.float32]]:
    """All parameters by name, from NumPy, so that other implementations can have them."""
    rng = np.random.default_rng(config.seed)
    cache_width = config.cache_heads * config.head_width
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocabulary, config.width)}
    for index in range(config.layers):
        layer = f"layers.{index}"
        shapes |= {
            f"{layer}.attention_norm.weight": (config.width,),
            f"{layer}.query.weight": (config.width, config.width),
            f"{layer}.key.weight": (cache_width, config.width),
            f"{layer}.value.weight": (cache_width, config.width),
            f"{layer}.output.weight": (config.width, config.width),
            f"{layer}.inner_norm.weight": (config.width,),
            f"{layer}.gate.weight": (config.inner_width, config.width),
            f"{layer}.up.weight": (config.inner_width, config.width),
            f"{layer}.down.weight": (config.width, config.inner_width),
        }
    shapes |= {"norm.weight": (config.width,), "head.weight": (config.vocabulary, config.width)}
    weights = {}
    for name, shape in shapes.items():
        spread = 1.0 if name.startswith("embedding") else 1.5 * shape[-1] ** -0.5
        values = rng.normal(0.0, spread, shape) if len(shape) == 2 else rng.uniform(0.8, 1.2, shape)
        weights[name] = values.astype(np.float32)
    return weights


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int):
        """One weight an element."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each row divided by its root mean square."""
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * self.weight


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[heads, S, D]``: the two halves of D are the pairs."""
    half = x.shape[-1] // 2
    rates = torch.exp(torch.arange(half) * (-np.log(1e4) / half))
    angles = positions[:, None].to(torch.float32) * rates
    a, b = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """Attention over the cache and the new tokens, then SwiGLU."""

    def __init__(self, config: Config):
        """Linear layers have no bias."""
        super().__init__()
        self.config = config
        cache_width = config.cache_heads * config.head_width
        self.attention_norm, self.inner_norm = Norm(config.width), Norm(config.width)
        self.query, self.output = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(2)
        )
        self.key, self.value = (nn.Linear(config.width, cache_width, bias=False) for _ in range(2))
        self.gate, self.up = (
            nn.Linear(config.width, config.inner_width, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.inner_width, config.width, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[S, heads * D]`` as ``[heads, S, D]``."""
        return x.reshape(x.shape[0], -1, self.config.head_width).transpose(0, 1).contiguous()

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``[S, width]`` to the same, and the longer cache of keys and values."""
        length = x.shape[0]
        normal = self.attention_norm(x)
        query, key, value = (
            self._heads(linear(normal)) for linear in (self.query, self.key, self.value)
        )
        query, key = rotated(query, positions), rotated(key, positions)
        keys, values = torch.cat([cache[0], key], dim=1), torch.cat([cache[1], value], dim=1)
        shared = torch.arange(self.config.heads) // (self.config.heads // self.config.cache_heads)
        each_key, each_value = (torch.index_select(array, 0, shared) for array in (keys, values))
        scores = query @ each_key.transpose(1, 2) * self.config.head_width**-0.5
        is_later = torch.arange(keys.shape[1])[None, :] > positions[:, None]
        share = torch.softmax(torch.where(is_later[None], -1e30, scores), dim=-1)
        mixed = share @ each_value
        x = x + self.output(mixed.transpose(0, 1).reshape(length, -1))
        normal = self.inner_norm(x)
        inner = functional.silu(self.gate(normal)) * self.up(normal)
        return x + self.down(inner), (keys, values)


class Decoder(nn.Module):
    """Tokens and a cache to the next token's logits and the longer cache."""

    def __init__(self, config: Config):
        """Weights are ``seeded_weights``."""
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        weights = seeded_weights(config)
        self.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})

    def forward(
        self, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run S tokens after a cache of C.

        Args:
            tokens: ``[S]``.
            keys: ``[layers, cache heads, C, D]``.
            values: The same.

        Returns:
            Logits ``[vocabulary]`` of the token after the last, keys and values of C + S tokens.
        """
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[0]) + keys.shape[2]
        new_keys, new_values = [], []
        for index, layer in enumerate(self.layers):
            x, (k, v) = layer(x, positions, (keys[index], values[index]))
            new_keys.append(k)
            new_values.append(v)
        logits = self.head(self.norm(x[-1:]))[0]
        return logits, torch.stack(new_keys), torch.stack(new_values)
