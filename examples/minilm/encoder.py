# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A sentence encoder as a plain PyTorch module, with the parameter names of all-MiniLM-L6-v2.

One sentence at a time needs no padding, and so no mask. Sentences of a batch are padded to one
length, and a mask says which tokens are theirs.
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

#: Taken off the scores of padding: their share of the softmax is 0 then.
_FAR = 1e9


@dataclass(frozen=True)
class Config:
    """Sizes; by default those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    width: int = 384
    inner_width: int = 1536
    heads: int = 12
    layers: int = 6


class Embeddings(nn.Module):
    """Words, positions and one sentence type, normalised."""

    def __init__(self, config: Config):
        """Parameters of the names that the checkpoint has."""
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.positions, config.width)
        self.token_type_embeddings = nn.Embedding(2, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, S]`` token ids to ``[B, S, width]``."""
        positions = torch.arange(ids.shape[1])
        total = self.word_embeddings(ids) + self.position_embeddings(positions)
        return self.LayerNorm(total + self.token_type_embeddings.weight[0])


class Attention(nn.Module):
    """Self-attention with its output layer, residual and normalisation."""

    def __init__(self, config: Config):
        """Query, key, value and output are linear layers."""
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.dense = (
            nn.Linear(config.width, config.width) for _ in range(4)
        )
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[B, S, width]`` to the same; see ``Encoder`` for the mask."""
        batch, length, width = x.shape
        query, key, value = (
            linear(x).reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) * (width // self.heads) ** -0.5
        if mask is not None:
            scores = scores + (mask[:, None, None, :] - 1) * _FAR
        mixed = torch.softmax(scores, dim=-1) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.LayerNorm(self.dense(mixed) + x)


class Layer(nn.Module):
    """Attention, then two linear layers with GELU between them."""

    def __init__(self, config: Config):
        """See the class."""
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = nn.Linear(config.width, config.inner_width)
        self.output = nn.Linear(config.inner_width, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[B, S, width]`` to the same; see ``Encoder`` for the mask."""
        x = self.attention(x, mask)
        inner = functional.gelu(self.intermediate(x))
        return self.LayerNorm(self.output(inner) + x)


class Encoder(nn.Module):
    """Token ids to one vector of length 1 for each sentence."""

    def __init__(self, config: Config):
        """See the class."""
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, S]`` token ids to ``[B, width]``.

        Args:
            ids: Token ids, the sentences of a batch padded to one length.
            mask: f32 ``[B, S]``, 1 for tokens and 0 for padding; None without padding.
        """
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, mask)
        if mask is None:
            return functional.normalize(x.mean(dim=1), dim=1)
        weights = mask[:, :, None]
        return functional.normalize((x * weights).sum(dim=1) / weights.sum(dim=1), dim=1)


#: Parts of the checkpoint's names, and of the names here; in this order.
_RENAMED = (
    ("encoder.layer.", "layers."),
    ("attention.self.", "attention."),
    ("attention.output.", "attention."),
    ("intermediate.dense.", "intermediate."),
    ("output.dense.", "output."),
    ("output.LayerNorm.", "LayerNorm."),
)


def load_checkpoint(encoder: Encoder, tensors: dict[str, torch.Tensor]) -> None:
    """Fill an encoder from the tensors of the checkpoint; the pooler is not part of it."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        for old, new in _RENAMED:
            name = name.replace(old, new)
        renamed[name] = tensor
    encoder.load_state_dict(renamed)
