# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiny modules that stock IREE compiles, for tests of what loads, runs and describes them."""

from __future__ import annotations

import struct
from functools import lru_cache

from block32.tools.iree_compile import run_iree_compile

SOURCE = b"""
func.func @main(%x: tensor<4x64xf8E4M3FN>, %s: tensor<4x2xf8E8M0FNU>)
    -> (tensor<4x64xf32>, tensor<4x2xf8E8M0FNU>) {
  %y = arith.extf %x : tensor<4x64xf8E4M3FN> to tensor<4x64xf32>
  return %y, %s : tensor<4x64xf32>, tensor<4x2xf8E8M0FNU>
}
func.func @scale(%x: tensor<?x4xf32>, %n: i32, %f: f32) -> (tensor<?x4xf32>, i32) {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x4xf32>
  %e = tensor.empty(%m) : tensor<?x4xf32>
  %g = linalg.fill ins(%f : f32) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %y = arith.mulf %x, %g : tensor<?x4xf32>
  %c1 = arith.constant 1 : i32
  %k = arith.addi %n, %c1 : i32
  return %y, %k : tensor<?x4xf32>, i32
}
func.func @twice(%x: tensor<?x8xbf16>, %i: tensor<8xi8>) -> tensor<?x8xbf16> {
  %y = arith.addf %x, %x : tensor<?x8xbf16>
  return %y : tensor<?x8xbf16>
}
"""
ONE = b"""
func.func @only(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = arith.addf %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
PARAMETERS = b"""
util.global private @w = #flow.parameter.named<"model"::"w"> : tensor<4xf32>
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %w = util.global.load @w : tensor<4xf32>
  %y = arith.addf %x, %w : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
CPU = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")
HOST = (*CPU, "--iree-llvmcpu-target-cpu=host")
GFX950 = ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx950")


@lru_cache(maxsize=16)
def compiled(source: bytes = SOURCE, flags: tuple[str, ...] = HOST) -> bytes:
    """The vmfb of a module."""
    return run_iree_compile(["-", *flags], stdin=source)


def with_hal_version(vmfb: bytes, version: int) -> bytes:
    """A vmfb that says it was compiled for another version of the runtime's hal module.

    The dependency is a table of its name, the version and flags: the version is the only 32-bit
    word 7 between the table's start and the name ``hal``.
    """
    name = vmfb.index(struct.pack("<I", 3) + b"hal\0")
    start = vmfb.rindex(struct.pack("<I", 7), name - 24, name)
    return vmfb[:start] + struct.pack("<I", version) + vmfb[start + 4 :]
