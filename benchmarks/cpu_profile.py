# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the time of one of our CPU kernels goes: samples of a run, added up by what blocks do.

    python -m benchmarks.cpu_profile 8x7168x2048                  # W8A8, on this machine's CPU
    python -m benchmarks.cpu_profile 256x4096x4096 --cpu=znver4   # kernels of another profile
    python -m benchmarks.cpu_profile 8x7168x2048 --kernel=MXFP4   # 4-bit weights
    python -m benchmarks.cpu_profile 8x7168x2048 --markdown       # a table of docs/cpu.md

The kernel runs in a loop on one core, with its operands on huge pages: for a second by the clock
alone, and then while ``perf`` notes every millisecond of processor time which instruction is next.
Milliseconds are a line's share of the median of the first runs. ``objdump`` lists the code that
IREE wrote, in blocks that run from a jump or its target to the next. IREE copies this code into
memory of no file, so that its address is found by matching: that at which most samples fall on
starts of instructions.

A block is named after the instructions in it (``WORK``, ``OTHERWISE``), and blocks of one name are
one line: "decode" is what holds table look-ups or conversions from f16, in ``pack`` those of x and
in ``gemm`` those of w. One that decodes and multiplies is named after both, since the processor
does both at a time. A sample counts for the block where its timer struck, which may be a few
instructions after the one that took long.

Needs Linux and the tools ``perf`` and ``objdump``. Without the right to look into the system's
kernel (root, or ``perf_event_paranoid`` below 2) its time is in no line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.cpu import (
    MXFP4,
    OPERANDS,
    OURS,
    W8A16,
    Shape,
    iree_contender,
    our_module,
    our_operands,
    parse_shape,
)
from benchmarks.cpu_layout import features_lacking_here
from benchmarks.cpu_static import PRODUCTS
from benchmarks.turns import Contender, start_with
from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.cpu.target import compile_flags
from block32.lowering.problem import ScaledMatmul
from block32.tools.cpu_listing import BRANCH, mnemonics
from block32.tools.tables import print_table

KERNELS = {"W8A8": OURS, "W8A16": W8A16, "MXFP4": MXFP4}
#: Samples a second of processor time: no round number, so that they keep step with nothing. Runs
#: take up to a twentieth longer with them, and 1.5 times as long with ten times as many.
SAMPLE_RATE = 997
#: Runs before the first that is timed: they pay for allocations and fill the caches.
FIRST_RUNS = 3
#: For how long runs are timed, without perf.
ALONE_SECONDS = 1.0
#: The least unit in which code is moved when it is loaded.
PAGE = 4096
#: The least share of all samples with which a phase has a line of its own.
LEAST_SHARE = 0.005
#: A block's instructions are counted if it has at least this share of its phase's samples.
LISTED_SHARE = 0.01
LISTED_MNEMONICS = 3

#: What the instructions of a block do; a block with several of these is named after all.
WORK = {
    "tile products": r"tdp",
    # Those of bytes are not in PRODUCTS: several of them make one product of fp8.
    "products": "|".join(["vpdpbusd", *(p for p in PRODUCTS if not p.startswith("tdp"))]),
    "decode": r"vperm([it]2)?b|vpshufb|vcvtph2ps|tb[lx]\s|fcvtl",
    "turn": r"vperm[it]2(ps|d)|vunpck[lh]p[sd]|vpunpck[lh](dq|qdq)|vperm2f|(zip|uzp|trn)[12]\s",
    "sums": r"v(add|scalef)ps|fadd\s",
}
#: The name of a block that does none of these: of the first that matches one of its instructions.
OTHERWISE = {
    "check of scales": r"vpm(ax|in)ub|vphminposuw|um(ax|in)v",
    "scales": r"vpadd[bw]\s",
    "loads, stores of tiles": r"tile(load|store|zero)",
    "loads, stores": r"vmov(dq|[au]ps)|(ld|st)[pr1]\s.*\b[vq]\d",
}
ADDRESSES = "addresses, loops"
#: What phases of few samples are one line as.
REST = "the rest"
#: The first function after all kernels, and how it and those after it are listed: without names.
LAST_NAME, NAMELESS = "iree_hal_executable_library_query", "functions called"
#: Who else takes time, by the name of the file that has the code.
OUTSIDE = {
    "system": r"\[kernel|\[guest|.*\.ko$",
    "IREE's runtime": r"_runtime|libIREE",
    "Python": r"(lib)?python",
    "C library": r"lib(c|m|pthread)[.-]|ld-linux|\[vdso",
}
ELSEWHERE = "elsewhere"
HEADINGS = ["kernel", "phase", "share", "ms a run", "instructions", "most of them"]
TOOLS = {
    "perf": "it is in the package linux-perf of Debian, linux-tools-generic of Ubuntu",
    "objdump": "it is in the package binutils",
}

#: How often each pair of an address and the name of the file that has its code was sampled.
Samples = Mapping[tuple[int, str], int]


class ProfileError(Exception):
    """What a profile lacks, and what would help: lower case, without a period."""


