# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""What the executor refuses, one rule a test; each names the instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from block32.tools.gfx950_executor import (
    Buffer,
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    StaleReadError,
    StuckError,
    UninitialisedError,
    UnknownInstructionError,
    decode,
)
from block32.tools.gfx950_executor.program import compile_instruction
from tests.tools.gfx950_executor.bench import EXEC_REGISTER, Bench, ins, s, v, wait

LANE = np.arange(64)


def words(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


# ---- waits


def test_reading_a_loaded_register_needs_a_wait() -> None:
    bench = Bench([words()])
    code = [
        ins.global_load_dword(v[1], v[0], saddr=s[2:3]),
        ins.v_add_u32_e32(v[2], v[1], v[1]),
    ]
    with pytest.raises(MissingWaitError, match=r"v_add_u32 at 0x8.*v1 .*global_load_dword at 0x0"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_overwriting_a_register_being_loaded_needs_a_wait() -> None:
    bench = Bench([words()])
    code = [
        ins.global_load_dword(v[1], v[0], saddr=s[2:3]),
        ins.v_mov_b32_e32(v[1], 0),
    ]
    with pytest.raises(MissingWaitError, match="v_mov_b32"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_a_later_load_may_overtake_an_earlier_one_to_its_register() -> None:
    """Memory loads return in issue order, so the later value stays; it needs a wait of its own."""
    bench = Bench([words(128)])
    code = [
        ins.global_load_dword(v[1], v[0], saddr=s[2:3]),
        ins.global_load_dword(v[1], v[0], saddr=s[2:3], offset=256),
    ]
    wave = bench.run(
        [*code, wait(vm=0), ins.v_mov_b32_e32(v[2], v[1])],
        vector={0: 4 * LANE},
        scalar=bench.pointer(0),
    )
    np.testing.assert_array_equal(wave.v[2], LANE + 64)
    again = Bench([words(128)])
    with pytest.raises(MissingWaitError, match="v1"):
        again.run(
            [*code, wait(vm=1), ins.v_mov_b32_e32(v[2], v[1])],
            vector={0: 4 * LANE},
            scalar=again.pointer(0),
        )


FLAT = [ins.flat_load_dword(v[1], v[4:5])]
LATER = [ins.global_load_dword(v[1], v[0], saddr=s[2:3], offset=256)]


@pytest.mark.parametrize(
    ("between", "names"),
    [
        ([], "v1"),
        ([wait(vm=0)], "v1"),
        ([wait(lgkm=0)], None),
        ([wait(vm=0, lgkm=0)], None),
    ],
)
def test_nothing_overtakes_a_flat_load(between: list[Any], names: str | None) -> None:
    """A flat load may come from LDS, out of order: lgkmcnt has to say that it did not."""
    bench = Bench([words(128)])
    (low, high) = bench.pointer(0).values()
    code = [*FLAT, *between, *LATER, wait(vm=0, lgkm=0), ins.v_mov_b32_e32(v[2], v[1])]
    setting = {"vector": {0: 4 * LANE, 4: low + 4 * LANE, 5: high}, "scalar": bench.pointer(0)}
    if names is None:
        np.testing.assert_array_equal(bench.run(code, **setting).v[2], LANE + 64)
        return
    with pytest.raises(MissingWaitError, match=names):
        bench.run(code, **setting)


def test_a_count_above_zero_says_nothing_while_a_flat_load_is_outstanding() -> None:
    bench = Bench([words(128)])
    (low, high) = bench.pointer(0).values()
    code = [
        ins.global_load_dword(v[2], v[0], saddr=s[2:3]),
        *FLAT,
        wait(vm=1),
        ins.v_mov_b32_e32(v[3], v[2]),
    ]
    with pytest.raises(MissingWaitError, match="v2"):
        bench.run(
            code,
            vector={0: 4 * LANE, 4: low + 4 * LANE, 5: high},
            scalar=bench.pointer(0),
        )


def test_an_lds_read_is_not_overtaken() -> None:
    """LDS and memory return in no order of each other."""
    bench = Bench([words(128)], lds=256)
    code = [
        ins.ds_write_b32(v[0], v[0]),
        ins.ds_read_b32(v[1], v[0]),
        *LATER,
    ]
    with pytest.raises(MissingWaitError, match="v1"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_an_undefined_high_half_of_an_addend_leaves_the_low_result_defined() -> None:
    """LLVM uses the 64-bit multiply-add for 32-bit results; v5 here was never written."""
    bench = Bench([words()])
    mad = ins.v_mad_u64_u32(v[2:3], s[8:9], v[0], 3, v[4:5])
    wave = bench.run([mad, ins.v_mov_b32_e32(v[6], v[2])], vector={0: LANE, 4: LANE})
    np.testing.assert_array_equal(wave.v[6], 4 * LANE)
    assert not wave.v_poison[6].any()
    again = Bench([words()])
    store = ins.global_store_dword(v[7], v[3], saddr=s[2:3])
    with pytest.raises(UninitialisedError):
        again.run([mad, store], vector={0: LANE, 4: LANE, 7: 4 * LANE}, scalar=again.pointer(0))


def test_a_count_releases_the_oldest_loads_only() -> None:
    bench = Bench([words()])
    code = [
        ins.global_load_dword(v[1], v[0], saddr=s[2:3]),
        ins.global_load_dword(v[2], v[0], saddr=s[2:3]),
        wait(vm=1),
        ins.v_mov_b32_e32(v[3], v[1]),
    ]
    wave = bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))
    np.testing.assert_array_equal(wave.v[3], LANE)
    again = Bench([words()])
    with pytest.raises(MissingWaitError, match="v2"):
        again.run(
            [*code, ins.v_mov_b32_e32(v[3], v[2])],
            vector={0: 4 * LANE},
            scalar=again.pointer(0),
        )


def test_scalar_loads_come_back_in_any_order() -> None:
    bench = Bench([words()])
    code = [
        ins.s_load_dword(s[8], s[2:3], offset=0, imm=1),
        ins.s_load_dword(s[9], s[2:3], offset=4, imm=1),
        wait(lgkm=1),
        ins.s_add_u32(s[10], s[8], s[8]),
    ]
    with pytest.raises(MissingWaitError, match="s8"):
        bench.run(code, scalar=bench.pointer(0))


def test_lds_reads_need_a_wait() -> None:
    bench = Bench(lds=256)
    code = [
        ins.ds_write_b32(addr=v[0], data0=v[1]),
        ins.ds_read_b32(v[2], v[0]),
        ins.v_mov_b32_e32(v[3], v[2]),
    ]
    with pytest.raises(MissingWaitError, match="v2"):
        bench.run(code, vector={0: 4 * LANE, 1: 5})


def test_reading_lds_before_a_direct_load_arrived() -> None:
    bench = Bench([words()], lds=256)
    load = ins.buffer_load_dword(v[9], v[0], s[4:7], 0, offen=1, lds=1)
    read = ins.ds_read_b32(v[2], v[0])
    scalar = {**bench.resource(0), 124: 0}
    with pytest.raises(MissingWaitError, match="LDS byte"):
        bench.run([load, read], vector={0: 4 * LANE}, scalar=scalar)


# ---- bounds


def test_memory_out_of_bounds() -> None:
    bench = Bench([words(63)])
    code = [ins.global_load_dword(v[1], v[0], saddr=s[2:3])]
    with pytest.raises(OutOfBoundsError, match=r"4 bytes at offset 252 of buffer 0, which has 252"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_inactive_lanes_may_point_anywhere() -> None:
    bench = Bench([words(63)])
    code = [ins.global_load_dword(v[1], v[0], saddr=s[2:3]), wait(vm=0)]
    bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0), exec_mask=(1 << 63) - 1)


def test_lds_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError, match=r"LDS offset 252"):
        Bench(lds=252).run([ins.ds_write_b32(addr=v[0], data0=v[0])], vector={0: 4 * LANE})


