# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The legality checker: the kernels pass, and each way of being wrong is refused by name."""

from __future__ import annotations

import re

import pytest

from block32.lowering.apple import air_legality, llvm14
from block32.lowering.apple.air_legality import LegalityError, check
from block32.lowering.apple.air_parser import AirSyntaxError, parse
from block32.lowering.apple.library import compile_matmul
from block32.lowering.apple.matmul import Matmul

MATRIX = "@air.simdgroup_matrix_16x16x16_multiply_accumulate.f.f.v8f32.v8bf16.v8f8e4m3fn.v8f32"


@pytest.fixture(scope="module")
def text() -> str:
    return llvm14.disassemble(compile_matmul(Matmul(n=64, k=64), "tiled", "gemm").bitcode)


def test_a_kernel_passes(text: str) -> None:
    check(parse(text))


#: A regular expression, what to put in its place, and the error.
WRONG = [
    ("macosx26.0.0", "macosx15.0.0", "expected the triple 'air64_v28-apple-macosx26.0.0'"),
    ("-n8:16:32", "-n8:16:32:64", "data layout '.*' is not AIR's"),
    ("!{i32 2, i32 8, i32 0}", "!{i32 2, i32 7, i32 0}", "expected !air.version"),
    ('!"Metal", i32 4', '!"Metal", i32 3', "expected !air.language_version"),
    (r"@air\.clz\.i32", "@air.ctz.i32", "'air.ctz.i32' is not among the AIR functions known here"),
    (r"@air\.clz\.i32", "@llvm.ctlz.i32", "'llvm.ctlz.i32' is not among"),
    (rf"(declare .*{MATRIX})\(<8 x bfloat>", r"\1(<8 x half>", "has type .*; expected <8 x float>"),
    (r"(call .*)<8 x bfloat>", r"\1<8 x half>", "call does not have the type of its function"),
    (
        r"\bconvergent mustprogress nounwind willreturn",
        "mustprogress nounwind willreturn",
        "lacks the attribute convergent",
    ),
    (
        r"\bconvergent mustprogress nounwind willreturn",
        "convergent mustprogress nounwind readnone willreturn",
        "must not be readnone",
    ),
    (r"i1 true, <8 x float>", "i1 %v14, <8 x float>", "a flag must be a constant"),
    (
        r"load i32, i32 addrspace\(2\)\* %constants",
        "load double, double addrspace(2)* %constants",
        "AIR has no type double",
    ),
    (
        r"%v9 = extractelement .*",
        "%v9 = addrspacecast i8 addrspace(1)* %v2 to i8*",
        "no casts between address spaces",
    ),
    (
        r"%v9 = extractelement .*",
        "%v9 = inttoptr i64 0 to i8*",
        "addresses come from bindings alone",
    ),
    (r"%v9 = extractelement .*", "%v9 = add i128 1, 2", "AIR has no type i128"),
    (
        r"%v9 = extractelement .*",
        "%v9 = fptrunc <4 x float> %v1 to <4 x half>",
        "converts vectors of floats by calls",
    ),
    (
        r'!"air.thread_index_in_simdgroup", !"air.arg_type_name", !"uint"',
        '!"air.thread_index_in_simdgroup", !"air.arg_type_name", !"ushort"',
        "parameter 3 of 'gemm' is air.thread_index_in_simdgroup",
    ),
    (
        r'!"air.thread_index_in_simdgroup"',
        '!"air.thread_index_in_warp"',
        "unknown role air.thread_index_in_warp",
    ),
    (
        r"!{i32 3, !\"air.thread_index",
        '!{i32 4, !"air.thread_index',
        "parameter 3 of 'gemm' has the metadata of parameter 4",
    ),
    (
        r'(!"air.buffer_size", i32 4, !"air.location_index"), i32 3',
        r"\1, i32 1",
        "has location 1, not 3",
    ),
    (
        r'(i32 8, i32 8, i32 0), !"uchar", !"rhs"',
        r'\1, !"float", !"rhs"',
        "binding 'rhs' of .* is i8 addrspace.1.. but called float",
    ),
    (
        r'i32 8, i32 8, i32 0, !"uchar"',
        'i32 4, i32 8, i32 0, !"uchar"',
        "binding 1 of .* has a wrong offset",
    ),
    (
        r'!"air.buffer_size", i32 24',
        '!"air.buffer_size", i32 16',
        "metadata for another number of bindings",
    ),
    (
        r'!"air.indirect_buffer", (.*)i32 2, !"air.struct',
        r'!"air.indirect_buffer", \1i32 1, !"air.struct',
        "is not in address space 2",
    ),
    (
        r"!air.kernel = !{!\d+}",
        "!air.kernel = !{}",
        "1 functions have bodies but !air.kernel lists 0",
    ),
    (r"\)\* @gemm, !", ")* @gemv, !", "!air.kernel lists 'gemv', which has no body"),
]


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"), WRONG, ids=[w[2][:50] for w in WRONG]
)
def test_refused(text: str, pattern: str, replacement: str, message: str) -> None:
    changed = re.sub(pattern, replacement, text)
    assert changed != text, "the pattern is not in the module any more"
    with pytest.raises(LegalityError, match=message):
        check(parse(changed))


def test_a_missing_metadata_node_is_refused(text: str) -> None:
    lines = text.splitlines()
    node = next(i for i, line in enumerate(lines) if "air.thread_index_in_simdgroup" in line)
    lines[node] = lines[node].replace('!"air.arg_type_name", ', "")
    with pytest.raises(LegalityError, match=r"lacks air\.arg_type_name"):
        check(parse("\n".join(lines)))


def test_more_bindings_than_are_bound_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(air_legality, "MAX_BINDINGS", 2)
    with pytest.raises(LegalityError, match="has 3 bindings; at most 2 are bound"):
        check(parse(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= icmp ", "= frobnicate "),
        ("ret void", "ret i32 0"),
        ("br label %", "br bla %"),
        (" phi ", " phi i32 "),
        ("target triple", "target tripe"),
    ],
)
def test_what_the_reader_does_not_know_is_quoted(text: str, old: str, new: str) -> None:
    with pytest.raises(AirSyntaxError, match=r"(?s)unknown instruction|cannot read"):
        parse(text.replace(old, new, 1))
