# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The instructions that the kernels are made of, each as one Python function.

Integers are ``i32`` inside a kernel, since 64-bit arithmetic costs two instructions; only the
offset of a row in device memory is computed in 64 bits. Names follow the PTX ISA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref, nvvm, vector
from iree.compiler.dialects import math as math_ops

from block32.lowering.common.index import Condition, Index, IndexValue
from block32.lowering.kernel_context import KernelContext

GLOBAL_SPACE: Final = 1
SHARED_SPACE: Final = 3

#: Shared memory that a kernel declares; the rest comes with the launch.
ANCHOR_BYTES: Final = 16


def i32() -> ir.Type:
    """The type of all integers in a kernel."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """The type of offsets in device memory."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """The type of accumulators and decoded scales."""
    return ir.F32Type.get()


def i32_value(value: Index) -> ir.Value:
    """An ``i32`` SSA value of an index of any type."""
    if isinstance(value, int):
        return arith.constant(i32(), value)
    if value.value.type == i32():
        return value.value
    return arith.index_castui(i32(), value.value)


def as_i32(value: Index) -> Index:
    """An index as ``i32``; Python integers stay what they are."""
    return value if isinstance(value, int) else IndexValue(i32_value(value))


def as_i32_value(value: Index) -> IndexValue:
    """An index as an SSA value of type ``i32``, for places where an integer would have no type."""
    return IndexValue(i32_value(value))


def f32_value(value: float) -> ir.Value:
    """An ``f32`` constant."""
    return arith.constant(f32(), value)


@dataclass(frozen=True)
class Pointer:
    """An address in device memory or in shared memory; ``+`` counts bytes."""

    value: ir.Value
    space: int

    def __add__(self, offset: Index) -> Pointer:
        if isinstance(offset, int):
            if offset == 0:
                return self
            return Pointer(self._offset([], [offset]), self.space)
        wide = offset.value
        if wide.type == i32():
            wide = arith.extui(i64(), wide)
        elif wide.type == ir.IndexType.get():
            wide = arith.index_castui(i64(), wide)
        return Pointer(self._offset([wide], [_DYNAMIC]), self.space)

    def _offset(self, dynamic: list[ir.Value], constants: list[int]) -> ir.Value:
        byte = ir.IntegerType.get_signless(8)
        flags = ir.Attribute.parse("0 : i32")
        return llvm.GEPOp(self.value.type, self.value, dynamic, constants, byte, flags).result

    def load(self, value_type: ir.Type, alignment: int) -> ir.Value:
        """Load a value; ``alignment`` in bytes is what the address is known to have."""
        return llvm.LoadOp(value_type, self.value, alignment=alignment).result

    def store(self, value: ir.Value, alignment: int) -> None:
        """Store ``value``."""
        llvm.StoreOp(value, self.value, alignment=alignment)


#: ``llvm.getelementptr``'s mark of a dynamic index among the constant ones.
_DYNAMIC: Final = -(2**31)


def global_pointer(kernel: KernelContext, name: str, size: Index) -> Pointer:
    """The first byte of a binding of ``size`` bytes."""
    extent = str(size) if isinstance(size, int) else "?"
    sizes = () if isinstance(size, int) else (size,)
    space = "#gpu.address_space<global>"
    buffer = kernel.memref(name, f"memref<{extent}xi8, {space}>", sizes)
    return _pointer_of(buffer, GLOBAL_SPACE)


def shared_memory() -> Pointer:
    """The first byte of the workgroup's shared memory, 1024-byte aligned; call it once a kernel.

    A static variable of ``ANCHOR_BYTES`` comes first in shared memory and the launch's dynamic
    memory right behind it, so together they are one array. (A ``memref.alloc`` would do, but IREE
    gives each kernel of an executable as much as all of them together allocate.)
    """
    text = (
        f"{{ .shared .align 1024 .b8 block32_shared[{ANCHOR_BYTES}]; mov.u64 $0, block32_shared; }}"
    )
    address = inline_ptx(text, "=l", [], [i64()], has_side_effects=True)[0]
    pointer_type = ir.Type.parse(f"!llvm.ptr<{SHARED_SPACE}>")
    return Pointer(llvm.IntToPtrOp(pointer_type, address).result, SHARED_SPACE)


def _pointer_of(buffer: ir.Value, space: int) -> Pointer:
    address = memref.ExtractAlignedPointerAsIndexOp(buffer).result
    wide = arith.index_castui(i64(), address)
    pointer_type = ir.Type.parse(f"!llvm.ptr<{space}>")
    return Pointer(llvm.IntToPtrOp(pointer_type, wide).result, space)


def shared_address(pointer: Pointer) -> IndexValue:
    """The address of a shared-memory pointer as the ``i32`` that instructions take."""
    return IndexValue(llvm.PtrToIntOp(i32(), pointer.value).result)


def row_offset(row: Index, pitch: int, column: Index = 0) -> Index:
    """``row * pitch + column`` in 64 bits, where it may pass 4 GiB."""
    if isinstance(row, int) and isinstance(column, int):
        return row * pitch + column
    wide_row = IndexValue(arith.extui(i64(), i32_value(row)))
    wide_column = (
        column if isinstance(column, int) else IndexValue(arith.extui(i64(), i32_value(column)))
    )
    return wide_row * pitch + wide_column


def thread_id() -> IndexValue:
    """The thread's position in its workgroup."""
    op = ir.Operation.create(
        "gpu.thread_id",
        results=[ir.IndexType.get()],
        attributes={"dimension": ir.Attribute.parse("#gpu.dim<x>")},
    )
    return IndexValue(i32_value(IndexValue(op.result)))


