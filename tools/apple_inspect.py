# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ``block32 inspect`` shows of a metallib, or of the Metal executables of a vmfb."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.apple import executable, llvm14, metallib
from block32.lowering.apple.air_parser import AirSyntaxError, parse
from block32.lowering.apple.air_statistics import Loop, hot_loop
from block32.lowering.apple.executable import Pipeline


@dataclass(frozen=True)
class AirKernelFacts:
    """One kernel of a library.

    Attributes:
        name: The entry point.
        air_version: Version of AIR, such as 2.8.
        language_version: Version of the Metal language.
        os_version: The oldest macOS that loads the library.
        sha256: Of the module, as the library carries it.
        size: Bytes of the module.
        threads: Threads in a threadgroup; None in a bare metallib.
        bindings: Number of bindings; None in a bare metallib.
        constants: Number of push constants; None in a bare metallib.
        loop: The hot loop; None without loops, or where another compiler's code is not understood.
        text: The module as LLVM text.
    """

    name: str
    air_version: str
    language_version: str
    os_version: str
    sha256: str
    size: int
    threads: tuple[int, int, int] | None
    bindings: int | None
    constants: int | None
    loop: Loop | None
    text: str


def holds_metal(data: bytes) -> bool:
    """Whether ``data`` is a metallib, or a vmfb with an executable for Metal."""
    try:
        return data[:4] == metallib.MAGIC or any(True for _ in executable.find_all(data))
    except executable.ExecutableError:
        return True  # there is one, and it is damaged: `inspect` says so


def inspect(path: str, data: bytes, name_filter: str | None, as_json: bool, code: bool) -> int:
    """Prints the kernels of a file; returns the exit code.

    Args:
        path: The file, for errors.
        data: Its bytes.
        name_filter: Only kernels whose name holds this.
        as_json: Print JSON.
        code: Print the kernels' LLVM text and nothing else.

    Raises:
        DiagnosticError: The file is damaged, holds only Metal source, or no kernel matches.
    """
    try:
        kernels = list(_kernels(data))
    except (metallib.MetallibError, executable.ExecutableError, llvm14.LlvmError) as error:
        raise DiagnosticError(path, str(error)) from error
    if not kernels:
        message = "the Metal executables in this module hold source text, which IREE generated"
        raise DiagnosticError(path, message, ("compile with --target=apple-m5",))
    kernels = [kernel for kernel in kernels if not name_filter or name_filter in kernel.name]
    if not kernels:
        raise DiagnosticError(path, f"no kernel's name holds '{name_filter}'")
    if code:
        print("\n".join(kernel.text for kernel in kernels))
    elif as_json:
        print(json.dumps([_as_json(kernel) for kernel in kernels], indent=2))
    else:
        print("\n".join(line for kernel in kernels for line in _describe(kernel)))
    return 0


def _kernels(data: bytes) -> Iterator[AirKernelFacts]:
    if data[:4] == metallib.MAGIC:
        library = metallib.read(data)
        for function in library.functions:
            yield _facts(function, library, None)
        return
    for found in executable.find_all(data):
        if found.metallib is None:
            continue
        for pipeline in found.pipelines:
            yield _facts(found.metallib.function(pipeline.name), found.metallib, pipeline)


def _facts(
    function: metallib.Function, library: metallib.Metallib, pipeline: Pipeline | None
) -> AirKernelFacts:
    text = llvm14.disassemble(function.bitcode)
    return AirKernelFacts(
        name=function.name,
        air_version=str(function.air_version),
        language_version=str(function.language_version),
        os_version=str(library.os_version),
        sha256=function.sha256.hex(),
        size=len(function.bitcode),
        threads=pipeline.threads if pipeline else None,
        bindings=len(pipeline.bindings) if pipeline else None,
        constants=pipeline.constants if pipeline else None,
        loop=_loop(text, function.name),
        text=text,
    )


def _loop(text: str, name: str) -> Loop | None:
    try:
        functions = parse(text).functions
    except AirSyntaxError:
        return None  # another compiler's kernel, with instructions that ours does not use
    return hot_loop(functions[name]) if name in functions else None


def _as_json(kernel: AirKernelFacts) -> dict:
    values = {name: value for name, value in vars(kernel).items() if name != "text"}
    if kernel.loop is not None:
        values["loop"] = {**vars(kernel.loop), "others": dict(kernel.loop.others)}
    return values


def _describe(kernel: AirKernelFacts) -> Iterator[str]:
    yield f"kernel {kernel.name}"
    yield (
        f"  AIR {kernel.air_version}, Metal {kernel.language_version}, "
        f"macOS {kernel.os_version}, {kernel.size} bytes of bitcode"
    )
    yield f"  sha256 {kernel.sha256}"
    if kernel.threads is not None:
        threads = "x".join(map(str, kernel.threads))
        yield f"  {threads} threads, {kernel.bindings} bindings, {kernel.constants} push constants"
    if kernel.loop is not None:
        yield f"  hot loop: {kernel.loop.describe()}"
