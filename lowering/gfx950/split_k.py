# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Split-K: partial tiles go to slots; the last workgroup to arrive, or a second launch, adds them.

The additions are in split order in both forms, so the result depends neither on scheduling nor on
the form. Slots are ``f32 [tiles][splits][BLOCK_M][BLOCK_N]``.

The L1 is not coherent, and every XCD has its own L2: partial sums are stored and loaded at device
scope (sc1), past both. The order that makes it work: store, wait until the stores have arrived,
barrier, count; and load only after the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref

from block32.lowering.common.counters import wrapping_limit
from block32.lowering.common.index import Index, IndexValue, as_value, equal, minimum
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.epilogue import (
    Piece,
    extract_values,
    pack_values,
    store_result,
)
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import CACHE_DEVICE_SCOPE
from block32.lowering.gfx950.workgroup import Workgroup
from block32.lowering.kernel_context import KernelContext

COUNTERS = "counters"
SLOTS = "slots"


def publish_partial(workgroup: Workgroup, pieces: Sequence[Piece]) -> None:
    """Store this workgroup's partial tile in its slot."""
    slots = _tile_slots(workgroup)
    slot = workgroup.split * _slot_bytes(workgroup)
    for piece in pieces:
        packed = pack_values(piece.values)
        slots.store(packed, _slot_offset(workgroup, piece), slot, CACHE_DEVICE_SCOPE)


def reduce_in_launch(
    workgroup: Workgroup, pieces: Sequence[Piece], thread: Index, waves: int
) -> None:
    """Publish the partial tile; the last workgroup of the tile adds all of them and stores y.

    Args:
        workgroup: The workgroup.
        pieces: What the calling waves hold.
        thread: The number of the calling thread among those that hold pieces.
        waves: Waves that hold pieces: a single one needs no barrier.
    """
    publish_partial(workgroup, pieces)
    ops.wait_for_stores()
    before = _count_arrival(workgroup, thread, waves)
    is_last = equal(before, wrapping_limit(workgroup.geometry.splits))

    def add_and_store(_: list[ir.Value]) -> list[ir.Value]:
        store_result(workgroup, _sum_slots(workgroup, pieces))
        return []

    ops.if_then(is_last, [], add_and_store)


def _tile_slots(workgroup: Workgroup) -> ops.Buffer:
    size = _slot_bytes(workgroup) * workgroup.geometry.splits
    address = ops.global_pointer(workgroup.kernel, SLOTS) + ops.as_i64(workgroup.tile) * size
    return ops.make_buffer(address, size)


def _slot_bytes(workgroup: Workgroup) -> int:
    return workgroup.geometry.slot_elements * 4


def _slot_offset(workgroup: Workgroup, piece: Piece) -> Index:
    return ops.or_out_of_bounds(piece.is_owner, piece.offset(workgroup.geometry.block_n, 4))


def _count_arrival(workgroup: Workgroup, thread: Index, waves: int) -> Index:
    """How many workgroups of this tile came before; known to all calling waves."""
    if waves == 1:
        return ops.first_lane(_increment_once(workgroup, thread))
    ops.barrier()  # every wave's stores have arrived before one thread speaks for all
    shared = ops.allocate_lds(1, ops.i32_type())
    is_first = equal(thread, 0)

    def count(_: list[ir.Value]) -> list[ir.Value]:
        memref.store(as_value(_increment(workgroup)), shared, [as_value(0)])
        return []

    ops.if_then(is_first, [], count)
    ops.barrier()
    return ops.first_lane(IndexValue(memref.load(shared, [as_value(0)])))


def _increment_once(workgroup: Workgroup, thread: Index) -> Index:
    """The counter before one lane of the wave counted; valid in that lane, the first."""
    nothing = ops.i32_value(0)
    is_first = equal(thread, 0)
    counted = ops.if_then(is_first, [nothing], lambda _: [as_value(_increment(workgroup))])
    return IndexValue(counted[0])


