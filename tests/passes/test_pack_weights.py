# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32-pack-weights``: which weights are repacked, and who may not read one that is."""

from __future__ import annotations

import numpy as np
import pytest

from block32.lowering.target import DeviceFacts
from block32.passes.base import Pass, Report
from block32.passes.expand_portable import ExpandPortablePass
from block32.passes.inline_composites import InlineCompositesPass
from block32.passes.isolate import IsolatePass
from block32.passes.outline import OutlinePass
from block32.passes.pack_weights import PackWeightsPass
from block32.passes.pipeline import PassFailedError, run_pipeline
from block32.passes.raise_ import RaisePass
from block32.passes.registry import standard_pipeline
from block32.passes.select_kernel import SelectKernelPass
from block32.tools.compiler import parse_module

AVX2 = {"cpu_features": "+avx2,+fma,+f16c", "architecture": "x86_64"}
AVX512 = {"cpu_features": "+avx512f,+avx512bw,+avx512vl", "architecture": "x86_64"}
N, K = 32, 64
BYTES = np.random.default_rng(0).integers(0, 120, (N, K), np.uint8).tobytes().hex().upper()
CONSTANT = f'dense<"0x{BYTES}"> : tensor<{N}x{K}xi8>'
PARAMETER = f'#flow.parameter.named<"model"::"w"> : tensor<{N}x{K}xi8>'

HEAD = f"""
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<127> : tensor<1x{K // 32}xi8>
"""
LOAD = f"""
  %bytes = util.global.load @w : tensor<{N}x{K}xi8>
  %w = flow.tensor.bitcast %bytes : tensor<{N}x{K}xi8> -> tensor<{N}x{K}xf8E4M3FN>"""
KERNEL = """block32.kernel = {target = "cpu", tiers = [{form = "tiled", isa = "avx2",
  mma = [6, 16, 1], tile = [384, 128, 96], weight_layout = "n16k1"}]}"""


def program(
    weight: str,
    *,
    load: str = LOAD,
    m: str = "16",
    kernel: str = "",
    rest: str = "",
    body: str = "",
) -> str:
    """A matmul of an f32 x by a weight; ``weight`` defines what ``load`` loads."""
    attributes = ", ".join(filter(None, ["block32.rhs = {block = [32, 32], scale = @ws}", kernel]))
    return f"""{HEAD}
{weight}
{rest}
util.func public @f(%x: tensor<{m}x{K}xf32>, %zero: tensor<{m}x{N}xf32>) -> tensor<{m}x{N}xf32> {{
  {load}
  {body}
  %y = linalg.matmul indexing_maps = [#x, #w, #y] {{{attributes}}}
      ins(%x, %w : tensor<{m}x{K}xf32>, tensor<{N}x{K}xf8E4M3FN>)
      outs(%zero : tensor<{m}x{N}xf32>) -> tensor<{m}x{N}xf32>
  util.return %y : tensor<{m}x{N}xf32>
}}"""


def quantized(source: str) -> str:
    """The same program with an x that is quantised first."""
    return source.replace(
        "{block32.rhs =", '{block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs ='
    )


def global_of(value: str, layout: str = "") -> str:
    attribute = f'{{block32.layout = "{layout}"}} ' if layout else ""
    return f"util.global private @w {attribute}= {value}"


def packed(source: str, *passes: Pass, target: str = "cpu", facts: dict[str, str] = AVX2) -> str:
    """The module after the passes up to this one, and ``passes`` after it."""
    module = parse_module(source.encode(), "model.mlir")
    options = {"target": target, **facts}
    pipeline = [RaisePass(), SelectKernelPass(**options), PackWeightsPass(**options), *passes]
    run_pipeline(module, pipeline, Report())
    return str(module)


