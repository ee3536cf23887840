# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whole functions of a program at IREE's phase hal, their dispatches in the emulator.

What stands between a function's arguments and its kernels is IREE's work and ours together: the
order of bindings, offsets and lengths, push constants, which tier runs, how many threadgroups. Here
the host's ops are interpreted as they stand in the module whose executables go into the vmfb. Only
what such functions consist of is known: integer arithmetic, branches, buffers, dispatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from iree.compiler import ir

from block32.lowering.apple import executable
from block32.tools.air_emulator import host_constants
from block32.tools.air_emulator.dispatch import Binding
from block32.tools.air_emulator.faults import AbiError, UnsupportedError
from block32.tools.air_emulator.vmfb import LoadedKernel

_WORD = (1 << 64) - 1

#: Bit of a binding's flags that says that the kernel does not write it (iree/hal/executable.h).
_READ_ONLY = 1

#: Ops that order or describe work, which happens here one after the other.
_IGNORED = frozenset(
    {
        *("hal.buffer_usage", "hal.memory_type", "hal.encoding_type", "hal.device.allocator"),
        *("hal.buffer.assert", "hal.fence.create", "hal.fence.join", "hal.fence.await"),
        *("hal.command_buffer.execution_barrier", "hal.command_buffer.finalize"),
        "hal.device.queue.dealloca",
        *("util.null", "util.status.check_ok", "hal.element_type"),
    }
)


@dataclass
class BufferView:
    """An argument or a result: bytes and a shape."""

    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Dispatched:
    """A dispatch that a call made: the kernel's name, its grid and its constants."""

    kernel: str
    grid: tuple[int, int, int]
    constants: tuple[int, ...]


#: A buffer, or the number of one in the table that a command buffer is executed with.
BufferSlot = npt.NDArray[np.uint8] | int


