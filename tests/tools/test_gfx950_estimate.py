# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The in-order model on loops whose time can be told by hand, and on kernels that it ranks."""

from __future__ import annotations

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_estimate import estimate
from block32.tools.gfx950_executor import Instruction, mutate
from tests.lowering.gfx950.kernels import compile_kernels, needs_executor


def instruction(pc: int, name: str, encoding: str = "SOPP", **fields: int) -> Instruction:
    return Instruction(pc, 4, name, encoding, {"simm16": 0, **fields}, {}, None)


MFMA = "v_mfma_scale_f32_16x16x128_f8f6f4"
WAIT_FOR_ALL = 0x0070  # vmcnt(0) lgkmcnt(0)


def loop_of(*body: tuple[str, str, int]) -> list[Instruction]:
    """The body and a branch back to its start."""
    code = [instruction(4 * i, name, kind, simm16=v) for i, (name, kind, v) in enumerate(body)]
    back = -(len(body) + 1) & 0xFFFF
    return [*code, instruction(4 * len(body), "s_cbranch_scc1", simm16=back)]


def test_matrix_instructions_alone_keep_the_unit_busy():
    result = estimate(loop_of(*[(MFMA, "VOP3PX2", 0)] * 8), waves=1)
    assert result is not None
    assert result.busy == pytest.approx(1.0, abs=0.02)
    assert result.clocks == pytest.approx(8 * 32, rel=0.02)


def test_a_load_that_is_waited_for_at_once_costs_its_whole_way():
    body = [
        ("buffer_load_dwordx4", "MUBUF", 0),
        ("s_waitcnt", "SOPP", WAIT_FOR_ALL),
        (MFMA, "VOP3PX2", 0),
    ]
    result = estimate(loop_of(*body), waves=1)
    assert result is not None
    assert result.clocks == pytest.approx(800, rel=0.05)
    assert result.bytes_per_clock == pytest.approx(1024 / 800, rel=0.05)


def test_code_without_a_loop_has_no_estimate():
    assert estimate([instruction(0, MFMA, "VOP3PX2")], waves=1) is None


@needs_executor
def test_deeper_pipelines_and_larger_tiles_rank_higher():
    problem = ScaledMatmul(m=None, n=1024, k=8192)

    def busy(*tile: int, stages: int) -> float:
        tier = KernelTier("tiled", tile=tile, warps=4, stages=stages)  # type: ignore[arg-type]
        hsaco = compile_kernels(problem, (tier,))
        result = estimate(mutate.instructions(hsaco, "gemm_tier0"), waves=1)
        assert result is not None
        return result.busy

    assert busy(64, 64, 256, stages=2) < busy(64, 64, 256, stages=4)
    assert busy(64, 64, 256, stages=2) < busy(128, 256, 256, stages=2)
