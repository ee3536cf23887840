# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiers, counters that start as zeros, and slots that nobody reads, through a spec.

The target here computes no matmul: its kernel says in each row of y which tier it is and what it
found in the counter.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from iree import runtime
from iree.compiler import ir
from iree.compiler.dialects import arith, memref, scf

from block32.dialects.kernel import KernelConfig, KernelTier
from block32.lowering.common.index import Index, as_value, constant
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import (
    RESULT,
    Buffer,
    DeviceFacts,
    KernelPlan,
    Launch,
    Selection,
    Target,
)
from block32.lowering.targets import TARGETS
from tests.tools.specs import GENERIC, apply_spec, write_spec

DIRTY = 7


class ProbeTarget(Target):
    name = "probe"

    def compile_flags(self) -> tuple[str, ...]:
        return GENERIC

    def choose_tiers(self, problem: ScaledMatmul, facts: DeviceFacts) -> Selection:
        tiers = (KernelTier("gemv", max_m=1), KernelTier("stream", max_m=3), KernelTier("tiled"))
        return Selection(KernelConfig(self.name, tiers), "a test")

    def check_tier(self, problem: ScaledMatmul, tier: KernelTier, facts: DeviceFacts) -> str | None:
        return None

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        launch = Launch("gemm", problem.operand_names, ("slots", RESULT), ("counters",))
        counters = Buffer("i32", lambda _m: 4, zeroed=True)
        return KernelPlan(
            (launch,), {"counters": counters, "slots": Buffer("f32", lambda m: m * 2)}
        )

    def workgroups(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, m: Index
    ) -> tuple[Index, Index, Index]:
        return 1, 1, 1

    def translation_info(self, problem: ScaledMatmul, tier: KernelTier, launch: Launch) -> str:
        return "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>"

    def emit(
        self, problem: ScaledMatmul, tier: KernelTier, launch: Launch, kernel: KernelContext
    ) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        zero, one = constant(0), constant(1)
        counters = kernel.memref("counters", "memref<4xi32>")
        result = kernel.memref(RESULT, f"memref<?x{problem.n}xf32>", (kernel.m,))
        tier_number = ("gemv", "stream", "tiled").index(tier.form) * 100
        seen = memref.load(counters, [zero])
        value = arith.sitofp(f32, arith.addi(arith.constant(i32, tier_number), seen))
        for row in scf.for_(zero, as_value(kernel.m), one):
            memref.store(value, result, [row, zero])
            scf.yield_([])
        memref.store(arith.constant(i32, DIRTY), counters, [zero])


MODEL = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
func.func @main(%x: tensor<?x32xf8E4M3FN>, %xs: tensor<?x1xf8E8M0FNU>,
    %w: tensor<1x32xf8E4M3FN>, %ws: tensor<1x1xf8E8M0FNU>, %any: tensor<?x1xf32>) -> tensor<?x1xf32> {
  %cst = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%cst : f32) outs(%any : tensor<?x1xf32>) -> tensor<?x1xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
      ins(%x, %xs, %w, %ws : tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>, tensor<1x32xf8E4M3FN>, tensor<1x1xf8E8M0FNU>)
      outs(%zero : tensor<?x1xf32>) -> tensor<?x1xf32>
  return %y : tensor<?x1xf32>
}
"""  # noqa: E501


def test_tiers_counters_and_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "probe", (__name__, "ProbeTarget"))
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(MODEL)
    write_spec(model, spec, "--target=probe")
    vmfb = apply_spec(model, spec, *GENERIC)
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    function = runtime.load_vm_module(module, config)["main"]
    for m, tier_number in ((1, 0), (2, 100), (3, 100), (4, 200), (9, 200), (1, 0)):
        x = np.zeros((m, 32), ml_dtypes.float8_e4m3fn)
        scale = np.full((m, 1), 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)
        arguments = [x, scale, x[:1], scale[:1], np.zeros((m, 1), np.float32)]
        for _ in range(2):  # what one call leaves in a counter is nothing to the next
            got = function(*arguments).to_host()
            np.testing.assert_array_equal(got, np.full((m, 1), tier_number, np.float32))