@dataclass
class Block:
    """Instructions that run one after another.

    Attributes:
        kernel: The function that they are in.
        addresses: Where each is in the file.
        instructions: In AT&T syntax, or in that of aarch64.
    """

    kernel: str
    addresses: list[int] = field(default_factory=list)
    instructions: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """What it does, by ``WORK`` and ``OTHERWISE``."""
        work = [name for name, pattern in WORK.items() if self._has(pattern)]
        if work:
            return ", ".join(work)
        named = (name for name, pattern in OTHERWISE.items() if self._has(pattern))
        return next(named, ADDRESSES)

    def _has(self, pattern: str) -> bool:
        return any(re.match(pattern, instruction) for instruction in self.instructions)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        kernel: The function, or who else takes time.
        phase: What its blocks do; empty outside of kernels.
        samples: How many fell on them.
        instructions: Those of the blocks that matter.
    """

    kernel: str
    phase: str
    samples: int
    instructions: list[str]

    def cells(self, all_samples: int, milliseconds: float) -> list[str]:
        """What is printed, for a run of so many milliseconds."""
        share = self.samples / all_samples
        most = mnemonics(self.instructions).most_common(LISTED_MNEMONICS)
        count = str(len(self.instructions)) if self.instructions else ""
        listed = ", ".join(f"{number} {name}" for name, number in most)
        time_cells = [f"{share:.1%}", f"{share * milliseconds:.3f}"]
        return [self.kernel, self.phase, *time_cells, count, listed]


def read_blocks(listing: str) -> list[Block]:
    """The blocks of code, from what ``objdump -d -l --no-show-raw-insn`` prints.

    IREE leaves no symbols of kernels in the file, but their names are in its line tables: ``-l``
    prints ``name():`` where a function begins.

    Raises:
        ProfileError: There is no instruction.
    """
    blocks: list[Block] = []
    targets = {int(target, 16) for target in re.findall(BRANCH + r"([0-9a-f]+)\b", listing)}
    kernel, ends = "", True
    for line in listing.splitlines():
        if function := re.fullmatch(r"(\S+)\(\):", line):
            name = NAMELESS if function[1] == LAST_NAME else function[1]
            ends |= name != kernel
            kernel = name
        # Where an instruction has a long and a short form, the listing names the long one so.
        elif code := re.match(r"\s*([0-9a-f]+):\s+(?:\{evex\}\s+)?(\S.*)", line):
            address, instruction = int(code[1], 16), code[2]
            if ends or address in targets:
                blocks.append(Block(kernel))
            blocks[-1].addresses.append(address)
            blocks[-1].instructions.append(instruction)
            ends = bool(re.match(BRANCH + r"|ret", instruction))
    if not blocks:
        raise ProfileError("objdump lists no instructions: it has to be one for this processor")
    return blocks


def read_samples(text: str) -> Samples:
    """Samples, from what ``perf script -F ip,dso`` prints: ``7f3ea71b4a80 (/path/to/file)``."""
    found = re.findall(r"^\s*([0-9a-f]+)\s+\((.*)\)$", text, re.MULTILINE)
    return Counter((int(address, 16), Path(file).name) for address, file in found)


def load_address(samples: Samples, addresses: Iterable[int]) -> int:
    """What to add to ``addresses`` of a file's instructions, so that most samples fall on them.

    Raises:
        ProfileError: No sample falls on any.
    """
    in_page: defaultdict[int, list[int]] = defaultdict(list)
    for address in addresses:
        in_page[address % PAGE].append(address)
    matches: Counter[int] = Counter()
    for (sampled, _), count in samples.items():
        for address in in_page[sampled % PAGE]:
            matches[sampled - address] += count
    if not matches:
        raise ProfileError("no sample is of the kernels: a longer run (--seconds) has more")
    return matches.most_common(1)[0][0]


def lines_of(blocks: list[Block], samples: Samples) -> list[Line]:
    """The samples of kernels by phase, in the order of the code, and then those of others."""
    start = load_address(samples, (address for block in blocks for address in block.addresses))
    index_at = {start + at: i for i, block in enumerate(blocks) for at in block.addresses}
    of_block: Counter[int] = Counter()
    of_others: Counter[str] = Counter()
    for (address, file), count in samples.items():
        if address in index_at:
            of_block[index_at[address]] += count
        else:
            named = (name for name, pattern in OUTSIDE.items() if re.match(pattern, file))
            of_others[next(named, ELSEWHERE)] += count
    lines: list[Line] = []
    least = LEAST_SHARE * sum(samples.values())
    for kernel in dict.fromkeys(block.kernel for block in blocks):
        counts = {i: of_block[i] for i in sorted(of_block) if blocks[i].kernel == kernel}
        lines += _lines_of_kernel(kernel, blocks, counts, least)
    return lines + [Line(name, "", count, []) for name, count in of_others.most_common()]


def _lines_of_kernel(
    kernel: str, blocks: list[Block], counts: dict[int, int], least: float
) -> list[Line]:
    """The phases with at least ``least`` of the samples that blocks have, and the rest."""
    lines: list[Line] = []
    rest = 0
    for phase in dict.fromkeys(blocks[i].phase for i in counts):
        own = {i: count for i, count in counts.items() if blocks[i].phase == phase}
        total = sum(own.values())
        if total < least:
            rest += total
            continue
        listed = [blocks[i] for i, count in own.items() if count >= LISTED_SHARE * total]
        instructions = [instruction for block in listed for instruction in block.instructions]
        lines.append(Line(kernel, phase, total, instructions))
    lines.sort(key=lambda line: -line.samples)
    return lines + ([Line(kernel, REST, rest, [])] if rest else [])


def timed_runs(contender: Contender) -> list[float]:
    """Seconds of each of the runs of ``ALONE_SECONDS``, after a few that are not timed."""
    for _ in range(FIRST_RUNS):
        contender.run()
    times: list[float] = []
    end = time.perf_counter() + ALONE_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        contender.run()
        times.append(time.perf_counter() - start)
    return times


def sample(contender: Contender, seconds: float, folder: Path, cores: set[int]) -> Samples:
    """Let ``contender`` run while ``perf``, on any of ``cores``, takes samples.

    Raises:
        ProfileError: ``perf`` may not take any.
    """
    data = str(folder / "perf.data")
    record = ["perf", "record", "-o", data, "-e", "cpu-clock", "-F", str(SAMPLE_RATE)]
    # perf takes samples as long as the command after it runs.
    command = [*record, "-p", str(os.getpid()), "--", "sleep", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as perf:
        assert perf.stderr is not None
        os.sched_setaffinity(perf.pid, cores)
        while perf.poll() is None:
            contender.run()
        said = perf.stderr.read().decode(errors="replace")
    samples = read_samples(output_of("perf", "script", "-i", data, "-F", "ip,dso"))
    if perf.returncode or not samples:
        reasons = [line for line in said.splitlines() if line.strip(" .") and line != "Error:"]
        reason = reasons[0].strip().rstrip(".") if perf.returncode and reasons else "none came"
        raise ProfileError(
            f"perf takes no samples of the event cpu-clock ('{reason}'): it may as root, or where "
            "/proc/sys/kernel/perf_event_paranoid is 2 or less and no sandbox forbids it"
        )
    return samples


def output_of(tool: str, *arguments: str) -> str:
    """What a tool prints; nothing, if it fails."""
    done = subprocess.run([tool, *arguments], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


def check_tools() -> None:
    """Raise a ``ProfileError`` where one of the tools is not installed."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise ProfileError(f"the tool '{tool}' is not installed: {package}")


