# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""K shared out over workgroups: numbers, the same bits for any number of threads, the choice."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iree import runtime

from block32.dialects.kernel import KernelTier
from block32.lowering.cpu.select import WORKGROUPS
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.runtime import reference
from block32.tools.standalone import compile_standalone
from tests.lowering.cpu.support import (
    HOST,
    X86_PROCESSORS,
    Processor,
    scales,
    skip_unless_it_runs,
)
from tests.numbers import random_operands

TARGET = CpuTarget()
AVX2 = Processor("avx2", "haswell")
#: 3 ranges of 11, 11 and 10 chunks of 32, then 8 more K; 40 columns end in the middle of a group.
RAGGED = ScaledMatmul(None, 40, 32 * 32 + 8)
#: Runs a module on operands from a file, with as many workers as it is told.
RUN_WITH_WORKERS = """
import sys
import ml_dtypes
import numpy as np
from iree import runtime
module, arrays, result, workers = sys.argv[1:]
runtime.flags.parse_flags(f"--task_topology_group_count={workers}")
config = runtime.Config("local-task")
code = open(module, "rb").read()
function = runtime.load_vm_module(
    runtime.VmModule.copy_buffer(config.vm_instance, code), config)["main"]
x, w, x_scale, w_scale = np.load(arrays).values()
as_scale = ml_dtypes.float8_e8m0fnu
y = function(x.view(ml_dtypes.float8_e4m3fn), w.view(ml_dtypes.float8_e4m3fn),
             x_scale.view(as_scale), w_scale.view(as_scale))
np.save(result, np.asarray(y.to_host()))
"""


def split_tier(processor: Processor, splits: int) -> KernelTier:
    """The processor's kernel for a few rows, with its K in ``splits`` ranges; for M up to 4."""
    config = TARGET.select(ScaledMatmul(4, 4096, 4096), processor.facts).config
    assert config is not None
    return dataclasses.replace(config.tiers[0], max_m=4, splits=splits, reduce="second_launch")


@lru_cache(maxsize=8)
def split_module(problem: ScaledMatmul, processor: Processor, splits: int) -> bytes:
    """The vmfb of ``problem`` with a split tier for up to 4 rows, and one without for more."""
    tier = split_tier(processor, splits)
    assert TARGET.verify(problem, tier, processor.facts) is None
    config = TARGET.select(dataclasses.replace(problem, m=None), processor.facts).config
    assert config is not None
    spec = KernelSpec(problem, TARGET, (tier, config.tiers[-1]))
    return compile_standalone(spec, processor.flags)


def split_function(problem: ScaledMatmul, processor: Processor, splits: int) -> Any:
    skip_unless_it_runs(processor)
    config = runtime.Config("local-task")
    code = split_module(problem, processor, splits)
    module = runtime.VmModule.copy_buffer(config.vm_instance, code)
    return runtime.load_vm_module(module, config)["main"]


@pytest.mark.parametrize("processor", X86_PROCESSORS[1:], ids=lambda p: p.profile)
def test_numbers_of_every_tier(processor: Processor) -> None:
    """M = 0, split rows, and rows of the tier without splits, whose grid of the sum is empty."""
    function = split_function(RAGGED, processor, 3)
    for m in (0, 1, 3, 7):
        operands = random_operands(RAGGED, m, seed=m)
        got = np.asarray(function(*operands.arrays()).to_host())
        comparison = reference.compare(got, operands.expected(), "f32")
        assert comparison.ok, f"M = {m}: {comparison}"


@pytest.mark.parametrize("byte", [0, 254])
def test_scales_that_cannot_be_folded(byte: int) -> None:
    """Every range of K takes the exact form, the short one at the end too."""
    operands = random_operands(RAGGED, 3)
    operands.lhs_scale[:] = byte
    operands.rhs_scale[:] = 254 - byte
    got = np.asarray(split_function(RAGGED, AVX2, 3)(*operands.arrays()).to_host())
    assert reference.compare(got, operands.expected(), "f32").ok