@dataclass(frozen=True)
class BufferRange:
    """A part of a buffer."""

    buffer: BufferSlot
    offset: int
    length: int

    def resolve(self, table: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """The bytes.

        Raises:
            AbiError: The part reaches beyond the buffer.
        """
        buffer = table[self.buffer] if isinstance(self.buffer, int) else self.buffer
        part = buffer[self.offset : self.offset + self.length]
        if part.size != self.length:
            raise AbiError(
                f"{self.length} bytes at offset {self.offset} of a buffer that has {buffer.size}"
            )
        return part


class CommandBuffer(list[Callable[[list[npt.NDArray[np.uint8]]], None]]):
    """Recorded commands, each run with a table of buffers."""


class HostProgram:
    """The functions of a module at phase hal.

    Attributes:
        dispatched: What the last call dispatched, in order.
    """

    def __init__(self, module: ir.Module):
        """Loads every kernel of the module's Metal executables.

        Raises:
            ExecutableError: An executable is damaged.
        """
        self.dispatched: list[Dispatched] = []
        self._module = module  # the operations live as long as it does
        self._functions: dict[str, ir.Operation] = {}
        self._kernels: dict[str, LoadedKernel] = {}
        self._constants: dict[str, npt.NDArray[np.uint8]] = {}
        for view in module.body.operations:
            op = view.operation
            if op.name == "util.func":
                self._functions[ir.StringAttr(op.attributes["sym_name"]).value] = op
            elif op.name == "hal.executable":
                self._load(op)
            elif op.name == "util.initializer":
                self._constants.update(host_constants.of_initializer(op))

    def _load(self, op: ir.Operation) -> None:
        for inner in op.regions[0].blocks[0].operations:
            if inner.operation.name != "hal.executable.binary":
                continue
            data = ir.DenseIntElementsAttr(inner.operation.attributes["data"])
            found = executable.read(np.array(data, np.int8).tobytes())
            if found.metallib is not None:
                for pipeline in found.pipelines:
                    self._kernels[pipeline.name] = LoadedKernel(pipeline, found.metallib)

    def call(self, name: str, arguments: Sequence[npt.NDArray[Any]]) -> list[BufferView]:
        """Calls a function.

        Args:
            name: Its symbol.
            arguments: An array for each tensor argument.

        Raises:
            AirError: A kernel did something wrong, or the host does what is not known here.
        """
        self.dispatched = []
        function = self._functions[name]
        block = function.regions[0].blocks[0]
        views = [
            BufferView(np.ascontiguousarray(a).reshape(-1).view(np.uint8), a.shape)
            for a in arguments
        ]
        return self._run(block, views)

    def _run(self, block: ir.Block, arguments: Sequence[Any]) -> list[Any]:
        return _HostFrame(self._dispatch, self._call, self._constants).run(block, arguments)

    def _call(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        return self._run(self._functions[name].regions[0].blocks[0], arguments)

    def _dispatch(
        self,
        name: str,
        grid: tuple[int, int, int],
        constants: tuple[int, ...],
        bindings: list[npt.NDArray[np.uint8]],
    ) -> None:
        if name not in self._kernels:
            raise UnsupportedError(f"kernel '{name}' is Metal source of IREE's own")
        kernel = self._kernels[name]
        flags = kernel.pipeline.bindings
        if len(flags) != len(bindings):
            raise AbiError(f"'{name}' takes {len(flags)} bindings but got {len(bindings)}")
        self.dispatched.append(Dispatched(name, grid, constants))
        bound = [Binding(b, not flag & _READ_ONLY) for b, flag in zip(bindings, flags, strict=True)]
        kernel.dispatch(bound, grid, constants)


class _HostFrame:
    """One call: the values of its ops."""

    def __init__(
        self,
        dispatch: Callable[..., None],
        call: Callable[..., list[Any]],
        constants: dict[str, npt.NDArray[np.uint8]],
    ):
        self.values: dict[ir.Value, Any] = {}
        self._constants = constants
        self._dispatch = dispatch
        self._call = call

    def run(self, block: ir.Block, arguments: Sequence[Any]) -> list[Any]:
        """Runs from a block on, to the return."""
        while True:
            self.values.update(zip(block.arguments, arguments, strict=True))
            *body, terminator = (view.operation for view in block.operations)
            for op in body:
                self._execute(op)
            operands = [self.values.get(operand) for operand in terminator.operands]
            if terminator.name == "util.return":
                return operands
            block, arguments = self._branch(terminator, operands)

    def _branch(self, op: ir.Operation, operands: list[Any]) -> tuple[ir.Block, list[Any]]:
        if op.name == "cf.br":
            return op.successors[0], operands
        if op.name != "cf.cond_br":
            raise UnsupportedError(f"'{op.name}' op on the host")
        _, first, second = _segments(op)
        taken, start = (0, 1) if operands[0] else (1, 1 + first)
        return op.successors[taken], operands[start : start + (second if taken else first)]

    def _execute(self, op: ir.Operation) -> None:
        if op.name in _IGNORED:
            self.values.update((result, None) for result in op.results)
            return
        operands = [self.values[operand] for operand in op.operands]
        if op.name == "util.call":
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            self.values.update(zip(op.results, self._call(callee, operands), strict=True))
            return
        if op.name in _ARITHMETIC:
            self.values[op.results[0]] = _ARITHMETIC[op.name](*operands) & _WORD
            return
        handler = _HANDLERS.get(op.name)
        if handler is None:
            raise UnsupportedError(f"'{op.name}' op on the host")
        result = handler(self, op, operands)
        for value in op.results:
            self.values[value] = result

    def constant(self, op: ir.Operation, operands: list[Any]) -> int:
        """arith.constant."""
        return ir.IntegerAttr(op.attributes["value"]).value & _WORD

    def load_global(self, op: ir.Operation, operands: list[Any]) -> Any:
        """util.global.load: a constant's bytes; a device or an executable is nothing here."""
        symbol = ir.FlatSymbolRefAttr(op.attributes["global"]).value
        if str(op.results[0].type) == "!hal.buffer" and symbol not in self._constants:
            raise UnsupportedError(f"global '{symbol}' holds a buffer that is no constant")
        return self._constants.get(symbol)

    def compare(self, op: ir.Operation, operands: list[Any]) -> int:
        """arith.cmpi, of values that are taken to be non-negative."""
        a, b = operands
        predicate = ir.IntegerAttr(op.attributes["predicate"]).value
        return int((a == b, a != b, a < b, a <= b, a > b, a >= b)[_unsigned(predicate)])

    def require(self, op: ir.Operation, operands: list[Any]) -> None:
        """cf.assert: a call that fails on a device fails here, with its message."""
        if not operands[0]:
            raise AbiError(ir.StringAttr(op.attributes["msg"]).value)

    def select(self, op: ir.Operation, operands: list[Any]) -> Any:
        """arith.select."""
        return operands[1] if operands[0] else operands[2]

    def dimension(self, op: ir.Operation, operands: list[Any]) -> int:
        """hal.buffer_view.dim."""
        return operands[0].shape[ir.IntegerAttr(op.attributes["index"]).value]

    def check_view(self, op: ir.Operation, operands: list[Any]) -> None:
        """hal.buffer_view.assert: the shape."""
        shape = tuple(operands[3:]) if len(operands) > 3 else ()
        if shape and operands[0].shape != shape:
            raise AbiError(f"argument has shape {operands[0].shape}; expected {shape}")

    def buffer(self, op: ir.Operation, operands: list[Any]) -> npt.NDArray[np.uint8]:
        """hal.buffer_view.buffer."""
        return operands[0].data

    def allocate(self, op: ir.Operation, operands: list[Any]) -> npt.NDArray[np.uint8]:
        """hal.device.queue.alloca: bytes that look like NaNs."""
        return np.full(operands[-1], 0xFF, np.uint8)

    def view(self, op: ir.Operation, operands: list[Any]) -> BufferView:
        """hal.buffer_view.create."""
        buffer, offset, length, _, _, *shape = operands
        return BufferView(buffer[offset : offset + length], tuple(shape))

    def lookup(self, op: ir.Operation, operands: list[Any]) -> str:
        """hal.executable.lookup.function."""
        return ir.SymbolRefAttr(op.attributes["entry_point"]).value[-1]

    def commands(self, op: ir.Operation, operands: list[Any]) -> CommandBuffer:
        """hal.command_buffer.create."""
        return CommandBuffer()

    def execute(self, op: ir.Operation, operands: list[Any]) -> None:
        """hal.device.queue.execute and .indirect, the latter with a table of buffers."""
        at = next(i for i, value in enumerate(operands) if isinstance(value, CommandBuffer))
        rest = operands[at + 1 :]
        count = len(rest) // 3
        ranges = map(BufferRange, rest[:count], rest[count : 2 * count], rest[2 * count :])
        table = [part.resolve([]) for part in ranges]
        for command in operands[at]:
            command(table)

    def copy(self, op: ir.Operation, operands: list[Any]) -> None:
        """hal.command_buffer.copy_buffer."""
        recorded, source, source_offset, target, target_offset, length = operands
        source_range = BufferRange(source, source_offset, length)
        target_range = BufferRange(target, target_offset, length)

        def command(table: list[npt.NDArray[np.uint8]]) -> None:
            target_range.resolve(table)[:] = source_range.resolve(table)

        recorded.append(command)

    def dispatch(self, op: ir.Operation, operands: list[Any]) -> None:
        """hal.command_buffer.dispatch."""
        groups = iter(operands)
        parts = [[next(groups) for _ in range(size)] for size in _segments(op)]
        (recorded,), _, (name,), *extents, constants, buffers, offsets, lengths = parts
        grid = tuple(extent[0] for extent in extents)
        words = tuple(constant & 0xFFFFFFFF for constant in constants)
        ranges = list(map(BufferRange, buffers, offsets, lengths))

        def command(table: list[npt.NDArray[np.uint8]]) -> None:
            self._dispatch(name, grid, words, [part.resolve(table) for part in ranges])

        recorded.append(command)


def _segments(op: ir.Operation) -> list[int]:
    """Sizes of an op's operand groups."""
    return list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))


