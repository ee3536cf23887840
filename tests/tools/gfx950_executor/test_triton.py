# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Kernels compiled by Triton must give the right numbers, under several schedules."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from block32.runtime import reference
from block32.tools.gfx950_executor import Buffer, RaceError, change, drop, instructions, mfma
from block32.tools.gfx950_executor.errors import ExecutionError, StaleReadError
from tests.tools.gfx950_executor import triton_kernels as kernels

POINTERS = {"a": "*u8", "b": "*u8", "c": "*fp32", "a_scale": "*u8", "b_scale": "*u8"}


def random_codes(rng: np.random.Generator, rows: int, k: int, form: str) -> np.ndarray:
    """Bytes of finite values; two codes a byte for e2m1."""
    codes = rng.integers(0, 256, (rows, k // (2 if form == "e2m1" else 1)), dtype=np.uint8)
    if form == "e2m1":
        return codes
    finite = np.isfinite(reference.decode(codes, form))  # type: ignore[arg-type]
    return np.where(finite, codes, codes & 0x3F).astype(np.uint8)


def scaled_product(a: str, b: str, mn: int) -> tuple[np.ndarray, np.ndarray, kernels.Compiled]:
    """A 64x64x256 product in the executor, its float64 value, and the kernel."""
    M, N, K = 64, 64, 256
    constants = {"M": M, "N": N, "K": K, "A_FORMAT": a, "B_FORMAT": b}
    constants |= {"A_PACKED": 1 + (a == "e2m1"), "B_PACKED": 1 + (b == "e2m1")}
    kernel = kernels.compile_kernel(
        kernels.scaled_dot, POINTERS, constants, num_warps=4, matrix_instr_nonkdim=mn
    )
    rng = np.random.default_rng([mn, *map(ord, a + b)])
    x, w = random_codes(rng, M, K, a), random_codes(rng, N, K, b)
    x_scale, w_scale = rng.integers(118, 136, (2, 64, K // 32), dtype=np.uint8)
    c = np.zeros((M, N), np.float32)
    kernel.launch((1,), x, w, Buffer(c, initialised=False), x_scale, w_scale)
    wanted = reference.scaled_matmul(
        x,
        x_scale,
        w,
        w_scale,
        rhs_block=(1, 32),
        lhs_element=a,  # type: ignore[arg-type]
        rhs_element=b,  # type: ignore[arg-type]
    )
    return c, wanted, kernel


@pytest.mark.parametrize("mn", [16, 32])
@pytest.mark.parametrize(
    ("a", "b"),
    [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e2m1", "e5m2")],
)
def test_scaled_dot(a: str, b: str, mn: int) -> None:
    got, wanted, kernel = scaled_product(a, b, mn)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    assert f"v_mfma_scale_f32_{mn}x{mn}x" in kernel.assembly


@pytest.mark.parametrize("mn", [16, 32])
def test_contiguous_k_chunks_would_be_wrong(mn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that some tables give, one run of 32 a lane, does not explain Triton's code."""

    def contiguous(shape: mfma.Shape, bits: int, scaled: bool) -> np.ndarray:
        count = shape.k // shape.groups
        return np.arange(count)[None, :] + count * (np.arange(64) // shape.mn)[:, None]

    monkeypatch.setattr(mfma, "k_of_elements", contiguous)
    got, wanted, _ = scaled_product("e4m3", "e4m3", mn)
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert error > 0.1


def test_a_swapped_scale_byte_is_wrong() -> None:
    _, _, kernel = scaled_product("e4m3", "e4m3", 16)
    scaled = [i for i in instructions(kernel.hsaco, kernel.name) if "mfma_scale" in i.name]
    broken = change(kernel.hsaco, scaled[1], opsel=scaled[1]["opsel"] ^ 1)
    rng = np.random.default_rng(0)
    x, w = random_codes(rng, 64, 256, "e4m3"), random_codes(rng, 64, 256, "e4m3")
    x_scale, w_scale = rng.integers(118, 136, (2, 64, 8), dtype=np.uint8)
    results = []
    for code in (kernel.hsaco, broken):
        c = np.zeros((64, 64), np.float32)
        run = kernels.Compiled(code, kernel.name, kernel.lds_bytes, "")
        run.launch((1,), x, w, c, x_scale, w_scale)
        results.append(c)
    assert np.linalg.norm(results[0] - results[1]) > 0.01 * np.linalg.norm(results[0])


@pytest.mark.parametrize("mn", [16, 32])
def test_matmul_with_a_loop(mn: int) -> None:
    M, N, K = 256, 256, 1024
    signature = POINTERS | {"c": "*bf16", "N": "i32", "K": "i32"}
    kernel = kernels.compile_kernel(
        kernels.scaled_matmul,
        signature,
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128},
        num_warps=4,
        num_stages=2,
        matrix_instr_nonkdim=mn,
    )
    rng = np.random.default_rng(mn)
    x, w = random_codes(rng, M, K, "e4m3"), random_codes(rng, N, K, "e4m3")
    x_scale, w_scale = rng.integers(120, 134, (2, M, K // 32), dtype=np.uint8)
    c = np.zeros((M, N), ml_dtypes.bfloat16)
    inputs = [Buffer(i, writable=False) for i in (x, w, x_scale, w_scale)]
    report = kernel.launch(
        (2, 2), inputs[0], inputs[1], Buffer(c, initialised=False), inputs[2], inputs[3], N, K
    )
    wanted = reference.scaled_matmul(x, x_scale, w, w_scale, rhs_block=(1, 32))
    np.testing.assert_allclose(
        c.astype(np.float64), wanted, rtol=2**-8, atol=1e-6 * np.abs(wanted).max()
    )
    flops_each = 2 * mn * mn * (2048 // mn)
    assert report.instructions["mfma"] * flops_each == 2 * M * N * K
    assert report.byte_counts["memory written"] == 2 * M * N


def test_spills_and_accumulators() -> None:
    """A tile too large for one wave's registers: AGPRs and scratch carry part of it."""
    M, N, K = 128, 256, 128
    kernel = kernels.compile_kernel(
        kernels.scaled_matmul,
        POINTERS | {"c": "*bf16", "N": "i32", "K": "i32"},
        {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": K},
        num_warps=1,
        num_stages=1,
        matrix_instr_nonkdim=16,
    )
    rng = np.random.default_rng(11)
    x, w = random_codes(rng, M, K, "e4m3"), random_codes(rng, N, K, "e4m3")
    x_scale = rng.integers(120, 134, (M, K // 32), dtype=np.uint8)
    w_scale = rng.integers(120, 134, (N, K // 32), dtype=np.uint8)
    c = np.zeros((M, N), ml_dtypes.bfloat16)
    report = kernel.launch((1, 1), x, w, Buffer(c, initialised=False), x_scale, w_scale, N, K)
    wanted = reference.scaled_matmul(x, x_scale, w, w_scale, rhs_block=(1, 32))
    np.testing.assert_allclose(
        c.astype(np.float64), wanted, rtol=2**-8, atol=1e-6 * np.abs(wanted).max()
    )
    assert report.byte_counts["scratch read"] > 0
    assert report.mnemonics["v_accvgpr_read"] > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("warps", [1, 4])
def test_reductions(warps: int, seed: int) -> None:
    M, N = 32, 256
    kernel = kernels.compile_kernel(
        kernels.reductions,
        {"x": "*fp32", "row_sums": "*fp32", "column_maxima": "*fp32"},
        {"M": M, "N": N},
        num_warps=warps,
    )
    x = np.random.default_rng(seed).standard_normal((M, N)).astype(np.float32)
    sums, maxima = np.zeros(M, np.float32), np.zeros(N, np.float32)
    kernel.launch((1,), x, sums, maxima, seed=seed)
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(maxima, x.max(0))
    assert "row_bcast" in kernel.assembly  # the trap is in the test


def test_softmax() -> None:
    kernel = kernels.compile_kernel(
        kernels.softmax, {"x": "*fp32", "y": "*fp16", "columns": "i32"}, {"N": 512}, num_warps=2
    )
    x = (np.random.default_rng(5).standard_normal((6, 389)) * 4).astype(np.float32)
    y = np.zeros(x.shape, np.float16)
    kernel.launch((6,), Buffer(x, writable=False), Buffer(y, initialised=False), x.shape[1])
    powers = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=1e-3, atol=1e-7)


def test_running_sum() -> None:
    kernel = kernels.compile_kernel(
        kernels.running_sum, {"x": "*i32", "y": "*i32"}, {"N": 1024}, num_warps=4
    )
    x = np.random.default_rng(6).integers(-1000, 1000, (3, 1024)).astype(np.int32)
    y = np.zeros_like(x)
    kernel.launch((3,), x, y)
    np.testing.assert_array_equal(y, np.cumsum(x, 1))


@pytest.mark.parametrize("seed", range(3))
def test_atomics(seed: int) -> None:
    kernel = kernels.compile_kernel(
        kernels.histogram,
        {"x": "*i32", "counts": "*i32", "largest": "*i32", "parity": "*i32"},
        {"N": 256},
        num_warps=2,
    )
    x = np.random.default_rng(seed).integers(0, 16, 1024).astype(np.int32)
    counts, largest, parity = (np.zeros(n, np.int32) for n in (16, 4, 2))
    kernel.launch((4,), x, counts, largest, parity, seed=seed)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=16))
    np.testing.assert_array_equal(largest, [np.flatnonzero(x % 4 == i).max() for i in range(4)])
    wanted = [np.bitwise_xor.reduce(np.flatnonzero(x % 2 == i)) for i in range(2)]
    np.testing.assert_array_equal(parity, wanted)


def last_arrival(order: str, warps: int) -> kernels.Compiled:
    signature = {"x": "*fp32", "partials": "*fp32", "counter": "*i32", "y": "*fp32", "S": "i32"}
    return kernels.compile_kernel(
        kernels.sum_by_last_arrival, signature, {"N": 512, "ORDER": order}, num_warps=warps
    )


def run_last_arrival(kernel: kernels.Compiled, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's sum and the right one."""
    S = 6
    x = np.random.default_rng(seed).standard_normal((S, 512)).astype(np.float32)
    counter, y = np.zeros(1, np.int32), np.zeros(512, np.float32)
    partials = Buffer(np.zeros((S, 512), np.float32), initialised=False)
    kernel.launch((S,), x, partials, counter, Buffer(y, initialised=False), S, seed=seed)
    assert counter[0] == 0
    total = np.zeros(512, np.float32)
    for row in x:
        total += row * np.float32(2)
    return y, total


@pytest.mark.parametrize("seed", range(5))
def test_last_arrival_sums_in_order(seed: int) -> None:
    got, wanted = run_last_arrival(last_arrival("acq_rel", 1), seed)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_last_arrival_with_a_relaxed_counter(seed: int) -> None:
    with pytest.raises(RaceError, match=r"(buffer|global)_load_dword"):
        run_last_arrival(last_arrival("relaxed", 1), seed)


def test_last_arrival_with_waves_that_do_not_drain_their_stores() -> None:
    """Only the wave that counts waits for its stores here; the others' are not published."""
    with pytest.raises(RaceError, match="_store_dword"):
        run_last_arrival(last_arrival("acq_rel", 4), 0)


@pytest.mark.parametrize("name", ["buffer_wbl2", "buffer_inv"])
def test_last_arrival_without_cache_maintenance(name: str) -> None:
    kernel = last_arrival("acq_rel", 1)
    inst = next(i for i in instructions(kernel.hsaco, kernel.name) if i.name == name)
    broken = change(kernel.hsaco, inst, sc1=0)
    with pytest.raises(StaleReadError):
        run_last_arrival(kernels.Compiled(broken, kernel.name, kernel.lds_bytes, ""), 1)


def test_division_is_correctly_rounded() -> None:
    kernel = kernels.compile_kernel(
        kernels.quotients, {"x": "*fp32", "y": "*fp32", "z": "*fp32"}, {"N": 1024}, num_warps=4
    )
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(1024) * 2.0 ** rng.integers(-60, 60, 1024)).astype(np.float32)
    y = rng.standard_normal(1024).astype(np.float32)
    z = np.zeros((3, 1024), np.float32)
    kernel.launch((1,), x, y, z)
    np.testing.assert_array_equal(z[0], x / y)
    np.testing.assert_array_equal(z[1], np.sqrt(np.abs(x)))
    np.testing.assert_allclose(z[2], np.floor(x) * np.exp2(y.astype(np.float64)), rtol=1e-6)


WAITS = ("s_waitcnt", "s_barrier")


def test_every_wait_and_barrier_of_a_kernel_is_needed_or_redundant_by_proof() -> None:
    """Dropping any wait or barrier is an error, or leaves the right result."""
    kernel = kernels.compile_kernel(
        kernels.reductions,
        {"x": "*fp32", "row_sums": "*fp32", "column_maxima": "*fp32"},
        {"M": 16, "N": 64},
        num_warps=4,
    )
    x = np.random.default_rng(8).standard_normal((16, 64)).astype(np.float32)
    caught = 0
    for inst in instructions(kernel.hsaco, kernel.name):
        if inst.name not in WAITS:
            continue
        broken = kernels.Compiled(drop(kernel.hsaco, inst), kernel.name, kernel.lds_bytes, "")
        sums, maxima = np.zeros(16, np.float32), np.zeros(64, np.float32)
        try:
            broken.launch((1,), x, sums, maxima)
        except ExecutionError:
            caught += 1
            continue
        np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(maxima, x.max(0))
    assert caught >= 4
