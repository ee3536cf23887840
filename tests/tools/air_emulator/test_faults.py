# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the emulator must not let pass: small kernels that do one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder, llvm14
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.builder import AirKernel, build_kernel
from block32.lowering.apple.library import compile_kernel
from block32.lowering.apple.signature import BufferParameter, KernelSignature
from block32.tools.air_emulator.dispatch import Binding, Kernel
from block32.tools.air_emulator.faults import (
    AbiError,
    AirError,
    AlignmentError,
    DivergenceError,
    OutOfBoundsError,
    PoisonError,
    RaceError,
    ReadOnlyError,
    UnsupportedError,
)

X, Y = BufferParameter("x", "f32"), BufferParameter("y", "f32", writable=True)
SIGNATURE = KernelSignature("k", (X, Y), constants=1, threads=(64, 1, 1))

Body = Callable[[AirKernel], None]


def _kernel(body: Body, signature: KernelSignature = SIGNATURE) -> Kernel:
    return Kernel(compile_kernel(signature, build_kernel(signature, body)).bitcode, "k")


def _dispatch(
    kernel: Kernel,
    groups: int = 1,
    constant: int = 0,
    seed: int | None = None,
    size: int = 256,
) -> np.ndarray:
    x, y = np.arange(size, dtype=np.float32), np.full(size, np.nan, np.float32)
    bindings = [Binding(x), Binding(y, output=True)]
    kernel.dispatch(bindings, (groups, 1, 1), (64, 1, 1), [constant], seed=seed)
    return y


def _thread(kernel: AirKernel) -> builder.Word:
    return kernel.threadgroup(0) * 64 + kernel.simdgroup * 32 + kernel.lane


def _copy(kernel: AirKernel) -> None:
    kernel.buffer("y").at(_thread(kernel)).store(kernel.buffer("x").at(_thread(kernel)).load())


def _sum_of_simdgroup(kernel: AirKernel) -> ir.Value:
    total = kernel.buffer("x").at(_thread(kernel)).load()
    for distance in (1, 2, 4, 8, 16):
        mask = arith.constant(ir.IntegerType.get_signless(16), distance)
        other = kernel.call("air.simd_shuffle_xor.f32", builder.f32(), [total, mask])
        total = arith.addf(total, other)
    return total


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_correct_kernel_runs_in_any_order(seed: int | None) -> None:
    y = _dispatch(_kernel(_copy), groups=4, seed=seed)
    np.testing.assert_array_equal(y, np.arange(256))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_lanes_that_diverged_meet_again_at_a_simdgroup_function(seed: int | None) -> None:
    def body(kernel: AirKernel) -> None:
        (count,) = builder.loop(  # every lane leaves the loop in an iteration of its own
            0,
            kernel.lane,
            1,
            [builder.float_constant(0.0)],
            lambda i, c: [arith.addf(c[0], builder.float_constant(1.0))],
        )
        total = _sum_of_simdgroup(kernel)
        kernel.buffer("y").at(_thread(kernel)).store(arith.addf(total, count))

    y = _dispatch(_kernel(body), seed=seed)[:64]
    x = np.arange(64).reshape(2, 32)
    expected = np.repeat(x.sum(axis=1), 32) + np.tile(np.arange(32), 2)
    np.testing.assert_array_equal(y, expected)


def test_simdgroups_may_part() -> None:
    def body(kernel: AirKernel) -> None:
        def work() -> None:
            kernel.buffer("y").at(_thread(kernel)).store(_sum_of_simdgroup(kernel))

        builder.when(builder.equal(kernel.simdgroup, 1), work)

    y = _dispatch(_kernel(body))
    assert np.isnan(y[:32]).all() and (y[32:64] == np.arange(32, 64).sum()).all()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_some_lanes_at_a_simdgroup_function(seed: int | None) -> None:
    def body(kernel: AirKernel) -> None:
        def work() -> None:
            kernel.buffer("y").at(_thread(kernel)).store(_sum_of_simdgroup(kernel))

        builder.when(builder.less(kernel.lane, 31), work)

    with pytest.raises(DivergenceError, match=r"only 31 of 32 lanes of simdgroup .*shuffle_xor"):
        _dispatch(_kernel(body), seed=seed)


