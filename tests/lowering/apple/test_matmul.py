# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What has no kernel is refused with the reason and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from block32.lowering.apple import gemv
from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.signature import BufferParameter, KernelError, KernelSignature
from block32.lowering.problem import Epilogue, Grouping

REFUSED = [
    ({"rhs": "f4E2M1FN"}, "w of type f4E2M1FN has no kernel on Apple GPUs; expected one of bf16"),
    ({"lhs": "f64"}, "x of type f64 has no kernel"),
    ({"result": "f8E4M3FN"}, "a result of type f8E4M3FN has no kernel"),
    ({"k": 2**31}, "K = 2147483648 is outside what an i32 index holds"),
    ({"k": 0}, "K = 0 is outside"),
    ({"n": 2**40}, "N = 1099511627776 is outside"),
    ({"m": 0}, "M = 0 is outside"),
    ({"rhs_block": (128, 128)}, "weight blocks of .128, 128.; expected"),
    ({"lhs_scaled": True, "lhs": "f8E4M3FN"}, "x has block scales but w has none"),
    ({"grouping": Grouping(2, 3), "rhs_transposed": True}, "grouped operands are"),
    ({"grouping": Grouping(0, 3)}, "without experts or groups has nothing"),
    ({"grouping": Grouping(2, 0)}, "without experts or groups has nothing"),
    ({"expert_scale": True}, "belongs to a grouped matmul"),
    ({"epilogue": Epilogue(bias="i8")}, "a bias of type i8"),
    ({"epilogue": Epilogue(activation="mish")}, "activation 'mish'; expected one of relu"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Matmul(**{"n": 64, "k": 64, **fields})


def test_the_largest_extent_is_accepted() -> None:
    assert Matmul(n=64, k=2**31 - 64).k_blocks == 2**26 - 2


def test_too_many_bindings_are_refused() -> None:
    buffers = tuple(BufferParameter(f"b{i}", "f32") for i in range(17))
    with pytest.raises(KernelError, match="has 17 bindings; IREE's Metal runtime takes at most 16"):
        KernelSignature("kernel", buffers)


def test_unknown_elements_and_too_many_constants_are_refused() -> None:
    with pytest.raises(KernelError, match="has a buffer of f64"):
        KernelSignature("kernel", (BufferParameter("x", "f64"),))
    with pytest.raises(KernelError, match="65 push constants"):
        KernelSignature("kernel", (), constants=65)


@pytest.mark.parametrize("fields", [{"grouping": Grouping(2, 3)}, {"rhs_transposed": True}])
def test_gemv_refuses_what_it_cannot(fields: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="no GEMV form"):
        gemv.build(Matmul(n=64, k=64, **fields), "kernel")


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(KernelError, match="no form 'packed'"):
        compile_matmul(Matmul(n=64, k=64), "packed", "kernel")
    with pytest.raises(KernelError, match="grouped form needs a grouped matmul"):
        compile_matmul(Matmul(n=64, k=64), "grouped", "kernel")
