# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A malformed composite is refused with its place and what would be right."""

from __future__ import annotations

import pytest

from block32.dialects import composite
from block32.dialects.composite import Quantize
from block32.dialects.diagnostics import DiagnosticError
from block32.tools.compiler import parse_module


def parse_first(attribute: str, results: str = "(tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>)"):
    text = f"""
util.func private @any_name(%x: tensor<?x64xbf16>) -> {results}
    attributes {{block32.composite = {attribute}}}
"""
    module = parse_module(text.encode(), "model.mlir")
    return composite.of_function(module.body.operations[0])


def test_the_attribute_identifies_a_composite() -> None:
    assert parse_first('{kind = "quantize", rule = "floor"}') == Quantize("floor")


def test_an_ordinary_function_is_none() -> None:
    module = parse_module(b"util.func private @quantize()", "model.mlir")
    assert composite.of_function(module.body.operations[0]) is None


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("32", "expected a dictionary with 'kind'"),
        ('{rule = "rceil"}', "expected a dictionary with 'kind'"),
        ('{kind = "softmax"}', "expected kind to be one of quantize"),
        ('{kind = "quantize", rules = "rceil"}', "unknown field 'rules'; expected rule, element"),
        ('{kind = "quantize", rule = "up"}', "expected rule to be one of rceil, floor, even, ceil"),
        ('{kind = "quantize", element = "f8E5M2"}', "expected codes of type tensor<?x64xf8E5M2>"),
    ],
)
def test_malformed(attribute: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_first(attribute)
    assert message in error.value.message
    assert "'util.func' op has a malformed 'block32.composite': " in error.value.message


def test_scales_of_another_shape() -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_first('{kind = "quantize"}', "(tensor<?x64xf8E4M3FN>, tensor<?x64xf8E8M0FNU>)")
    assert "expected scales of type tensor<?x2xf8E8M0FNU>" in error.value.message
