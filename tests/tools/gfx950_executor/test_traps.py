# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Details of the hardware that emulators are known to get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from block32.tools.gfx950_executor import UnknownInstructionError, decode
from tests.tools.gfx950_executor.bench import Bench, ins, machine_code, s, v, wait

LANE = np.arange(64)
RANDOM = np.random.default_rng(950).integers(0, 1 << 32, 64, dtype=np.uint32)


def test_cache_maintenance_moves_no_data() -> None:
    wave = Bench().run(
        [ins.buffer_wbl2(v[0], v[0], s[4:7], sc1=1), ins.buffer_inv(v[0], v[0], s[4:7], sc1=1)],
        vector={0: RANDOM},
    )
    np.testing.assert_array_equal(wave.v[0], RANDOM)
    assert not wave.v_locked[0]


def dpp_move(target: int, source: int, control: int, **rest: int) -> object:
    masks = {"row_mask": 15, "bank_mask": 15, **rest}
    return ins.VOP1_DPP16(
        ins.VOP1Op.V_MOV_B32_E32, v[target], ins.DPP16, vsrc0=v[source], dpp=control, **masks
    )


def dpp_add(target: int, first: int, second: int, control: int, **rest: int) -> object:
    masks = {"row_mask": 15, "bank_mask": 15, **rest}
    return ins.VOP2_DPP16(
        ins.VOP2Op.V_ADD_U32_E32,
        v[target],
        ins.DPP16,
        v[second],
        vsrc0=v[first],
        dpp=control,
        **masks,
    )


def test_dpp_reads_all_lanes_before_it_writes_any() -> None:
    # row_shr:1 onto the source itself: done in place, lane 0's value would run down the row.
    wave = Bench().run([dpp_add(0, 0, 0, 0x111, bc=1)], vector={0: LANE + 1})
    before = np.where(LANE % 16 == 0, 0, LANE)
    np.testing.assert_array_equal(wave.v[0], LANE + 1 + before)


def test_dpp_lane_without_a_source_is_not_written() -> None:
    wave = Bench().run([dpp_move(1, 0, 0x111)], vector={0: LANE, 1: 1000})
    np.testing.assert_array_equal(wave.v[1], np.where(LANE % 16 == 0, 1000, LANE - 1))


def test_dpp_inactive_source_lane_counts_as_none() -> None:
    wave = Bench().run(
        [dpp_move(1, 0, 0x111, bc=1)], vector={0: LANE, 1: 1000}, exec_mask=~0b10 & (1 << 64) - 1
    )
    assert wave.v[1][2] == 0
    assert wave.v[1][1] == 1000
    assert wave.v[1][4] == 3


