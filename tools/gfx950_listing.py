# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What can be read from gfx950 machine code: resources, and the loop that does the work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from block32.lowering.gfx950.atoms import ATOMS, MFMA_16X16X32_BF16
from block32.lowering.gfx950.machine import LDS_BYTES, SIMDS, VECTOR_REGISTERS, WAVE_LANES
from block32.tools.gfx950_executor import DamagedCodeError, Instruction, Kernel
from block32.tools.gfx950_executor.counts import instruction_class
from block32.tools.gfx950_executor.mutate import instructions

#: Most waves that a SIMD holds (AMD "CDNA4 ISA", wave slots).
WAVES_PER_SIMD = 8

_MFMA_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)_")
_NARROW_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2}


@dataclass(frozen=True)
class Mix:
    """The instructions of a piece of code, a wave each.

    Attributes:
        count: All instructions.
        classes: By class: mfma, valu, salu, smem, vmem, lds, wait, barrier, branch.
        widths: Memory and LDS operations by what they do and bytes a lane,
            such as ``global load 16``, ``load to lds 16``, ``lds read 16``.
        mfma_clocks: Clocks that the matrix unit is busy.
        loaded_bytes: Bytes that a wave's loads from memory bring, to registers or to LDS.
    """

    count: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    widths: Counter[str] = field(default_factory=Counter)
    mfma_clocks: int = 0
    loaded_bytes: int = 0

    @property
    def mfma_units(self) -> float:
        """The matrix instructions in units of 32 clocks."""
        return self.mfma_clocks / 32

    @property
    def lds_read_bytes(self) -> int:
        """Bytes that a wave reads from LDS."""
        reads = {what: count for what, count in self.widths.items() if what.startswith("lds read")}
        return sum(count * int(what.split()[-1]) * WAVE_LANES for what, count in reads.items())


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of a module.

    Attributes:
        name: Its symbol.
        vgprs: Vector registers of a lane, as the compiler counted them.
        agprs: Accumulation registers of a lane.
        sgprs: Scalar registers of a wave.
        lds_bytes: LDS of a workgroup.
        vgpr_spills: Vector registers that were spilled.
        sgpr_spills: Scalar registers that were spilled.
        scratch_bytes: Scratch memory of a lane.
        threads: Threads of a workgroup.
        occupancy: Waves that fit on a SIMD at a time.
        whole: The mix of the whole code.
        loop: The mix of the loop that holds most matrix instructions; None without one.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    threads: int
    occupancy: int
    whole: Mix
    loop: Mix | None


def branch_target(instruction: Instruction) -> int | None:
    """Where a direct branch goes."""
    if instruction.name != "s_branch" and not instruction.name.startswith("s_cbranch"):
        return None
    words = instruction["simm16"]
    words -= (words & 0x8000) << 1
    return instruction.pc + instruction.size + 4 * words


def facts_of(hsaco: bytes, kernel: Kernel) -> KernelFacts:
    """Everything that ``inspect`` says of a kernel of a code object.

    Raises:
        UnknownInstructionError: The code cannot be decoded.
        DamagedCodeError: The kernel's metadata lack what every compiler writes.
    """
    code = instructions(hsaco, kernel.name)
    try:
        return _facts(code, kernel)
    except KeyError as error:
        raise DamagedCodeError(f"kernel '{kernel.name}' has no {error} in its metadata") from error


def _facts(code: list[Instruction], kernel: Kernel) -> KernelFacts:
    loop = loop_instructions(code)
    metadata = kernel.metadata
    threads = metadata[".max_flat_workgroup_size"]
    vgprs, agprs = metadata[".vgpr_count"], metadata.get(".agpr_count", 0)
    return KernelFacts(
        name=kernel.name,
        # The metadata counts AGPRs among the vector registers.
        vgprs=vgprs - agprs,
        agprs=agprs,
        sgprs=metadata[".sgpr_count"],
        lds_bytes=kernel.lds_bytes,
        vgpr_spills=metadata[".vgpr_spill_count"],
        sgpr_spills=metadata[".sgpr_spill_count"],
        scratch_bytes=kernel.scratch_bytes,
        threads=threads,
        occupancy=occupancy(vgprs, kernel.lds_bytes, threads),
        whole=mix_of(code),
        loop=mix_of(loop) if loop else None,
    )


