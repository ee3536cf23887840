# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scaled tables: every code times every scale byte that is folded, bit for bit.

The scale is a constant here, so that MLIR computes the tables while it folds constants: this needs
no processor that looks values up in them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from iree.compiler import ir
from iree.compiler.dialects import func
from iree.compiler.passmanager import PassManager

from block32.lowering.cpu import ops, scaled_tables
from block32.lowering.cpu.fold import SAFE_BYTES
from block32.lowering.cpu.formats import SMALL_FLOATS
from block32.runtime import reference

Words = npt.NDArray[np.uint16]


def folded(build: Callable[[ir.Value], list[ir.Value]], byte: int) -> list[npt.NDArray[np.uint64]]:
    """The constant vectors that ``build`` makes of a scale byte, as unsigned numbers."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(name="main")
            def main() -> list[ir.Value]:
                return build(ops.splat(byte, ops.i8()))

        PassManager.parse("builtin.module(func.func(canonicalize))").run(module.operation)
        function = module.body.operations[0]
        returned = function.regions[0].blocks[0].operations
        return [elements(value) for value in returned[len(returned) - 1].operands]


def elements(constant: ir.Value) -> npt.NDArray[np.uint64]:
    """The elements of a constant vector of integers."""
    attribute = ir.DenseIntElementsAttr(constant.owner.attributes["value"])
    width = ir.IntegerType(ir.VectorType(constant.type).element_type).width
    return np.array([attribute[i] % (1 << width) for i in range(len(attribute))], np.uint64)


def expected(element: reference.Element, codes: int, byte: int) -> Words:
    """The bf16 of the first codes of a format, each times 2^(byte - 127).

    An entry of NaN is the same NaN, and all of these values are exact in bf16.
    """
    numbers = np.arange(codes, dtype=np.uint8)
    if element == "e2m1":
        numbers = reference.pack(numbers)
    values = np.ldexp(reference.decode(numbers, element), byte - 127).astype(np.float32)
    bits = values.view(np.uint32)
    assert not np.any(bits[~np.isnan(values)] & 0xFFFF)
    return np.where(np.isnan(values), 0x7FC0, bits >> 16).astype(np.uint16)


@pytest.mark.parametrize(("name", "element"), [("f8E4M3FN", "e4m3"), ("f8E5M2", "e5m2")])
def test_every_magnitude_times_every_folded_scale(name: str, element: reference.Element) -> None:
    small = SMALL_FLOATS[name]

    def build(scale: ir.Value) -> list[ir.Value]:
        tables = scaled_tables.byte_tables(small)
        low, high = scaled_tables.scale_byte_tables(small, tables, scale)
        return [*low, *high]

    for byte in SAFE_BYTES:
        low0, low1, high0, high1 = folded(build, byte)
        low, high = np.concatenate([low0, low1]), np.concatenate([high0, high1])
        np.testing.assert_array_equal(high << 8 | low, expected(element, 128, byte), str(byte))


def test_every_4_bit_code_times_every_folded_scale() -> None:
    small = SMALL_FLOATS["f4E2M1FN"]

    def build(scale: ir.Value) -> list[ir.Value]:
        table = scaled_tables.word_table(small)
        return [scaled_tables.scale_word_table(small, table, scale)]

    for byte in SAFE_BYTES:
        (words,) = folded(build, byte)
        np.testing.assert_array_equal(words, np.tile(expected("e2m1", 16, byte), 2), str(byte))


@pytest.mark.parametrize("byte", [0, 1, 82, 172, 253, 254])
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_zeros_stay_zeros_whatever_the_scale(name: str, byte: int) -> None:
    """Blocks of zeros are folded with any byte but that of NaN."""
    small = SMALL_FLOATS[name]

    def build(scale: ir.Value) -> list[ir.Value]:
        if small.bits == 4:
            return [scaled_tables.scale_word_table(small, scaled_tables.word_table(small), scale)]
        tables = scaled_tables.byte_tables(small)
        low, high = scaled_tables.scale_byte_tables(small, tables, scale)
        return [low[0], high[0]]

    found = folded(build, byte)
    assert [table[0] for table in found] == [0] * len(found)
    if small.bits == 4:
        assert found[0][8] == 0x8000, "-0"
