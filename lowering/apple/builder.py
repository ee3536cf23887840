# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Building a kernel's ops: integers with Python's operators, typed pointers, loops and branches.

A kernel is a ``func.func`` of arith, 1-D vector, scf and llvm (address) ops; ``air_printer`` turns
it into LLVM text. Index arithmetic is exact on Python integers too, so that the tests can evaluate
the same index maps that the kernels use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from iree.compiler import ir
from iree.compiler.dialects import arith, func, llvm, scf, vector

from block32.lowering.apple.signature import ELEMENT_TYPES, KernelSignature

CONSTANT_SPACE = 2

#: Marks a dynamic index in llvm.getelementptr's constant list (LLVM dialect, kDynamicIndex).
_DYNAMIC_INDEX = -(2**31)


def i1() -> ir.Type:
    """The type of conditions."""
    return ir.IntegerType.get_signless(1)


def i32() -> ir.Type:
    """The type of indices."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """The type of offsets that may pass 2^32 elements."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """The type of accumulators."""
    return ir.F32Type.get()


def element_type(name: str) -> ir.Type:
    """The type of a buffer's element by its MLIR name."""
    return ir.Type.parse(name)


def vector_type(count: int, element: ir.Type) -> ir.Type:
    """A 1-D vector type."""
    return ir.VectorType.get([count], element)


class Word:
    """An i32 or i64 SSA value with Python's integer operators. Comparisons are unsigned."""

    def __init__(self, value: ir.Value):
        self.value = value

    @property
    def type(self) -> ir.Type:
        """Type of the value."""
        return self.value.type

    def __add__(self, other: Int) -> Word:
        return self if _is(other, 0) else self._binary(arith.addi, other)

    __radd__ = __add__

    def __sub__(self, other: Int) -> Word:
        return self if _is(other, 0) else self._binary(arith.subi, other)

    def __rsub__(self, other: Int) -> Word:
        return Word(arith.subi(self._like(other), self.value))

    def __mul__(self, other: Int) -> Word:
        return self if _is(other, 1) else self._binary(arith.muli, other)

    __rmul__ = __mul__

    def __and__(self, other: Int) -> Word:
        return self._binary(arith.andi, other)

    def __or__(self, other: Int) -> Word:
        return self if _is(other, 0) else self._binary(arith.ori, other)

    __rand__ = __and__
    __ror__ = __or__

    def __lshift__(self, other: Int) -> Word:
        return self if _is(other, 0) else self._binary(arith.shli, other)

    def __rlshift__(self, other: int) -> Word:
        return Word(arith.shli(self._like(other), self.value))

    def __rshift__(self, other: Int) -> Word:
        return self if _is(other, 0) else self._binary(arith.shrui, other)

    def __rrshift__(self, other: int) -> Word:
        return Word(arith.shrui(self._like(other), self.value))

    def _like(self, other: Int) -> ir.Value:
        return as_value(other, self.type)

    def _binary(self, op: Callable[[ir.Value, ir.Value], Any], other: Int) -> Word:
        return Word(op(self.value, self._like(other)))


#: What index maps take and give.
Int: TypeAlias = int | Word


def _is(value: Int, wanted: int) -> bool:
    return isinstance(value, int) and value == wanted


def as_value(value: Int, type_: ir.Type | None = None) -> ir.Value:
    """The SSA value of an integer; a Python integer becomes a constant of ``type_`` (i32)."""
    if isinstance(value, Word):
        return value.value
    return arith.constant(type_ or i32(), value)


def wide(value: Int) -> Word:
    """The value as i64, zero-extended."""
    if isinstance(value, int):
        return Word(arith.constant(i64(), value))
    return Word(arith.extui(i64(), value.value))


def _compare(predicate: arith.CmpIPredicate, a: Int, b: Int) -> ir.Value:
    kind = a.type if isinstance(a, Word) else b.type if isinstance(b, Word) else i32()
    return arith.cmpi(predicate, as_value(a, kind), as_value(b, kind))