def test_lanes_at_different_simdgroup_functions() -> None:
    def body(kernel: AirKernel) -> None:
        def work() -> None:
            kernel.buffer("y").at(_thread(kernel)).store(_sum_of_simdgroup(kernel))

        def other_work() -> None:
            value = arith.addf(_sum_of_simdgroup(kernel), builder.float_constant(1.0))
            kernel.buffer("y").at(_thread(kernel)).store(value)

        builder.either(builder.less(kernel.lane, 16), work, other_work)

    with pytest.raises(DivergenceError, match="16 of 32 lanes"):
        _dispatch(_kernel(body))


def _matrix_in_a_branch(kernel: AirKernel) -> None:
    atom = SimdgroupAtom("f32", "f32")
    kind = builder.vector_type(8, builder.f32())

    def work() -> None:
        tile = kernel.buffer("x").load(8)
        flag = builder.as_value(0, builder.i1())
        product = kernel.call(atom.intrinsic, kind, [tile, flag, tile, flag, builder.zero(kind)])
        kernel.buffer("y").at(_thread(kernel)).store(builder.extract(product, 0))

    builder.when(builder.less(kernel.lane, 8), work)


def _at(offset: int) -> Body:
    def body(kernel: AirKernel) -> None:
        kernel.buffer("y").at(_thread(kernel)).store(kernel.buffer("x").at(offset).load())

    return body


def _store_before_y(kernel: AirKernel) -> None:
    offset = builder.wide(_thread(kernel)) - 1
    kernel.buffer("y").at(offset).store(builder.float_constant(0.0))


def _store_to_x(kernel: AirKernel) -> None:
    kernel.buffer("x").at(_thread(kernel)).store(builder.float_constant(0.0))


def _everybody_stores_to_one_place(kernel: AirKernel) -> None:
    kernel.buffer("y").store(builder.float_constant(0.0))


def _neighbours_overlap(kernel: AirKernel) -> None:
    value = builder.broadcast(builder.float_constant(0.0), 2)
    kernel.buffer("y").at(_thread(kernel)).store(value)


def _read_what_another_wrote(kernel: AirKernel) -> None:
    y, thread = kernel.buffer("y"), _thread(kernel)
    y.at(thread).store(builder.float_constant(1.0))
    value = y.at((thread + 32) & 63).load()
    y.at(thread + 64).store(value)


def _read_what_nobody_wrote(kernel: AirKernel) -> None:
    y, thread = kernel.buffer("y"), _thread(kernel)
    y.at(thread).store(y.at(thread).load())


def _misaligned(kernel: AirKernel) -> None:
    kernel.buffer("y").at(_thread(kernel) * 4).store(kernel.buffer("x").at(1).load(4, 16), 16)


def _wide_shift(kernel: AirKernel) -> None:
    shifted = builder.Word(kernel.lane.value) << kernel.constant(0)
    kernel.buffer("y").at(_thread(kernel) + (shifted & 1)).store(builder.float_constant(0.0))


def _far_away(kernel: AirKernel) -> None:
    offset = builder.wide(kernel.lane) + (1 << 40)
    kernel.buffer("y").at(_thread(kernel)).store(kernel.buffer("x").at(offset).load())


@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (_matrix_in_a_branch, DivergenceError, "only 8 of 32 lanes of simdgroup 0"),
        (_at(256), OutOfBoundsError, "4 bytes at offset 1024 of buffer x, which has 1024"),
        (_far_away, OutOfBoundsError, "threadgroup .0, 0, 0., simdgroup 0, lane 0: access"),
        (_store_before_y, OutOfBoundsError, "simdgroup 0, lane 0: 4 bytes at offset 10995116"),
        (_store_to_x, ReadOnlyError, "store to the read-only buffer x"),
        (_everybody_stores_to_one_place, RaceError, "stores to byte 0 of y, which .* wrote"),
        (_neighbours_overlap, RaceError, "of y, which .* wrote"),
        (_read_what_another_wrote, RaceError, "loads from byte .* of y, which .* wrote"),
        (_read_what_nobody_wrote, PoisonError, "load of unwritten bytes at offset 0 of y"),
        (_misaligned, AlignmentError, "offset 4 of x is not 16-aligned"),
        (_wide_shift, PoisonError, "shift by at least the width"),
    ],
)
def test_fault(body: Body, fault: type[AirError], message: str) -> None:
    constant = 32 if body is _wide_shift else 0
    with pytest.raises(fault, match=message):
        _dispatch(_kernel(body), constant=constant)


def test_threadgroups_that_write_the_same_place_are_a_race_across_batches() -> None:
    def body(kernel: AirKernel) -> None:
        thread = kernel.simdgroup * 32 + kernel.lane
        kernel.buffer("y").at(thread).store(builder.float_constant(0.0))

    assert not np.isnan(_dispatch(_kernel(body))[:64]).any()
    with pytest.raises(RaceError, match=r"threadgroup \(\d+, 0, 0\).*threadgroup \(\d+, 0, 0\)"):
        _dispatch(_kernel(body), groups=300)


