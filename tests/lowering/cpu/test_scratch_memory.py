# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""No kernel reads scratch that it has not written: all of it starts as NaN here.

Stacks and transient buffers hold whatever was there before, so that such a read shows in a few
processes only. These modules fill both first, with bytes that are NaN as f32 and as bf16.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from iree import runtime
from iree.compiler import ir
from iree.compiler.dialects import arith, memref

from block32.dialects.kernel import KernelTier
from block32.lowering import host
from block32.lowering.cpu import ops
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.lowering.target import RESULT, KernelPlan, Launch
from block32.runtime import reference
from block32.tools.standalone import compile_standalone
from tests.lowering.cpu.support import (
    ACTIVATION_DTYPES,
    X86_PROCESSORS,
    Array,
    Processor,
    skip_unless_it_runs,
)
from tests.numbers import random_operands

#: Rows of x that reach the stream kernels, one slab and several.
ROWS = (1, 3, 8, 21)


class PoisonedTarget(CpuTarget):
    """The CPU target with transient buffers that are tied to buffers full of poison."""

    def plan(self, problem: ScaledMatmul, tiers: tuple[KernelTier, ...]) -> KernelPlan:
        plan = super().plan(problem, tiers)
        buffers = {
            name: dataclasses.replace(buffer, zeroed=True) for name, buffer in plan.buffers.items()
        }
        return KernelPlan(tuple(_updating(launch) for launch in plan.launches), buffers)


def _updating(launch: Launch) -> Launch:
    """The launch with its scratch as buffers that exist before it."""
    scratch = tuple(name for name in launch.writes if name != RESULT)
    results = tuple(name for name in launch.writes if name == RESULT)
    return dataclasses.replace(launch, updates=launch.updates + scratch, writes=results)


def poisoned_stack_buffer(type_text: str) -> ir.Value:
    """``ops.stack_buffer`` whose bytes are all 0xFF."""
    type_ = ir.MemRefType(ir.Type.parse(type_text))
    width = ir.IntegerType(type_.element_type).width if "xi" in type_text else 32
    size = math.prod(type_.shape) * width // 8
    raw = memref.alloca(ir.Type.parse(f"memref<{size}xi8>"), [], [], alignment=64)
    ops.repeat(0, size, 1, lambda i: ops.store_scalar(ops.splat(-1, ops.i8()), raw, [i]))
    return memref.view(type_, raw, arith.constant(ir.IndexType.get(), 0), [])


def poisoned_splat(dispatches: Any, name: str) -> ir.Value:
    """Instead of the zeros that a buffer starts with."""
    buffer_type = ir.RankedTensorType(dispatches._buffer_type(name))
    poison = ops.splat(
        float("nan") if isinstance(buffer_type.element_type, ir.F32Type) else -1,
        buffer_type.element_type,
    )
    sizes = dispatches._dynamic_sizes(name)
    operation = ir.Operation.create(
        "flow.tensor.splat", results=[buffer_type], operands=[poison, *sizes]
    )
    return operation.result


@pytest.fixture
def poisoned_function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From a problem and a processor to its function, with all scratch poisoned."""
    monkeypatch.setattr(ops, "stack_buffer", poisoned_stack_buffer)
    monkeypatch.setattr(host._Dispatches, "_zeros", poisoned_splat)

    def build(problem: ScaledMatmul, processor: Processor) -> Any:
        skip_unless_it_runs(processor)
        target = PoisonedTarget()
        config = target.select(problem, processor.facts).config
        assert config is not None
        spec = KernelSpec(problem, target, config.tiers)
        vmfb = compile_standalone(spec, processor.flags)
        device = runtime.Config("local-task")
        return runtime.load_vm_module(
            runtime.VmModule.copy_buffer(device.vm_instance, vmfb), device
        )["main"]

    return build


def operands_and_result(problem: ScaledMatmul, m: int) -> tuple[list[Array], Array]:
    """Operands of ``problem`` for ``m`` rows, and the float64 result."""
    operands = random_operands(
        dataclasses.replace(problem, lhs="f8E4M3FN", lhs_scaled=True), m, seed=m
    )
    if problem.lhs_scaled:
        return operands.arrays(), operands.expected()
    dtype = ACTIVATION_DTYPES[problem.lhs]
    x = np.random.default_rng(m).standard_normal((m, problem.k)).astype(dtype)
    weights = reference.dequantize(operands.rhs, operands.rhs_scale, problem.rhs_block)
    return [x, operands.arrays()[1], operands.arrays()[3]], x.astype(np.float64) @ weights.T


@pytest.mark.parametrize("processor", X86_PROCESSORS, ids=lambda p: p.profile)
@pytest.mark.parametrize("lhs", ["f8E4M3FN", "bf16", "f32"])
def test_scratch_is_written_before_it_is_read(
    processor: Processor, lhs: str, poisoned_function: Any
) -> None:
    """Ragged N and K: the last step of 64 K lacks a block and most of another."""
    problem = ScaledMatmul(None, 70, 72, lhs=lhs, lhs_scaled=lhs == "f8E4M3FN", result="f32")
    function = poisoned_function(problem, processor)
    for m in ROWS:
        arguments, expected = operands_and_result(problem, m)
        got = np.asarray(function(*arguments).to_host())
        comparison = reference.compare(got, expected, "f32")
        assert comparison.ok, f"M = {m}: {comparison}"
