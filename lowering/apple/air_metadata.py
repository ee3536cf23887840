# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The metadata that makes an LLVM module an AIR module, from a kernel's signature.

Node layouts were read off modules that Apple's toolchain built for macOS 26; those for macOS 14
differ in the versions alone.
"""

from __future__ import annotations

from block32.lowering.apple.signature import (
    ARGUMENT_BUFFER_INDEX,
    ELEMENT_TYPES,
    PUSH_CONSTANT_BUFFER_INDEX,
    BufferParameter,
    KernelSignature,
)

_VECTOR_BITS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


def _data_layout() -> str:
    scalars = ["i1:8:8", *(f"i{n}:{n}:{n}" for n in (8, 16, 32, 64))]
    scalars += ["f32:32:32", "f64:64:64"]
    # Three-element vectors are as aligned as four-element ones.
    aligned = {24: 32, 48: 64, 96: 128, 192: 256}
    vectors = [f"v{n}:{aligned.get(n, n)}:{aligned.get(n, n)}" for n in _VECTOR_BITS]
    return "-".join(["e", "p:64:64:64", *scalars, *vectors, "n8:16:32"])


DATA_LAYOUT = _data_layout()

_MODULE_FLAGS = (
    ("wchar_size", 1, 4),
    ("frame-pointer", 7, 2),
    ("air.max_device_buffers", 7, 31),
    ("air.max_constant_buffers", 7, 31),
    ("air.max_threadgroup_buffers", 7, 31),
    ("air.max_textures", 7, 128),
    ("air.max_read_write_textures", 7, 8),
    ("air.max_samplers", 7, 16),
)

#: Fast math would drop the NaN of a NaN scale; Apple GPUs flush f32 denormals in any case.
_COMPILE_OPTIONS = (
    "air.compile.denorms_disable",
    "air.compile.fast_math_disable",
    "air.compile.framebuffer_fetch_enable",
)


def _string(text: str) -> str:
    return f'!"{text}"'


def _i32(value: int) -> str:
    return f"i32 {value}"


class MetadataPrinter:
    """Collects numbered nodes and prints them, with the named nodes, as LLVM text."""

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._named: list[str] = []

    def node(self, *fields: str) -> str:
        """Adds a node and returns the reference to it."""
        self._nodes.append(f"!{{{', '.join(fields)}}}")
        return f"!{len(self._nodes) - 1}"

    def named(self, name: str, *nodes: str) -> None:
        """Adds a named node."""
        self._named.append(f"!{name} = !{{{', '.join(nodes)}}}")

    def text(self) -> str:
        """All nodes."""
        numbered = [f"!{index} = {node}" for index, node in enumerate(self._nodes)]
        return "\n".join([*self._named, "", *numbered]) + "\n"


def module_metadata(signature: KernelSignature, function_type: str) -> str:
    """Every metadata node of a module with one kernel.

    Args:
        signature: The kernel's name and parameters.
        function_type: The type of its pointer in LLVM text, such as ``void (i32)*``.
    """
    printer = MetadataPrinter()
    architecture = signature.architecture
    sdk = f"[2 x i32] [i32 {architecture.os.major}, i32 {architecture.os.minor}]"
    flags = [printer.node(_i32(2), _string("SDK Version"), sdk)]
    for name, behaviour, value in _MODULE_FLAGS:
        flags.append(printer.node(_i32(behaviour), _string(name), _i32(value)))
    printer.named("llvm.module.flags", *flags)
    printer.named("llvm.ident", printer.node(_string("block32")))
    air, language = architecture.air, architecture.language
    version = printer.node(_i32(air.major), _i32(air.minor), _i32(0))
    printer.named("air.version", version)
    metal = (_string("Metal"), _i32(language.major), _i32(language.minor), _i32(0))
    printer.named("air.language_version", printer.node(*metal))
    options = [printer.node(_string(option)) for option in _COMPILE_OPTIONS]
    printer.named("air.compile_options", *options)
    printer.named("air.source_file_name", printer.node(_string(f"{signature.name}.metal")))
    parameters = _parameters(printer, signature)
    kernel = printer.node(f"{function_type} @{signature.name}", printer.node(), parameters)
    printer.named("air.kernel", kernel)
    return printer.text()


def _parameters(printer: MetadataPrinter, signature: KernelSignature) -> str:
    """One node a parameter of the function, the first element its position."""
    nodes = [_argument_buffer(printer, signature)]
    if signature.constants:
        nodes.append(_push_constants(printer, signature, len(nodes)))
    for name, kind, argument in (
        ("air.threadgroup_position_in_grid", "uint3", "threadgroup"),
        ("air.thread_index_in_simdgroup", "uint", "lane"),
        ("air.simdgroup_index_in_threadgroup", "uint", "simdgroup"),
    ):
        fields = [_i32(len(nodes)), _string(name), *_type_and_name(kind, argument)]
        nodes.append(printer.node(*fields))
    return printer.node(*nodes)


def _type_and_name(kind: str, name: str) -> list[str]:
    return [_string("air.arg_type_name"), _string(kind), _string("air.arg_name"), _string(name)]


def _location(index: int, access: str, space: int) -> list[str]:
    return [
        *(_string("air.location_index"), _i32(index), _i32(1), _string(access)),
        *(_string("air.address_space"), _i32(space)),
    ]


def _sizes(size: int, alignment: int) -> list[str]:
    return [
        *(_string("air.arg_type_size"), _i32(size)),
        *(_string("air.arg_type_align_size"), _i32(alignment)),
    ]


def _argument_buffer(printer: MetadataPrinter, signature: KernelSignature) -> str:
    fields: list[str] = []
    for binding, buffer in enumerate(signature.buffers):
        kind = ELEMENT_TYPES[buffer.element].metal
        fields += [_i32(8 * binding), _i32(8), _i32(0), _string(kind), _string(buffer.name)]
        fields += [_string("air.indirect_argument"), _device_buffer(printer, binding, buffer)]
    return printer.node(
        *(_i32(0), _string("air.indirect_buffer")),
        *(_string("air.buffer_size"), _i32(8 * len(signature.buffers))),
        *_location(ARGUMENT_BUFFER_INDEX, "air.read", 2),
        *(_string("air.struct_type_info"), printer.node(*fields)),
        *_sizes(8 * len(signature.buffers), 8),
        *_type_and_name("Bindings", "bindings"),
    )


def _device_buffer(printer: MetadataPrinter, binding: int, buffer: BufferParameter) -> str:
    kind = ELEMENT_TYPES[buffer.element]
    access = "air.read_write" if buffer.writable else "air.read"
    return printer.node(
        *(_i32(binding), _string("air.buffer")),
        *_location(binding, access, 1),
        *_sizes(kind.size, kind.size),
        *_type_and_name(kind.metal, buffer.name),
    )


def _push_constants(printer: MetadataPrinter, signature: KernelSignature, position: int) -> str:
    return printer.node(
        *(_i32(position), _string("air.buffer")),
        *(_string("air.buffer_size"), _i32(4 * signature.constants)),
        *_location(PUSH_CONSTANT_BUFFER_INDEX, "air.read", 2),
        *_sizes(4, 4),
        *_type_and_name("uint", "constants"),
    )
