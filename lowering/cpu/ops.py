# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Short names for the vector, memory and control operations that CPU kernels are made of.

Everything is built at the current insertion point. Vectors are one-dimensional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref, scf, vector

from block32.lowering.common.index import Index, IndexValue, as_value

#: The body of a loop: from the counter and the carried values to the next carried values.
LoopBody = Callable[[IndexValue, list[ir.Value]], Sequence[ir.Value]]


def i1() -> ir.Type:
    """The type of conditions."""
    return ir.IntegerType.get_signless(1)


def i8() -> ir.Type:
    """The type of codes and scale bytes."""
    return ir.IntegerType.get_signless(8)


def i16() -> ir.Type:
    """The type of the bits of a bf16."""
    return ir.IntegerType.get_signless(16)


def i32() -> ir.Type:
    """The type of the bits of an f32, and of a pair of bf16."""
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    """The type of accumulators."""
    return ir.F32Type.get()


def vector_type(count: int, element: ir.Type) -> ir.Type:
    """``vector<count x element>``."""
    return ir.VectorType.get([count], element)


def length(value: ir.Value) -> int:
    """The number of elements of a vector."""
    return ir.VectorType(value.type).shape[0]


def element_type(value: ir.Value) -> ir.Type:
    """The element type of a vector; the type itself of a scalar."""
    return ir.VectorType(value.type).element_type if is_vector(value.type) else value.type


def is_vector(type_: ir.Type) -> bool:
    """Whether a type is a vector type."""
    return isinstance(type_, ir.VectorType)


