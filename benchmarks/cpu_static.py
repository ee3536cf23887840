# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be measured of CPU kernels without the processor: instructions of their hot loops.

For kernels of one processor, as LLVM names it: how many instructions of each kind the hot loop
takes to multiply 64 weights with one row of x, and how many use the stack, for what is spilled.
Products are the instructions that multiply and add; vector instructions beside them decode and
scale; the scalar ones are addresses and the counter. x is packed before, so that the loops are the
same for any type of it that the products take. ``--markdown`` writes the table of docs/cpu.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from block32.dialects.diagnostics import DiagnosticError
from block32.dialects.kernel import KernelTier
from block32.lowering.cpu.isa import InstructionSet, instruction_set
from block32.lowering.cpu.target import CpuTarget
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import ScaledMatmul
from block32.tools.cpu_listing import hot_loop, stack_accesses
from block32.tools.iree_compile import device_facts
from block32.tools.standalone import compile_standalone
from block32.tools.tables import print_table

N, K = 4096, 4096
#: Weights of one row of x that the figures are for.
WEIGHTS = 64
#: Weights that the kernels scale together, so that a loop holds a multiple of them.
BLOCK = 32

PROBLEMS: dict[str, dict[str, Any]] = {
    "W8A8": {},
    "W8A8, w in 1x32 blocks": {"rhs_block": (1, 32)},
    "MXFP4": {"rhs": "f4E2M1FN"},
}
ROWS = (1, 4, 8, 64)

#: Instructions that multiply and add, and how many products each makes.
PRODUCTS = {
    r"bfmmla": 16,
    r"bfdot": 8,
    r"fmla\s+v\d+\.4s": 4,
    r"tdpbf16ps": 16 * 16 * 32,
    r"vdpbf16ps.*%zmm": 32,
    r"vfn?madd\d+ps.*%zmm": 16,
    r"vfn?madd\d+ps.*%ymm": 8,
}
_VECTOR_REGISTER = re.compile(r"\b[vzq]\d+\b|%[xyzt]mm\d")
_MEMORY = re.compile(r"(?:ld|st|prf|prefetch|v?p?mov\S*\s.*\(|v?p?broadcast\S*\s.*\(|tile)")


@dataclass(frozen=True)
class Figures:
    """One kernel's hot loop.

    Attributes:
        name: Which kernel.
        kinds: Instructions for 64 weights of one row: products, memory, vector, scalar.
        stack: Instructions of the loop that use the stack pointer: what is spilled.
    """

    name: str
    kinds: Counter[str]
    stack: int

    def cells(self) -> list[str]:
        """The figures as the table has them."""
        kinds = ("products", "vector", "memory", "scalar")
        counts = [self.kinds.total(), *(self.kinds[kind] for kind in kinds)]
        return [self.name, *(f"{count:.1f}" for count in counts), f"{self.stack}"]


HEADINGS = [
    "kernel",
    "instructions",
    "products",
    "other vector",
    "loads, stores",
    "scalar",
    "uses of the stack",
]


def measure(name: str, problem: ScaledMatmul, flags: tuple[str, ...]) -> Figures:
    """Compile one kernel and count its hot loop."""
    target = CpuTarget()
    config = target.select(problem, device_facts(flags)).config
    assert config is not None
    (tier,) = config.tiers
    with TemporaryDirectory() as folder:
        dump = f"--iree-hal-dump-executable-files-to={folder}"
        compile_standalone(KernelSpec(problem, target, config.tiers), (*flags, dump))
        (path,) = Path(folder).glob("*.s")
        assembly = path.read_text()
    isa = instruction_set(tier.isa)
    pattern, products = next((p, n) for p, n in PRODUCTS.items() if re.search(p, assembly))
    loop = hot_loop(assembly, pattern)
    kinds = Counter(_kind(line, pattern) for line in loop)
    rows = problem.m if tier.form == "stream" else _rows_of_tile(tier, isa)
    assert rows is not None
    # Where sums are scaled, that is done by the instruction of the products too.
    blocks = kinds["products"] * products // (BLOCK * rows)
    shares = blocks * BLOCK * rows / WEIGHTS
    each = Counter({kind: count / shares for kind, count in kinds.items()})  # type: ignore[arg-type]
    form = f"{tier.isa} {tier.form}"
    return Figures(f"{name}, M = {problem.m}: {form}", each, len(stack_accesses(loop)))


def _rows_of_tile(tier: KernelTier, isa: InstructionSet) -> int:
    assert tier.mma is not None
    return 1 if isa.tiles else tier.mma[0]


def _kind(line: str, product: str) -> str:
    if re.match(product, line):
        return "products"
    if _MEMORY.match(line):
        return "memory"
    return "vector" if _VECTOR_REGISTER.search(line) else "scalar"


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", default="neoverse-v2", help="as LLVM names it")
    parser.add_argument("--triple", default="aarch64-linux-gnu", help="the target triple")
    parser.add_argument("--markdown", action="store_true", help="a table of docs/cpu.md")
    arguments = parser.parse_args()
    flags = (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-triple={arguments.triple}",
        f"--iree-llvmcpu-target-cpu={arguments.cpu}",
    )
    try:
        rows = [
            measure(name, ScaledMatmul(m, N, K, **fields), flags)
            for name, fields in PROBLEMS.items()
            for m in ROWS
        ]
    except DiagnosticError as error:
        print(f"cpu_static: error: {error.message}", file=sys.stderr)
        return 1
    print_table(HEADINGS, [row.cells() for row in rows], arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
