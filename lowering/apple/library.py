# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From ops to a metallib: print, verify, encode, check, pack."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from iree.compiler import ir

from block32.lowering.apple import air_legality, dense, gemv, grouped, llvm14
from block32.lowering.apple.air_math import expand_math
from block32.lowering.apple.air_parser import parse
from block32.lowering.apple.air_printer import print_air
from block32.lowering.apple.builder import declare_callees
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.metallib import Function, Metallib
from block32.lowering.apple.signature import KernelError, KernelSignature

#: The kernel forms by the name that a tier gives them.
FORMS = {"tiled": dense.build, "gemv": gemv.build, "grouped": grouped.build}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as bitcode, with what the loader has to know of it."""

    signature: KernelSignature
    bitcode: bytes


def compile_kernel(signature: KernelSignature, module: ir.Module) -> CompiledKernel:
    """Compiles the ops of one kernel.

    Raises:
        KernelError: An op, type or function that AIR does not have.
        LlvmError: The package llvmlite is missing or of the wrong version.
    """
    with module.context, ir.Location.unknown():
        expand_math(module)
        declare_callees(module)
    bitcode = llvm14.encode(print_air(module, signature))
    air_legality.check(parse(llvm14.disassemble(bitcode)), signature.architecture)
    return CompiledKernel(signature, bitcode)


def compile_matmul(matmul: Matmul, form: str, name: str) -> CompiledKernel:
    """Compiles one matmul in the given form (``FORMS``).

    Raises:
        KernelError: There is no such form, or it cannot compute this matmul.
        LlvmError: The package llvmlite is missing or of the wrong version.
    """
    if form not in FORMS:
        raise KernelError(f"no form '{form}' on Apple GPUs; expected one of {', '.join(FORMS)}")
    return compile_kernel(*FORMS[form](matmul, name))


def build_metallib(kernels: Sequence[CompiledKernel]) -> bytes:
    """A metallib with the given kernels of one architecture, one module each."""
    functions = tuple(
        Function(
            name=kernel.signature.name,
            bitcode=kernel.bitcode,
            air_version=kernel.signature.architecture.air,
            language_version=kernel.signature.architecture.language,
        )
        for kernel in kernels
    )
    # Apple's files all carry an identifier; this one follows from what is in the file.
    digest = hashlib.sha256(b"".join(function.sha256 for function in functions))
    (architecture,) = {kernel.signature.architecture for kernel in kernels}
    library = Metallib(
        functions,
        architecture.os,
        format_patch=architecture.container_patch,
        uuid=digest.digest()[:16],
    )
    return library.to_bytes()
