# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``portable`` target: no kernels, only the rewrite of ``expand.py``."""

from __future__ import annotations

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import DeviceFacts, KernelPlan, Launch, Selection, Target


class PortableTarget(Target):
    """Leaves every matmul to plain linalg, on whatever device IREE's own flags name."""

    name = "portable"
    # It writes no kernels of any kind, and says so in `choose_tiers`.
    quantizes = True
    groups = True

    def compile_flags(self) -> tuple[str, ...]:
        """None: the user names a device, or IREE's default applies."""
        return ()

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """Choose nothing."""
        del problem, facts
        return Selection(None, "no kernels of block32 for this device")

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Only the form ``portable`` is possible."""
        del problem, facts
        return None if tier.form == "portable" else f"portable has no form '{tier.form}'"

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """There are no launches."""
        raise NotImplementedError("portable has no kernels")

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """There are no launches."""
        raise NotImplementedError("portable has no kernels")

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """There are no launches."""
        raise NotImplementedError("portable has no kernels")

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """There are no launches."""
        raise NotImplementedError("portable has no kernels")
