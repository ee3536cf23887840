# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a target is: the whole contract between the passes and ``lowering/<target>/``.

A target chooses tiers for a matmul (``select``), says which launches compute it and which buffers
they exchange (``plan``), and writes the kernels (``workgroups``, ``emit``). Everything between the
program and the kernels (executables, exports, conditions, dispatches, buffer sizes) is the passes'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from iree.compiler import ir

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.common.index import Index
from block32.lowering.common.weight_layout import PLAIN
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul

#: The name of the buffer that holds y in every plan.
RESULT = "result"


@dataclass(frozen=True)
class DeviceFacts:
    """What the user's flags say of the machine that a module is compiled for.

    Attributes:
        cpu_features: LLVM feature names that are on, such as ``avx512bf16``; empty on GPUs.
        architecture: The target triple's first part on CPUs, the chip on GPUs.
    """

    cpu_features: frozenset[str] = frozenset()
    architecture: str = ""


@dataclass(frozen=True)
class Selection:
    """What a target chose for a matmul; without a configuration it is left to ``portable``.

    Attributes:
        config: The tiers, or None where this target has no kernel.
        reason: One phrase for the remark: why this form, or why none.
    """

    config: KernelConfig | None
    reason: str


@dataclass(frozen=True)
class LayoutTiers:
    """What a target would choose for a weight in another order of bytes.

    Attributes:
        tiers: The tiers, all of one ``weight_layout``; empty where it has no such kernels.
        pays: They are faster than those of the plain order.
    """

    tiers: tuple[KernelTier, ...] = ()
    pays: bool = False

    @property
    def layout(self) -> str:
        """The order that the tiers read."""
        return self.tiers[0].weight_layout if self.tiers else PLAIN


@dataclass(frozen=True)
class Buffer:
    """A transient buffer between the launches of one matmul: a flat array.

    Attributes:
        element: Its MLIR element type, such as ``i8``, ``i32`` or ``f32``.
        size: The number of elements, from M.
        zeroed: Whether it starts as zeros (counters) or holds anything.
    """

    element: str
    size: Callable[[Index], Index]
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """One dispatch of a matmul, with one kernel a tier. Bindings: reads, then updates, then writes.

    Attributes:
        name: Its name in symbols: ``gemm``, ``pack``, ``reduce``, ``quantize``.
        reads: Operands of the matmul or buffers that an earlier launch wrote.
        updates: Buffers read and written in place (counters).
        writes: Buffers written; ``result`` is y.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    updates: tuple[str, ...] = ()

    @property
    def bindings(self) -> tuple[str, ...]:
        """The names of the kernel's bindings in order."""
        return self.reads + self.updates + self.writes


@dataclass(frozen=True)
class KernelPlan:
    """The launches of one matmul in order, and the buffers between them."""

    launches: tuple[Launch, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict)


class Target(ABC):
    """A machine that block32 writes kernels for.

    Attributes:
        name: What ``--target=`` takes.
        guards_empty: M = 0 is kept away from the device by a branch on the host.
        takes_empty_grids: A launch of no workgroups is harmless; otherwise none is recorded.
        finishes_binaries: IREE's own binaries are replaced at phase hal (``finish_binaries``).
        quantizes: It has kernels for an x that is quantised on the way (``lhs_quantize``).
        groups: It has kernels for grouped matmuls (``grouping``).
        merges_equal_ops: Equal operations of a kernel become one as soon as it is written. IREE
            walks kernels in most of its passes, and that takes longer than LLVM where they are big.
        extra: The extra of block32's package whose packages its kernels are written with.
    """

    name: str
    guards_empty: bool = False
    takes_empty_grids: bool = True
    finishes_binaries: bool = False
    quantizes: bool = False
    groups: bool = False
    merges_equal_ops: bool = False
    extra: str = ""

    @abstractmethod
    def compile_flags(self) -> tuple[str, ...]:
        """The iree-compile flags that choose this target's device."""

    def refused_flag(self, flags: tuple[str, ...]) -> str | None:
        """Why a flag for ``iree-compile`` among ``flags`` cannot go with this target, or None."""
        del flags

    def select(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """Choose the tiers for ``problem`` on a machine with these ``facts``."""
        reason = self._no_kernels(problem)
        return Selection(None, reason) if reason else self.choose_tiers(problem, facts)

    def verify(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Why ``tier`` cannot compute ``problem`` here, or None: for a user's explicit choice."""
        reason = self._no_kernels(problem) or _quantize_mismatch(problem, tier)
        return reason or self.check_tier(problem, tier, facts)

    def _no_kernels(self, problem: ScaledMatmul) -> str | None:
        """Why the target has no kernels at all for problems of this kind, or None."""
        if problem.lhs_quantize and not self.quantizes:
            return f"no kernel of {self.name} quantises an activation"
        if problem.grouping and not self.groups:
            return f"no kernel of {self.name} multiplies groups of rows"
        return None

    @abstractmethod
    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """``select`` for a problem of a kind that the target has kernels for."""

    def choose_layout_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> LayoutTiers:
        """The tiers over a weight whose bytes may be put in another order; none by default."""
        del problem, facts
        return LayoutTiers()

    @abstractmethod
    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """``verify`` for a problem of a kind that the target has kernels for."""

    @abstractmethod
    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """The launches that serve all ``tiers`` and the buffers between them.

        All tiers share the launches and the bindings. A launch that a tier does not need has 0
        workgroups for every M, and is recorded all the same where ``takes_empty_grids``. The
        launches of a grouped matmul have ``result`` among their updates: it comes with the rows of
        no group in it.
        """

    @abstractmethod
    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """The launch's grid for ``m`` rows; ``m`` is an integer where it is known."""

    def workgroup_memory(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> int:
        """Bytes of shared memory to reserve for the kernel beside what it allocates.

        IREE gives every export of an executable the sum of all its kernels' allocations. A target
        whose kernels differ much in size allocates nothing and states each one's need here.
        """
        del problem, tier, launch
        return 0

    @abstractmethod
    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """The ``#iree_codegen.translation_info`` attribute of the kernel, as text."""

    @abstractmethod
    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Write the kernel's body at the current insertion point; the return op comes after it."""

    def finish_binaries(self, module: ir.Module) -> None:
        """Replace the data of executables in a module at phase hal."""
        del module


def _quantize_mismatch(problem: ScaledMatmul, tier: KernelTier) -> str | None:
    """Why a tier's ``quantize`` does not fit the problem, or None."""
    if problem.lhs_quantize and tier.quantize == "none":
        return "expected quantize 'fused' or 'separate' for an activation that is to be quantised"
    if not problem.lhs_quantize and tier.quantize != "none":
        return (
            f"expected quantize 'none' but got '{tier.quantize}': no activation is quantised "
            "for this matmul alone"
        )
    return None