def _unsigned(predicate: int) -> int:
    """eq, ne, lt, le, gt, ge as 0 to 5, for signed (2 to 5) and unsigned (6 to 9) predicates."""
    return predicate if predicate < 6 else predicate - 4


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divui": lambda a, b: a // b,
    "arith.ceildivui": lambda a, b: -(-a // b),
    "util.align": lambda value, alignment: -(-value // alignment) * alignment,
    "arith.remui": lambda a, b: a % b,
    "arith.shrui": lambda a, b: a >> b,
    "arith.shli": lambda a, b: a << b,
    "arith.ori": lambda a, b: a | b,
    "arith.andi": lambda a, b: a & b,
    "arith.minui": min,
    "arith.maxui": max,
    **dict.fromkeys(
        ("arith.index_cast", "arith.index_castui", "arith.extui", "arith.trunci"), lambda a: a
    ),
}

_HANDLERS: dict[str, Callable[[_HostFrame, ir.Operation, list[Any]], Any]] = {
    "arith.constant": _HostFrame.constant,
    "util.global.load": _HostFrame.load_global,
    "arith.cmpi": _HostFrame.compare,
    "arith.select": _HostFrame.select,
    "cf.assert": _HostFrame.require,
    "hal.buffer_view.dim": _HostFrame.dimension,
    "hal.buffer_view.assert": _HostFrame.check_view,
    "hal.buffer_view.buffer": _HostFrame.buffer,
    "hal.buffer_view.create": _HostFrame.view,
    "hal.device.queue.alloca": _HostFrame.allocate,
    "hal.executable.lookup.function": _HostFrame.lookup,
    "hal.command_buffer.create": _HostFrame.commands,
    "hal.command_buffer.copy_buffer": _HostFrame.copy,
    "hal.command_buffer.dispatch": _HostFrame.dispatch,
    "hal.device.queue.execute": _HostFrame.execute,
    "hal.device.queue.execute.indirect": _HostFrame.execute,
}