def barrier() -> None:
    """All threads of the workgroup arrive; shared memory written before is seen after."""
    ir.Operation.create("gpu.barrier")


def sync_warp() -> None:
    """All lanes of the warp arrive; shared memory written before is seen after."""
    nvvm.bar_warp_sync(arith.constant(i32(), -1))


def device_fence() -> None:
    """Orders this thread's memory accesses before it and after it, for the whole device."""
    nvvm.memory_barrier(ir.Attribute.parse("#nvvm.mem_scope<gpu>"))


def atomic_wrapping_increment(pointer: Pointer, limit: int) -> IndexValue:
    """Add 1 to an i32 in device memory, or set it to 0 where it was ``limit``; the old value.

    Acquire-release, and of device scope: ``memref.atomic_rmw`` would be of the wider system scope.
    """
    op = llvm.AtomicRMWOp(
        llvm.AtomicBinOp.uinc_wrap,
        pointer.value,
        arith.constant(i32(), limit),
        llvm.AtomicOrdering.acq_rel,
        syncscope="device",
        results=[i32()],
    )
    return IndexValue(op.res)


def copy_async(destination: Pointer, source: Pointer, size: int, valid_bytes: ir.Value) -> None:
    """Start a copy of 4, 8 or 16 bytes from device memory to shared memory.

    Bytes past ``valid_bytes`` (an i32) are written as zeros and not read.
    """
    modifier = "cg" if size == 16 else "ca"
    nvvm.CpAsyncOp(
        destination.value,
        source.value,
        size,
        ir.Attribute.parse(f"#nvvm.load_cache_modifier<{modifier}>"),
        cpSize=valid_bytes,
    )


def commit_copies() -> None:
    """Close the group of copies that this thread started since the last commit."""
    nvvm.CpAsyncCommitGroupOp()


def wait_copies(pending_groups: int) -> None:
    """Wait until at most ``pending_groups`` of this thread's groups are unfinished."""
    nvvm.CpAsyncWaitGroupOp(pending_groups)


def load_matrices(pointer: Pointer) -> list[ir.Value]:
    """``ldmatrix.x4``: four matrices of 8 rows x 16 bytes, 4 bytes of each in every lane.

    Lane ``8 * i + r`` gives the address of row r of matrix i. Lane ``4 * r + c`` gets bytes
    ``4 * c`` to ``4 * c + 3`` of row r of each matrix.
    """
    registers = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    op = nvvm.LdMatrixOp(
        pointer.value,
        4,
        ir.Attribute.parse("#nvvm.mma_layout<row>"),
        ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m = 8, n = 8>"),
        ir.Attribute.parse("#nvvm.ld_st_matrix_elt_type<b16>"),
        results=[registers],
    )
    return unpack_struct(op.res, 4, i32())


def exchange(value: ir.Value, lane: Index) -> ir.Value:
    """The 32-bit ``value`` that ``lane`` has; all lanes of the warp take part."""
    return _shuffle(value, i32_value(lane), "idx")


def exchange_across(value: ir.Value, distance: int) -> ir.Value:
    """The 32-bit ``value`` of the lane whose number differs in the bit ``distance``."""
    return _shuffle(value, arith.constant(i32(), distance), "bfly")


