# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A malformed composite is refused with its place and what would be right."""

from __future__ import annotations

import pytest

from block32.dialects import composite
from block32.dialects.composite import Matmul, Quantize
from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.common.epilogue import ACTIVATIONS
from block32.lowering.problem import ACTIVATION_NAMES, Grouping
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


GROUPED = (
    "(%x: tensor<?x64xbf16>, %w: tensor<4x48x64xf8E4M3FN>, %ws: tensor<4x2x2xf8E8M0FNU>, "
    "%offsets: tensor<4xi32>, %ids: tensor<3xi32>, %init: tensor<?x48xf32>) -> tensor<?x48xf32>"
)
DYNAMIC = (
    "(%x: tensor<?x64xbf16>, %w: tensor<48x64xf8E4M3FN>, %ws: tensor<2x2xf8E8M0FNU>) "
    "-> tensor<?x48xf32>"
)


#: A matmul of a bf16 activation and a 48x64 weight.
PROBLEM = {
    "k": "64",
    "n": "48",
    "rhs_block": "[32, 32]",
    "result": '"f32"',
    "lhs": '"bf16"',
    "lhs_scaled": "false",
    "rhs": '"f8E4M3FN"',
}


def parse_matmul(kind: str, signature: str, fields: str) -> composite.Composite | None:
    """``PROBLEM`` with other or further ``fields``."""
    kept = [f"{name} = {v}" for name, v in PROBLEM.items() if f", {name} =" not in fields]
    problem = ", ".join(kept) + fields
    text = f"""
util.func private @any_name{signature}
    attributes {{block32.composite = {{kind = "{kind}", problem = {{{problem}}}}}}}
"""
    module = parse_module(text.encode(), "model.mlir")
    return composite.of_function(module.body.operations[0])


def test_grouped_and_dynamic_matmuls() -> None:
    groups = ", grouping = {experts = 4 : i64, groups = 3 : i64}"
    grouped = parse_matmul("grouped_matmul", GROUPED, groups)
    assert isinstance(grouped, Matmul)
    assert grouped.problem.grouping == Grouping(4, 3)
    dynamic = parse_matmul("matmul_dynamic", DYNAMIC, ', lhs_quantize = "floor"')
    assert isinstance(dynamic, Matmul)
    assert dynamic.problem.lhs_quantize == "floor"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("matmul_dynamic", ', lhs_quantize = "up"', "expected lhs_quantize to be one of rceil"),
        ("matmul_w8a16", ', lhs_quantize = "rceil"', "expected kind matmul_dynamic for this"),
        (
            "matmul_dynamic",
            ', lhs_quantize = "rceil", lhs_scaled = true',
            "takes an activation of f32, bf16, f16 without scales but lhs is bf16 with scales",
        ),
        (
            "matmul_dynamic",
            ', lhs_quantize = "rceil", lhs = "f8E4M3FN"',
            "takes an activation of f32, bf16, f16 without scales but lhs is f8E4M3FN",
        ),
        ("grouped_matmul", ", grouping = {experts = 4 : i64}", "malformed problem: "),
        (
            "grouped_matmul",
            ", grouping = {experts = 0 : i64, groups = 3 : i64}",
            "expected at least one expert and no negative number of groups but got 0 experts",
        ),
        (
            "grouped_matmul",
            ", grouping = {experts = 4 : i64, groups = 3 : i64}, epilogue = {scale = true}",
            "a grouped matmul takes no epilogue",
        ),
        (
            "grouped_matmul",
            ", grouping = {experts = 4 : i64, groups = 2 : i64}",
            "expected a function of type",
        ),
        ("matmul_w8a16", ', rhs = "f8E4M3"', "expected rhs to be one of"),
    ],
)
def test_malformed_matmuls(kind: str, fields: str, message: str) -> None:
    signature = GROUPED if kind == "grouped_matmul" else DYNAMIC
    with pytest.raises(DiagnosticError) as error:
        parse_matmul(kind, signature, fields)
    assert message in error.value.message
    assert ":2:1: error: 'util.func' op has a malformed" in error.value.render()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("m = -1", "expected m to be an integer from 0 on, got -1"),
        ('m = "4"', "expected m to be an integer from 0 on, got 4"),
        ("m = true", "expected m to be an integer from 0 on, got True"),
        ("n = 0", "expected n to be an integer from 1 on, got 0"),
        ("k = 64.0", "expected k to be an integer from 1 on"),
        ('lhs = ["bf16"]', "expected lhs to be one of"),
        ('lhs = "f8E4M3FN"', "expected lhs without scales to be one of f32, bf16, f16"),
        ("lhs_scaled = true", "expected lhs with scales to be one of f8E4M3FN, f8E5M2, f4E2M1FN"),
        ("lhs_scaled = []", "expected lhs_scaled to be true or false but got []"),
        ('rhs = "bf16"', "expected rhs to be one of f8E4M3FN, f8E5M2, f4E2M1FN but got bf16"),
        ('result = "f8E4M3FN"', "expected result to be one of f32, bf16, f16 but got f8E4M3FN"),
        ("rhs_block = [64, 32]", "expected rhs_block to be [1, 32] or [32, 32] but got [64, 32]"),
        ("rhs_block = [0, 0]", "expected rhs_block to be [1, 32] or [32, 32] but got [0, 0]"),
        ("rhs_block = [32]", "expected rhs_block to be [1, 32] or [32, 32] but got [32]"),
        ("lhs_quantize = {}", "expected lhs_quantize to be one of rceil, floor, even, ceil"),
        ('epilogue = {activation = "elu"}', "expected activation to be one of relu, gelu"),
        ("epilogue = {bias = 3}", "expected bias to be one of f32, bf16, f16 but got 3"),
        ('epilogue = {residual = "i8"}', "expected residual to be one of f32, bf16, f16"),
        ("epilogue = {scale = 3}", "expected scale to be true or false but got 3"),
        ('grouping = {experts = "a", groups = 1}', "expected experts to be an integer but got a"),
        ("grouping = {experts = 2, groups = 1.5}", "expected groups to be an integer but got 1.5"),
    ],
)
def test_fields_of_a_problem_that_nothing_computes(field: str, message: str) -> None:
    """Each is refused before any pass reads it, whatever the function's type."""
    with pytest.raises(DiagnosticError) as error:
        parse_matmul("matmul_w8a16", DYNAMIC, f", {field}")
    assert message in error.value.message


def test_every_activation_has_a_meaning() -> None:
    assert set(ACTIVATION_NAMES) == set(ACTIVATIONS)
