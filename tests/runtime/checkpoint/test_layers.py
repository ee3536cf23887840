# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tensors are weights and which are their scales, and every inconsistency by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.checkpoint.files import open_checkpoint
from block32.runtime.checkpoint.layers import ScaledWeight, find_weights
from tests.checkpoints import E4M3, E8M0, field, random_layer, save, write_raw

Tensors = dict[str, npt.NDArray[Any]]

W = np.zeros((96, 64), np.uint8).view(E4M3)


def u8(*shape: int) -> npt.NDArray[np.uint8]:
    return np.full(shape, 127, np.uint8)


def found(folder: Path, tensors: Tensors) -> list[ScaledWeight]:
    return find_weights(open_checkpoint(save(folder / "m.safetensors", tensors)))[0]


def refused(folder: Path, tensors: Tensors) -> str:
    with pytest.raises(DiagnosticError) as caught:
        found(folder, tensors)
    assert caught.value.location == str(folder / "m.safetensors")
    return caught.value.message


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("scales", "block"),
    [
        (u8(96, 2).view(E8M0), (1, 32)),
        (u8(96, 2), (1, 32)),
        (u8(96, 2, 1), (1, 32)),
        (u8(3, 2).view(E8M0), (32, 32)),
        (u8(1, 1), (128, 128)),
        (np.ones((3, 2), np.float32), (32, 32)),
    ],
    ids=["e8m0 rows", "u8 rows", "u8 trailing 1", "e8m0 32x32", "u8 128x128", "f32"],
)
def test_names_types_and_shapes(
    tmp_path: Path, suffix: str, scales: npt.NDArray[Any], block: tuple[int, int]
) -> None:
    (weight,) = found(tmp_path, {"l.weight": W, f"l.{suffix}": scales})
    assert (weight.layer, weight.n, weight.k, weight.block) == ("l", 96, 64, block)


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((300, 130), (3, 2), (128, 128)),
        ((12, 640), (12, 20), (1, 32)),
        ((12, 640), (1, 20), (32, 32)),
        ((96, 40), (3, 2), (32, 32)),
        ((1, 32), (1, 1), (1, 32)),
        ((129, 33), (2, 1), (128, 128)),
        ((129, 33), (5, 2), (32, 32)),
    ],
)
def test_blocks_that_shapes_imply(
    tmp_path: Path, shape: tuple[int, int], scale: tuple[int, int], block: tuple[int, int]
) -> None:
    tensors = {"l.weight": np.zeros(shape, np.uint8).view(E4M3), "l.weight_scale": u8(*scale)}
    assert found(tmp_path, tensors)[0].block == block


def test_a_declared_block_comes_first_and_the_data_decide(tmp_path: Path) -> None:
    """192x192 in 2x2 scales is 128x128, or 96x96 where the configuration says so."""
    tensors = {"l.weight": np.zeros((192, 192), np.uint8).view(E4M3), "l.weight_scale": u8(2, 2)}
    assert found(tmp_path, tensors)[0].block == (128, 128)
    for declared, block in (([96, 96], (96, 96)), ([64, 64], (128, 128))):
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": declared}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert found(tmp_path, tensors)[0].block == block


def test_a_weight_of_another_name(tmp_path: Path) -> None:
    (weight,) = found(tmp_path, {"experts.down": W, "experts.down_scale": u8(96, 2)})
    assert (weight.layer, weight.scales.name) == ("experts.down", "experts.down_scale")


