# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Apple GPUs on IREE's Metal device: ``apple-m5`` multiplies fp8, ``apple-m1`` decodes it first."""

from __future__ import annotations

from iree.compiler import ir

from block32.dialects.diagnostics import DiagnosticError
from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.apple import dense, gemv, grouped, install, library, select
from block32.lowering.apple.architecture import M1, M5, Architecture
from block32.lowering.apple.executable import ExecutableError
from block32.lowering.apple.llvm14 import LlvmError
from block32.lowering.apple.program import stub_translation_info
from block32.lowering.apple.signature import KernelError
from block32.lowering.common.index import Index, ceil_div
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import (
    RESULT,
    DeviceFacts,
    KernelPlan,
    Launch,
    Selection,
    Target,
)


class AppleTarget(Target):
    """Macs of one architecture."""

    architecture: Architecture
    # Whether Metal takes a grid of zero threadgroups has not been tried on a device.
    guards_empty = True
    finishes_binaries = True
    groups = True
    extra = "apple"

    def compile_flags(self) -> tuple[str, ...]:
        """IREE's Metal device, with Metal source for IREE's own kernels.

        On a Mac IREE would else call Xcode's compiler for every kernel, stubs among them.
        """
        return ("--iree-hal-target-device=metal", "--iree-metal-compile-to-metallib=false")

    def refused_flag(self, flags: tuple[str, ...]) -> str | None:
        """Another platform than macOS: its loader does not take the kernels' library."""
        prefix = "--iree-metal-target-platform="
        platforms = [flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)]
        if not platforms or platforms[-1] == "macos":
            return None
        return (
            f"the kernels of {self.name} are for macOS but the flags ask for {platforms[-1]}; "
            "leave out --iree-metal-target-platform, or use --target=portable "
            "--iree-hal-target-device=metal"
        )

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        """A GEMV for one row where w is not wide, 64x64 tiles otherwise, also of groups."""
        del facts
        try:
            select.matmul_of(problem, self.architecture)
        except KernelError as error:
            return Selection(None, str(error))
        tiers = select.tiers(problem, self.architecture)
        forms = " then ".join(tier.form for tier in tiers)
        return Selection(KernelConfig(self.name, tiers), f"{forms}, simdgroup matrices in AIR")

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        """Only the forms and tiles of ``select`` exist."""
        del facts
        try:
            select.matmul_of(problem, self.architecture)
        except KernelError as error:
            return str(error)
        return select.mismatch(tier, problem, self.architecture)

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        """One launch; it leaves rows of no group in the result as they are."""
        del tiers
        updates, writes = ((RESULT,), ()) if problem.grouping else ((), (RESULT,))
        return KernelPlan((Launch("gemm", problem.operand_names, writes, updates),))

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        """A padded Z-order grid in one dimension, one simdgroup a column, or slots for groups."""
        del launch
        if tier.form == "grouped":
            return grouped.grid(select.matmul_of(problem, self.architecture), m)
        if tier.form == "gemv":
            return ceil_div(problem.n, gemv.COLUMNS) * m, 1, 1
        tiles_m, tiles_n = ceil_div(m, dense.TILE), ceil_div(problem.n, dense.TILE)
        return dense.next_power_of_two(tiles_m) * dense.next_power_of_two(tiles_n), 1, 1

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        """For the stub: IREE's SPIR-V pipeline takes it as it is."""
        del problem, launch
        threads = gemv.THREADS if tier.form == "gemv" else dense.THREADS
        return stub_translation_info(threads)

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        """Leaves the body empty and records the AIR kernel that will take its place.

        Raises:
            DiagnosticError: The problem has no kernel here, or llvmlite is missing or of the wrong
                version.
        """
        del launch, kernel
        function = ir.InsertionPoint.current.block.owner.operation
        name = ir.StringAttr(function.attributes["sym_name"]).value
        try:
            compiled = library.compile_matmul(
                select.matmul_of(problem, self.architecture), tier.form, name
            )
        except (KernelError, LlvmError) as error:
            raise DiagnosticError(self.name, str(error)) from error
        install.attach(function, compiled)

    def finish_binaries(self, module: ir.Module) -> None:
        """Puts the recorded kernels into the executables of a module at phase hal.

        Raises:
            DiagnosticError: An executable is not for IREE's Metal device.
        """
        with module.context, ir.Location.unknown():
            try:
                install.install(module.operation)
            except ExecutableError as error:
                raise DiagnosticError(self.name, str(error)) from error


class AppleM5Target(AppleTarget):
    """Macs whose GPU has 16x16x16 simdgroup matrices with fp8 operands: the M5 family, macOS 26."""

    name = M5.name
    architecture = M5


class AppleM1Target(AppleTarget):
    """Macs whose GPU has 8x8 simdgroup matrices: M1 to M4, macOS 14."""

    name = M1.name
    architecture = M1