def profile(shape: Shape, kernel: str, cpu: str, seconds: float) -> tuple[list[float], list[Line]]:
    """Compile a kernel, and let it run on one core.

    Returns:
        Seconds of each run without ``perf``, and where the time of runs with it goes.

    Raises:
        ProfileError: A tool is missing or refuses, or this machine cannot run the kernel.
        IreeCompileError: IREE does not know ``cpu``.
    """
    check_tools()
    flags = compile_flags(cpu)
    if lacking := features_lacking_here(flags):
        raise ProfileError(f"this machine lacks {', '.join(lacking)}, which '{cpu}' has")
    problem = ScaledMatmul(*shape, **OPERANDS[KERNELS[kernel]])
    with TemporaryDirectory() as name:
        folder = Path(name)
        dump = f"--iree-hal-dump-executable-files-to={folder}"
        module = our_module(problem, (*flags, dump))
        (code,) = folder.glob("*.so")
        blocks = read_blocks(output_of("objdump", "-d", "-l", "--no-show-raw-insn", str(code)))
        rng = np.random.default_rng(0)
        m, n, k = shape
        x, w = (rng.standard_normal((rows, k), np.float32) for rows in (m, n))
        contender = iree_contender(kernel, module, our_operands(problem, x, w))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        times = timed_runs(contender)
        samples = sample(contender, seconds, folder, cores)
    return times, lines_of(blocks, samples)


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", type=parse_shape, metavar="MxNxK")
    parser.add_argument("--kernel", choices=KERNELS, default="W8A8", help="types of x and w")
    parser.add_argument("--cpu", default="host", help="the CPU to compile for, as LLVM names it")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long samples are taken")
    parser.add_argument("--markdown", action="store_true", help="a table of docs/cpu.md")
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds: expected a positive number but got {options.seconds:g}")
    start_with("huge", 1)
    try:
        times, lines = profile(options.shape, options.kernel, options.cpu, options.seconds)
    except (ProfileError, DiagnosticError) as error:
        message = error.message if isinstance(error, DiagnosticError) else error
        print(f"cpu_profile: error: {message}", file=sys.stderr)
        return 1
    samples = sum(line.samples for line in lines)
    milliseconds = 1e3 * statistics.median(times)
    shape = ",".join(map(str, options.shape))
    print(f"{options.kernel} {shape}, cpu {options.cpu}:", end=" ")
    print(f"{milliseconds:.3f} ms a run (median of {len(times)}), {samples} samples\n")
    print_table(HEADINGS, [line.cells(samples, milliseconds) for line in lines], options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