def splat(value: int | float, like: ir.Type) -> ir.Value:
    """A constant of type ``like``; every element of a vector is ``value``."""
    element = ir.VectorType(like).element_type if is_vector(like) else like
    if isinstance(element, ir.IntegerType):
        bits = 1 << element.width
        signed = int(value) % bits
        attribute = ir.IntegerAttr.get(element, signed - bits if signed >= bits // 2 else signed)
    else:
        attribute = ir.FloatAttr.get(element, float(value))
    if is_vector(like):
        attribute = ir.DenseElementsAttr.get_splat(like, attribute)
    return arith.constant(like, attribute)


def int_table(values: Sequence[int], element: ir.Type) -> ir.Value:
    """A constant vector of integers, given as unsigned or signed numbers."""
    bits = 1 << ir.IntegerType(element).width
    signed = [v % bits - (bits if v % bits >= bits // 2 else 0) for v in values]
    attributes = [ir.IntegerAttr.get(element, v) for v in signed]
    type_ = vector_type(len(values), element)
    return arith.constant(type_, ir.DenseElementsAttr.get(attributes, type_))


def broadcast(value: ir.Value, count: int) -> ir.Value:
    """A vector of ``count`` copies of a scalar."""
    return vector.broadcast(vector_type(count, value.type), value)


def shuffle(a: ir.Value, b: ir.Value, order: Sequence[int]) -> ir.Value:
    """Elements of the concatenation of ``a`` and ``b``, picked by position."""
    return vector.shuffle(a, b, list(order))


def permute(a: ir.Value, order: Sequence[int]) -> ir.Value:
    """Elements of ``a``, picked by position."""
    return a if list(order) == list(range(length(a))) else shuffle(a, a, order)


def part(value: ir.Value, offset: int, count: int) -> ir.Value:
    """``count`` neighbouring elements of a vector."""
    if count == length(value):
        return value
    type_ = vector_type(count, element_type(value))
    return vector.extract_strided_slice(type_, value, [offset], [count], [1])


def parts(value: ir.Value, count: int) -> list[ir.Value]:
    """The vector cut into vectors of ``count`` elements."""
    return [part(value, offset, count) for offset in range(0, length(value), count)]


def join(pieces: Sequence[ir.Value]) -> ir.Value:
    """Vectors of equal length, a power of two of them, one after another."""
    while len(pieces) > 1:
        pieces = [
            shuffle(a, b, range(2 * length(a)))
            for a, b in zip(pieces[::2], pieces[1::2], strict=True)
        ]
    return pieces[0]


def bitcast(value: ir.Value, element: ir.Type) -> ir.Value:
    """The bits of a vector as elements of another type."""
    bits = length(value) * element_type(value).width
    return vector.bitcast(vector_type(bits // element.width, element), value)


def convert(op: Callable[..., ir.Value], value: ir.Value, element: ir.Type) -> ir.Value:
    """Apply a cast op such as ``arith.extui`` to a scalar or to a vector's elements."""
    type_ = vector_type(length(value), element) if is_vector(value.type) else element
    return op(type_, value)


def intrinsic(name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic."""
    call = llvm.call_intrinsic(result, name, list(arguments), [], [])
    assert isinstance(call, ir.Value)
    return call


def load(
    buffer: ir.Value, indices: Sequence[Index], count: int, alignment: int | None = None
) -> ir.Value:
    """Load ``count`` neighbouring elements as a vector.

    ``alignment`` is that of the buffer: a shorter vector in it is aligned to its own size.
    """
    type_ = vector_type(count, ir.MemRefType(buffer.type).element_type)
    positions = [as_value(index) for index in indices]
    return vector.load(type_, buffer, positions, alignment=_alignment(type_, alignment))


def store(
    value: ir.Value, buffer: ir.Value, indices: Sequence[Index], alignment: int | None = None
) -> None:
    """Store a vector to neighbouring elements; see ``load``."""
    positions = [as_value(index) for index in indices]
    vector.store(value, buffer, positions, alignment=_alignment(value.type, alignment))


def _alignment(vector_: ir.Type, of_buffer: int | None) -> int | None:
    """The alignment in bytes of a vector in a buffer."""
    if of_buffer is None:
        return None
    type_ = ir.VectorType(vector_)
    return min(of_buffer, type_.shape[0] * type_.element_type.width // 8)


def load_scalar(buffer: ir.Value, indices: Sequence[Index]) -> ir.Value:
    """Load one element."""
    return memref.load(buffer, [as_value(index) for index in indices])


def store_scalar(value: ir.Value, buffer: ir.Value, indices: Sequence[Index]) -> None:
    """Store one element."""
    memref.store(value, buffer, [as_value(index) for index in indices])


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    """``count`` elements as (offset, length) pieces whose lengths are falling powers of two."""
    offset = 0
    while offset < count:
        size = 1 << ((count - offset).bit_length() - 1)
        yield offset, size
        offset += size


def load_first(buffer: ir.Value, indices: Sequence[Index], count: int, width: int) -> ir.Value:
    """Load ``count`` elements into a vector of ``width``; the rest are zeros and are never read."""
    if count == width:
        return load(buffer, indices, width)
    *outer, last = indices
    element = ir.MemRefType(buffer.type).element_type
    result = splat(0, vector_type(width, element))
    for offset, size in _pieces(count):
        piece = load(buffer, [*outer, last + offset], size)
        result = vector.insert_strided_slice(piece, result, [offset], [1])
    return result


def store_first(value: ir.Value, buffer: ir.Value, indices: Sequence[Index], count: int) -> None:
    """Store the first ``count`` elements of a vector, and touch nothing after them."""
    *outer, last = indices
    for offset, size in _pieces(count):
        store(part(value, offset, size), buffer, [*outer, last + offset])


def prefetch(buffer: ir.Value, indices: Sequence[Index], cache: int = 1) -> None:
    """Ask for the cache line of an element; one that is not used costs no more than its way.

    Args:
        buffer: A memref.
        indices: The element's.
        cache: How far it comes: 1 for the innermost, 2 for the next.
    """
    positions = [as_value(index) for index in indices]
    hint = 4 - cache
    memref.prefetch(buffer, positions, is_write=False, locality_hint=hint, is_data_cache=True)


#: Bytes of stack that the large buffers of a kernel may take together; IREE allows 32 KiB in all.
STACK = 28 * 1024


def stack_buffer(type_text: str) -> ir.Value:
    """Scratch on the worker's stack, aligned to a cache line."""
    return memref.alloca(ir.Type.parse(type_text), [], [], alignment=64)


def view(raw: ir.Value, type_text: str) -> ir.Value:
    """Bytes of scratch seen as another memref."""
    return memref.view(ir.Type.parse(type_text), raw, as_value(0), [])


def for_range(
    lower: Index, upper: Index, step: Index, carried: Sequence[ir.Value], body: LoopBody
) -> list[ir.Value]:
    """``for i in range(lower, upper, step)``; gives the carried values after the last iteration."""
    first, last, stride = (as_value(bound) for bound in (lower, upper, step))
    loop = scf.ForOp(first, last, stride, list(carried))
    with ir.InsertionPoint(loop.body):
        scf.yield_(list(body(IndexValue(loop.induction_variable), list(loop.inner_iter_args))))
    return list(loop.results)


def repeat(lower: Index, upper: Index, step: Index, body: Callable[[IndexValue], None]) -> None:
    """``for i in range(lower, upper, step)`` without carried values."""

    def without_values(i: IndexValue, _: list[ir.Value]) -> Sequence[ir.Value]:
        body(i)
        return []

    for_range(lower, upper, step, [], without_values)


@contextmanager
def when(condition: ir.Value) -> Iterator[None]:
    """Ops built inside run only where the i1 ``condition`` holds."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def choose(condition: ir.Value, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Run ``then`` where the i1 ``condition`` holds, else ``otherwise``."""

    def without_values(body: Callable[[], None]) -> Sequence[ir.Value]:
        body()
        return []

    choose_values(condition, [], lambda: without_values(then), lambda: without_values(otherwise))


def choose_values(
    condition: ir.Value,
    types: Sequence[ir.Type],
    then: Callable[[], Sequence[ir.Value]],
    otherwise: Callable[[], Sequence[ir.Value]],
) -> list[ir.Value]:
    """The values of ``then`` where the i1 ``condition`` holds, else those of ``otherwise``."""
    branch = scf.IfOp(condition, list(types), has_else=True)
    for block, body in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(list(body()))
    return list(branch.results)


def is_below(a: Index, b: Index) -> ir.Value:
    """Whether ``a < b``, as an i1."""
    return arith.cmpi(arith.CmpIPredicate.ult, as_value(a), as_value(b))


def is_equal(a: Index, b: Index) -> ir.Value:
    """Whether ``a == b``, as an i1."""
    return arith.cmpi(arith.CmpIPredicate.eq, as_value(a), as_value(b))


def element(value: ir.Value, position: int) -> ir.Value:
    """One element of a vector."""
    return vector.extract(value, [], [position])