def test_scratch_out_of_bounds_and_back() -> None:
    store = ins.scratch_store_dword(addr=v[0], data=v[1], saddr=ins.src[127], sve=1)
    load = ins.scratch_load_dword(v[2], v[0], saddr=ins.src[127], sve=1)
    wave = Bench(scratch=16).run([store, load, wait(vm=0)], vector={0: 12, 1: LANE * 3})
    np.testing.assert_array_equal(wave.v[2], LANE * 3)
    with pytest.raises(OutOfBoundsError, match="scratch offset 16"):
        Bench(scratch=16).run([store], vector={0: 16, 1: LANE})


def test_an_unaligned_atomic() -> None:
    bench = Bench([words()])
    code = [ins.global_atomic_add(v[1], v[0], v[2], saddr=s[2:3])]
    with pytest.raises(OutOfBoundsError, match=r"global_atomic_add at 0x0: .* not aligned"):
        bench.run(code, vector={0: 2, 2: 1}, scalar=bench.pointer(0))


def test_a_store_to_a_read_only_buffer() -> None:
    bench = Bench([Buffer(words(), writable=False)])
    code = [ins.global_store_dword(addr=v[0], data=v[0], saddr=s[2:3])]
    with pytest.raises(OutOfBoundsError, match="read-only"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_soffset_that_decides_the_bounds_check_is_refused() -> None:
    bench = Bench([words(128)])
    code = [ins.buffer_load_dword(v[1], v[0], s[4:7], s[8], offen=1)]
    scalar = {**bench.resource(0, 256), 8: 16}
    with pytest.raises(OutOfBoundsError, match="soffset 16"):
        bench.run(code, vector={0: 4 * LANE}, scalar=scalar)


def test_registers_beyond_the_allocation() -> None:
    inst = decode(ins.v_mov_b32_e32(v[40], 0).to_bytes(), 0)
    with pytest.raises(OutOfBoundsError, match=r"v40; the kernel has 40"):
        compile_instruction(inst, (40, 0))


# ---- uninitialised values


def test_an_uninitialised_register_must_not_be_stored() -> None:
    bench = Bench([words()])
    code = [
        ins.v_add_u32_e32(v[2], v[0], v[1]),
        ins.global_store_dword(addr=v[0], data=v[2], saddr=s[2:3]),
    ]
    with pytest.raises(UninitialisedError, match=r"global_store_dword at 0x4: .* lane 0"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_masked_poison_is_harmless() -> None:
    bench = Bench([words()])
    code = [
        ins.v_and_b32_e32(v[2], 0, v[1]),
        ins.v_lshlrev_b32_e32(v[3], 8, v[1]),
        ins.v_bfi_b32_e64(v[4], 0, v[3], v[2]),
        ins.global_store_dword(addr=v[0], data=v[4], saddr=s[2:3]),
        ins.global_store_byte(addr=v[0], data=v[3], saddr=s[2:3]),
    ]
    data = words() + 1
    bench = Bench([data])
    bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))
    np.testing.assert_array_equal(data, 0)


