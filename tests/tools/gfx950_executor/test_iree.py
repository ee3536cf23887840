# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Stock IREE's own gfx950 kernels, taken out of modules and run; and what modules may lack."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from iree.compiler import api

from block32.tools.gfx950_executor import (
    Buffer,
    CodeObjectError,
    ExecutionError,
    Executor,
    LaunchError,
    drop,
    hsaco_from_vmfb,
    hsacos_from_vmfb,
    instructions,
    parse_code_object,
)

pytest.importorskip("tinygrad", reason="the gfx950 extra (tinygrad) is not installed")

MATMUL = """
func.func @matmul(%a: tensor<64x96xf16>, %b: tensor<80x96xf16>) -> tensor<64x80xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x80xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x80xf32>) -> tensor<64x80xf32>
  %r = linalg.matmul
    indexing_maps = [affine_map<(m,n,k)->(m,k)>, affine_map<(m,n,k)->(n,k)>,
                     affine_map<(m,n,k)->(m,n)>]
    ins(%a, %b : tensor<64x96xf16>, tensor<80x96xf16>)
    outs(%init : tensor<64x80xf32>) -> tensor<64x80xf32>
  return %r : tensor<64x80xf32>
}
"""

# Two constants after three buffers: the launch ABI of a hand-written executable.
QUOTIENT = """
#layout = #hal.pipeline.layout<constants = 2, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer, ReadOnly>,
  #hal.pipeline.binding<storage_buffer>]>
hal.executable.source private @exe {
  hal.executable.export public @quotient ordinal(0) layout(#layout)
      count(%dev: !hal.device, %w: index) -> (index, index, index) {
    %one = arith.constant 1 : index
    hal.return %w, %one, %one : index, index, index
  }
  builtin.module {
    func.func @quotient() attributes {translation_info = #iree_codegen.translation_info<
        pipeline = #iree_codegen.no_pipeline workgroup_size = [128, 1, 1] subgroup_size = 64>} {
      %zero = arith.constant 0 : index
      %size = arith.constant 128 : index
      %m32 = hal.interface.constant.load layout(#layout) ordinal(0) : i32
      %d32 = hal.interface.constant.load layout(#layout) ordinal(1) : i32
      %m = arith.index_cast %m32 : i32 to index
      %a = hal.interface.binding.subspan layout(#layout) binding(0) offset(%zero)
        : memref<?xf32>{%m}
      %b = hal.interface.binding.subspan layout(#layout) binding(1) offset(%zero)
        : memref<?xf32>{%m}
      %c = hal.interface.binding.subspan layout(#layout) binding(2) offset(%zero)
        : memref<?xf32>{%m}
      %t = gpu.thread_id x
      %g = gpu.block_id x
      %first = arith.muli %g, %size : index
      %i = arith.addi %first, %t : index
      %inside = arith.cmpi ult, %i, %m : index
      scf.if %inside {
        %x = memref.load %a[%i] : memref<?xf32>
        %y = memref.load %b[%i] : memref<?xf32>
        %sum = arith.addf %x, %y : f32
        %d = arith.sitofp %d32 : i32 to f32
        %r = arith.divf %sum, %d : f32
        memref.store %r, %c[%i] : memref<?xf32>
      }
      return
    }
  }
}
func.func @main(%a: tensor<?xf32>, %b: tensor<?xf32>, %d: i32) -> tensor<?xf32> {
  %zero = arith.constant 0 : index
  %m = tensor.dim %a, %zero : tensor<?xf32>
  %m32 = arith.index_cast %m : index to i32
  %w = arith.constant 3 : index
  %r = flow.dispatch @exe::@quotient[%w](%m32, %d, %a, %b)
    : (i32, i32, tensor<?xf32>{%m}, tensor<?xf32>{%m}) -> tensor<?xf32>{%m}
  return %r : tensor<?xf32>
}
"""


def compile_module(text: str, *flags: str) -> bytes:
    """An IREE module's bytes."""
    session = api.Session()
    session.set_flags(*flags)
    source = api.Source.wrap_buffer(session, text.encode() + b"\0")
    output = api.Output.open_membuffer()
    invocation = session.invocation()
    invocation.enable_console_diagnostics()
    assert invocation.parse_source(source)
    assert invocation.execute()
    invocation.output_vm_bytecode(output)
    return bytes(output.map_memory())


@cache
def gfx950_module(text: str) -> bytes:
    """A module for gfx950."""
    return compile_module(text, "--iree-hal-target-device=hip", "--iree-rocm-target=gfx950")


