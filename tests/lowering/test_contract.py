# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantising in the kernel and groups of rows, from the program to launches and back.

The toy target uses all of the contract; the real ones must refuse what they have no kernel for.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from block32.dialects import problem as problem_attribute
from block32.dialects.diagnostics import BadAttributeError
from block32.dialects.kernel import KernelTier
from block32.lowering.problem import Epilogue, Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import TARGETS, target_named
from block32.runtime import reference
from block32.tools.compiler import CompileOptions, compile_source
from tests.grouped import program as program_of_groups
from tests.numbers import run_function

QUANTIZED = ScaledMatmul(None, 48, 64, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil")
GROUPED = ScaledMatmul(None, 48, 64, grouping=Grouping(4, 3))


@pytest.fixture(autouse=True)
def toy_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "toy", ("tests.lowering.toy_target", "ToyTarget"))


def compiled(text: str, target: str) -> tuple[bytes, list[str]]:
    """The vmfb of a program, and the remarks that the passes made."""
    remarks: list[str] = []
    flags = LOCAL if target == "portable" else ()
    options = CompileOptions(
        target, flags=flags, on_remark=lambda remark: remarks.append(remark.message)
    )
    return compile_source(text.encode(), "model.mlir", options), remarks


def weights(n: int = 48, experts: tuple[int, ...] = ()) -> list[npt.NDArray]:
    """Codes and scales of w."""
    rng = np.random.default_rng(1)
    w = reference.encode(rng.standard_normal((*experts, n, 64)))
    return [w, rng.integers(120, 130, (*experts, -(-n // 32), 2), dtype=np.uint8)]


def activation(m: int) -> npt.NDArray:
    rng = np.random.default_rng(m)
    return (rng.standard_normal((m, 64)) * 10.0 ** rng.uniform(-3, 3, (m, 1))).astype(
        ml_dtypes.bfloat16
    )


LOCAL = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
FP8, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
TYPES = "%x: tensor<?x64xbf16>, %w: tensor<48x64xf8E4M3FN>, %b: tensor<48xf32>"
MATMUL = """
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
#mn = affine_map<(m, n) -> (m, n)>
#n = affine_map<(m, n) -> (n)>
util.global private @ws = dense<[[127, 126], [129, 120]]> : tensor<2x2xi8>
func.func @main({types}) -> ({results}) {{
  %axis = arith.constant 0 : index
  %m = tensor.dim %x, %axis : tensor<?x64xbf16>
  %cst = arith.constant 0.0 : f32
  %e = tensor.empty(%m) : tensor<?x48xf32>
  %zero = linalg.fill ins(%cst : f32) outs(%e : tensor<?x48xf32>) -> tensor<?x48xf32>
{body}
}}
"""
DYNAMIC = """  %{name} = linalg.matmul indexing_maps = [#x, #w, #y]
      {{block32.lhs = {{block = [1, 32], scale = "dynamic"}},
       block32.rhs = {{block = [32, 32], scale = @ws}}{more}}}
      ins(%x, %w : tensor<?x64xbf16>, tensor<48x64xf8E4M3FN>)
      outs(%zero : tensor<?x48xf32>) -> tensor<?x48xf32>
"""
BIAS = """  %z = linalg.generic
      {indexing_maps = [#mn, #n, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%y, %b : tensor<?x48xf32>, tensor<48xf32>) outs(%e : tensor<?x48xf32>) {
  ^bb0(%a: f32, %c: f32, %o: f32):
    %s = arith.addf %a, %c : f32
    linalg.yield %s : f32
  } -> tensor<?x48xf32>
"""
W_SCALE = np.array([[127, 126], [129, 120]], np.uint8)


def program(*names: str, bias: bool = False, more: str = "") -> str:
    """Matmuls of one activation that is quantised at run time, a bias after the one named y."""
    body = "".join(DYNAMIC.format(name=name, more=more) for name in names)
    returned = ["z" if bias and name == "y" else name for name in names]
    results = ", ".join(["tensor<?x48xf32>"] * len(names))
    body += BIAS if bias else ""
    body += f"  return {', '.join('%' + name for name in returned)} : {results}"
    return MATMUL.format(types=TYPES, results=results, body=body)


@pytest.mark.parametrize("target", ["toy", "portable"])
@pytest.mark.parametrize("bias", [False, True])
def test_quantising_in_the_kernel_gives_the_same_bits(target: str, bias: bool) -> None:
    """M = 3 and 4 are quantised in the toy's kernel, more rows by its launch: one result."""
    vmfb, remarks = compiled(program("y", bias=bias), target)
    said = [r for r in remarks if "x is quantised (rceil)" in r]
    assert len(said) == (target == "toy")
    assert all("M <= 4, else by a launch of its own" in r for r in said)
    w = weights()[0]
    added = np.linspace(-2, 2, 48, dtype=np.float32)
    rows = activation(9)
    got = {m: run_function(vmfb, "main", rows[:m], w.view(FP8), added) for m in (3, 4, 5, 9)}
    codes, scales = reference.quantize(rows)
    want = reference.scaled_matmul(codes, scales, w, W_SCALE) + added * bias
    for m, y in got.items():
        comparison = reference.compare(y, want[:m], "f32")
        assert comparison.ok, f"M = {m}: {comparison}"
        np.testing.assert_array_equal(y, got[9][:m])


def test_the_remark_comes_once_for_each_shape() -> None:
    doubled = "  %x2 = arith.addf %x, %x : tensor<?x64xbf16>\n"
    second = DYNAMIC.format(name="y2", more="").replace("ins(%x,", "ins(%x2,")
    total = "  %s = arith.addf %y, %y2 : tensor<?x48xf32>\n  return %s"
    text = program("y").replace("  return %y", doubled + second + total)
    _, remarks = compiled(text, "toy")
    assert len([r for r in remarks if "48x64_bf16_rceil" in r]) == 2
    assert len([r for r in remarks if "x is quantised" in r]) == 1


def test_two_readers_share_one_quantisation() -> None:
    """It would be done twice in the kernels, so it stays a step of its own."""
    first, _, second = program("y", "u").rpartition("scale = @ws")
    _, remarks = compiled(f"{first}scale = dense<127> : tensor<2x2xi8>{second}", "toy")
    assert len(remarks) == 2
    assert not [r for r in remarks if "rceil" in r]


def test_an_epilogue_that_the_target_lacks_keeps_the_fused_quantisation() -> None:
    text = program("y", bias=True).replace("arith.addf %a, %c : f32", "math.tanh %a : f32")
    _, remarks = compiled(text, "toy")
    assert any("48x64_bf16_rceil" in r and " with " not in r for r in remarks)


@pytest.mark.parametrize(
    ("quantize", "is_fused"), [("fused", True), ("separate", True), ("none", False)]
)
def test_a_forced_kernel_decides(quantize: str, is_fused: bool) -> None:
    tiers = f'[{{form = "tiled", quantize = "{quantize}"}}]'
    kernel = f'block32.kernel = {{target = "toy", tiers = {tiers}}}'
    _, remarks = compiled(program("y", more=f", {kernel}"), "toy")
    assert any("rceil" in r for r in remarks) == is_fused


def grouped_arguments(m: int, offsets: list[int], ids: list[int]) -> list[npt.NDArray]:
    rng = np.random.default_rng(5)
    x = reference.encode(rng.standard_normal((m, 64)))
    x_scale = rng.integers(120, 130, (m, 2), dtype=np.uint8)
    w, w_scale = weights(48, (4,))
    init = rng.standard_normal((m, 48)).astype(np.float32)
    groups = [np.array(offsets, np.int32), np.array(ids, np.int32)]
    return [x, w, x_scale, w_scale, *groups, init]


def viewed(arguments: list[npt.NDArray]) -> list[npt.NDArray]:
    types = (FP8, FP8, E8M0, E8M0, np.int32, np.int32, np.float32)
    return [a.view(t) for a, t in zip(arguments, types, strict=True)]


@pytest.fixture(scope="module")
def grouped_vmfb() -> Iterator[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "toy", ("tests.lowering.toy_target", "ToyTarget"))
        yield compiled(program_of_groups(GROUPED), "toy")[0]


@pytest.mark.parametrize(
    ("m", "offsets", "ids"),
    [
        (10, [0, 3, 3, 8], [2, 0, 3]),
        (9, [2, 4, 7, 7], [1, -1, 0]),
        (5, [0, 2, 4, 5], [3, 3, 4]),
        (4, [4, 4, 4, 4], [0, 1, 2]),
        (0, [0, 0, 0, 0], [0, 1, 2]),
    ],
    ids=["an empty group", "no expert", "an id too large", "no rows of a group", "no rows"],
)
def test_a_grouped_launch_updates_the_result(
    grouped_vmfb: bytes, m: int, offsets: list[int], ids: list[int]
) -> None:
    """Rows of no group are those of init, which the launch is given as its result."""
    arguments = grouped_arguments(m, offsets, ids)
    x, w, x_scale, w_scale, rows, experts, init = arguments
    got = run_function(grouped_vmfb, "main", *viewed(arguments))
    want = reference.grouped_matmul(x, x_scale, w, w_scale, rows, experts, init)
    assert got.shape == want.shape
    comparison = reference.compare(got, want, "f32")
    assert comparison.ok, comparison
    outside = np.ones(m, bool)
    outside[offsets[0] : offsets[-1]] = False
    np.testing.assert_array_equal(got[outside], init[outside])


def test_without_groups_there_is_no_launch() -> None:
    problem = ScaledMatmul(None, 48, 64, grouping=Grouping(4, 0))
    vmfb, _ = compiled(program_of_groups(problem), "toy")
    arguments = viewed(grouped_arguments(6, [0], []))
    np.testing.assert_array_equal(run_function(vmfb, "main", *arguments), arguments[-1])


def without_kernels() -> Iterator[tuple[str, ScaledMatmul]]:
    """Each target with the problems that it has no kernels for."""
    for name in TARGETS:
        target = target_named(name)
        if name == "portable" or not target.quantizes:
            yield name, QUANTIZED
        if name == "portable" or not target.groups:
            yield name, GROUPED


@pytest.mark.parametrize(("name", "problem"), list(without_kernels()))
def test_a_target_without_such_kernels_says_so(name: str, problem: ScaledMatmul) -> None:
    target = target_named(name)
    selection = target.select(problem, DeviceFacts())
    assert selection.config is None
    assert name in selection.reason or name == "portable"
    assert target.verify(problem, KernelTier("tiled", quantize="fused"), DeviceFacts())


@pytest.mark.parametrize(
    ("problem", "quantize", "words"),
    [
        (QUANTIZED, "none", "expected quantize 'fused' or 'separate'"),
        (GROUPED, "fused", "expected quantize 'none' but got 'fused'"),
        (ScaledMatmul(None, 48, 64), "separate", "expected quantize 'none' but got 'separate'"),
    ],
)
def test_a_tier_that_quantises_nothing_or_too_much(
    problem: ScaledMatmul, quantize: str, words: str
) -> None:
    tier = KernelTier("tiled", quantize=quantize)
    assert words in (target_named("toy").verify(problem, tier, DeviceFacts()) or "")


def test_names_tell_problems_apart() -> None:
    """Symbols and remarks are made of them."""
    plain = ScaledMatmul(None, 48, 64)
    problems = [
        plain,
        ScaledMatmul(None, 48, 64, lhs="bf16", lhs_scaled=False),
        QUANTIZED,
        ScaledMatmul(None, 48, 64, lhs="bf16", lhs_scaled=False, lhs_quantize="floor"),
        GROUPED,
        ScaledMatmul(None, 48, 64, grouping=Grouping(4, 2)),
        ScaledMatmul(None, 48, 64, grouping=Grouping(3, 3)),
    ]
    assert len({p.describe() for p in problems}) == len(problems)


def test_an_epilogue_is_no_part_of_a_grouped_matmul() -> None:
    """The consumer also reads the rows of no group."""
    both = ScaledMatmul(None, 48, 64, epilogue=Epilogue(scale=True), grouping=Grouping(4, 3))
    with pytest.raises(BadAttributeError, match="takes no epilogue"):
        problem_attribute.check(both)