def _shuffle(value: ir.Value, lane: ir.Value, kind: str) -> ir.Value:
    op = nvvm.ShflOp(
        arith.constant(i32(), -1),
        value,
        lane,
        arith.constant(i32(), 31),
        ir.Attribute.parse(f"#nvvm<shfl_kind<{kind}>>"),
        results=[value.type],
    )
    return op.res


def count_lanes(condition: ir.Value) -> IndexValue:
    """In how many lanes of the warp an i1 holds; all lanes take part."""
    ballot = nvvm.VoteSyncOp(
        arith.constant(i32(), -1),
        condition,
        ir.Attribute.parse("#nvvm<vote_sync_kind<ballot>>"),
        results=[i32()],
    )
    return IndexValue(math_ops.CtPopOp(ballot.res).result)


def encode_fp8_pair(low: ir.Value, high: ir.Value, name: str) -> ir.Value:
    """Two f32 as fp8 codes in an i16: nearest, ties to even, saturating; NaN stays NaN."""
    text = f"cvt.rn.satfinite.{name}x2.f32 $0, $2, $1;"
    i16 = ir.IntegerType.get_signless(16)
    return inline_ptx(text, "=h,f,f", [low, high], [i16])[0]


def unpack_struct(struct: ir.Value, count: int, element: ir.Type) -> list[ir.Value]:
    """The ``count`` fields of a struct that an instruction returned."""
    return [llvm.ExtractValueOp(element, struct, [index]).result for index in range(count)]


def inline_ptx(
    text: str,
    constraints: str,
    operands: Sequence[ir.Value],
    results: Sequence[ir.Type],
    has_side_effects: bool = False,
) -> list[ir.Value]:
    """An instruction that no operation stands for: PTX with ``$0``, ... as LLVM's inline asm."""
    if len(results) > 1:
        result = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, results))})>")
    else:
        result = results[0] if results else None
    op = llvm.InlineAsmOp(
        result, list(operands), text, constraints, has_side_effects=has_side_effects or None
    )
    if len(results) > 1:
        return unpack_struct(op.res, len(results), results[0])
    return [op.res] if results else []


def computed_here(values: Sequence[ir.Value]) -> list[ir.Value]:
    """The same f32 ``values``; what computes them stays before this place."""
    count = len(values)
    constraints = ",".join(["=f"] * count + [str(index) for index in range(count)])
    return inline_ptx("", constraints, values, [f32()] * count, has_side_effects=True)


def or_zero(value: ir.Value, condition: Condition) -> ir.Value:
    """An i32 ``value``, or 0 where ``condition`` does not hold."""
    if isinstance(condition, bool):
        return value if condition else i32_value(0)
    return arith.select(condition, value, i32_value(0))


def low_half(register: ir.Value) -> ir.Value:
    """The low 16 bits."""
    return arith.trunci(ir.IntegerType.get_signless(16), register)


def high_half(register: ir.Value) -> ir.Value:
    """The high 16 bits."""
    return low_half(arith.shrui(register, arith.constant(i32(), 16)))


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """``a * b + c`` in f32, rounded once."""
    return math_ops.FmaOp(a, b, c).result


def decode_scale(word: ir.Value, index: int = 0) -> ir.Value:
    """2^(byte - 127) of the E8M0 byte ``index`` of a little-endian i32; 255 is NaN.

    The byte becomes the exponent field of an f32 and all bits below it are set. That is just below
    2^(byte - 126), for 0 too, which would be no power of two without them; and 255 is a NaN. Half
    of it, and a bit more, rounds to 2^(byte - 127) for every byte. So no case needs a comparison:
    the integer unit has the most to do where few rows are multiplied.
    """
    if index == 3:
        shifted = arith.shrui(word, arith.constant(i32(), 1))
    else:
        shifted = arith.shli(word, arith.constant(i32(), 23 - 8 * index))
    bits = arith.ori(shifted, arith.constant(i32(), 0x007F_FFFF))
    # The sign is a bit of the next byte; to leave it out is free.
    magnitude = math_ops.AbsFOp(arith.bitcast(f32(), bits)).result
    return arith.mulf(magnitude, f32_value(0.5 + 2.0**-24))


def make_vector(elements: Sequence[ir.Value]) -> ir.Value:
    """A vector of scalars of one type."""
    vector_type = ir.VectorType.get([len(elements)], elements[0].type)
    return vector.FromElementsOp(vector_type, list(elements)).result


def vector_elements(value: ir.Value) -> list[ir.Value]:
    """The scalars of a one-dimensional vector."""
    count = math.prod(ir.VectorType(value.type).shape)
    return [vector.ExtractOp(value, [], [index]).result for index in range(count)]