def _increment(workgroup: Workgroup) -> IndexValue:
    """Count one arrival at the tile's counter; the value before. It wraps to 0 at the last one."""
    address = ops.global_pointer(workgroup.kernel, COUNTERS) + ops.as_i64(workgroup.tile) * 4
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), as_value(address))
    limit = ops.i32_value(wrapping_limit(workgroup.geometry.splits))
    before = llvm.atomicrmw(
        llvm.AtomicBinOp.uinc_wrap,
        pointer,
        limit,
        llvm.AtomicOrdering.monotonic,
        syncscope="agent",
        alignment=4,
    )
    return IndexValue(before)


def _sum_slots(workgroup: Workgroup, pieces: Sequence[Piece]) -> list[Piece]:
    """All partial tiles of the tile, added in split order."""
    slots = _tile_slots(workgroup)
    slot_bytes = _slot_bytes(workgroup)

    def load(slot: Index) -> list[ir.Value]:
        loaded = [_load_piece(workgroup, slots, piece, slot) for piece in pieces]
        return [value for values in loaded for value in values]

    def add(slot: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
        return [arith.addf(a, b) for a, b in zip(sums, load(slot), strict=True)]

    end = slot_bytes * workgroup.geometry.splits
    sums = iter(ops.for_range(slot_bytes, end, slot_bytes, load(0), add))
    return [piece.with_values([next(sums) for _ in piece.values]) for piece in pieces]


def _load_piece(
    workgroup: Workgroup, slots: ops.Buffer, piece: Piece, slot: Index
) -> list[ir.Value]:
    count = len(piece.values)
    loaded_type = ops.vector_type(count, ir.F32Type.get())
    loaded = slots.load(loaded_type, _slot_offset(workgroup, piece), slot, CACHE_DEVICE_SCOPE)
    return [loaded] if count == 1 else extract_values(loaded, range(count))


#: The part of y that a workgroup of the second launch adds: rows and columns.
REDUCE_BLOCK = (32, 64)
REDUCE_THREADS = 256


def emit_reduce(geometry: Geometry, kernel: KernelContext) -> None:
    """The second launch: add all partial tiles of a block of y, in split order.

    Sixteen threads stand side by side on four columns each; a thread takes two rows. Rows and
    columns past the end add some that exist, and are not stored.
    """
    rows, columns = REDUCE_BLOCK
    as_block = replace(geometry.tier, tile=(rows, columns, geometry.block_k))
    block_geometry = Geometry(geometry.problem, as_block)
    m = ops.as_i32(kernel.m)
    block = ops.as_i32(kernel.workgroup_id(0))
    block_m, block_n = block // block_geometry.tiles_n, block % block_geometry.tiles_n
    workgroup = Workgroup(block_geometry, kernel, m, block_m, block_n, 0, True)
    thread, threads_in_row = ops.thread_id(), columns // 4
    column = thread % threads_in_row * 4
    pieces = []
    for row_step in range(0, rows, REDUCE_THREADS // threads_in_row):
        row = thread // threads_in_row + row_step
        y_row = minimum(workgroup.first_row + row, m - 1)
        # Tiles are whole fours of columns, so four columns of a tile exist where the first does.
        y_column = minimum(workgroup.first_column + column, (geometry.problem.n - 1) // 4 * 4)
        values = _sum_columns(geometry, kernel, m, y_row, y_column)
        pieces.append(Piece(row, column, tuple(values)))
    store_result(workgroup, pieces)


def _sum_columns(
    geometry: Geometry, kernel: KernelContext, m: Index, row: Index, column: Index
) -> list[ir.Value]:
    """The sums of four neighbouring columns of one row of y."""
    tile_m, tile_n = row // geometry.block_m, column // geometry.block_n
    workgroup = Workgroup(geometry, kernel, m, tile_m, tile_n, 0, True)
    inside = row % geometry.block_m * geometry.block_n + column % geometry.block_n
    elements = geometry.slot_elements
    address = ops.as_i64(workgroup.tile) * (elements * geometry.splits) + ops.as_i64(inside)
    address = ops.global_pointer(kernel, SLOTS) + address * 4
    partials = []
    for split in range(geometry.splits):
        start = as_value(address + split * elements * 4)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), start)
        four = ops.vector_type(4, ir.F32Type.get())
        partials.append(llvm.load(four, pointer, alignment=16))
    total = partials[0]
    for partial in partials[1:]:
        total = arith.addf(total, partial)
    return extract_values(total, range(4))
