# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checkpoints from the field that broke somebody's system, each with its right value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from block32.runtime import reference
from tests.checkpoints import E4M3, E8M0, RandomLayer, random_layer, save
from tests.tools.imports import call, import_checkpoint, refused


def check(folder: Path, layer: RandomLayer, scales: npt.NDArray[Any]) -> None:
    """Import a layer with its scales stored as given, and multiply by it."""
    path = save(
        folder / "m.safetensors", {"l.weight": layer.codes.view(E4M3), "l.weight_scale": scales}
    )
    assert import_checkpoint(path, folder, "--activations=given") == 0
    values = np.random.default_rng(0).standard_normal((4, layer.codes.shape[1]))
    x, x_scale = reference.quantize(values)
    got = call(folder, "l", x.view(E4M3), x_scale.view(E8M0))
    comparison = reference.compare(got, layer.multiplied(x, x_scale), "f32")
    assert comparison.ok, comparison


def test_u8_scales_of_rows(tmp_path: Path) -> None:
    """Case 36: U8 [N, K/32] holds E8M0 bytes, never numbers."""
    layer = random_layer(96, 96, (1, 32))
    check(tmp_path, layer, layer.scales)


def test_blocks_of_128_that_do_not_divide(tmp_path: Path) -> None:
    """Case 37: O = 300, I = 130 with 128x128 blocks: 3x2 scales, of bytes 115 and 116."""
    layer = random_layer(300, 130, (128, 128))
    layer.scales[:] = [[115, 116], [116, 115], [115, 116]]
    check(tmp_path, layer, layer.scales)


def test_scales_with_a_trailing_one(tmp_path: Path) -> None:
    """Case 38: scales of shape [.., K/32, 1]."""
    layer = random_layer(48, 64, (1, 32))
    check(tmp_path, layer, layer.scales[:, :, None])


def test_a_weight_without_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 39."""
    layer = random_layer(32, 32, (32, 32))
    path = save(tmp_path / "m.safetensors", {"l.weight": layer.codes.view(E4M3)})
    error = refused(path, tmp_path, capsys)
    assert error == (
        f"{path}: error: the weight 'l.weight' has no scales; expected l.weight_scale or "
        "l.weight_scale_inv\n"
    )


def test_both_names_of_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 40."""
    layer = random_layer(32, 32, (32, 32))
    tensors = layer.tensors("l", "weight_scale") | layer.tensors("l", "weight_scale_inv")
    error = refused(save(tmp_path / "m.safetensors", tensors), tmp_path, capsys)
    assert "has both l.weight_scale and l.weight_scale_inv; expected one" in error


def test_an_f32_scale_that_is_no_power_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 41: a scale of 0.0123 is refused, and what would take it is named."""
    layer = random_layer(32, 64, (32, 32))
    scales = np.array([[0.0123, 1.0]], np.float32)
    path = save(
        tmp_path / "m.safetensors", {"l.weight": layer.codes.view(E4M3), "l.weight_scale": scales}
    )
    error = refused(path, tmp_path, capsys)
    assert "'l.weight_scale' holds 0.0123 at [0, 0]; expected powers of two" in error
    assert "note: --requantize" in error