def error_of(source: str, *passes: Pass, target: str = "cpu") -> str:
    """The error of the passes up to this one, or of ``passes`` alone where there are any."""
    module = parse_module(source.encode(), "model.mlir")
    options = {"target": target, **AVX2}
    pipeline = passes or (
        RaisePass(),
        SelectKernelPass(**options),
        PackWeightsPass(**options),
    )
    with pytest.raises(PassFailedError) as failure:
        run_pipeline(module, list(pipeline), Report())
    assert failure.value.diagnostic is not None
    return failure.value.diagnostic.render()


IS_PACKED = 'attributes {block32.layout = "n16k1"}'


def test_a_constant_is_repacked() -> None:
    text = packed(program(global_of(CONSTANT), m="?"), facts=AVX512)
    assert text.count("permutation = [0, 2, 1, 3]") == text.count(IS_PACKED) == 1
    assert text.count('weight_layout = "n16k1"') == 4, "a tier each for 1, 4, 8 and more rows"


def test_a_constant_of_floats_is_repacked_as_bytes() -> None:
    """IREE evaluates no op on f8 while it compiles: it would run whenever a program is loaded."""
    constant = f'%w = arith.constant dense<"0x{BYTES}"> : tensor<{N}x{K}xf8E4M3FN>'
    text = packed(program("", load=constant))
    assert f'dense<"0x{BYTES}"> : tensor<{N}x{K}xi8>' in text
    assert text.count(IS_PACKED) == 1


@pytest.mark.parametrize(
    "source",
    {
        "parameter": program(global_of(PARAMETER)),
        "argument": program("", load="").replace("%zero:", f"%w: tensor<{N}x{K}xf8E4M3FN>, %zero:"),
        "mutable": program(f"util.global private mutable @w = {CONSTANT}"),
        "read_elsewhere": program(
            global_of(CONSTANT),
            body=f"util.optimization_barrier %w : tensor<{N}x{K}xf8E4M3FN>",
        ),
        "another_kernel": program(
            global_of(CONSTANT), kernel=KERNEL.replace(', weight_layout = "n16k1"', "")
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_other_weights_stay_as_they_are(source: tuple[str, str]) -> None:
    assert "n16k1" not in packed(source[1])


def test_only_where_it_pays() -> None:
    """Not for processors without tiers for it, and not on other targets."""
    source = quantized(program(global_of(CONSTANT)))
    amx = "+amx-tile,+amx-bf16,+avx512f,+avx512bw,+avx512vl,+avx512vbmi,+avx512vnni,"
    amx += "+avx512bf16"
    assert "n16k" not in packed(source, facts={"cpu_features": amx, "architecture": "x86_64"})
    assert "n16k" not in packed(source, target="gfx950")
    assert "n16k" not in packed(program(global_of(CONSTANT), m="1"), facts=AVX512)
    assert "n16k" in packed(program(global_of(CONSTANT), m="2"), facts=AVX512)
    # Few rows are slower over pieces with AVX2, and an M that is not known may be few.
    assert "n16k" not in packed(program(global_of(CONSTANT), m="?"))


@pytest.mark.parametrize("value", [CONSTANT, PARAMETER], ids=["constant", "parameter"])
def test_a_kernel_that_a_user_asks_for_gets_its_layout(value: str) -> None:
    text = packed(program(global_of(value), kernel=KERNEL))
    assert text.count(IS_PACKED) == text.count('weight_layout = "n16k1"') == 1


def test_a_weight_that_is_stored_so_is_read_as_it_is() -> None:
    text = packed(program(global_of(PARAMETER, "n16k1")), OutlinePass())
    assert "permutation" not in text
    assert 'weight_layout = "n16k1"' in text


PLAIN_STREAM = """{form = "stream", max_m = 4, isa = "avx2", mma = [4, 2, 32],
  tile = [4, 128, 32]}"""
STORED = global_of(PARAMETER, "n16k1")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            program("", load="", kernel=KERNEL).replace(
                "%zero:", f"%w: tensor<{N}x{K}xf8E4M3FN>, %zero:"
            ),
            "'util.call' op asks for a weight in the layout 'n16k1', but its weight is known only "
            "at run time; expected a constant or a parameter",
        ),
        (
            program(STORED, kernel=KERNEL.replace(', weight_layout = "n16k1"', "")),
            "'util.call' op reads its weight in the layout 'plain', but it is stored as 'n16k1'",
        ),
        (
            program(global_of(PARAMETER, "n16k4")),
            "stored as 'n16k4', which no kernel for it on cpu reads; expected 'plain' or 'n16k1'",
        ),
        (
            program(STORED, body=f"util.optimization_barrier %bytes : tensor<{N}x{K}xi8>"),
            "'util.optimization_barrier' op reads @w, whose bytes are stored as 'n16k1'; expected "
            "a block-scaled matmul that has it as its weight",
        ),
        (
            program(
                STORED,
                load=LOAD.replace("%w =", "%v =")
                + f"""
  %e = tensor.empty() : tensor<{K}x{N}xf8E4M3FN>
  %t = linalg.transpose ins(%v : tensor<{N}x{K}xf8E4M3FN>)
      outs(%e : tensor<{K}x{N}xf8E4M3FN>) permutation = [1, 0]
  %w = flow.tensor.bitcast %t : tensor<{K}x{N}xf8E4M3FN> -> tensor<{N}x{K}xf8E4M3FN>""",
            ),
            "'linalg.transpose' op reads @w, whose bytes are stored as 'n16k1'",
        ),
        (
            program(global_of(CONSTANT), kernel=KERNEL.replace("[{", f"[{PLAIN_STREAM}, {{", 1)),
            "has tiers that read its weight as 'n16k1' and as 'plain'; expected one weight_layout",
        ),
        (
            program(global_of(PARAMETER, "n8k8")),
            "'util.global' op has a malformed 'block32.layout': unknown layout 'n8k8'; expected "
            "one of plain, n16k1, n16k4",
        ),
        (
            program(STORED, rest="util.global private @s {block32.layout = 3} : tensor<4xi8>"),
            "has a malformed 'block32.layout': expected a string but got 3",
        ),
        (
            program(
                global_of(CONSTANT),
                rest='util.global private @s {block32.layout = "n16k1"} : tensor<40x64xi8>',
            ),
            "'n16k1' is for [N, K] bytes with N a multiple of 16 and K one of 64 but this is "
            "tensor<40x64xi8>",
        ),
    ],
)
def test_refuses(source: str, message: str) -> None:
    assert message in error_of(source)


