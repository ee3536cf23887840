# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix kernel where tiles are not granted, and against its own vector code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from iree import runtime

from block32.lowering.cpu import amx, ops
from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from block32.tools.iree_compile import run_iree_compile
from tests.lowering.cpu.support import (
    X86_PROCESSORS,
    Array,
    kernel_module,
    run,
    skip_unless_it_runs,
)
from tests.numbers import random_operands

AMX = X86_PROCESSORS[0]
RAGGED = ScaledMatmul(None, 70, 200)


def without_tiles(problem: ScaledMatmul, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function of ``problem`` with kernels to which tiles are never granted."""
    monkeypatch.setattr(amx, "is_permitted", lambda: ops.splat(0, ops.i1()))
    source = kernel_module(problem, AMX).encode()
    monkeypatch.undo()
    device = runtime.Config("local-task")
    vmfb = run_iree_compile(["-", *AMX.flags], stdin=source)
    module = runtime.VmModule.copy_buffer(device.vm_instance, vmfb)
    return runtime.load_vm_module(module, device)["main"]


def test_vector_code_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slab and several, with N and K that end inside a tile, folded and exact."""
    skip_unless_it_runs(AMX)
    function = without_tiles(RAGGED, monkeypatch)
    for m in (2, 16, 17, 32, 33, 70):
        for scale in (127, 30):
            operands = random_operands(RAGGED, m, seed=m)
            operands.lhs_scale[m // 2] = scale
            got = np.asarray(function(*operands.arrays()).to_host())
            assert reference.compare(got, operands.expected(), "f32").ok, (m, scale)


@pytest.mark.parametrize("m", [3, 20, 50])
def test_integers_come_out_the_same_from_tiles_and_from_vectors(
    m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of small integers are exact in any order: no product is lost or doubled."""
    skip_unless_it_runs(AMX)
    operands = random_operands(RAGGED, m)
    rng = np.random.default_rng(m)
    operands.lhs[:] = integer_codes(rng, operands.lhs.shape)
    operands.rhs[:] = integer_codes(rng, operands.rhs.shape)
    operands.lhs_scale[:] = 127
    operands.rhs_scale[:] = 128
    with_tiles = run(RAGGED, AMX, *operands.arrays())
    vectors = without_tiles(RAGGED, monkeypatch)(*operands.arrays()).to_host()
    assert np.array_equal(with_tiles, operands.expected().astype(np.float32))
    assert np.array_equal(with_tiles, np.asarray(vectors))


def integer_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """e4m3 codes of the integers 1 to 4 and of their negatives."""
    magnitudes = np.array([0x38, 0x40, 0x44, 0x48], np.uint8)
    return rng.choice(np.concatenate([magnitudes, magnitudes | 0x80]), shape)
