# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""AMX: eight tile registers, products of bf16 tiles, and the leave to use them.

A tile holds 16 rows of 64 bytes. ``multiply`` adds to a tile of 16 x 16 f32 the product of 16 rows
of 32 bf16 with 32 x 16 bf16, which is held as 16 rows of 16 pairs (Intel Architecture Instruction
Set Extensions Programming Reference, chapter on AMX).

An operating system has to save the tiles, and Linux lets a process use them only after it has asked
(Linux documentation, "Using XSTATE features in user space applications"). Whoever runs a module
cannot be made to ask, so that kernels do it themselves and have vector code to fall back on.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref

from block32.lowering.common.index import Index, IndexValue, as_value
from block32.lowering.cpu import ops

#: Rows of a tile; also its columns of 32 bits.
ROWS = 16
#: Bytes of a tile's row.
ROW_BYTES = 64
#: Bytes of a whole tile.
TILE_BYTES = ROWS * ROW_BYTES
#: Elements of K in one product.
DEPTH = 32
#: Pairs of them: what a row of a tile of bf16 holds.
PAIRS = DEPTH // 2
#: Tile registers.
REGISTERS = 8

#: Bits of the register XCR0 that stand for tiles: the configuration and the data.
_XCR0_TILES = 0x60000
#: The system call arch_prctl of x86-64 Linux, its request for a state component, and tile data.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def is_permitted() -> ir.Value:
    """Ask for the use of tiles, as an i1: whether the kernel may go on with AMX.

    False on a processor without AMX, on a system that does not save tiles, and where Linux refuses.
    Systems other than Linux get no system call, since theirs would mean something else: they keep a
    selector in the register ds, which is 0 on 64-bit Linux. They are served without AMX.
    """
    i64 = ir.IntegerType.get_signless(64)
    zero = ops.splat(0, i64)
    enabled = _assembly("xgetbv", "={ax},{cx},~{dx}", i64, [zero])
    tiles = ops.splat(_XCR0_TILES, i64)
    has_tiles = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(enabled, tiles), tiles)
    selector = _assembly("movq %ds, $0", "=r", i64, [])
    is_linux = arith.cmpi(arith.CmpIPredicate.eq, selector, zero)

    def ask() -> list[ir.Value]:
        request = [_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA]
        arguments = [ops.splat(value, i64) for value in request]
        clobbers = "~{rcx},~{r11},~{memory}"
        error = _assembly("syscall", f"={{ax}},{{ax}},{{di}},{{si}},{clobbers}", i64, arguments)
        return [arith.cmpi(arith.CmpIPredicate.eq, error, zero)]

    (granted,) = ops.choose_values(
        arith.andi(has_tiles, is_linux), [ops.i1()], ask, lambda: [ops.splat(0, ops.i1())]
    )
    return granted


def _assembly(text: str, constraints: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    return llvm.InlineAsmOp(result, arguments, text, constraints, has_side_effects=True).result


def configure(row_bytes: Sequence[int] = ()) -> None:
    """Give each register 16 rows of at most 64 bytes; registers past the last one get 64."""
    table = [0] * 64
    table[0] = 1  # the palette
    for register in range(REGISTERS):
        table[16 + 2 * register] = row_bytes[register] if register < len(row_bytes) else ROW_BYTES
        table[48 + register] = ROWS
    buffer = ops.stack_buffer("memref<64xi8>")
    ops.store(ops.int_table(table, ops.i8()), buffer, [0], 64)
    _call("ldtilecfg", [pointer(buffer)])


def release() -> None:
    """Leave the tile registers unused, which makes a change of threads cheap again."""
    _call("tilerelease", [])


def pointer(buffer: ir.Value, byte_offset: Index = 0) -> ir.Value:
    """The address of a memref's first byte, plus an offset, as a pointer."""
    start = memref.extract_aligned_pointer_as_index(buffer)
    address = as_value(IndexValue(start) + byte_offset)
    as_integer = arith.index_cast(ir.IntegerType.get_signless(64), address)
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr"), as_integer)


def zero(register: int) -> None:
    """Fill a tile register with zeros."""
    _call("tilezero", [_register(register)])


def load(register: int, buffer: ir.Value, byte_offset: Index, row_bytes: int = ROW_BYTES) -> None:
    """Load a tile whose rows begin every ``row_bytes`` bytes in memory."""
    stride = _stride(row_bytes)
    _call("tileloadd64", [_register(register), pointer(buffer, byte_offset), stride])


def store(register: int, buffer: ir.Value, byte_offset: Index) -> None:
    """Store a tile whose rows begin every 64 bytes in memory."""
    stride = _stride(ROW_BYTES)
    _call("tilestored64", [_register(register), pointer(buffer, byte_offset), stride])


def multiply(sums: int, a: int, b: int) -> None:
    """Add the product of the tiles ``a`` and ``b`` to the tile ``sums``."""
    _call("tdpbf16ps", [_register(register) for register in (sums, a, b)])


def _register(register: int) -> ir.Value:
    return ops.splat(register, ops.i8())


def _stride(row_bytes: int) -> ir.Value:
    return ops.splat(row_bytes, ir.IntegerType.get_signless(64))


def _call(name: str, arguments: list[ir.Value]) -> None:
    llvm.CallIntrinsicOp(None, f"llvm.x86.{name}", arguments, [], [])
