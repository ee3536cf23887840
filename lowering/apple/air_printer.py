# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a kernel's ops to LLVM 14 text with typed pointers, which Apple's loader can read.

One op becomes one instruction, but for structured control flow (blocks and phis), vectors made of
scalars (insertelement chains) and pointers: the ops' pointers are opaque, so the printer remembers
what each one points to and adds a bitcast where an op sees it otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
from iree.compiler import ir

from block32.lowering.apple import air_metadata
from block32.lowering.apple.air_intrinsics import INTRINSICS
from block32.lowering.apple.signature import ELEMENT_TYPES, KernelError, KernelSignature

BINDINGS_TYPE = "%struct.Bindings"

_SCALAR_TYPES = {
    "i1": "i1",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "f16": "half",
    "bf16": "bfloat",
    "f32": "float",
}

#: arith ops that are one LLVM instruction on two operands of one type.
_BINARY = {
    "arith.addi": "add",
    "arith.subi": "sub",
    "arith.muli": "mul",
    "arith.divui": "udiv",
    "arith.remui": "urem",
    "arith.andi": "and",
    "arith.ori": "or",
    "arith.xori": "xor",
    "arith.shli": "shl",
    "arith.shrui": "lshr",
    "arith.shrsi": "ashr",
    "arith.addf": "fadd",
    "arith.subf": "fsub",
    "arith.mulf": "fmul",
    "arith.divf": "fdiv",
}

#: The fast-math flag that kernels set: let a multiply and an add become one instruction.
_CONTRACT = "#arith.fastmath<contract>"

_CASTS = {
    "arith.extui": "zext",
    "arith.extsi": "sext",
    "arith.trunci": "trunc",
    "arith.truncf": "fptrunc",
    "arith.extf": "fpext",
    "arith.uitofp": "uitofp",
    "arith.bitcast": "bitcast",
}

#: Predicates by the number that MLIR's enums give them.
_INTEGER_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_FLOAT_PREDICATES = (
    *("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"),
    *("ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"),
)

#: Function attributes of a kernel, as Apple's compiler writes them without fast math.
_KERNEL_ATTRIBUTES = (
    "convergent mustprogress nounwind "
    '"frame-pointer"="all" "min-legal-vector-width"="0" "no-builtins" '
    '"no-trapping-math"="true" "stack-protector-buffer-size"="8"'
)


def llvm_type(type_: ir.Type) -> str:
    """A scalar or 1-D vector type in LLVM text.

    Raises:
        KernelError: AIR has no such type (f64, integers above 64 bits, several dimensions).
    """
    if isinstance(type_, ir.VectorType):
        if len(type_.shape) != 1:
            raise KernelError(f"AIR has no type {type_}; expected a vector of one dimension")
        return f"<{type_.shape[0]} x {llvm_type(type_.element_type)}>"
    text = str(type_)
    if text not in _SCALAR_TYPES:
        raise KernelError(f"AIR has no type {text}; expected one of {', '.join(_SCALAR_TYPES)}")
    return _SCALAR_TYPES[text]


def print_air(module: ir.Module, signature: KernelSignature) -> str:
    """LLVM text of the module that ``builder.build_kernel`` made.

    Raises:
        KernelError: An op, type or function that AIR does not have.
    """
    functions = list(module.body.operations)
    bodies = [f for f in functions if f.operation.regions[0].blocks]
    declarations = [f for f in functions if not f.operation.regions[0].blocks]
    printer = _FunctionPrinter(signature)
    definition = printer.print(bodies[0].operation)
    fields = ", ".join(f"{ELEMENT_TYPES[b.element].llvm} addrspace(1)*" for b in signature.buffers)
    attributes: dict[frozenset[str], int] = {}
    lines = [
        f'source_filename = "{signature.name}.metal"',
        f'target datalayout = "{air_metadata.DATA_LAYOUT}"',
        f'target triple = "{signature.architecture.triple}"',
        "",
        f"{BINDINGS_TYPE} = type {{ {fields} }}" if fields else f"{BINDINGS_TYPE} = type {{}}",
        "",
        *definition,
        "",
        *(_declaration(f.operation, attributes) for f in declarations),
        "",
        f"attributes #0 = {{ {_KERNEL_ATTRIBUTES} }}",
        *(f"attributes #{n} = {{ {' '.join(sorted(a))} }}" for a, n in attributes.items()),
        "",
        air_metadata.module_metadata(signature, printer.pointer_type()),
    ]
    return "\n".join(lines)


def _declaration(function: ir.Operation, attributes: dict[frozenset[str], int]) -> str:
    name = ir.StringAttr(function.attributes["sym_name"]).value
    if name not in INTRINSICS:
        raise KernelError(f"call of '{name}', which is not among the AIR functions known here")
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    operands = ", ".join(llvm_type(t) for t in kind.inputs)
    number = attributes.setdefault(INTRINSICS[name].attributes, len(attributes) + 1)
    return f"declare {llvm_type(kind.results[0])} @{name}({operands}) local_unnamed_addr #{number}"


