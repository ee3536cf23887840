# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix kernel without tiles, against its own vector code, and in every shape of a tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from iree import runtime

from block32.dialects.kernel import KernelTier
from block32.lowering.cpu import amx, ops
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from block32.tools.iree_compile import run_iree_compile
from block32.tools.standalone import compile_standalone
from tests.lowering.cpu.support import (
    X86_PROCESSORS,
    Array,
    kernel_module,
    run,
    skip_unless_it_runs,
)
from tests.numbers import random_operands

AMX = X86_PROCESSORS[0]
AMX_ISA = "amx_bf16"
RAGGED = ScaledMatmul(None, 70, 200)


def without_tiles(problem: ScaledMatmul, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function of ``problem`` with kernels to which tiles are never granted."""
    monkeypatch.setattr(amx, "is_permitted", lambda: ops.splat(0, ops.i1()))
    source = kernel_module(problem, AMX).encode()
    monkeypatch.undo()
    return loaded(run_iree_compile(["-", *AMX.flags], stdin=source))


def loaded(vmfb: bytes) -> Any:
    """The function of a module."""
    device = runtime.Config("local-task")
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


#: A user's tiers in every shape that a product may have: (tile, rows of x, rows of w, stages).
WRITTEN = (
    ((40, 32, 64), 8, 16, 1),
    ((24, 64, 256), 8, 32, 2),
    ((16, 128, 128), 8, 64, 3),
    ((8, 96, 64), 8, 96, 9),
    ((48, 48, 192), 16, 16, 2),
    ((16, 32, 128), 16, 32, 4),
    ((32, 64, 64), 16, 64, 1),
    ((16, 192, 64), 16, 96, 2),
    ((64, 16, 128), 32, 16, 3),
    ((64, 64, 192), 32, 32, 1),
    ((100, 32, 128), 48, 16, 2),
)


@pytest.mark.parametrize(
    ("tile", "slab", "panel", "stages"), WRITTEN, ids=lambda value: str(value).replace(" ", "")
)
def test_every_shape_that_a_user_may_write(
    tile: tuple[int, int, int], slab: int, panel: int, stages: int
) -> None:
    """Several slabs and panels; one slab and one panel of each are not folded."""
    skip_unless_it_runs(AMX)
    tier = KernelTier("tiled", None, tile, mma=(slab, panel, 32), isa=AMX_ISA, stages=stages)
    assert CpuTarget().verify(RAGGED, tier, AMX.facts) is None
    function = loaded(compile_standalone(KernelSpec(RAGGED, CpuTarget(), (tier,)), AMX.flags))
    for m in (3, 16, 70):
        operands = random_operands(RAGGED, m, seed=m)
        operands.lhs_scale[m // 2, 3] = 30
        operands.rhs_scale[1, 2] = 220
        got = np.asarray(function(*operands.arrays()).to_host())
        comparison = reference.compare(got, operands.expected(), "f32")
        assert comparison.ok, (m, comparison)
