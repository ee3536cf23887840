# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How PyTorch programs dequantise MX weights, as iree-turbine exports it: each gets a kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import block32
from block32.passes.base import Remark
from block32.runtime import reference

torch = pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("iree.turbine", reason="needs the extra torch")

M, N, K = 4, 128, 128
CODES = torch.float8_e4m3fn
SCALES = torch.float8_e8m0fnu

Dequantise = Callable[[Any, Any], Any]


def by_view(w: Any, s: Any) -> Any:
    blocks = w.view(CODES).to(torch.bfloat16).unflatten(1, (-1, 32))
    return (blocks * s.view(SCALES).to(torch.bfloat16).unsqueeze(-1)).flatten(1).float()


def by_repetition(w: Any, s: Any) -> Any:
    wide = s.view(SCALES).float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    return w.view(CODES).float() * wide


def by_f32_scales(w: Any, s: Any) -> Any:
    blocks = w.view(CODES).float().view(N // 128, 128, K // 128, 128)
    return (blocks * s.view(N // 128, 1, K // 128, 1)).view(N, K)


def by_exp2(w: Any, s: Any) -> Any:
    scales = torch.exp2(s.float() - 127)
    blocks = w.view(CODES).float().view(N // 32, 32, K // 32, 32)
    return (blocks * scales[:, None, :, None]).view(N, K)


def by_ldexp(w: Any, s: Any) -> Any:
    exponents = s.to(torch.int32) - 127
    blocks = w.view(CODES).float().view(N, K // 32, 32)
    return torch.ldexp(blocks, exponents[:, :, None]).view(N, K)


SPELLINGS: dict[str, tuple[Dequantise, tuple[int, int]]] = {
    "view": (by_view, (1, 32)),
    "repetition": (by_repetition, (32, 32)),
    "f32 scales": (by_f32_scales, (128, 128)),
    "exp2": (by_exp2, (32, 32)),
    "ldexp": (by_ldexp, (1, 32)),
}


@pytest.mark.parametrize(("dequantise", "block"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_the_spelling_is_raised(dequantise: Dequantise, block: tuple[int, int]) -> None:
    from iree.turbine import aot

    rng = np.random.default_rng(4)
    codes = rng.integers(0, 0x70, (N, K), dtype=np.uint8)
    scales = rng.integers(118, 132, (N // block[0], K // block[1]), dtype=np.uint8)

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stored = torch.from_numpy(scales)
            if dequantise is by_f32_scales:
                stored = torch.exp2(stored.float() - 127)
            self.register_buffer("w", torch.from_numpy(codes))
            self.register_buffer("s", stored)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, dequantise(self.w, self.s))

    x = torch.from_numpy(rng.standard_normal((M, K)).astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = str(aot.export(Linear().eval(), args=(x,)).mlir_module)
    remarks: list[Remark] = []
    vmfb = block32.compile(text, target="cpu", on_remark=remarks.append)
    assert [r.severity for r in remarks] == ["remark"], remarks
    rows = "1x32" if block[0] == 1 else "32x32"
    assert f"{M}x{N}x{K}_f32_e4m3_{rows}_f32: cpu " in remarks[0].message
    got = np.array(block32.load(vmfb)["main"](x.numpy()))
    full = np.repeat(np.repeat(scales, block[0], 0), block[1] // 32, 1)
    expected = reference.scaled_matmul(x.numpy(), None, codes, full, rhs_block=(1, 32))
    comparison = reference.compare(got, expected, "f32")
    assert comparison.ok, comparison
