# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The decoder in float64 NumPy, on the values that its MX weights stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from block32.runtime import reference

Reals = npt.NDArray[np.float64]


def dequantised(weights: dict[str, npt.NDArray[np.float32]]) -> dict[str, Reals]:
    """Weights of linear layers as 32x32 blocks of e4m3 give them back, the others as they are."""
    values: dict[str, Reals] = {}
    for name, array in weights.items():
        values[name] = array.astype(np.float64)
        if array.ndim == 2 and not name.startswith("embedding"):
            codes, scales = reference.quantize_weight(array)
            values[name] = reference.dequantize(codes, scales, (32, 32))
    return values


def greedy_tokens(
    weights: dict[str, Reals],
    prompt: list[int],
    count: int,
    heads: int,
    cache_heads: int,
    layers: int,
) -> tuple[list[int], float]:
    """The most likely token, ``count`` times, without any cache.

    Returns:
        The tokens, and the least lead that a token had over the next.
    """
    tokens = list(prompt)
    least = np.inf
    for _ in range(count):
        logits = _logits(weights, np.array(tokens), heads, cache_heads, layers)
        best, second = np.sort(logits)[::-1][:2]
        least = min(least, best - second)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :], float(least)


def _logits(
    weights: dict[str, Reals],
    tokens: npt.NDArray[np.int64],
    heads: int,
    cache_heads: int,
    layers: int,
) -> Reals:
    x = weights["embedding.weight"][tokens]
    for index in range(layers):
        layer = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        x = x + _attention(layer, _norm(x, layer["attention_norm.weight"]), heads, cache_heads)
        normal = _norm(x, layer["inner_norm.weight"])
        gate = normal @ layer["gate.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normal @ layer["up.weight"].T)
        x = x + inner @ layer["down.weight"].T
    return (_norm(x, weights["norm.weight"]) @ weights["head.weight"].T)[-1]


def _norm(x: Reals, weight: Reals) -> Reals:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def _attention(layer: dict[str, Reals], x: Reals, heads: int, cache_heads: int) -> Reals:
    length = len(x)

    def split(name: str, count: int) -> Reals:
        return (x @ layer[f"{name}.weight"].T).reshape(length, count, -1).transpose(1, 0, 2)

    query, key = _rotated(split("query", heads)), _rotated(split("key", cache_heads))
    value = split("value", cache_heads)
    key, value = (np.repeat(array, heads // cache_heads, axis=0) for array in (key, value))
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
    scores = np.where(np.triu(np.ones((length, length)), 1) > 0, -np.inf, scores)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = share / share.sum(axis=-1, keepdims=True) @ value
    return mixed.transpose(1, 0, 2).reshape(length, -1) @ layer["output.weight"].T


def _rotated(x: Reals) -> Reals:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 1e4 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )
