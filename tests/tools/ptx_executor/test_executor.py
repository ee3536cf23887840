# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The PTX executor: what instructions do, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.tools.ptx_executor import PtxError, launch, matrix, parse_ptx

#: A kernel of 64 threads that may read buffer 0 and write buffer 1; %rd2 and %rd3 point to them,
#: %rd4 is four times the thread's number and %rd1 the start of shared memory.
FRAME = """
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
.maxntid 64, 1, 1
{
  { .shared .align 1024 .b8 anchor[16]; mov.u64 %rd1, anchor; }
  ld.param.b64 %rd2, [k_param_0];
  ld.param.b64 %rd3, [k_param_1];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd5, %rd1, %rd4;
  add.s64 %rd6, %rd2, %rd4;
  add.s64 %rd7, %rd3, %rd4;
BODY
  ret;
}
"""


def run(body: str, seed: int = 0) -> npt.NDArray[np.uint32]:
    """Run a body; the 64 words that it may write, which start as 0."""
    source = np.arange(64, dtype=np.uint32) * 3
    target = np.zeros(64, np.uint32)
    kernel = parse_ptx(FRAME.replace("BODY", body))["k"]
    launch(kernel, 1, [source, target], [False, True], dynamic_shared=1008, seed=seed)
    return target


def test_arithmetic_and_a_branch():
    y = run(
        """
        ld.global.nc.b32 %r2, [%rd6];
        setp.lt.u32 %p1, %r1, 10;
        @%p1 bra $L__low;
        add.s32 %r2, %r2, 1000;
    $L__low:
        shl.b32 %r2, %r2, 1;
        st.global.b32 [%rd7], %r2;
        """
    )
    threads = np.arange(64)
    assert (y == 2 * (3 * threads + np.where(threads < 10, 0, 1000))).all()


def test_warps_meet_at_a_barrier():
    body = """
        st.shared.b32 [%rd5], %r1;
        bar.sync 0;
        sub.s32 %r3, 63, %r1;
        mul.wide.u32 %rd8, %r3, 4;
        add.s64 %rd8, %rd8, %rd1;
        ld.shared.b32 %r4, [%rd8];
        st.global.b32 [%rd7], %r4;
    """
    for seed in range(3):
        assert (run(body, seed) == 63 - np.arange(64)).all()


REFUSED: dict[str, tuple[str, str]] = {
    "an unknown instruction": ("bfind.u32 %r2, %r1;", "unknown instruction: bfind"),
    "a read past a buffer": ("ld.global.b32 %r2, [%rd6+4];", "byte 256 of a buffer of 256"),
    "a misaligned read": ("ld.global.b32 %r2, [%rd6+2];", "not aligned to 4"),
    "a store to an input": ("st.global.b32 [%rd6], %r1;", "only reads"),
    "a register without a value": ("add.s32 %r2, %r9, 1;", "%r9 is read before"),
    "shared memory without a value": ("ld.shared.b32 %r2, [%rd5];", "nothing has written"),
    "a place outside shared memory": ("st.shared.b32 [%rd5+1000], %r1;", "of shared memory"),
    "a race of two warps": (
        "st.shared.b32 [%rd5], %r1; and.b32 %r2, %r1, 31; mul.wide.u32 %rd8, %r2, 4;"
        "add.s64 %rd8, %rd8, %rd1; ld.shared.b32 %r3, [%rd8]; ld.shared.b32 %r3, [%rd8+128];",
        "no barrier between|nothing has written",
    ),
    "two warps that write one place": ("st.shared.b32 [%rd1], %r1;", "overwrites"),
    "a copy that nobody waits for": (
        "cp.async.ca.shared.global [%rd5], [%rd6], 4; cp.async.commit_group;",
        "never waited for",
    ),
    "a copy read too early": (
        "cp.async.ca.shared.global [%rd5], [%rd6], 4; cp.async.commit_group;"
        "ld.shared.b32 %r2, [%rd5];",
        "nothing has written",
    ),
    "a barrier in a branch": (
        "setp.lt.u32 %p1, %r1, 7; @%p1 bra $L__skip; bar.sync 0; $L__skip:",
        "not all lanes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str):
    body, words = REFUSED[what]
    with pytest.raises(PtxError, match=words):
        run(body)


def test_a_copy_fills_up_with_zeros():
    y = run(
        """
        setp.lt.u32 %p1, %r1, 5;
        selp.b32 %r2, 4, 0, %p1;
        cp.async.ca.shared.global [%rd5], [%rd6], 4, %r2;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.b32 %r3, [%rd5];
        st.global.b32 [%rd7], %r3;
        """
    )
    assert y[:5].tolist() == [0, 3, 6, 9, 12]
    assert not y[5:].any()


def _fragments(
    matrix_values: npt.NDArray, rows: Sequence[tuple[int, int]], width: int
) -> npt.NDArray[np.uint32]:
    """Registers of an operand as ISA prose says: lane (g, t) holds row g, ``width`` K from t on."""
    registers = []
    for row, k in rows:
        lanes = [
            matrix_values[lane // 4 + row, lane % 4 * width + k :][:width] for lane in range(32)
        ]
        registers.append(np.stack(lanes).view(np.uint32)[:, 0])
    return np.stack(registers, axis=1)


@pytest.mark.parametrize(
    ("name", "dtype", "k"),
    [
        ("f16", np.float16, 16),
        ("bf16", ml_dtypes.bfloat16, 16),
        ("e4m3", ml_dtypes.float8_e4m3fn, 32),
    ],
)
def test_mma_multiplies(name: str, dtype: npt.DTypeLike, k: int):
    rng = np.random.default_rng(1)
    a = rng.standard_normal((16, k)).astype(dtype)
    b = rng.standard_normal((8, k)).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    width = k // 8
    left = _fragments(a, [(0, 0), (8, 0), (0, k // 2), (8, k // 2)], width)
    right = _fragments(b, [(0, 0), (0, k // 2)], width)
    places = [
        [(lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2) for r in range(4)] for lane in range(32)
    ]
    rows, columns = np.moveaxis(np.array(places), -1, 0)
    y = matrix.mma_sync(left, right, c[rows, columns], (name, name))
    want = a.astype(np.float64) @ b.astype(np.float64).T + c
    assert np.allclose(y, want[rows, columns], rtol=1e-6, atol=1e-6)


def test_the_parser_reads_what_llvm_prints():
    kernels = parse_ptx(FRAME.replace("BODY", "@!%p1 bra $L__end;\n$L__end:"))
    kernel = kernels["k"]
    assert kernel.threads == 64
    assert kernel.parameters == ["k_param_0", "k_param_1"]
    assert kernel.shared == {"anchor": 16}
    branch = kernel.instructions[-2]
    assert (branch.opcode, branch.guard, branch.is_negated) == ("bra", "%p1", True)
    assert kernel.labels["$L__end"] == len(kernel.instructions) - 1