def _hexadecimal(type_: ir.Type, value: float) -> str:
    """A floating-point constant in LLVM's exact spelling."""
    kind = str(type_)
    if kind == "f32":
        return "0x" + struct.pack(">d", float(np.float32(value))).hex().upper()
    if kind == "f16":
        return "0xH" + struct.pack(">e", value).hex().upper()
    if kind == "bf16":
        return "0xR" + struct.pack(">f", value)[:2].hex().upper()
    raise KernelError(f"AIR has no constant of type {kind}")


class _FunctionPrinter:
    """Prints one kernel: names of values, what pointers point to, and the current block."""

    def __init__(self, signature: KernelSignature):
        self.signature = signature
        self.lines: list[str] = []
        self.names: dict[ir.Value, str] = {}
        self.pointees: dict[ir.Value, str] = {}
        self.count = 0
        self.block = "entry"
        self.parameter_types: list[str] = []

    def pointer_type(self) -> str:
        """Type of a pointer to the kernel."""
        return f"void ({', '.join(self.parameter_types)})*"

    def print(self, function: ir.Operation) -> list[str]:
        """The definition's lines."""
        block = function.regions[0].blocks[0]
        kinds = [f"{BINDINGS_TYPE} addrspace(2)*"]
        pointees, names = [BINDINGS_TYPE], ["bindings"]
        if self.signature.constants:
            kinds.append("i32 addrspace(2)*")
            pointees.append("i32")
            names.append("constants")
        kinds += ["<3 x i32>", "i32", "i32"]
        names += ["threadgroup", "lane", "simdgroup"]
        self.parameter_types = kinds
        for argument, name in zip(block.arguments, names, strict=True):
            self.names[argument] = f"%{name}"
        for argument, pointee in zip(block.arguments, pointees, strict=False):
            self.pointees[argument] = pointee
        parameters = ", ".join(f"{k} noundef %{n}" for k, n in zip(kinds, names, strict=True))
        self._operations(block)
        self.emit("ret void")
        head = f"define void @{self.signature.name}({parameters}) local_unnamed_addr #0 {{"
        return [head, "entry:", *self.lines, "}"]

    def emit(self, text: str) -> None:
        """Adds an instruction to the current block."""
        self.lines.append(f"  {text}")

    def fresh(self, stem: str = "") -> str:
        """A new name."""
        self.count += 1
        return f"%{stem or 'v'}{self.count}"

    def define(self, value: ir.Value, text: str) -> None:
        """Adds an instruction whose result is ``value``."""
        self.names[value] = self.fresh()
        self.emit(f"{self.names[value]} = {text}")

    def start_block(self, label: str) -> None:
        """Begins a block."""
        self.lines.append(f"{label}:")
        self.block = label

    def type_of(self, value: ir.Value) -> str:
        """LLVM type of a value, with the pointee of pointers."""
        if value in self.pointees:
            return f"{self.pointees[value]} addrspace({_address_space(value.type)})*"
        return llvm_type(value.type)

    def typed(self, value: ir.Value) -> str:
        """A value with its type in front."""
        return f"{self.type_of(value)} {self.names[value]}"

    def _operations(self, block: ir.Block) -> None:
        for view in block.operations:
            op = view.operation
            if op.name in ("func.return", "scf.yield"):
                continue
            handler = _HANDLERS.get(op.name)
            if handler is None:
                raise KernelError(f"'{op.name}' op cannot be printed as AIR")
            handler(self, op)

    def binary(self, op: ir.Operation) -> None:
        a, b = op.operands
        opcode = _BINARY[op.name]
        if "fastmath" in op.attributes and str(op.attributes["fastmath"]) == _CONTRACT:
            opcode += " contract"
        self.define(op.results[0], f"{opcode} {self.typed(a)}, {self.names[b]}")

    def negate(self, op: ir.Operation) -> None:
        self.define(op.results[0], f"fneg {self.typed(op.operands[0])}")

    def cast(self, op: ir.Operation) -> None:
        source, result = op.operands[0], op.results[0]
        name = _CASTS[op.name]
        if name in ("fptrunc", "fpext") and isinstance(result.type, ir.VectorType):
            # Apple's own modules convert vectors by calls (air.convert) and scalars by casts.
            raise KernelError(f"'{op.name}' op on a vector cannot be printed as AIR")
        self.define(result, f"{name} {self.typed(source)} to {llvm_type(result.type)}")

    def constant(self, op: ir.Operation) -> None:
        result, attribute = op.results[0], op.attributes["value"]
        if isinstance(result.type, ir.VectorType):
            splat = ir.DenseElementsAttr(attribute).get_splat_value()
            element = self._scalar(result.type.element_type, splat)
            kind = llvm_type(result.type.element_type)
            self.names[result] = f"<{', '.join([f'{kind} {element}'] * result.type.shape[0])}>"
        else:
            self.names[result] = self._scalar(result.type, attribute)

    def _scalar(self, type_: ir.Type, attribute: ir.Attribute) -> str:
        if isinstance(type_, ir.IntegerType):
            if type_.width == 1:
                return "true" if bool(ir.BoolAttr(attribute).value) else "false"
            return str(ir.IntegerAttr(attribute).value)
        return _hexadecimal(type_, ir.FloatAttr(attribute).value)

    def compare(self, op: ir.Operation) -> None:
        a, b = op.operands
        predicate = ir.IntegerAttr(op.attributes["predicate"]).value
        integer = op.name == "arith.cmpi"
        name = (_INTEGER_PREDICATES if integer else _FLOAT_PREDICATES)[predicate]
        opcode = "icmp" if integer else "fcmp"
        self.define(op.results[0], f"{opcode} {name} {self.typed(a)}, {self.names[b]}")

    def select(self, op: ir.Operation) -> None:
        condition, a, b = op.operands
        pointee = self.pointees.get(a)
        operands = f"{self.typed(condition)}, {self.typed(a)}, {self._as(b, pointee)}"
        self.define(op.results[0], f"select {operands}")
        if pointee is not None:
            self.pointees[op.results[0]] = pointee

    def shuffle(self, op: ir.Operation) -> None:
        a, b = op.operands
        mask = list(ir.DenseI64ArrayAttr(op.attributes["mask"]))
        indices = ", ".join(f"i32 {i}" for i in mask)
        operands = f"{self.typed(a)}, {self.typed(b)}, <{len(mask)} x i32> <{indices}>"
        self.define(op.results[0], f"shufflevector {operands}")

    def extract(self, op: ir.Operation) -> None:
        (position,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
        self.define(op.results[0], f"extractelement {self.typed(op.operands[0])}, i32 {position}")

    def insert(self, op: ir.Operation) -> None:
        value, vector = op.operands
        (position,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
        text = f"insertelement {self.typed(vector)}, {self.typed(value)}, i32 {position}"
        self.define(op.results[0], text)

    def from_elements(self, op: ir.Operation) -> None:
        result = op.results[0]
        kind, vector = llvm_type(result.type), "undef"
        for index, element in enumerate(op.operands):
            name = self.fresh()
            text = f"insertelement {kind} {vector}, {self.typed(element)}, i32 {index}"
            self.emit(f"{name} = {text}")
            vector = name
        self.names[result] = vector

    def broadcast(self, op: ir.Operation) -> None:
        source, result = op.operands[0], op.results[0]
        kind, count = llvm_type(result.type), ir.VectorType(result.type).shape[0]
        one = self.fresh()
        self.emit(f"{one} = insertelement {kind} undef, {self.typed(source)}, i32 0")
        text = f"shufflevector {kind} {one}, {kind} undef, <{count} x i32> zeroinitializer"
        self.define(result, text)

    def _as(self, pointer: ir.Value, pointee: str | None) -> str:
        """A pointer with its type, cast to point to ``pointee``; other values as they are."""
        if pointee is None or self.pointees[pointer] == pointee:
            return self.typed(pointer)
        kind = f"{pointee} addrspace({_address_space(pointer.type)})*"
        name = self.fresh()
        self.emit(f"{name} = bitcast {self.typed(pointer)} to {kind}")
        return f"{kind} {name}"

    def address(self, op: ir.Operation) -> None:
        base, *dynamic = op.operands
        element = ir.TypeAttr(op.attributes["elem_type"]).value
        constants = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
        result = op.results[0]
        if str(element).startswith("!llvm.struct"):
            kind, pointee = BINDINGS_TYPE, self._field_type(constants[1])
            indices = ", ".join(f"i32 {c}" for c in constants)
        else:
            kind = pointee = llvm_type(element)
            indices = self.typed(dynamic[0]) if dynamic else f"i64 {constants[0]}"
        pointer = self._as(base, kind)
        self.define(result, f"getelementptr inbounds {kind}, {pointer}, {indices}")
        self.pointees[result] = pointee

    def _field_type(self, index: int) -> str:
        return f"{ELEMENT_TYPES[self.signature.buffers[index].element].llvm} addrspace(1)*"

    def load(self, op: ir.Operation) -> None:
        address, result = op.operands[0], op.results[0]
        if _is_pointer(result.type):
            kind = self.pointees[address]
            self.pointees[result] = kind.removesuffix(" addrspace(1)*")
        else:
            kind = llvm_type(result.type)
        pointer = self._as(address, kind)
        self.define(result, f"load {kind}, {pointer}, align {_alignment(op)}")

    def store(self, op: ir.Operation) -> None:
        value, address = op.operands
        pointer = self._as(address, llvm_type(value.type))
        self.emit(f"store {self.typed(value)}, {pointer}, align {_alignment(op)}")

    def call(self, op: ir.Operation) -> None:
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        operands = ", ".join(self.typed(operand) for operand in op.operands)
        kind = llvm_type(op.results[0].type)
        self.define(op.results[0], f"call {kind} @{name}({operands})")

    def branch(self, op: ir.Operation) -> None:
        """scf.if: a diamond, or a triangle where there is no else."""
        then, merge = self.fresh("then")[1:], self.fresh("merge")[1:]
        regions = [region for region in op.regions if len(region.blocks)]
        other = self.fresh("else")[1:] if len(regions) == 2 else merge
        self.emit(f"br {self.typed(op.operands[0])}, label %{then}, label %{other}")
        incoming: list[tuple[list[ir.Value], str]] = []
        for label, region in zip((then, other), regions, strict=False):
            self.start_block(label)
            self._operations(region.blocks[0])
            incoming.append((_yielded(region.blocks[0]), self.block))
            self.emit(f"br label %{merge}")
        self.start_block(merge)
        for index, result in enumerate(op.results):
            sources = ", ".join(
                f"[ {self.names[values[index]]}, %{label} ]" for values, label in incoming
            )
            self.define(result, f"phi {llvm_type(result.type)} {sources}")

    def for_loop(self, op: ir.Operation) -> None:
        """scf.for: the test at the head, the carried values as phis."""
        lower, upper, step, *initial = op.operands
        block = op.regions[0].blocks[0]
        head, body, end = (self.fresh(stem)[1:] for stem in ("loop", "body", "end"))
        before = self.block
        self.emit(f"br label %{head}")
        self.start_block(head)
        first_phi = len(self.lines)
        for argument in block.arguments:
            self.names[argument] = self.fresh()
            self.lines.append("")  # the phi, known when the last block of the body is
        index = block.arguments[0]
        test = self.fresh()
        self.emit(f"{test} = icmp slt {self.typed(index)}, {self.names[upper]}")
        self.emit(f"br i1 {test}, label %{body}, label %{end}")
        self.start_block(body)
        self._operations(block)
        following = self.fresh()
        self.emit(f"{following} = add nsw {self.typed(index)}, {self.names[step]}")
        self.emit(f"br label %{head}")
        nexts = [following, *(self.names[value] for value in _yielded(block))]
        starts = [self.names[value] for value in (lower, *initial)]
        for n, argument in enumerate(block.arguments):
            sources = f"[ {starts[n]}, %{before} ], [ {nexts[n]}, %{self.block} ]"
            kind = llvm_type(argument.type)
            self.lines[first_phi + n] = f"  {self.names[argument]} = phi {kind} {sources}"
        self.start_block(end)
        for result, argument in zip(op.results, list(block.arguments)[1:], strict=True):
            self.names[result] = self.names[argument]


def _yielded(block: ir.Block) -> list[ir.Value]:
    return list(list(block.operations)[-1].operation.operands)


def _is_pointer(type_: ir.Type) -> bool:
    return str(type_).startswith("!llvm.ptr")


def _address_space(type_: ir.Type) -> int:
    return int(str(type_).removeprefix("!llvm.ptr<").removesuffix(">"))


def _alignment(op: ir.Operation) -> int:
    return ir.IntegerAttr(op.attributes["alignment"]).value


_HANDLERS: dict[str, Callable[[_FunctionPrinter, ir.Operation], None]] = {
    **dict.fromkeys(_BINARY, _FunctionPrinter.binary),
    **dict.fromkeys(_CASTS, _FunctionPrinter.cast),
    "arith.negf": _FunctionPrinter.negate,
    "arith.constant": _FunctionPrinter.constant,
    "arith.cmpi": _FunctionPrinter.compare,
    "arith.cmpf": _FunctionPrinter.compare,
    "arith.select": _FunctionPrinter.select,
    "vector.shuffle": _FunctionPrinter.shuffle,
    "vector.extract": _FunctionPrinter.extract,
    "vector.insert": _FunctionPrinter.insert,
    "vector.from_elements": _FunctionPrinter.from_elements,
    "vector.broadcast": _FunctionPrinter.broadcast,
    "llvm.getelementptr": _FunctionPrinter.address,
    "llvm.load": _FunctionPrinter.load,
    "llvm.store": _FunctionPrinter.store,
    "func.call": _FunctionPrinter.call,
    "scf.if": _FunctionPrinter.branch,
    "scf.for": _FunctionPrinter.for_loop,
}