def test_poison_travels_through_lds() -> None:
    bench = Bench([words()], lds=512)
    code = [
        ins.ds_read_b32(v[2], v[0], offset0=4),
        wait(lgkm=0),
        ins.global_store_dword(addr=v[0], data=v[2], saddr=s[2:3]),
    ]
    with pytest.raises(UninitialisedError, match="global_store_dword"):
        bench.run(code, vector={0: 4 * LANE}, scalar=bench.pointer(0))


def test_an_uninitialised_buffer_must_not_reach_a_store() -> None:
    bench = Bench([words(), Buffer(words(), initialised=False)])
    code = [
        ins.global_load_dword(v[2], v[0], saddr=s[4:5]),
        wait(vm=0),
        ins.global_store_dword(addr=v[0], data=v[2], saddr=s[2:3]),
    ]
    scalar = {**bench.pointer(0), **bench.pointer(1, 4)}
    with pytest.raises(UninitialisedError):
        bench.run(code, vector={0: 4 * LANE}, scalar=scalar)


def test_an_uninitialised_address() -> None:
    bench = Bench([words()])
    with pytest.raises(UninitialisedError, match="an address"):
        bench.run([ins.global_load_dword(v[2], v[1], saddr=s[2:3])], scalar=bench.pointer(0))


def test_a_branch_on_an_uninitialised_value() -> None:
    code = [ins.s_cmp_eq_u32(s[8], 0), ins.s_cbranch_scc1(0)]
    with pytest.raises(UninitialisedError, match="scc"):
        Bench().run(code)
    with pytest.raises(UninitialisedError, match="vcc"):
        Bench().run([ins.v_cmp_eq_u32_e32(0, v[3]), ins.s_cbranch_vccnz(0)])


# ---- races between waves