def test_buffers_come_before_constants() -> None:
    executor = Executor(hsaco_from_vmfb(gfx950_module(QUOTIENT)))
    kernel = executor.kernels["quotient"]
    assert kernel.workgroup_size == (128, 1, 1)
    assert [(a.offset, a.size) for a in kernel.arguments] == [
        (0, 8),
        (8, 8),
        (16, 8),
        (24, 4),
        (28, 4),
    ]
    a, b = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    c = np.zeros(300, np.float32)
    report = executor.launch("quotient", (3,), [a, b, Buffer(c, initialised=False)], [300, 7])
    np.testing.assert_array_equal(c, (a + b) / np.float32(7))
    assert report.byte_counts["memory written"] == 1200


def run_matmul(hsaco: bytes, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product and the float64 one."""
    rng = np.random.default_rng(1)
    a, b = (
        rng.standard_normal((64, 96)).astype(np.float16),
        rng.standard_normal((80, 96)).astype(np.float16),
    )
    c = np.zeros((64, 80), np.float32)
    executor = Executor(hsaco)
    inputs = [Buffer(a, writable=False), Buffer(b, writable=False), Buffer(c, initialised=False)]
    executor.launch(next(iter(executor.kernels)), (3,), inputs, seed=seed)
    return c, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("seed", range(3))
def test_matmul_with_direct_loads_to_lds(seed: int) -> None:
    got, wanted = run_matmul(hsaco_from_vmfb(gfx950_module(MATMUL)), seed)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_dropped_waits_and_barriers_are_caught() -> None:
    hsaco = hsaco_from_vmfb(gfx950_module(MATMUL))
    name = next(iter(Executor(hsaco).kernels))
    kinds: set[str] = set()
    for inst in instructions(hsaco, name):
        if inst.name not in ("s_waitcnt", "s_barrier"):
            continue
        try:
            got, wanted = run_matmul(drop(hsaco, inst))
        except ExecutionError as error:
            kinds.add(f"{inst.name}: {error.kind}")
            continue
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert {"s_waitcnt: missing wait", "s_barrier: race"} <= kinds


def test_sampled_workgroups_write_their_part_alone() -> None:
    executor = Executor(hsaco_from_vmfb(gfx950_module(QUOTIENT)))
    a, b = np.ones((2, 300), np.float32)
    c = np.zeros(300, np.float32)
    executor.launch("quotient", (3,), [a, b, c], [300, 2], workgroups=[(1, 0, 0)])
    np.testing.assert_array_equal(c, np.repeat([0.0, 1.0, 0.0], [128, 128, 44]))


def test_launch_errors() -> None:
    executor = Executor(hsaco_from_vmfb(gfx950_module(QUOTIENT)))
    a = np.zeros(4, np.float32)
    with pytest.raises(LaunchError, match="no kernel 'f' in the code object; it has: quotient"):
        executor.launch("f", (1,), [a, a, a], [1, 1])
    with pytest.raises(LaunchError, match="more constants than the 1 given"):
        executor.launch("quotient", (1,), [a, a, a], [1])
    with pytest.raises(LaunchError, match="1 buffers and 0 constants are left over"):
        executor.launch("quotient", (1,), [a, a, a, a], [1, 1])
    with pytest.raises(LaunchError, match="outside of the grid"):
        executor.launch("quotient", (1,), [a, a, a], [1, 1], workgroups=[(1, 0, 0)])


def test_a_module_without_gpu_code(tmp_path: Path) -> None:
    text = "func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
    path = tmp_path / "cpu.vmfb"
    path.write_bytes(
        compile_module(
            text,
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
        )
    )
    with pytest.raises(CodeObjectError, match="--iree-rocm-target=gfx950"):
        hsaco_from_vmfb(path)


def test_a_module_with_several_code_objects() -> None:
    one = hsaco_from_vmfb(gfx950_module(QUOTIENT))
    both = b"other bytes" + one + bytes(5) + one
    assert hsacos_from_vmfb(both) == [one, one]
    with pytest.raises(CodeObjectError, match="holds 2 code objects"):
        hsaco_from_vmfb(both)


def test_a_code_object_for_another_chip() -> None:
    module = compile_module(MATMUL, "--iree-hal-target-device=hip", "--iree-rocm-target=gfx942")
    with pytest.raises(CodeObjectError, match="for gfx942; compile for gfx950"):
        parse_code_object(hsaco_from_vmfb(module))
    with pytest.raises(CodeObjectError, match="not a 64-bit AMDGPU ELF file"):
        parse_code_object(b"\x7fELF\x02\x01" + bytes(60))
