# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The whole-model example at small size: random weights, several lengths, alone and in batches."""

# PyTorch and its way into IREE are an extra that type checks go without.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs block32[examples]")
pytest.importorskip("iree.turbine", reason="needs block32[examples]")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "minilm"))


def test_a_small_encoder_is_quantised_compiled_and_close(tmp_path: Path) -> None:
    """All linear layers of a model from PyTorch, with their epilogues, for every length."""
    from encoder import Config, Encoder  # pyright: ignore[reportMissingImports]
    from pipeline import compile_mxfp8, export  # pyright: ignore[reportMissingImports]

    config = Config(vocabulary=100, positions=32, width=64, inner_width=160, heads=2, layers=2)
    torch.manual_seed(4)
    encoder = Encoder(config).eval()
    sentences = [torch.randint(0, 100, (1, length)) for length in (2, 3, 8, 21)]
    expected = [encoder(ids).detach().numpy()[0] for ids in sentences]
    export(encoder, config.positions, tmp_path)
    compiled = compile_mxfp8(tmp_path, "none")
    assert len(compiled.kernels) == 12
    assert sum("with bias, gelu" in kernel for kernel in compiled.kernels) == 2
    assert sum("with bias, residual" in kernel for kernel in compiled.kernels) == 4
    for ids, want in zip(sentences, expected, strict=True):
        assert float(np.dot(compiled.encode(ids.numpy())[0], want)) > 0.99


def test_a_batch_is_padded_and_masked(tmp_path: Path) -> None:
    """Each sentence has the vector that it has by itself, whatever is in its padding."""
    from encoder import Config, Encoder  # pyright: ignore[reportMissingImports]
    from pipeline import compile_mxfp8, export  # pyright: ignore[reportMissingImports]

    config = Config(vocabulary=100, positions=32, width=64, inner_width=160, heads=2, layers=1)
    torch.manual_seed(5)
    encoder = Encoder(config).eval()
    lengths = (2, 9, 5)
    ids = torch.randint(0, 100, (len(lengths), max(lengths)))
    mask = torch.tensor([[float(i < length) for i in range(max(lengths))] for length in lengths])
    alone = [
        encoder(row[None, :length]).detach().numpy()[0]
        for row, length in zip(ids, lengths, strict=True)
    ]
    export(encoder, config.positions, tmp_path, is_batched=True)
    compiled = compile_mxfp8(tmp_path, "none")
    assert len(compiled.kernels) == 6
    vectors = compiled.encode(ids.numpy(), mask.numpy())
    for vector, want in zip(vectors, alone, strict=True):
        assert float(np.dot(vector, want)) > 0.99
