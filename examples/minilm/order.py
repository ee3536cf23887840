# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much of the order of neighbours MXFP8 keeps, and what keeping layers in f32 buys.

Run as a program, it prints a line for each of several settings, computed in PyTorch alone: scales
for 32x32 and 1x32, quantised activations, bf16 weights; then W8A16 with more and more layers left
in f32, first those whose quantisation moves the vectors most for each weight.

    pip install 'block32[examples]'
    python examples/minilm/order.py
"""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import nn

Vectors = npt.NDArray[np.float32]
#: Neighbours of a sentence that ``Order.first`` looks at.
FIRST = 3
#: Layers that the curve leaves in f32.
KEPT = (3, 6, 12, 18, 24, 30, 33, 35)


@dataclass(frozen=True)
class Order:
    """How the neighbours of all sentences are ordered, against f32.

    A pair is two neighbours of one sentence, and their gap the difference of their f32 cosines to
    it.

    Attributes:
        nearest: Sentences with the same nearest neighbour.
        first: Sentences whose nearest ``FIRST`` neighbours are the same in the same order.
        whole: Sentences whose neighbours are all in the same order.
        pairs: The share of pairs in the same order.
        widest_swap: The largest gap of a pair that changed places, 0 without any.
    """

    nearest: int
    first: int
    whole: int
    pairs: float
    widest_swap: float

    @classmethod
    def of(cls, f32: Vectors, other: Vectors) -> Order:
        """Compare the neighbours of all vectors, ``[sentences, width]``."""
        nearest, first, whole, kept, total, widest = 0, 0, 0, 0, 0, 0.0
        for row in range(len(f32)):
            before, after = (np.delete(v @ v[row], row) for v in (f32, other))
            order, other_order = (np.argsort(-v, kind="stable") for v in (before, after))
            nearest += int(order[0] == other_order[0])
            first += bool((order[:FIRST] == other_order[:FIRST]).all())
            # Every pair once, the one that is nearer in f32 first.
            gaps = before[order][:, None] - before[order][None, :]
            ahead = np.triu(np.ones_like(gaps, dtype=bool), 1)
            swapped = ahead & (after[order][:, None] < after[order][None, :])
            whole += not swapped.any()
            kept, total = kept + int((ahead & ~swapped).sum()), total + int(ahead.sum())
            widest = max(widest, float(gaps[swapped].max(initial=0.0)))
        return cls(nearest, first, whole, kept / total, widest)


class Settings:
    """The encoder with some of its weights rounded, and the vectors that it gives."""

    def __init__(self, encoder: nn.Module, sentences: Iterable[npt.NDArray[np.int64]]):
        """The f32 encoder, and token ids ``[1, S]``."""
        import torch
        from torch import nn

        self._encoder = encoder.eval()
        self._sentences = [torch.from_numpy(ids) for ids in sentences]
        self.layers = {n: m for n, m in encoder.named_modules() if isinstance(m, nn.Linear)}
        self._f32 = {name: layer.weight.data for name, layer in self.layers.items()}
        self._mxfp8 = {name: self.rounded(name) for name in self.layers}
        self.f32_vectors = self.vectors(self._encoder)

    def rounded(self, name: str, block: tuple[int, int] = (32, 32)) -> torch.Tensor:
        """A layer's weight with MXFP8's values."""
        from block32.torch import MXLinear

        return MXLinear.from_linear(self.layers[name], block=block).dequantized()

    def vectors(self, encoder: nn.Module) -> Vectors:
        """A vector for each sentence."""
        import torch

        with torch.no_grad():
            return np.concatenate([encoder(ids).numpy() for ids in self._sentences])

    def with_weights(self, weights: dict[str, torch.Tensor]) -> Vectors:
        """The vectors with other weights in some layers."""
        for name, weight in weights.items():
            self.layers[name].weight.data = weight
        found = self.vectors(self._encoder)
        for name in weights:
            self.layers[name].weight.data = self._f32[name]
        return found

    def keeping(self, kept: Iterable[str]) -> Vectors:
        """W8A16 with some layers in f32."""
        kept = set(kept)
        return self.with_weights({n: w for n, w in self._mxfp8.items() if n not in kept})

    def quantized_activations(self) -> Vectors:
        """W8A8."""
        from block32.torch import convert_linear

        encoder = copy.deepcopy(self._encoder)
        convert_linear(encoder, activation="mxfp8")
        return self.vectors(encoder)

    def by_sensitivity(self) -> list[str]:
        """Layers whose own rounding moves the vectors most for each weight, those first."""

        def moved(name: str) -> float:
            cosines = (self.f32_vectors * self.with_weights({name: self._mxfp8[name]})).sum(axis=1)
            return float(1 - cosines.mean()) / self._f32[name].numel()

        return sorted(self.layers, key=moved, reverse=True)

    def line(self, title: str, vectors: Vectors) -> str:
        """One line of the output."""
        cosines = (self.f32_vectors * vectors).sum(axis=1)
        order = Order.of(self.f32_vectors, vectors)
        return (
            f"{title:44s} {cosines.min():.4f} {order.nearest:8d} {order.first:8d} "
            f"{order.pairs:8.2%} {order.widest_swap:8.4f}"
        )


def main() -> int:
    """Print all lines."""
    from minilm import token_ids
    from pipeline import pretrained

    encoder, package = pretrained()
    settings = Settings(encoder, token_ids(package))
    by_row = {name: settings.rounded(name, (1, 32)) for name in settings.layers}
    bf16 = {name: layer.weight.bfloat16().float() for name, layer in settings.layers.items()}
    print(f"{'':44s}  worst  nearest  first {FIRST}    pairs   widest")
    print(f"{'':44s} cosine     same     same  in order    swap", flush=True)
    print(settings.line("W8A16, scales for 32x32", settings.keeping(())), flush=True)
    print(settings.line("W8A16, scales for 1x32", settings.with_weights(by_row)), flush=True)
    print(settings.line("W8A8", settings.quantized_activations()), flush=True)
    print(settings.line("bf16 weights", settings.with_weights(bf16)), flush=True)
    ranked = settings.by_sensitivity()
    total = sum(layer.weight.numel() for layer in settings.layers.values())
    for count in KEPT:
        share = sum(settings.layers[name].weight.numel() for name in ranked[:count]) / total
        title = f"W8A16, {count} layers ({share:.0%} of weights) in f32"
        print(settings.line(title, settings.keeping(ranked[:count])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