def test_endless_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("block32.tools.air_emulator.interpreter._BLOCK_LIMIT", 1000)

    def body(kernel: AirKernel) -> None:
        builder.loop(0, 10**6, 1, [], lambda i, c: [])
        _copy(kernel)

    with pytest.raises(UnsupportedError, match="runs for more than 1000 blocks"):
        _dispatch(_kernel(body))


def _module(body: str, declarations: str = "") -> Kernel:
    """A kernel whose body is LLVM text, with the metadata of SIGNATURE."""
    compiled = compile_kernel(SIGNATURE, build_kernel(SIGNATURE, _copy))
    text = llvm14.disassemble(compiled.bitcode)
    head, _, rest = text.partition("entry:")
    _, _, tail = rest.partition("\n}")
    text = f"{head}entry:\n{body}\n  ret void\n}}\n{declarations}{tail}"
    module = llvm14.binding().parse_assembly(text)
    return Kernel(module.as_bitcode(), "k")


@pytest.mark.parametrize(
    ("body", "declarations", "fault", "message"),
    [
        (
            "  %a = call float @air.sin.f32(float 1.0)",
            "declare float @air.sin.f32(float)",
            UnsupportedError,
            "call of 'air.sin.f32'",
        ),
        (
            "  %a = addrspacecast i32 addrspace(2)* %constants to i32*",
            "",
            UnsupportedError,
            "addrspacecast",
        ),
        ("  %a = add i32 %lane, undef", "", PoisonError, "undefined value of type i32"),
        (
            "  %a = shufflevector <3 x i32> %threadgroup, <3 x i32> undef, "
            "<2 x i32> <i32 0, i32 undef>",
            "",
            PoisonError,
            "undefined elements",
        ),
        ("  %a = udiv i32 %lane, 0", "", PoisonError, "division by zero"),
        ("  %a = fadd half 1.0, 2.0", "", UnsupportedError, "arithmetic in f32 only"),
        (
            "  %a = extractelement <3 x i32> %threadgroup, i32 %lane",
            "",
            UnsupportedError,
            "not constant",
        ),
    ],
)
def test_unknown_and_undefined(
    body: str, declarations: str, fault: type[AirError], message: str
) -> None:
    with pytest.raises(fault, match=message):
        _dispatch(_module(body, declarations))


def test_abi_mistakes_are_named() -> None:
    kernel = _kernel(_copy)
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(AbiError, match="takes 2 bindings but got 1"):
        kernel.dispatch([Binding(x)], (1, 1, 1), (64, 1, 1), [0])
    with pytest.raises(AbiError, match="'x' is an output, but the kernel only reads it"):
        kernel.dispatch([Binding(x, True), Binding(y, True)], (1, 1, 1), (64, 1, 1), [0])
    with pytest.raises(AbiError, match=r"expected .a multiple of 32, 1, 1."):
        kernel.dispatch([Binding(x), Binding(y, True)], (1, 1, 1), (8, 8, 1), [0])
    with pytest.raises(AbiError, match="a threadgroup outside the grid"):
        kernel.dispatch(
            [Binding(x), Binding(y, True)], (1, 1, 1), (64, 1, 1), [0], threadgroups=[(1, 0, 0)]
        )
    with pytest.raises(AbiError, match="'x' is not contiguous"):
        kernel.dispatch(
            [Binding(np.zeros((8, 8), np.float32).T[:4]), Binding(y, True)],
            (1, 1, 1),
            (64, 1, 1),
            [0],
        )
    with pytest.raises(AbiError, match="no kernel called 'gemm'"):
        Kernel(compile_kernel(SIGNATURE, build_kernel(SIGNATURE, _copy)).bitcode, "gemm")


def test_a_push_constant_that_was_not_given_is_out_of_bounds() -> None:
    def body(kernel: AirKernel) -> None:
        kernel.buffer("y").at(_thread(kernel) + kernel.constant(0)).store(builder.float_constant(0))

    kernel = _kernel(body)
    bindings = [Binding(np.zeros(64, np.float32)), Binding(np.zeros(64, np.float32), True)]
    with pytest.raises(OutOfBoundsError, match="of buffer push constants, which has 0"):
        kernel.dispatch(bindings, (1, 1, 1), (64, 1, 1), [])
