# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The estimate of a launch: the way of a wave through a kernel, and the limit that decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.problem import ScaledMatmul
from block32.tools.gfx950_estimate import path_clocks, wave_path
from block32.tools.gfx950_launch_time import Way, Work, launch_time, work_of
from block32.tools.gfx950_listing import KernelFacts, Mix
from tests.tools.test_gfx950_estimate import MFMA, WAIT_FOR_ALL, instruction


def kernel_with_a_loop(in_loop: int, behind: int):
    """A load, a loop of matrix instructions, more of them behind it, and a store."""
    names = [("buffer_load_dwordx4", "MUBUF"), ("s_waitcnt", "SOPP")]
    names += [(MFMA, "VOP3PX2")] * in_loop + [("s_cbranch_scc1", "SOPP")]
    names += [(MFMA, "VOP3PX2")] * behind + [("buffer_store_dwordx4", "MUBUF")]
    code = []
    for number, (name, encoding) in enumerate(names):
        simm16 = {"s_waitcnt": WAIT_FOR_ALL, "s_cbranch_scc1": -(in_loop + 1) & 0xFFFF}.get(name, 0)
        code.append(instruction(4 * number, name, encoding, simm16=simm16))
    return code


@pytest.mark.parametrize(("units", "in_loop", "behind", "taken"), [(12, 4, 3, 12), (14, 4, 3, 14)])
def test_a_wave_takes_the_loop_as_often_as_its_work_needs(units, in_loop, behind, taken):
    path = wave_path(kernel_with_a_loop(in_loop, behind), 32 * units)
    assert sum(i.name == MFMA for i in path) == taken
    assert path[0].name == "buffer_load_dwordx4"
    assert path[-1].name == "buffer_store_dwordx4", "what follows the loop counts"


def test_a_loop_that_leaves_its_last_turn_to_the_code_behind_it_takes_one_less():
    path = wave_path(kernel_with_a_loop(in_loop=4, behind=4), 32 * 20)
    assert sum(i.name == "s_cbranch_scc1" for i in path) == 4
    assert sum(i.name == MFMA for i in path) == 20


def test_a_second_wave_fills_the_time_that_one_waits():
    path = kernel_with_a_loop(in_loop=8, behind=0)
    alone, together = path_clocks(path, 1), path_clocks(path, 2)
    assert alone == pytest.approx(800 + 8 * 32, rel=0.05)
    assert together == pytest.approx(800 + 16 * 32, rel=0.05)


FACTS = KernelFacts("k", 64, 0, 32, 0, 0, 0, 0, 256, 8, Mix(), None)


def work(**changes: float) -> Work:
    values = Work(
        waves=4,
        workgroups=256,
        matrix_clocks=32.0 * 8,
        weight_bytes=1024.0,
        weight_bytes_of_clock=4.0,
        moved_bytes=0.0,
        flops=0.0,
    )
    return replace(values, **changes)


def test_the_slowest_limit_decides():
    way = Way.create(kernel_with_a_loop(in_loop=8, behind=0), 32 * 8)
    in_order = launch_time(way, FACTS, work())
    assert in_order.seconds == in_order.in_order_seconds > 0
    assert launch_time(way, FACTS, work(moved_bytes=8e12)).seconds == pytest.approx(1.0)
    assert launch_time(way, FACTS, work(flops=5e15)).seconds == pytest.approx(1.0)


def test_partial_sums_are_exchanged_after_the_work():
    way = Way.create(kernel_with_a_loop(in_loop=8, behind=0), 32 * 8)
    alone = launch_time(way, FACTS, work()).seconds
    assert launch_time(way, FACTS, work(slot_bytes=8e12)).seconds == pytest.approx(alone + 1.0)
    twice = launch_time(way, FACTS, work(has_second_launch=True)).seconds
    assert twice == pytest.approx(alone + 2e-6)


def test_more_workgroups_than_fit_take_further_rounds():
    way = Way.create(kernel_with_a_loop(in_loop=8, behind=0), 32 * 8)
    few = launch_time(way, replace(FACTS, occupancy=1), work())
    many = launch_time(way, replace(FACTS, occupancy=1), work(workgroups=257))
    assert many.in_order_seconds == pytest.approx(2 * few.in_order_seconds)


def test_work_counts_ranges_and_tiles_that_exist():
    problem = ScaledMatmul(m=None, n=100, k=2048)
    tier = KernelTier("tiled", tile=(64, 64, 256), warps=4, stages=2, splits=2)
    got = work_of(Geometry(problem, tier), 65)
    assert got.workgroups == 2 * 2 * 2
    assert got.matrix_clocks == 4 * (64 * 64 * 256 / 1024 / 4)
    assert got.weight_bytes == 64 * 1024 / 4
    assert got.moved_bytes == (65 + 100) * 2048 + (65 + 4) * 64 + 2 * 65 * 100
