# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Short names for the machine operations that gfx950 kernels are made of.

Everything is built at the current insertion point. Byte offsets are i32 ``Index`` values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import amdgpu, arith, gpu, llvm, memref, rocdl, scf, vector

from block32.lowering.common.index import (
    Condition,
    Index,
    IndexValue,
    as_typed_value,
    as_value,
    choose,
)
from block32.lowering.gfx950.atoms import ScaledAtom
from block32.lowering.gfx950.machine import BUFFER_FLAGS, CACHE_DEFAULT, OUT_OF_BOUNDS, WAVE_LANES
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import SCALE_TYPE


def i32_type() -> ir.Type:
    """The type of byte offsets and of most registers."""
    return ir.IntegerType.get_signless(32)


def i64_type() -> ir.Type:
    """The type of addresses."""
    return ir.IntegerType.get_signless(64)


def vector_type(count: int, element: ir.Type) -> ir.Type:
    """``vector<count x element>``, or the element itself for a count of 1."""
    return element if count == 1 else ir.VectorType.get([count], element)


def i32_value(value: Index) -> ir.Value:
    """An i32 SSA value of an integer or of an i32 index."""
    return as_typed_value(value, i32_type())


def as_i32(value: Index) -> Index:
    """An index narrowed to i32."""
    if isinstance(value, int):
        return value
    return IndexValue(arith.index_castui(i32_type(), value.value))


def as_i64(value: Index) -> Index:
    """An i32 or ``index`` value widened to i64."""
    if isinstance(value, int):
        return IndexValue(arith.constant(i64_type(), value))
    if isinstance(value.value.type, ir.IndexType):
        return IndexValue(arith.index_castui(i64_type(), value.value))
    return IndexValue(arith.extui(i64_type(), value.value))


def as_index(value: Index) -> ir.Value:
    """An i32 index as a value of type ``index``."""
    if isinstance(value, int):
        return as_value(value)
    return arith.index_castui(ir.IndexType.get(), value.value)


def or_out_of_bounds(is_inside: Condition, offset: Index) -> Index:
    """``offset``, or one that a buffer refuses."""
    return choose(is_inside, offset, OUT_OF_BOUNDS)


def thread_id() -> IndexValue:
    """The thread's number in its workgroup."""
    return IndexValue(arith.index_castui(i32_type(), gpu.thread_id(gpu.Dimension.x)))


def wave_id(thread: Index) -> IndexValue:
    """The wave's number in the workgroup, in a scalar register."""
    wave = thread // WAVE_LANES
    return first_lane(wave)


def first_lane(value: Index) -> IndexValue:
    """A value that is the same in all lanes, moved to a scalar register."""
    return IndexValue(rocdl.readfirstlane(i32_type(), i32_value(value)))


def lane_id() -> IndexValue:
    """The lane's number, from the hardware.

    Unlike the thread id it can be made again anywhere, so nothing is kept in a register through a
    loop for the sake of an epilogue. The ballot keeps LLVM from sharing it with an earlier one.
    """
    true = arith.constant(ir.IntegerType.get_signless(1), 1)
    all_lanes = rocdl.ballot(i64_type(), true)
    low = arith.trunci(i32_type(), all_lanes)
    high = arith.trunci(i32_type(), arith.shrui(all_lanes, arith.constant(i64_type(), 32)))
    below = rocdl.mbcnt_lo(i32_type(), low, i32_value(0))
    return IndexValue(rocdl.mbcnt_hi(i32_type(), high, below))


@dataclass(frozen=True)
class Buffer:
    """A raw buffer descriptor: a base address in scalar registers, and a checked size in bytes.

    Addresses are ``base + offset + uniform``. The hardware checks ``offset`` alone against the
    size: a load outside gives zeros, a store outside does nothing. So rows and columns that may
    not exist belong in ``offset``, and what only walks inside a row belongs in ``uniform``.
    """

    descriptor: ir.Value

    def load(
        self, result: ir.Type, offset: Index, uniform: Index = 0, cache: int = CACHE_DEFAULT
    ) -> ir.Value:
        """Load a value of up to 16 bytes."""
        return rocdl.raw_ptr_buffer_load(
            result, self.descriptor, i32_value(offset), i32_value(uniform), aux=_aux(cache)
        )

    def store(
        self, value: ir.Value, offset: Index, uniform: Index = 0, cache: int = CACHE_DEFAULT
    ) -> None:
        """Store a value of up to 16 bytes."""
        rocdl.raw_ptr_buffer_store(
            value, self.descriptor, i32_value(offset), i32_value(uniform), aux=_aux(cache)
        )

    def load_to_lds(self, lds_address: Index, offset: Index, uniform: Index) -> None:
        """Start a 16-byte load a lane straight to LDS; lane l's bytes go to ``address + 16 l``.

        Complete after ``mark_loads_to_lds`` and ``wait_loads_to_lds``.
        """
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), i32_value(lds_address))
        rocdl.raw_ptr_buffer_load_async_lds(
            self.descriptor,
            pointer,
            i32_value(16),
            i32_value(offset),
            i32_value(uniform),
            i32_value(0),
            aux=_aux(0),
        )


def _aux(bits: int) -> ir.Attribute:
    return ir.IntegerAttr.get(i32_type(), bits)


def global_pointer(kernel: KernelContext, name: str) -> IndexValue:
    """The address of a binding, as an i64."""
    memory = kernel.memref(name, "memref<1xi8, #gpu.address_space<global>>")
    address = memref.extract_aligned_pointer_as_index(memory)
    return IndexValue(arith.index_castui(i64_type(), address))


