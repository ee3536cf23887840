# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that read a weight in pieces: the reference's numbers, and those of plain kernels."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from iree import runtime

import block32
from block32.dialects.kernel import KernelTier
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from block32.tools.standalone import compile_standalone
from tests.lowering.cpu.support import (
    X86_PROCESSORS,
    Array,
    Processor,
    run,
    skip_unless_it_runs,
)
from tests.numbers import Operands, random_operands, run_function

TARGET = CpuTarget()
PROCESSORS = {processor.profile: processor for processor in X86_PROCESSORS}
#: Those whose tiers over a layout are chosen by themselves.
WITH_TIERS = ("avx512_vbmi", "avx512", "avx2")
#: 48 columns are less than a stream kernel takes at a time, and more than half of a panel.
PROBLEM = ScaledMatmul(None, 48, 192)
ROWS = ScaledMatmul(None, 80, 320, rhs="f8E5M2", rhs_block=(1, 32), result="bf16")
#: A row, and the first and the last M of each tier.
MS = (1, 2, 4, 5, 8, 9, 17)


def asked_for(isa: str) -> tuple[KernelTier, ...]:
    """Tiers on request, for instruction sets that have none in the table."""
    layout = instruction_set(isa).layout
    assert layout is not None
    lanes = instruction_set(isa).lanes
    stream = KernelTier("stream", 4, (4, 128, 32), mma=(4, 16, 32), isa=isa)
    tiled = KernelTier("tiled", None, (384, 128, 64), mma=(4, lanes, 2), isa=isa)
    return tuple(dataclasses.replace(t, weight_layout=layout.name) for t in (stream, tiled))


def tiers_of(problem: ScaledMatmul, processor: Processor) -> tuple[KernelTier, ...]:
    """The table's tiers, or those on request."""
    if processor.profile in WITH_TIERS:
        return TARGET.choose_layout_tiers(problem, processor.facts).tiers
    return asked_for(processor.profile)


@lru_cache(maxsize=16)
def function(problem: ScaledMatmul, processor: Processor) -> Any:
    """``problem`` over a weight in pieces as a function of arrays."""
    skip_unless_it_runs(processor)
    tiers = tiers_of(problem, processor)
    assert all(TARGET.verify(problem, tier, processor.facts) is None for tier in tiers)
    vmfb = compile_standalone(KernelSpec(problem, TARGET, tiers), processor.flags)
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, vmfb)
    return runtime.load_vm_module(module, config)["main"]


def in_pieces(w: Array, row_bytes: int) -> Array:
    """``w`` as 16 rows by ``row_bytes`` bytes after 16 rows by ``row_bytes`` bytes."""
    n, k = w.shape
    pieces = [
        w[row : row + 16, byte : byte + row_bytes].tobytes()
        for row in range(0, n, 16)
        for byte in range(0, k, row_bytes)
    ]
    return np.frombuffer(b"".join(pieces), w.dtype).reshape(n, k)


def run_in_pieces(operands: Operands, processor: Processor) -> Array:
    """The result over the repacked weight."""
    x, w, *scales = operands.arrays()
    row_bytes = 4 if instruction_set(processor.profile).widen == "table" else 1
    call = function(operands.problem, processor)
    return np.asarray(call(x, in_pieces(w, row_bytes), *scales).to_host())


@pytest.mark.parametrize("profile", [*WITH_TIERS, "avx512_bf16", "generic"])
@pytest.mark.parametrize("problem", [PROBLEM, ROWS], ids=lambda p: p.describe())
def test_agrees_with_the_reference(profile: str, problem: ScaledMatmul) -> None:
    for m in MS:
        operands = random_operands(problem, m, seed=m)
        got = run_in_pieces(operands, PROCESSORS[profile])
        comparison = reference.compare(got, operands.expected(), problem.result)  # type: ignore[arg-type]
        assert comparison.ok, f"M = {m}: {comparison}"


