# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Declarations as IREE writes them, read back as types."""

from __future__ import annotations

import pytest

from block32.runtime.signature import ValueType, parse_declaration, parse_value_type, signless


def test_reads_tensors_scalars_and_attributes() -> None:
    signature = parse_declaration(
        "sync func @main(%input0: tensor<?x64xf8E4M3FN>, %input1: i32, "
        "%input2: tensor<4xf32> {iree.abi.output = 0 : index, b = {c = 1, d = 2}}) "
        "-> (%output0: tensor<4xcomplex<f32>>, %output1: tensor<f32>)"
    )
    assert signature is not None
    assert signature.arguments == (
        ValueType("f8E4M3FN", (None, 64)),
        ValueType("i32", None),
        ValueType("f32", (4,)),
    )
    assert signature.results == (ValueType("complex<f32>", (4,)), ValueType("f32", ()))
    assert not signature.is_async
    assert str(signature) == (
        "main(tensor<?x64xf8E4M3FN>, i32, tensor<4xf32>) -> (tensor<4xcomplex<f32>>, tensor<f32>)"
    )


def test_reads_functions_without_arguments_or_results() -> None:
    signature = parse_declaration("async func @f() -> ()")
    assert signature is not None
    assert (signature.arguments, signature.results, signature.is_async) == ((), (), True)


@pytest.mark.parametrize("text", ["", "func main", "sync func @main(%input0: i32)"])
def test_text_of_another_form_is_no_signature(text: str) -> None:
    assert parse_declaration(text) is None


@pytest.mark.parametrize("text", ["!hal.buffer_view", "tensor<4x>", "tensor<4x?>", "memref<4xf32>"])
def test_what_is_no_tensor_has_no_dtype(text: str) -> None:
    kind = parse_value_type(text)
    assert kind == ValueType(text, None)
    assert kind.dtype is None


def test_integers_have_no_sign() -> None:
    assert [signless(n, "i8") for n in (-128, -1, 127, 128, 255)] == [-128, -1, 127, -128, -1]
    assert [signless(n, "i1") for n in (0, 1)] == [0, 1]
    for number in (-129, 256):
        with pytest.raises(OverflowError, match=f"{number} does not fit into i8"):
            signless(number, "i8")