def test_other_tensors_are_left(tmp_path: Path) -> None:
    """Scales of caches and activations end in _scale, too, and are nobody's weight scales."""
    tensors: Tensors = {
        **random_layer(32, 32, (32, 32)).tensors("l"),
        "l.bias": np.zeros(32, np.float32),
        "norm.weight": np.zeros(5, np.float32),
        "attn.k_scale": np.ones(1, np.float32),
        "l.input_scale": np.ones(1, np.float32),
    }
    weights, rest = find_weights(open_checkpoint(save(tmp_path / "m.safetensors", tensors)))
    assert weights[0].bias is not None and weights[0].bias.name == "l.bias"
    assert {t.name for t in rest} == {"norm.weight", "attn.k_scale", "l.input_scale"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"l.weight": W}, "the weight 'l.weight' has no scales; expected l.weight_scale or l.weig"),
        (
            {"l.weight": W, "l.weight_scale": u8(3, 2), "l.weight_scale_inv": u8(3, 2)},
            "the weight 'l.weight' has both l.weight_scale and l.weight_scale_inv; expected one",
        ),
        ({"l.weight_scale": u8(3, 2)}, "the scales 'l.weight_scale' belong to 'l.weight', which"),
        ({"x_scale": u8(3, 2).view(E8M0)}, "the scales 'x_scale' belong to 'x', which is missing"),
        (
            {"l.weight": W.view(np.uint8), "l.weight_scale": u8(3, 2)},
            "'l.weight_scale' scales 'l.weight', which is U8 [96, 64]; expected F8_E4M3",
        ),
        (
            {"l.weight": W.astype(np.float32), "l.weight_scale_inv": u8(3, 2).view(E8M0)},
            "'l.weight_scale_inv' scales 'l.weight', which is F32 [96, 64]; expected F8_E4M3",
        ),
        (
            {"l.weight": W, "l.weight_scale": np.ones((3, 2), np.float16)},
            "the scales 'l.weight_scale' are F16; expected F8_E8M0, U8 bytes, or F32",
        ),
        (
            {"l.weight": W, "l.weight_scale": np.ones((3, 2), np.int8)},
            "the scales 'l.weight_scale' are I8; expected F8_E8M0, U8 bytes, or F32",
        ),
        (
            {"l.weight": W, "l.weight_scale": u8(2, 3)},
            "the scales 'l.weight_scale' have shape [2, 3]; expected one of [96, 2] (1x32), "
            "[3, 2] (32x32), [1, 1] (128x128) for 'l.weight' [96, 64]",
        ),
        ({"l.weight": W, "l.weight_scale": u8(1)}, "have shape [1]; expected one of"),
        ({"l.weight": W, "l.weight_scale": u8(96)}, "have shape [96]; expected one of"),
        ({"l.weight": W, "l.weight_scale": u8(3, 2, 2)}, "have shape [3, 2, 2]; expected one of"),
        ({"l.weight": W, "l.weight_scale": u8(3, 2, 1, 1)}, "have shape [3, 2, 1, 1]; expected"),
        (
            {"l.weight": W.reshape(2, 48, 64), "l.weight_scale": u8(2, 48, 2)},
            "expected [N, K] as shape of 'l.weight' but got [2, 48, 64]",
        ),
        (
            {"l.weight": W[:0], "l.weight_scale": u8(0, 2)},
            "expected [N, K] as shape of 'l.weight' but got [0, 64]",
        ),
        (
            {"l.weight": W, "l.weight_scale": u8(3, 2), "l.bias": np.zeros(95, np.float32)},
            "expected 'l.bias' to be F32, BF16 or F16 [96] but got F32 [95]",
        ),
        ({"l.weight": W.astype(np.float32)}, "no weight of F8_E4M3 with scales is in the"),
    ],
)
def test_what_is_inconsistent(tmp_path: Path, tensors: Tensors, message: str) -> None:
    assert message in refused(tmp_path, tensors)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3FNUZ", "F4"])
def test_other_small_floats_are_named(tmp_path: Path, dtype: str) -> None:
    size = 16 if dtype == "F4" else 32
    path = write_raw(tmp_path / "m.safetensors", {"w": field(dtype, [1, 32], 0, size)}, bytes(size))
    with pytest.raises(DiagnosticError, match=rf"'w' is {dtype} \[1, 32\]; expected weights of F8"):
        find_weights(open_checkpoint(path))


def test_a_checkpoint_of_another_method_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    message = refused(tmp_path, {"l.weight": W.astype(np.float32)})
    assert message.endswith("is in the checkpoint, whose configuration says 'awq'")