@pytest.mark.parametrize("profile", WITH_TIERS)
@pytest.mark.parametrize(("lhs", "rhs"), [(0, 254), (254, 0), (127, 127), (255, 127), (127, 255)])
def test_every_kind_of_scale(profile: str, lhs: int, rhs: int) -> None:
    """What a plain kernel gives: products that cancel, and NaN where a scale is one."""
    for m in (1, 4, 9):
        operands = random_operands(PROBLEM, m)
        operands.lhs_scale[:, 1], operands.rhs_scale[:, 1] = lhs, rhs
        plain = run(PROBLEM, PROCESSORS[profile], *operands.arrays())
        got = run_in_pieces(operands, PROCESSORS[profile])
        comparison = reference.compare(got, plain.astype(np.float64), "f32")
        assert comparison.ok, f"M = {m}: {comparison}"
        assert np.isnan(got).all() == (255 in (lhs, rhs))


@pytest.mark.parametrize("profile", WITH_TIERS)
@pytest.mark.parametrize("problem", [PROBLEM, ROWS], ids=lambda p: p.describe())
def test_a_block_of_zeros_is_folded_whatever_its_byte(profile: str, problem: ScaledMatmul) -> None:
    """The look for codes that are no zeros reads the layout, too: folding stops at 2^44."""
    operands = random_operands(problem, 9)
    rows = problem.rhs_block[0]
    operands.rhs[:rows, 32:64] = 0
    operands.rhs_scale[0, 1] = 200
    operands.lhs[:, 63], operands.lhs_scale[:, 1] = 0x38, 127
    for code in (0, 0x38):
        operands.rhs[rows - 1, 63] = code
        got = run_in_pieces(operands, PROCESSORS[profile])
        comparison = reference.compare(got, operands.expected(), problem.result)  # type: ignore[arg-type]
        assert comparison.ok, f"code {code}: {comparison}"


CODES = random_operands(ScaledMatmul(1, 64, 128)).rhs
SCALES = np.arange(120, 128, dtype=np.uint8).reshape(2, 4)
HEX = CODES.tobytes().hex()
WEIGHTS = {
    "bytes": (
        f'util.global private @w = dense<"0x{HEX}"> : tensor<64x128xi8>',
        "%b = util.global.load @w : tensor<64x128xi8>\n"
        "  %w = flow.tensor.bitcast %b : tensor<64x128xi8> -> tensor<64x128xf8E4M3FN>",
    ),
    "floats": ("", f'%w = arith.constant dense<"0x{HEX}"> : tensor<64x128xf8E4M3FN>'),
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_iree_repacks_a_constant_while_it_compiles(form: str) -> None:
    """Nothing is left of it for each run, or for when the program is loaded."""
    definition, load = WEIGHTS[form]
    source = f"""
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<"0x{SCALES.tobytes().hex()}"> : tensor<2x4xi8>
{definition}
func.func @main(%x: tensor<17x128xf32>) -> tensor<17x64xf32> {{
  {load}
  %z = arith.constant dense<0.0> : tensor<17x64xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {{block32.rhs = {{block = [32, 32], scale = @ws}}}}
      ins(%x, %w : tensor<17x128xf32>, tensor<64x128xf8E4M3FN>)
      outs(%z : tensor<17x64xf32>) -> tensor<17x64xf32>
  return %y : tensor<17x64xf32>
}}
"""
    flow = block32.compile(source, cpu="haswell", flags=["--compile-to=flow"]).decode()
    assert flow.count("flow.dispatch @block32_kernels") == 2, "packs x, and multiplies"
    assert in_pieces(CODES, 1).tobytes().hex() in flow.lower()
    assert "transpose" not in flow and "util.initializer" not in flow
    skip_unless_it_runs(PROCESSORS["avx2"])
    x = np.random.default_rng(2).standard_normal((17, 128)).astype(np.float32)
    got = run_function(block32.compile(source, cpu="haswell"), "main", x)
    expected = reference.scaled_matmul(x, None, CODES, SCALES)
    comparison = reference.compare(got, expected, "f32")
    assert comparison.ok, comparison