def test_an_epilogue_is_applied_to_the_whole_sum() -> None:
    epilogue = Epilogue(scale=True, bias="f32", activation="relu")
    problem = dataclasses.replace(RAGGED, result="bf16", epilogue=epilogue)
    operands = random_operands(problem, 2)
    peak = np.abs(operands.expected()).max()
    scale = np.array([0.5], np.float32)
    bias = (np.linspace(-1, 1, problem.n) * peak).astype(np.float32)
    function = split_function(problem, AVX2, 3)
    got = np.asarray(function(*operands.arrays(), scale, bias).to_host())
    expected = np.maximum(operands.expected() * 0.5 + bias, 0)
    assert reference.compare(got, expected, "bf16").ok


def test_the_same_bits_for_any_number_of_threads(tmp_path: Path) -> None:
    skip_unless_it_runs(AVX2)
    operands = random_operands(RAGGED, 3)
    (tmp_path / "module.vmfb").write_bytes(split_module(RAGGED, AVX2, 3))
    x, w, x_scale, w_scale = operands.arrays()
    bytes_ = [array.view(np.uint8) for array in (x, w, scales(x_scale), scales(w_scale))]
    np.savez(tmp_path / "arrays.npz", *bytes_)
    results = []
    for workers in (1, 2, 4, 8):
        files = [str(tmp_path / name) for name in ("module.vmfb", "arrays.npz", f"{workers}.npy")]
        subprocess.run(
            [sys.executable, "-c", RUN_WITH_WORKERS, *files, str(workers)], check=True, timeout=120
        )
        results.append(np.load(tmp_path / f"{workers}.npy"))
    assert reference.compare(results[0], operands.expected(), "f32").ok
    for result in results[1:]:
        assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"splits": 33}, "expected splits that share out 32 steps of 32 K, none empty"),
        ({"splits": 9}, "expected splits that share out 32 steps of 32 K, none empty"),
        ({"reduce": "in_launch"}, "expected reduce 'second_launch' with splits but got 'in_"),
        ({"splits": 1}, "expected no reduce without splits but got 'second_launch'"),
        ({"form": "tiled", "tile": (96, 64, 32), "mma": (6, 16, 1)}, "expected splits 1 for a ker"),
    ],
)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    tier = split_tier(AVX2, 3)
    assert TARGET.verify(RAGGED, tier, AVX2.facts) is None
    refused = TARGET.verify(RAGGED, dataclasses.replace(tier, **changes), AVX2.facts)
    assert refused is not None and reason in refused


@pytest.mark.parametrize(
    ("m", "n", "k", "columns", "splits"),
    [
        (1, 4096, 4096, 128, 1),  # 32 workgroups as it is
        (1, 1024, 8192, 32, 1),  # fewer columns are enough
        (8, 64, 16384, 16, 8),  # 4 workgroups of 16 columns, so 8 ranges
        (1, 64, 1024, 128, 1),  # too little work to share out
        (8, 16, 2880, 16, 1),  # not two ranges of enough work
    ],
)
def test_the_choice(m: int, n: int, k: int, columns: int, splits: int) -> None:
    config = TARGET.select(ScaledMatmul(m, n, k), AVX2.facts).config
    assert config is not None
    (tier,) = config.tiers
    assert tier.tile is not None and (tier.tile[1], tier.splits) == (columns, splits)
    assert tier.reduce == ("second_launch" if splits > 1 else "in_launch")


@pytest.mark.parametrize("processor", [AVX2, HOST], ids=lambda p: p.cpu)
def test_what_is_chosen_is_valid(processor: Processor) -> None:
    """Few columns and any K: no empty range, no more workgroups than are wanted."""
    for n in (8, 48, 200, 1000):
        for k in (40, 2880, 16392, 40000):
            for m in (None, 1, 3, 20, 300):
                problem = ScaledMatmul(m, n, k)
                config = TARGET.select(problem, processor.facts).config
                assert config is not None
                for tier in config.tiers:
                    assert TARGET.verify(problem, tier, processor.facts) is None
                    assert tier.tile is not None
                    assert tier.splits * -(-n // tier.tile[1]) <= max(WORKGROUPS, -(-n // 16))
