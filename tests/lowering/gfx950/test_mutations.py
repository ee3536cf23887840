# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that are broken on purpose: each way of breaking them is caught, and by its name.

This is the test of the tests: a kernel that these let pass would let a broken one ship.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from iree.compiler.dialects import llvm

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950 import epilogue, split_k
from block32.lowering.gfx950.atoms import ScaledAtom
from block32.lowering.gfx950.workgroup import Workgroup
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_executor import (
    Instruction,
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    StaleReadError,
    UninitialisedError,
    mutate,
)
from tests.lowering.gfx950.kernels import (
    assert_matches_reference,
    compile_kernels,
    compile_uncached,
    needs_executor,
    run_matmul,
)
from tests.numbers import random_operands

pytestmark = needs_executor

TILED = KernelTier("tiled", tile=(32, 64, 256), warps=4, stages=2)
SPLIT = replace(TILED, splits=2)
#: Five K steps: two rounds of the loop and one step after it; with split-K a part has none after.
PROBLEM = ScaledMatmul(m=32, n=70, k=1280, rhs_block=(1, 32))


def instructions(tier: KernelTier, matches: Callable[[Instruction], bool]) -> list[Instruction]:
    """The kernel's instructions that match, in order; at least one."""
    found = [
        i
        for i in mutate.instructions(compile_kernels(PROBLEM, (tier,)), "gemm_tier0")
        if matches(i)
    ]
    assert found, "nothing to mutate"
    return found


def run(tier: KernelTier, hsaco: bytes, seed: int = 0) -> None:
    """Run a broken kernel and compare its numbers."""
    operands = random_operands(PROBLEM)
    y = run_matmul(PROBLEM, [tier], operands, hsaco=hsaco, seed=seed)
    assert_matches_reference(PROBLEM, y, operands)


@pytest.mark.parametrize("tier", [TILED, SPLIT])
def test_unbroken_kernels_pass(tier: KernelTier):
    run(tier, compile_kernels(PROBLEM, (tier,)))


def test_swapped_k_chunk(monkeypatch: pytest.MonkeyPatch):
    """The contiguous lane layout in place of two chunks: right only where scales are equal."""

    def contiguous(atom: ScaledAtom, group, chunk: int, bits: int):
        return group * 32 + chunk * 16

    monkeypatch.setattr(ScaledAtom, "chunk_k", contiguous)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(TILED, compile_uncached(PROBLEM, (TILED,)))


def test_wrong_scale_byte():
    hsaco = compile_kernels(PROBLEM, (TILED,))
    mfma = instructions(TILED, lambda i: i.name.startswith("v_mfma_scale"))[-1]
    for field in ("opsel", "opsel_hi"):
        wrong = mutate.change(hsaco, mfma, **{field: mfma[field] ^ 1})
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            run(TILED, wrong)


def uncaught(tier: KernelTier, mnemonic: str, errors: tuple[type[Exception], ...]) -> list[int]:
    """Which of the kernel's instructions of a kind can be dropped without one of the errors."""
    hsaco = compile_kernels(PROBLEM, (tier,))
    missed = []
    for number, instruction in enumerate(instructions(tier, lambda i: i.name == mnemonic)):
        try:
            for seed in range(3):
                run(tier, mutate.drop(hsaco, instruction), seed)
        except errors:
            continue
        missed.append(number)
    return missed


def test_dropped_wait():
    """Every wait is needed, and its absence noticed."""
    assert uncaught(TILED, "s_waitcnt", (MissingWaitError, RaceError)) == []


def test_missing_bypass_bit():
    hsaco = compile_kernels(PROBLEM, (SPLIT,))
    loads = instructions(SPLIT, lambda i: i.name.startswith("buffer_load") and i["sc1"] == 1)
    # Each loads from one slot, of which a workgroup's own is never stale.
    reads = hsaco
    for load in loads:
        reads = mutate.change(reads, load, sc1=0)
    with pytest.raises(StaleReadError):
        run(SPLIT, reads)
    stores = instructions(SPLIT, lambda i: i.name.startswith("buffer_store") and i["sc1"] == 1)
    with pytest.raises((StaleReadError, RaceError)):
        run(SPLIT, mutate.change(hsaco, stores[0], sc1=0))


def test_counter_that_is_not_reset(monkeypatch: pytest.MonkeyPatch):
    real = split_k.llvm.atomicrmw

    def plain_increment(operation, pointer, limit, ordering, **options):
        one = split_k.ops.i32_value(1)
        return real(llvm.AtomicBinOp.add, pointer, one, ordering, **options)

    monkeypatch.setattr(split_k.llvm, "atomicrmw", plain_increment)
    with pytest.raises(AssertionError, match="a counter was not set back to 0"):
        run(SPLIT, compile_uncached(PROBLEM, (SPLIT,)))


def test_barrier_left_out():
    """Between LDS steps, between the stores of partial sums and the count, and after the count."""
    assert uncaught(TILED, "s_barrier", (RaceError,)) == []
    assert uncaught(SPLIT, "s_barrier", (RaceError, UninitialisedError)) == []


def test_off_by_one_edge_mask(monkeypatch: pytest.MonkeyPatch):
    """One column too many is stored: it is the next row's first."""
    right = epilogue._Writer.create

    def one_too_many(workgroup: Workgroup) -> epilogue._Writer:
        writer = right(workgroup)
        return replace(writer, columns=writer.columns + 1)

    monkeypatch.setattr(epilogue._Writer, "create", one_too_many)
    with pytest.raises((AssertionError, RaceError, OutOfBoundsError)):
        run(TILED, compile_uncached(PROBLEM, (TILED,)))


def test_off_by_one_row_count(monkeypatch: pytest.MonkeyPatch):
    """One row too many of w is described to the hardware: it lies behind the buffer."""
    right = Workgroup.columns.fget
    assert right is not None
    monkeypatch.setattr(Workgroup, "columns", property(lambda w: right(w) + 1))
    with pytest.raises(OutOfBoundsError):
        run(TILED, compile_uncached(PROBLEM, (TILED,)))
