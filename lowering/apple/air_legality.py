# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Refuses by name what Apple's loader would reject, or take for something else.

Checked on the bitcode's own disassembly, after all passes: no Apple machine is at hand to complain.
"""

from __future__ import annotations

import re

from block32.lowering.apple import air_metadata
from block32.lowering.apple.air_intrinsics import INTRINSICS
from block32.lowering.apple.air_parser import Function, Instruction, Metadata, Module, parse_type
from block32.lowering.apple.architecture import M5, Architecture
from block32.lowering.apple.signature import (
    ARGUMENT_BUFFER_INDEX,
    MAX_BINDINGS,
    PUSH_CONSTANT_BUFFER_INDEX,
    KernelError,
)


class LegalityError(KernelError):
    """The module is valid LLVM IR but not AIR that a kernel may use."""


_FORBIDDEN_TYPE = re.compile(
    r"\b(double|fp128|x86_fp80|ppc_fp128|ptr|i(?:6[5-9]|[7-9]\d|\d{3,}))\b"
)
_FORBIDDEN_OPCODES = {
    "addrspacecast": "AIR has no casts between address spaces",
    "inttoptr": "addresses come from bindings alone",
    "ptrtoint": "addresses come from bindings alone",
}

#: Metadata name of a builtin parameter, and the LLVM type that it needs.
_BUILTINS = {
    "air.threadgroup_position_in_grid": ("uint3", "<3 x i32>"),
    "air.thread_position_in_threadgroup": ("uint3", "<3 x i32>"),
    "air.thread_index_in_simdgroup": ("uint", "i32"),
    "air.simdgroup_index_in_threadgroup": ("uint", "i32"),
}

#: LLVM type of what a buffer holds, by the Metal name in its metadata.
_METAL_TYPES = {
    "uchar": "i8",
    "half": "half",
    "bfloat": "bfloat",
    "int": "i32",
    "uint": "i32",
    "float": "float",
}


def check(module: Module, architecture: Architecture = M5) -> None:
    """Checks a parsed module.

    Args:
        module: The module.
        architecture: The GPUs that it is for.

    Raises:
        LegalityError: The first thing that is wrong, and what would be right.
    """
    if module.triple != architecture.triple:
        raise LegalityError(
            f"expected the triple '{architecture.triple}' but got '{module.triple}'"
        )
    if module.data_layout != air_metadata.DATA_LAYOUT:
        raise LegalityError(f"data layout '{module.data_layout}' is not AIR's")
    air, language = architecture.air, architecture.language
    for name, expected in (
        ("air.version", [[air.major, air.minor, 0]]),
        ("air.language_version", [["Metal", language.major, language.minor, 0]]),
    ):
        if module.metadata.get(name) != expected:
            found = module.metadata.get(name)
            raise LegalityError(f"expected !{name} to be {expected} but got {found}")
    for declaration in module.declarations.values():
        _check_declaration(declaration.name, module, architecture)
    for function in module.functions.values():
        for instruction in function.instructions():
            _check_instruction(instruction, module)
    _check_kernels(module)


def _check_declaration(name: str, module: Module, architecture: Architecture) -> None:
    found = module.declarations[name]
    known = INTRINSICS.get(name)
    if known is None:
        raise LegalityError(f"'{name}' is not among the AIR functions known here")
    if known.oldest_air > architecture.air:
        raise LegalityError(
            f"'{name}' needs AIR {known.oldest_air}; {architecture.name} has {architecture.air}"
        )
    if (found.result, found.operands) != (known.result, known.operands):
        raise LegalityError(
            f"'{name}' has type {found.result} ({', '.join(found.operands)}); "
            f"expected {known.result} ({', '.join(known.operands)})"
        )
    missing = known.attributes - found.attributes
    if missing:
        raise LegalityError(f"'{name}' lacks the attribute {sorted(missing)[0]}")
    if known.is_convergent and found.attributes & {"readnone", "readonly", "speculatable"}:
        raise LegalityError(f"'{name}' must not be readnone: LLVM could move it into a branch")


def _check_instruction(instruction: Instruction, module: Module) -> None:
    text = instruction.text
    if instruction.opcode in _FORBIDDEN_OPCODES:
        raise LegalityError(f"{_FORBIDDEN_OPCODES[instruction.opcode]}: '{text}'")
    types = [instruction.type, *(operand.type for operand in instruction.operands)]
    for kind in types:
        if match := _FORBIDDEN_TYPE.search(kind):
            raise LegalityError(f"AIR has no type {match.group()}: '{text}'")
    if instruction.opcode in ("fptrunc", "fpext") and instruction.type.startswith("<"):
        raise LegalityError(f"AIR converts vectors of floats by calls, not casts: '{text}'")
    if instruction.opcode == "call":
        _check_call(instruction, module)


def _check_call(instruction: Instruction, module: Module) -> None:
    known = INTRINSICS.get(instruction.callee)
    if known is None or instruction.callee not in module.declarations:
        raise LegalityError(f"call of '{instruction.callee}', which is no AIR function known here")
    operands = tuple(operand.type for operand in instruction.operands)
    if (instruction.type, operands) != (known.result, known.operands):
        raise LegalityError(f"call does not have the type of its function: '{instruction.text}'")
    for operand in instruction.operands:
        if operand.type == "i1" and operand.is_name:
            raise LegalityError(f"a flag must be a constant: '{instruction.text}'")


def _check_kernels(module: Module) -> None:
    kernels = module.metadata.get("air.kernel", [])
    if len(kernels) != len(module.functions):
        raise LegalityError(
            f"{len(module.functions)} functions have bodies but !air.kernel lists {len(kernels)}"
        )
    for node in kernels:
        assert isinstance(node, list)
        name = str(node[0]).rpartition("@")[2]
        if name not in module.functions:
            raise LegalityError(f"!air.kernel lists '{name}', which has no body")
        parameters = node[2]
        assert isinstance(parameters, list)
        _check_parameters(module.functions[name], parameters, module)


def _check_parameters(function: Function, nodes: list[Metadata], module: Module) -> None:
    if len(nodes) != len(function.parameters):
        raise LegalityError(
            f"'{function.name}' has {len(function.parameters)} parameters "
            f"but metadata for {len(nodes)}"
        )
    for index, (parameter, node) in enumerate(zip(function.parameters, nodes, strict=True)):
        assert isinstance(node, list)
        where = f"parameter {index} of '{function.name}'"
        if node[0] != index:
            raise LegalityError(f"{where} has the metadata of parameter {node[0]}")
        role = node[1]
        if role == "air.indirect_buffer":
            _check_argument_buffer(where, parameter.type, node, module)
        elif role == "air.buffer":
            _check_constants(where, parameter.type, node)
        elif role in _BUILTINS:
            metal, llvm = _BUILTINS[str(role)]
            if parameter.type != llvm or _field(node, "air.arg_type_name") != metal:
                raise LegalityError(f"{where} is {role}; expected {llvm}, {metal}")
        else:
            raise LegalityError(f"{where} has the unknown role {role}")
    roles = [node[1] for node in nodes if isinstance(node, list)]
    if not roles or roles[0] != "air.indirect_buffer" or roles.count("air.indirect_buffer") > 1:
        raise LegalityError(f"parameter 0 of '{function.name}', and no other, is argument buffer 0")


def _field(node: list, name: str) -> Metadata:
    """The field behind the string ``name``."""
    if name not in node:
        raise LegalityError(f"a metadata node lacks {name}: {node}")
    return node[node.index(name) + 1]


def _check_location(where: str, node: list, index: int, space: int) -> None:
    if _field(node, "air.location_index") != index:
        raise LegalityError(
            f"{where} has location {_field(node, 'air.location_index')}, not {index}"
        )
    if _field(node, "air.address_space") != space:
        raise LegalityError(f"{where} is not in address space {space}")


def _check_argument_buffer(where: str, kind: str, node: list, module: Module) -> None:
    struct = kind.removesuffix(" addrspace(2)*")
    if struct not in module.structs:
        raise LegalityError(f"{where} is {kind}; expected a pointer to a struct in constant space")
    _check_location(where, node, ARGUMENT_BUFFER_INDEX, 2)
    fields, info = module.structs[struct], _field(node, "air.struct_type_info")
    assert isinstance(info, list)
    if len(fields) > MAX_BINDINGS:
        raise LegalityError(f"{where} has {len(fields)} bindings; at most {MAX_BINDINGS} are bound")
    if len(info) != 7 * len(fields) or _field(node, "air.buffer_size") != 8 * len(fields):
        raise LegalityError(f"{where} has metadata for another number of bindings")
    for number, field in enumerate(fields):
        offset, size, _, metal, name, marker, buffer = info[7 * number : 7 * number + 7]
        if (offset, size, marker) != (8 * number, 8, "air.indirect_argument"):
            raise LegalityError(f"binding {number} of {where} has a wrong offset or size")
        expected = f"{_METAL_TYPES.get(str(metal))} addrspace(1)*"
        if field != expected or parse_type(field)[0] != field:
            raise LegalityError(f"binding '{name}' of {where} is {field} but called {metal}")
        assert isinstance(buffer, list)
        _check_location(f"binding '{name}' of {where}", buffer, number, 1)


def _check_constants(where: str, kind: str, node: list) -> None:
    if kind != "i32 addrspace(2)*":
        raise LegalityError(f"{where} is {kind}; push constants are i32 addrspace(2)*")
    _check_location(where, node, PUSH_CONSTANT_BUFFER_INDEX, 2)
