# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which form computes a matmul: a GEMV for one row of a weight that is not wide, else tiles.

Groups of rows have a form of their own, for any number of rows.
"""

from __future__ import annotations

import dataclasses

from block32.dialects.kernel import KernelTier
from block32.lowering.apple import dense, gemv
from block32.lowering.apple.architecture import M5, Architecture
from block32.lowering.apple.matmul import Matmul
from block32.lowering.problem import BLOCK_K, ScaledMatmul

GEMV = KernelTier(form="gemv", tile=(1, gemv.COLUMNS, gemv.CHUNK), warps=gemv.COLUMNS)


def tiled(architecture: Architecture, form: str = "tiled") -> KernelTier:
    """The tier of 64x64 tiles: the form, or the one for groups of rows."""
    size = architecture.matrix
    tile = (dense.TILE, dense.TILE, BLOCK_K)
    return KernelTier(form=form, tile=tile, mma=(size, size, size), warps=4)


def matmul_of(problem: ScaledMatmul, architecture: Architecture = M5) -> Matmul:
    """The kernel's view of a problem.

    Raises:
        KernelError: There is no kernel for it; the message is a phrase for a remark.
    """
    return Matmul(
        n=problem.n,
        k=problem.k,
        lhs=problem.lhs,
        rhs=problem.rhs,
        m=problem.m,
        result=problem.result,
        lhs_scaled=problem.lhs_scaled,
        rhs_block=problem.rhs_block,
        grouping=problem.grouping,
        epilogue=problem.epilogue,
        architecture=architecture,
    )


def tiers(problem: ScaledMatmul, architecture: Architecture = M5) -> tuple[KernelTier, ...]:
    """The tiers for a problem that ``matmul_of`` accepts.

    One row uses a sixteenth of a matrix instruction, and is bound by reading w: a simdgroup a
    column reads it in long runs. Where N is above K there are too many columns for that to pay.
    """
    if problem.grouping:
        return (tiled(architecture, "grouped"),)
    serves_one_row = problem.n <= problem.k and problem.m in (None, 1)
    if not serves_one_row:
        return (tiled(architecture),)
    if problem.m == 1:
        return (GEMV,)
    return (dataclasses.replace(GEMV, max_m=1), tiled(architecture))


def mismatch(
    tier: KernelTier, problem: ScaledMatmul, architecture: Architecture = M5
) -> str | None:
    """Why a tier that a user wrote cannot be used, or None. Left-out fields are defaults."""
    forms = (tiled(architecture), GEMV)
    if problem.grouping:
        forms = (tiled(architecture, "grouped"),)
    known = {form.form: form for form in forms}
    if tier.form not in known:
        what = "groups of rows" if problem.grouping else "one weight"
        return f"Apple GPUs have no form '{tier.form}' for {what}; expected {' or '.join(known)}"
    default = known[tier.form]
    for name in ("tile", "mma"):
        value, only = getattr(tier, name), getattr(default, name)
        if value is not None and value != only:
            return (
                f"{name} = {list(value)} for form '{tier.form}'; only {only and list(only)} exists"
            )
    for name in ("k_pack", "splits"):
        if getattr(tier, name) != 1:
            return f"{name} = {getattr(tier, name)}; kernels of this target have no {name}"
    if tier.form == "gemv" and problem.m != 1 and tier.max_m != 1:
        return "form 'gemv' computes one row; expected max_m = 1"
    return None