@pytest.mark.parametrize("target", ["portable", "gfx950", "sm_89"])
def test_targets_without_kernels_for_it_refuse_what_is_stored_so(target: str) -> None:
    assert f"which no kernel for it on {target} reads; expected 'plain'" in error_of(
        program(STORED), target=target
    )


@pytest.mark.parametrize("check", [OutlinePass(), InlineCompositesPass()], ids=lambda p: p.argument)
def test_each_reader_checks_by_itself(check: Pass) -> None:
    """Also in a pipeline without this pass."""
    source = program(STORED)
    assert "reads its weight in the layout 'plain', but it is stored as 'n16k1'" in error_of(
        source, RaisePass(), check
    )


def test_portable_code_checks_by_itself() -> None:
    source = quantized(program(STORED))
    assert "'linalg.scaled_contract' op reads its weight in the layout 'plain'" in error_of(
        source, RaisePass(), ExpandPortablePass()
    )


def test_a_spec_takes_plain_weights_alone() -> None:
    assert (
        "'util.global' op holds a weight that is stored as 'n16k1'; expected 'plain' for a spec"
        in error_of(program(STORED), IsolatePass())
    )


def test_the_pipeline_of_a_compile_repacks() -> None:
    facts = DeviceFacts(frozenset({"avx2", "fma", "f16c"}), "x86_64")
    module = parse_module(program(global_of(CONSTANT)).encode(), "model.mlir")
    run_pipeline(module, standard_pipeline("cpu", facts), Report())
    assert "permutation = [0, 2, 1, 3]" in str(module)
