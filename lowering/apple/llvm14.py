# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LLVM 14 through llvmlite: the last LLVM whose bitcode Apple's loader is known to read.

llvmlite 0.43 carries LLVM 14.0.6 with typed pointers and bfloat; its bitcode writer adds Apple's
wrapper for Apple's triples. Newer releases write opaque pointers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

REQUIRED_VERSION = "0.43.0"


class LlvmError(RuntimeError):
    """llvmlite is missing or of another version, or it refused a module."""


def binding() -> Any:
    """The module ``llvmlite.binding``.

    Raises:
        LlvmError: The package llvmlite is absent, or not the version that writes typed pointers.
    """
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        raise LlvmError(
            f"writing AIR needs llvmlite {REQUIRED_VERSION}: pip install 'block32[apple]'"
        ) from None
    if version != REQUIRED_VERSION:
        raise LlvmError(
            f"writing AIR needs llvmlite {REQUIRED_VERSION} (LLVM 14, typed pointers) but "
            f"{version} is installed: pip install 'block32[apple]'"
        )
    return importlib.import_module("llvmlite.binding")


def encode(text: str) -> bytes:
    """Verifies LLVM text, tidies it, and writes it as bitcode with Apple's wrapper.

    The passes remove repeated and unused arithmetic and hoist what does not change in a loop. Those
    that rewrite for a CPU, or into generic intrinsics (instcombine, vectorizers), are left out.

    Raises:
        LlvmError: LLVM does not parse or verify the text.
    """
    llvm = binding()
    try:
        # A context of its own: in a shared one the names of structs depend on what came before.
        module = llvm.parse_assembly(text, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise LlvmError(f"LLVM refuses the kernel: {error}") from None
    passes = llvm.create_module_pass_manager()
    passes.add_basic_alias_analysis_pass()
    passes.add_gvn_pass()
    passes.add_licm_pass()
    passes.add_cfg_simplification_pass()
    passes.add_gvn_pass()
    passes.add_aggressive_dead_code_elimination_pass()
    passes.run(module)
    module.verify()
    return module.as_bitcode()


def disassemble(bitcode: bytes) -> str:
    """LLVM text of a module.

    Raises:
        LlvmError: The bytes are no bitcode that LLVM 14 reads.
    """
    llvm = binding()
    try:
        return str(llvm.parse_bitcode(bitcode, llvm.create_context()))
    except RuntimeError as error:
        raise LlvmError(f"LLVM refuses the bitcode: {error}") from None
