# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Modules for aarch64 run on other machines: QEMU runs the ``iree-run-module`` of IREE's wheel.

CONTRIBUTING.md says how to install what that takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Names that iree-run-module has for the element types of operands and results.
_ELEMENTS = {
    np.dtype(ml_dtypes.float8_e4m3fn): "f8E4M3FN",
    np.dtype(ml_dtypes.float8_e5m2): "f8E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "f8E8M0FNU",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float16): "f16",
    np.dtype(np.float32): "f32",
    np.dtype(np.int32): "i32",
    np.dtype(np.uint8): "i8",
}
#: Debian's libc and libstdc++ for aarch64.
_LIBRARIES = Path("/usr/aarch64-linux-gnu")


def _runner() -> Path:
    """The aarch64 wheel's ``iree-run-module``."""
    folder = os.environ.get("BLOCK32_AARCH64_RUNTIME", str(Path(sys.prefix) / "aarch64"))
    return Path(folder) / "iree" / "_runtime_libs" / "iree-run-module"


@lru_cache(maxsize=1)
def missing() -> str:
    """What is not installed here to run modules for aarch64, or nothing."""
    if not shutil.which("qemu-aarch64"):
        return "qemu-aarch64"
    if not (_LIBRARIES / "lib" / "libstdc++.so.6").exists():
        return "libstdc++ for aarch64"
    return "" if _runner().exists() else "IREE's runtime for aarch64"


def run_emulated(vmfb: bytes, like: Array, *arguments: Array) -> Array:
    """Call ``main`` of a module for aarch64 on a processor with all that QEMU knows.

    Args:
        vmfb: The module.
        like: An array of the result's shape and type.
        arguments: The operands.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "module.vmfb").write_bytes(vmfb)
        flags = [f"--module={folder}/module.vmfb", "--function=main", "--device=local-task"]
        for i, array in enumerate(arguments):
            (folder / f"{i}.bin").write_bytes(array.tobytes())
            shape = "x".join([*map(str, array.shape), _ELEMENTS[array.dtype]])
            flags.append(f"--input={shape}=@{folder}/{i}.bin")
        flags.append(f"--output=@{folder}/result.bin")
        command = ["qemu-aarch64", "-cpu", "max", "-L", str(_LIBRARIES), str(_runner()), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
        values = np.frombuffer((folder / "result.bin").read_bytes(), like.dtype)
    return values.reshape(like.shape)