def make_buffer(address: Index, size: Index) -> Buffer:
    """A buffer of ``size`` bytes (i32) at an i64 address; both the same in all lanes."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), as_value(address))
    descriptor = rocdl.make_buffer_rsrc(
        ir.Type.parse("!llvm.ptr<8>"),
        pointer,
        arith.constant(ir.IntegerType.get_signless(16), 0),
        as_value(as_i64(size)),
        arith.constant(i32_type(), BUFFER_FLAGS),
    )
    return Buffer(descriptor)


def mark_loads_to_lds() -> None:
    """Close the group of the loads to LDS that were started since the last mark."""
    rocdl.asyncmark()


def wait_loads_to_lds(groups_left: int) -> None:
    """Wait until at most ``groups_left`` groups of loads to LDS are on their way."""
    rocdl.wait_asyncmark(groups_left)


def barrier() -> None:
    """A barrier of the workgroup that also orders its LDS accesses."""
    amdgpu.lds_barrier()


def wait_for_stores() -> None:
    """Wait until all of this wave's loads and stores have arrived."""
    amdgpu.memory_counter_wait(load=0, store=0)


def allocate_lds(count: int, element: ir.Type) -> ir.Value:
    """A memref of ``count`` elements in LDS."""
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    return memref.alloc(ir.MemRefType.get([count], element, memory_space=space), [], [])


def lds_address(memory: ir.Value) -> IndexValue:
    """The LDS byte address of a memref."""
    address = memref.extract_aligned_pointer_as_index(memory)
    return IndexValue(arith.index_castui(i32_type(), address))


def load_lds(memory: ir.Value, count: int, element: ir.Type, position: Index) -> ir.Value:
    """Load ``count`` elements from an LDS memref; 16 bytes must be aligned to 16."""
    if count == 1:
        return memref.load(memory, [as_index(position)])
    alignment = 16 if count * ir.IntegerType(element).width == 128 else None
    loaded = vector_type(count, element)
    return vector.load(loaded, memory, [as_index(position)], alignment=alignment)


def concatenate(parts: Sequence[ir.Value]) -> ir.Value:
    """One i32 vector from one or two vectors of four."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return vector.shuffle(first, second, list(range(8)))


def lane_operand(chunks: Sequence[ir.Value], element: str) -> ir.Value:
    """A lane's 32 elements of a matrix operand from its 16-byte chunks."""
    operand = vector_type(32, ir.Type.parse(element))
    return vector.bitcast(operand, concatenate(chunks))


def scale_operand(word: ir.Value) -> ir.Value:
    """Four scale bytes from a 32-bit register."""
    scales = vector_type(4, ir.Type.parse(SCALE_TYPE))
    single = vector.from_elements(ir.VectorType.get([1], i32_type()), [word])
    return vector.bitcast(scales, single)


def widen_undefined(value: ir.Value) -> ir.Value:
    """An i32 whose low bits are an i8, i16 or i32 value, and whose other bits do not matter.

    Zero extension would make LLVM carry the narrow value through loops and mask it in each turn.
    """
    count = 32 // ir.IntegerType(value.type).width
    if count == 1:
        return value
    several = ir.VectorType.get([count], value.type)
    undefined = llvm.UndefOp(several).result
    widened = vector.insert(value, undefined, [], [0])
    word = vector.bitcast(ir.VectorType.get([1], i32_type()), widened)
    return vector.extract(word, [], [0])


@dataclass(frozen=True)
class MatrixOperand:
    """One side of a matrix instruction: a lane's elements, its scale word and the byte to use."""

    elements: ir.Value
    scale_word: ir.Value
    scale_byte: int


def scaled_mfma(
    atom: ScaledAtom, a: MatrixOperand, b: MatrixOperand, accumulator: ir.Value
) -> ir.Value:
    """``accumulator + (a * scales) @ (b * scales)^T``; rows of the result are a's."""
    return amdgpu.scaled_mfma(
        atom.m,
        atom.m,
        atom.k,
        a.elements,
        b.elements,
        accumulator,
        scale_operand(a.scale_word),
        scale_operand(b.scale_word),
        a.scale_byte,
        b.scale_byte,
    )


#: Which lane of four each lane is given, for the first and the second round of a reduction.
QUAD_NEIGHBOURS = ((1, 0, 3, 2), (2, 3, 0, 1))


def quad_permute(value: ir.Value, lanes: tuple[int, int, int, int]) -> ir.Value:
    """The 32-bit values of other lanes, within each four neighbouring ones."""
    positions = ", ".join(f"{lane} : i32" for lane in lanes)
    return amdgpu.dpp(
        value,
        value,
        attribute("#amdgpu.dpp_perm<quad_perm>"),
        perm_argument=attribute(f"[{positions}]"),
    )


def for_range(
    start: Index,
    stop: Index,
    step: int,
    state: Sequence[ir.Value],
    body: Callable[[IndexValue, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """A loop over i32 that carries ``state``; ``body`` gets the counter and gives the new state."""
    loop = scf.ForOp(i32_value(start), i32_value(stop), i32_value(step), list(state))
    with ir.InsertionPoint(loop.body):
        counter, *carried = loop.body.arguments
        scf.yield_(list(body(IndexValue(counter), carried)))
    return list(loop.results)


def if_then(
    condition: Condition,
    state: Sequence[ir.Value],
    body: Callable[[list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """``body(state)`` where the condition holds, else ``state``; known conditions cost nothing."""
    if isinstance(condition, bool):
        return list(body(list(state))) if condition else list(state)
    branch = scf.IfOp(condition, [value.type for value in state], has_else=bool(state))
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(body(list(state))))
    if state:
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(state))
    return list(branch.results)


def attribute(text: str) -> Any:
    """An attribute that the bindings have no class for."""
    return ir.Attribute.parse(text)