@pytest.mark.parametrize(
    ("control", "row_mask", "source"),
    [
        (0x142, 0xA, np.where(LANE // 16 % 2 == 1, LANE // 16 * 16 - 1, -1)),
        (0x143, 0xC, np.where(LANE >= 32, 31, -1)),
        (0x140, 0xF, LANE // 16 * 16 + 15 - LANE % 16),
        (0x141, 0xF, LANE // 8 * 8 + 7 - LANE % 8),
        (0x124, 0xF, LANE // 16 * 16 + (LANE - 4) % 16),
        (0x1B, 0xF, LANE // 4 * 4 + 3 - LANE % 4),
        (0x153, 0xF, LANE // 16 * 16 + 3),
    ],
    ids=["row_bcast15", "row_bcast31", "mirror", "half_mirror", "ror4", "quad_reverse", "newbcast"],
)
def test_dpp_patterns(control: int, row_mask: int, source: np.ndarray) -> None:
    wave = Bench().run([dpp_move(1, 0, control, row_mask=row_mask)], vector={0: RANDOM, 1: 77})
    np.testing.assert_array_equal(wave.v[1], np.where(source >= 0, RANDOM[source], 77))


def test_byte_and_short_buffer_loads_stay_narrow() -> None:
    data = np.arange(1, 71, dtype=np.uint8)  # the last bytes leave no room for a dword
    bench = Bench([data])
    code = [
        ins.buffer_load_ubyte(v[1], v[0], s[4:7], 0, offen=1, offset=6),
        ins.buffer_load_sbyte(v[2], v[0], s[4:7], 0, offen=1),
        ins.buffer_load_ushort(v[3], v[0], s[4:7], 0, offen=1, offset=5),
        wait(vm=0),
    ]
    data[:64] += 150
    wave = bench.run(code, vector={0: LANE}, scalar=bench.resource(0))
    np.testing.assert_array_equal(wave.v[1], data[6 + LANE])
    np.testing.assert_array_equal(wave.v[2].view(np.int32), data[LANE].view(np.int8))
    shorts = data[5 + LANE].astype(np.uint32) | data[6 + LANE].astype(np.uint32) << 8
    np.testing.assert_array_equal(wave.v[3], shorts)


def test_d16_loads_leave_the_other_half_undefined() -> None:
    data = np.arange(1000, 1064, dtype=np.uint16)
    bench = Bench([data], lds=256)
    code = [
        ins.buffer_load_short_d16(v[1], v[0], s[4:7], 0, offen=1),
        ins.buffer_load_short_d16_hi(v[2], v[0], s[4:7], 0, offen=1),
        ins.ds_write_b16(addr=v[0], data0=v[4]),
        wait(vm=0, lgkm=0),
        ins.ds_read_u16_d16(v[3], v[0]),
        wait(lgkm=0),
    ]
    old = {0: 2 * LANE, 1: 0xABCD1234, 2: 0xABCD1234, 3: 0xABCD1234, 4: LANE}
    wave = bench.run(code, vector=old, scalar=bench.resource(0))
    np.testing.assert_array_equal(wave.v[1] & 0xFFFF, data)
    np.testing.assert_array_equal(wave.v[2] >> 16, data)
    np.testing.assert_array_equal(wave.v[3] & 0xFFFF, LANE)
    for register, undefined in ((1, 0xFFFF0000), (2, 0xFFFF), (3, 0xFFFF0000)):
        np.testing.assert_array_equal(wave.v_poison[register], undefined)


def test_lds_and_memory_stores_from_accumulators() -> None:
    out = np.zeros(64, np.uint32)
    bench = Bench([out], lds=256)
    code = [
        ins.ds_write_b32(addr=v[0], data0=v[7], acc=1),
        wait(lgkm=0),
        ins.ds_read_b32(v[9], v[0], acc=1),
        wait(lgkm=0),
        ins.global_store_dword(addr=v[0], data=v[9], saddr=s[2:3], acc=1),
    ]
    values = {0: 4 * LANE, 7: 1, 9: 2, 256 + 7: RANDOM, 256 + 9: 3}
    wave = bench.run(code, vector=values, scalar=bench.pointer(0))
    np.testing.assert_array_equal(out, RANDOM)
    assert wave.v[9][0] == 2


def test_two_halves_that_end_like_a_scaled_mfma_are_not_one() -> None:
    # Any 8-byte instruction followed by a plain f8f6f4 MFMA must decode on its own.
    first = ins.v_add3_u32_e64(v[1], v[2], v[3], v[4])
    plain = ins.VOP3P_MFMA(
        ins.VOP3POp.V_MFMA_F32_16X16X128_F8F6F4, v[0:3], v[8:15], v[16:23], v[0:3]
    )
    code = machine_code([first, plain])
    assert [decode(code, 0).name, decode(code, 8).name] == [
        "v_add3_u32",
        "v_mfma_f32_16x16x128_f8f6f4",
    ]
    assert decode(code, 0).size == 8


def test_buffer_bounds_return_zero_and_drop_stores() -> None:
    data = np.arange(1, 41, dtype=np.uint32)
    bench = Bench([data])
    code = [
        ins.buffer_load_dword(v[1], v[0], s[4:7], 0, offen=1),
        ins.buffer_load_dwordx2(v[2:3], v[0], s[4:7], 0, offen=1, offset=4),
        wait(vm=0),
        ins.buffer_store_dword(v[4], v[0], s[4:7], 0, offen=1),
    ]
    expected = np.where(LANE < 30, LANE + 1, 0)
    wave = bench.run(code, vector={0: 4 * LANE, 4: 5}, scalar=bench.resource(0, 120))
    np.testing.assert_array_equal(wave.v[1], expected)
    # Each dword of a wide load is checked by itself.
    np.testing.assert_array_equal(wave.v[2], np.where(LANE < 29, LANE + 2, 0))
    np.testing.assert_array_equal(wave.v[3], np.where(LANE < 28, LANE + 3, 0))
    np.testing.assert_array_equal(data, np.where(np.arange(40) < 30, 5, np.arange(1, 41)))


@pytest.mark.parametrize("width", [1, 4])
def test_load_to_lds_places_each_lane(width: int) -> None:
    data = np.random.default_rng(1).integers(0, 1 << 32, 64 * width, dtype=np.uint32)
    bench = Bench([data], lds=4096)
    load = {1: ins.buffer_load_dword, 4: ins.buffer_load_dwordx4}[width]
    code = [
        load(v[9 : 8 + width], v[0], s[4:7], 0, offen=1, lds=1),
        wait(vm=0),
    ]
    scalar = {**bench.resource(0), 124: 512}
    order = (LANE * 5 + 3) % 64
    bench.run(code, vector={0: 4 * width * order}, scalar=scalar)
    stored = bench.groups[0].lds.data[512 : 512 + 256 * width].view(np.uint32).reshape(64, width)
    np.testing.assert_array_equal(stored, data.reshape(64, width)[order])


def test_inactive_lanes_of_a_load_to_lds_leave_their_place_alone() -> None:
    data = np.arange(64, dtype=np.uint32)
    bench = Bench([data], lds=256)
    lds = bench.groups[0].lds
    code = [ins.buffer_load_dword(v[9], v[0], s[4:7], 0, offen=1, lds=1), wait(vm=0)]
    bench.run(code, vector={0: 4 * LANE}, scalar={**bench.resource(0), 124: 0}, exec_mask=0b1010)
    stored = lds.data.view(np.uint32)
    assert stored[1] == 1
    assert stored[3] == 3
    assert lds.poison.view(np.uint32)[2] == 0xFFFFFFFF


def test_sixteen_bit_results_clear_or_keep_the_high_half() -> None:
    half = np.float16(1.5).view(np.uint16)
    word = np.uint32(0xABCD0000) | half
    wave = Bench().run(
        [
            ins.v_add_f16_e32(v[1], v[0], v[0]),
            ins.v_fma_f16(v[2], v[0], v[0], v[0]),
        ],
        vector={0: word, 1: 0x11112222, 2: 0x33334444},
    )
    assert wave.v[1][0] == np.float16(3.0).view(np.uint16)
    assert wave.v[2][0] == 0x33330000 | int(np.float16(3.75).view(np.uint16))


def test_permlane_swaps() -> None:
    a, b = RANDOM, RANDOM[::-1].copy()
    wave = Bench().run(
        [ins.v_permlane32_swap_b32_e32(v[0], v[1]), ins.v_permlane16_swap_b32_e32(v[2], v[3])],
        vector={0: a, 1: b, 2: a, 3: b},
    )
    np.testing.assert_array_equal(wave.v[0], np.concatenate([a[:32], b[:32]]))
    np.testing.assert_array_equal(wave.v[1], np.concatenate([a[32:], b[32:]]))
    rows_a, rows_b = a.reshape(4, 16), b.reshape(4, 16)
    np.testing.assert_array_equal(
        wave.v[2].reshape(4, 16), [rows_a[0], rows_b[0], rows_a[2], rows_b[2]]
    )
    np.testing.assert_array_equal(
        wave.v[3].reshape(4, 16), [rows_a[1], rows_b[1], rows_a[3], rows_b[3]]
    )


def test_bitop3_truth_table() -> None:
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(0, 1 << 32, (3, 64), dtype=np.uint32)
    table = 0x96 ^ 0x40  # neither symmetric nor a simple operation
    op = ins.v_bitop3_b32(
        v[3], v[0], v[1], v[2], omod=table >> 6, abs=table >> 3 & 7, neg=table & 7
    )
    wave = Bench().run([op], vector={0: a, 1: b, 2: c})
    bits = [(x[:, None] >> np.arange(32)) & 1 for x in (a, b, c)]
    wanted = (table >> (bits[0] * 4 + bits[1] * 2 + bits[2]).astype(np.int64)) & 1
    np.testing.assert_array_equal((wave.v[3][:, None] >> np.arange(32)) & 1, wanted)


def test_unknown_modes_are_refused_not_guessed() -> None:
    with pytest.raises(UnknownInstructionError, match="v_mul_lo_u32 with clamp"):
        Bench().run([ins.v_mul_lo_u32(v[0], v[0], v[0], clmp=1)], vector={0: 1})