def occupancy(registers: int, lds_bytes: int, threads: int) -> int:
    """Waves on a SIMD, limited by registers (in steps of 8), by LDS and by wave slots.

    Whole workgroups only; their waves go round the four SIMDs.
    """
    by_registers = VECTOR_REGISTERS // (-(-max(1, registers) // 8) * 8)
    waves = -(-threads // WAVE_LANES)
    limit = min(WAVES_PER_SIMD, by_registers)
    workgroups = limit * SIMDS // waves
    if lds_bytes:
        workgroups = min(workgroups, LDS_BYTES // lds_bytes)
    return min(limit, -(-workgroups * waves // SIMDS))


def loop_range(code: Sequence[Instruction]) -> range | None:
    """Where the loop with most matrix instructions is: from a branch's target up to the branch.

    Of nested loops with equally many the inner one, which is the shorter.
    """
    positions = {instruction.pc: number for number, instruction in enumerate(code)}
    best: range | None = None
    best_key = (0, 0)
    for number, instruction in enumerate(code):
        target = branch_target(instruction)
        if target is None or target > instruction.pc or target not in positions:
            continue
        loop = range(positions[target], number + 1)
        mfma_count = sum(instruction_class(code[inside]) == "mfma" for inside in loop)
        if mfma_count and (mfma_count, -len(loop)) > best_key:
            best, best_key = loop, (mfma_count, -len(loop))
    return best


def loop_instructions(code: Sequence[Instruction]) -> Sequence[Instruction] | None:
    """The loop with most matrix instructions (``loop_range``)."""
    place = loop_range(code)
    return code[place.start : place.stop] if place else None


def mix_of(code: Sequence[Instruction]) -> Mix:
    """Count instructions by class and width; the same instruction may come several times."""
    classes: Counter[str] = Counter()
    widths: Counter[str] = Counter()
    clocks = loaded = 0
    times = Counter(instruction.pc for instruction in code)
    for instruction in {instruction.pc: instruction for instruction in code}.values():
        kind, count = instruction_class(instruction), times[instruction.pc]
        classes[kind] += count
        if kind == "mfma":
            clocks += count * mfma_clocks(instruction)
        if kind in ("vmem", "lds"):
            what, size = memory_operation(instruction)
            widths[f"{what} {size}"] += count
            if what in ("global load", "load to lds"):
                loaded += count * size * WAVE_LANES
    return Mix(len(code), classes, widths, clocks, loaded)


def mfma_clocks(instruction: Instruction) -> int:
    """Clocks of the matrix unit: half where both operands of a scaled one have 4 or 6 bits."""
    if instruction.name == "v_mfma_f32_16x16x32_bf16":
        return MFMA_16X16X32_BF16.clocks
    match = _MFMA_SHAPE.search(instruction.name)
    atom = ATOMS.get(tuple(map(int, match.groups()))) if match else None  # type: ignore[arg-type]
    if atom is None:
        return 0
    formats = instruction.get("cbsz"), instruction.get("blgp")
    return atom.clocks if min(formats) < 2 else atom.clocks // 2


def memory_operation(instruction: Instruction) -> tuple[str, int]:
    """What a memory or LDS instruction does, and bytes a lane."""
    name = instruction.name
    size = _bytes_of(name)
    if name.startswith("ds_"):
        reads = "read" in name or "load" in name
        return ("lds read" if reads else "lds write" if "write" in name else "lds other"), size
    if "atomic" in name:
        return "atomic", size
    if "store" in name:
        return "global store", size
    if "load" in name:
        return ("load to lds" if instruction.get("lds") or "lds" in name else "global load"), size
    return "cache", 0


def _bytes_of(name: str) -> int:
    for unit, size in _NARROW_BYTES.items():
        if f"_{unit}" in name:
            return size
    match = re.search(r"_dwordx(\d)", name)
    if match:
        return 4 * int(match.group(1))
    match = re.search(r"_b(\d+)", name)
    return int(match.group(1)) // 8 if match else 4