def less(a: Int, b: Int) -> Any:
    """``a < b``, unsigned, as an i1; a truth value where both are integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return _compare(arith.CmpIPredicate.ult, a, b)


def equal(a: Int, b: Int) -> ir.Value:
    """``a == b`` as an i1."""
    return _compare(arith.CmpIPredicate.eq, a, b)


def both(a: ir.Value, b: ir.Value) -> ir.Value:
    """The conjunction of two conditions."""
    return arith.andi(a, b)


def choose(condition: ir.Value | bool, a: Int, b: Int) -> Int:
    """``a if condition else b``, on integers in tests and on SSA values in kernels."""
    if isinstance(condition, bool):
        return a if condition else b
    return Word(arith.select(condition, as_value(a), as_value(b)))


def float_constant(value: float, type_: ir.Type | None = None) -> ir.Value:
    """A floating-point constant, f32 unless told otherwise; a vector type gives a splat."""
    kind = type_ or f32()
    if isinstance(kind, ir.VectorType):
        scalar = ir.FloatAttr.get(kind.element_type, value)
        return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, scalar))
    return arith.constant(kind, ir.FloatAttr.get(kind, value))


def splat_integer(value: int, type_: ir.Type) -> ir.Value:
    """An integer vector constant with one value in every element."""
    scalar = ir.IntegerAttr.get(ir.VectorType(type_).element_type, value)
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, scalar))


def zero(type_: ir.Type) -> ir.Value:
    """The zero of a scalar or vector type."""
    element = type_.element_type if isinstance(type_, ir.VectorType) else type_
    if isinstance(element, ir.IntegerType):
        return splat_integer(0, type_) if isinstance(type_, ir.VectorType) else as_value(0, type_)
    return float_constant(0.0, type_)


def extract(source: ir.Value, position: int) -> ir.Value:
    """One element of a vector."""
    return vector.extract(source, dynamic_position=[], static_position=[position])


def from_elements(elements: Sequence[ir.Value]) -> ir.Value:
    """A vector of the given elements."""
    return vector.from_elements(vector_type(len(elements), elements[0].type), elements)


def concatenate(low: ir.Value, high: ir.Value) -> ir.Value:
    """One vector of the elements of two."""
    count = ir.VectorType(low.type).shape[0] + ir.VectorType(high.type).shape[0]
    return vector.shuffle(low, high, list(range(count)))


def broadcast(value: ir.Value, count: int) -> ir.Value:
    """A vector with ``value`` in every element."""
    return vector.broadcast(vector_type(count, value.type), value)


@dataclass(frozen=True)
class Pointer:
    """An address in device or constant memory, and the MLIR name of the elements there."""

    value: ir.Value
    element: str

    def at(self, offset: Int) -> Pointer:
        """The address ``offset`` elements further on; the offset counts as unsigned."""
        if isinstance(offset, int):
            indices, constants = [], [offset]
        else:
            index = offset if offset.type == i64() else wide(offset)
            indices, constants = [index.value], [_DYNAMIC_INDEX]
        kind = element_type(self.element)
        op = llvm.GEPOp(self.value.type, self.value, indices, constants, kind, 0)
        return Pointer(op.res, self.element)

    def load(self, count: int = 1, alignment: int | None = None) -> ir.Value:
        """Loads one element, or a vector of ``count``.

        Args:
            count: Number of elements; 1 gives a scalar.
            alignment: Bytes that the address is a multiple of; the element's size by default.
        """
        kind = element_type(self.element)
        result = kind if count == 1 else vector_type(count, kind)
        size = ELEMENT_TYPES[self.element].size
        return llvm.LoadOp(result, self.value, alignment=alignment or size).res

    def store(self, value: ir.Value, alignment: int | None = None) -> None:
        """Stores a scalar or a vector of elements."""
        size = ELEMENT_TYPES[self.element].size
        llvm.StoreOp(value, self.value, alignment=alignment or size)


def when(condition: ir.Value, then: Callable[[], None]) -> None:
    """Runs ``then`` where the condition holds."""
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        then()
        scf.YieldOp([])


def either(condition: ir.Value, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Runs ``then`` where the condition holds and ``otherwise`` elsewhere."""
    op = scf.IfOp(condition, has_else=True)
    for block, body in ((op.then_block, then), (op.else_block, otherwise)):
        with ir.InsertionPoint(block):
            body()
            scf.YieldOp([])