def exchange(*between: object) -> list[object]:
    """Each wave writes its 256 bytes of LDS and reads the next wave's."""
    return [
        ins.s_lshl_b32(s[8], s[0], 8),
        ins.v_add_u32_e32(v[2], s[8], v[0]),
        ins.ds_write_b32(addr=v[2], data0=v[2]),
        *between,
        ins.v_xor_b32_e32(v[3], s[9], v[2]),
        ins.ds_read_b32(v[4], v[3]),
        wait(lgkm=0),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_lds_exchange_needs_wait_and_barrier(seed: int) -> None:
    vector, scalar = {0: 4 * LANE}, {9: 256}
    bench = Bench(lds=512, waves=2)
    bench.run(exchange(wait(lgkm=0), ins.s_barrier(0)), vector, scalar, seed=seed)
    np.testing.assert_array_equal(bench.waves[0].v[4], 256 + 4 * LANE)
    for broken in ([wait(lgkm=0)], [ins.s_barrier(0)], []):
        with pytest.raises(RaceError, match=r"wave [01] (reads|writes) LDS bytes"):
            Bench(lds=512, waves=2).run(exchange(*broken), vector, scalar, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_memory_exchange_inside_a_workgroup(seed: int) -> None:
    def code(*between: object) -> list[object]:
        return [
            ins.s_lshl_b32(s[8], s[0], 8),
            ins.v_add_u32_e32(v[5], s[8], v[0]),
            ins.global_store_dword(addr=v[5], data=v[5], saddr=s[2:3]),
            *between,
            ins.v_xor_b32_e32(v[3], s[9], v[5]),
            ins.global_load_dword(v[4], v[3], saddr=s[2:3]),
            wait(vm=0),
        ]

    def run(*between: object) -> Bench:
        bench = Bench([words(128)], waves=2)
        bench.run(code(*between), {0: 4 * LANE}, {9: 256, **bench.pointer(0)}, seed=seed)
        return bench

    np.testing.assert_array_equal(run(wait(vm=0), ins.s_barrier(0)).waves[0].v[4], 256 + 4 * LANE)
    for broken in ([wait(vm=0)], [ins.s_barrier(0)]):
        with pytest.raises(RaceError, match="buffer 0"):
            run(*broken)


def test_overwriting_what_another_wave_reads() -> None:
    code = [
        ins.s_lshl_b32(s[8], s[0], 8),
        ins.global_load_dword(v[4], v[0], saddr=s[2:3]),
        wait(vm=0),
        ins.global_store_dword(addr=v[0], data=v[4], saddr=s[2:3]),
    ]
    bench = Bench([words()], waves=2)
    with pytest.raises(RaceError, match="buffer 0"):
        bench.run(code, {0: 4 * LANE}, bench.pointer(0))


# ---- between workgroups


def publish(
    *,
    drain: bool = True,
    write_back: bool = True,
    store_sc1: int = 0,
    load_sc0: int = 0,
    load_sc1: int = 1,
    invalidate: bool = False,
) -> list[object]:
    """Workgroup i stores part i and counts; the last one sums both parts into the result.

    s2: parts, s4: counter, s6: result.
    """
    through = [ins.buffer_wbl2(v[0], v[0], s[4:7], sc1=1)] if write_back else []
    return [
        ins.s_lshl_b32(s[8], s[1], 8),
        ins.v_add_u32_e32(v[5], s[8], v[0]),
        ins.v_add_u32_e32(v[6], 7, v[5]),
        ins.global_store_dword(addr=v[5], data=v[6], saddr=s[2:3], sc1=store_sc1),
        *through,
        *([wait(vm=0)] if drain else []),
        ins.s_mov_b64(EXEC_REGISTER, 1),
        ins.global_atomic_add(v[8], v[1], v[2], saddr=s[4:5], sc0=1),
        wait(vm=0),
        *([ins.buffer_inv(v[0], v[0], s[4:7], sc1=1)] if invalidate else []),
        ins.v_readfirstlane_b32_e32(v[9], v[8]),
        ins.s_mov_b64(EXEC_REGISTER, -1),
        ins.s_cmp_eq_u32(s[9], 1),
        ins.s_cbranch_scc0(8),
        ins.global_load_dword(v[9], v[0], saddr=s[2:3], sc0=load_sc0, sc1=load_sc1),
        ins.global_load_dword(v[10], v[0], saddr=s[2:3], offset=256, sc0=load_sc0, sc1=load_sc1),
        wait(vm=0),
        ins.v_add_u32_e32(v[9], v[9], v[10]),
        ins.global_store_dword(addr=v[0], data=v[9], saddr=s[6:7]),
    ]


def run_publish(seed: int, xcds: int = 0, workgroups: int = 2, **options: Any) -> np.ndarray:
    parts, counter, result = words(128), np.zeros(1, np.uint32), words()
    bench = Bench([parts, counter, result], workgroups=workgroups, xcds=xcds)
    scalar = {**bench.pointer(0), **bench.pointer(1, 4), **bench.pointer(2, 6)}
    bench.run(publish(**options), {0: 4 * LANE, 1: 0, 2: 1}, scalar, seed=seed)
    return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [{}, {"write_back": False, "store_sc1": 1}, {"load_sc1": 0, "invalidate": True}],
    ids=["wbl2", "store sc1", "buffer_inv"],
)
def test_arrival_counter_protocol(seed: int, options: dict[str, Any]) -> None:
    np.testing.assert_array_equal(run_publish(seed, **options), 8 * LANE + 256 + 14)


@pytest.mark.parametrize("seed", range(6))
def test_arrival_counter_without_draining_stores(seed: int) -> None:
    with pytest.raises(RaceError, match="global_load_dword"):
        run_publish(seed, drain=False, write_back=False, store_sc1=1)


@pytest.mark.parametrize("seed", range(6))
def test_partials_read_without_bypass_bits(seed: int) -> None:
    with pytest.raises(StaleReadError, match="without sc1 or an earlier buffer_inv"):
        run_publish(seed, load_sc1=0)


@pytest.mark.parametrize("seed", range(6))
def test_partials_left_in_another_l2(seed: int) -> None:
    with pytest.raises(StaleReadError, match="another XCD's L2"):
        run_publish(seed, write_back=False)


def test_workgroups_of_one_xcd_share_the_l2() -> None:
    # With one XCD every pair of workgroups shares it.
    cheap: dict[str, Any] = {"write_back": False, "load_sc0": 1, "load_sc1": 0}
    np.testing.assert_array_equal(run_publish(1, xcds=1, **cheap), 8 * LANE + 256 + 14)
    with pytest.raises(StaleReadError):
        run_publish(1, xcds=8, **cheap)
    with pytest.raises(StaleReadError, match="sc0 or sc1"):
        run_publish(1, xcds=1, write_back=False, load_sc1=0)


def test_two_workgroups_store_to_one_place() -> None:
    bench = Bench([words()], workgroups=2)
    code = [ins.global_store_dword(addr=v[0], data=v[0], saddr=s[2:3])]
    with pytest.raises(RaceError, match=r"workgroup [01]"):
        bench.run(code, {0: 4 * LANE}, bench.pointer(0))


# ---- control


def test_a_barrier_that_one_wave_skips() -> None:
    code = [
        ins.s_cmp_eq_u32(s[0], 0),
        ins.s_cbranch_scc1(1),
        ins.s_barrier(0),
    ]
    with pytest.raises(StuckError, match="wave 0 never reaches"):
        Bench(waves=2).run(code)


def test_an_endless_loop() -> None:
    with pytest.raises(StuckError, match="still runs"):
        Bench().run([ins.s_branch(0xFFFF)])


def test_an_instruction_without_a_meaning() -> None:
    with pytest.raises(UnknownInstructionError, match="v_cubeid_f32"):
        Bench().run([ins.v_cubeid_f32_e64(v[0], v[0], v[0], v[0])], vector={0: 1})


def test_one_seed_is_one_schedule() -> None:
    def failure(seed: int) -> str:
        bench = Bench([words()], workgroups=4, waves=2)
        code = [ins.s_nop(0)] * 40 + [ins.global_store_dword(addr=v[0], data=v[0], saddr=s[2:3])]
        with pytest.raises(RaceError) as caught:
            bench.run(code, {0: 4 * LANE}, bench.pointer(0), seed=seed)
        return str(caught.value)

    assert failure(1) == failure(1)
    assert len({failure(seed) for seed in range(12)}) > 1