def loop(
    lower: Int,
    upper: Int,
    step: Int,
    carried: Sequence[ir.Value],
    body: Callable[[Word, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """``for i in range(lower, upper, step)`` with values carried from one iteration to the next.

    Args:
        lower: First index, i32.
        upper: The index to stop before, i32, at most 2^31 - 1.
        step: A positive step.
        carried: The values before the first iteration.
        body: Given the index and the carried values, returns the next ones.

    Returns:
        The carried values after the last iteration. No loop is written that never runs.
    """
    if isinstance(lower, int) and isinstance(upper, int) and lower >= upper:
        return list(carried)
    op = scf.ForOp(as_value(lower), as_value(upper), as_value(step), list(carried))
    with ir.InsertionPoint(op.body):
        scf.YieldOp(list(body(Word(op.induction_variable), list(op.inner_iter_args))))
    return list(op.results)


class AirKernel:
    """One kernel under construction: its parameters, at the current insertion point.

    Attributes:
        signature: Name and parameters.
        lane: Index of the thread in its simdgroup.
        simdgroup: Index of the simdgroup in its threadgroup.
    """

    def __init__(self, signature: KernelSignature, function: func.FuncOp):
        arguments = list(function.entry_block.arguments)
        self.signature = signature
        self._arguments = arguments[0]
        self._constants = arguments[1] if signature.constants else None
        position, lane, simdgroup = arguments[-3:]
        self._position = position
        self.lane = Word(lane)
        self.simdgroup = Word(simdgroup)
        self._buffers: dict[str, Pointer] = {}

    def threadgroup(self, axis: int) -> Word:
        """Position of the threadgroup in the grid along x (0), y (1) or z (2)."""
        return Word(extract(self._position, axis))

    def has(self, name: str) -> bool:
        """Whether the kernel has a buffer of this name."""
        return any(buffer.name == name for buffer in self.signature.buffers)

    def buffer(self, name: str) -> Pointer:
        """The start of the buffer bound under ``name``; first asked for at the function's top."""
        if name not in self._buffers:
            index = self.signature.binding(name)
            pointers = ", ".join(["ptr<1>"] * len(self.signature.buffers))
            struct = ir.Type.parse(f"!llvm.struct<({pointers})>")
            field = llvm.GEPOp(self._arguments.type, self._arguments, [], [0, index], struct, 0)
            pointer = llvm.LoadOp(ir.Type.parse("!llvm.ptr<1>"), field.res, alignment=8)
            self._buffers[name] = Pointer(pointer.res, self.signature.buffers[index].element)
        return self._buffers[name]

    def constant(self, index: int) -> Word:
        """A push constant, an i32."""
        if self._constants is None:
            raise IndexError(f"kernel '{self.signature.name}' has no push constants")
        return Word(Pointer(self._constants, "i32").at(index).load())

    def call(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        """Calls an ``air.*`` function."""
        return func.CallOp([result], ir.FlatSymbolRefAttr.get(name), list(operands)).results[0]


def build_kernel(signature: KernelSignature, body: Callable[[AirKernel], None]) -> ir.Module:
    """A module with the kernel that ``body`` writes.

    Args:
        signature: Name and parameters.
        body: Writes the ops; the return op comes after it.

    Returns:
        A module with one ``func.func``; ``declare_callees`` makes it complete.
    """
    with ir.Context(), ir.Location.name(signature.name):
        module = ir.Module.create()
        constant = ir.Type.parse(f"!llvm.ptr<{CONSTANT_SPACE}>")
        pointers = [constant] * (2 if signature.constants else 1)
        inputs = [*pointers, vector_type(3, i32()), i32(), i32()]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp(signature.name, (inputs, []))
        with ir.InsertionPoint(function.add_entry_block()):
            kernel = AirKernel(signature, function)
            for buffer in signature.buffers:
                kernel.buffer(buffer.name)  # loaded at the top, so that they dominate every use
            body(kernel)
            func.ReturnOp([])
        return module


def declare_callees(module: ir.Module) -> None:
    """Adds a private declaration for each function that is called, and verifies the module."""
    callees: dict[str, ir.FunctionType] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.call":
            name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            operand_types = [operand.type for operand in op.operands]
            callees[name] = ir.FunctionType.get(operand_types, [r.type for r in op.results])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with ir.InsertionPoint(module.body):
        for name, kind in sorted(callees.items()):
            func.FuncOp(name, kind, visibility="private")
    module.operation.verify()
