# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs of one process timed side by side on the CPU: in turns, from rest, on equal pages.

Whatever else the machine does hits all contenders. A turn starts when no thread of the process runs
any more, since those of NumPy and PyTorch wait for more work by spinning for a while. It is one
call that is not timed and then a few that are, in a row, as a program makes them.

All operands are on the same kind of pages: huge ones, as every large buffer is where Linux says
``always`` in /sys/kernel/mm/transparent_hugepage/enabled, or small ones. By itself NumPy asks for
huge pages and IREE does not. The process is started anew with the settings that make them equal.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iree import runtime

#: Timed calls of a turn.
CALLS = 5
#: A contender slower than this many seconds a run makes one call a turn, in a few rounds only.
SLOW_SECONDS = 0.5
SLOW_ROUNDS = 3
#: No thread runs if they all together took less than this share of a pause in seconds.
PAUSE, IDLE_SHARE = 0.003, 0.1
#: Threads that still spin after this many seconds are waited for no longer.
MOST_PAUSES_SECONDS = 1.0
THREADS = "OPENBLAS_NUM_THREADS"
#: What makes the C library's and NumPy's large buffers ask for a kind of pages.
PAGE_SETTINGS = {
    "huge": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "NUMPY_MADVISE_HUGEPAGE": "1"},
    "small": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "NUMPY_MADVISE_HUGEPAGE": "0"},
}


@dataclass
class Contender:
    """Somebody who computes the matmul.

    Attributes:
        name: For the table.
        run: Computes it once.
        seconds: What each timed run took.
        cpu_seconds: The processor time of a run, over all threads: the average of each turn.
    """

    name: str
    run: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of its runs in seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The seconds that a quarter and three quarters of its runs stay below."""
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def is_slow(self) -> bool:
        """Whether it has shown that it takes long."""
        return bool(self.seconds) and self.median > SLOW_SECONDS

    def take_turn(self) -> None:
        """Run once for the caches and the threads, then a few times by the clock."""
        calls = 1 if self.is_slow else CALLS
        if not self.is_slow:
            self.run()
        cpu_start = thread_seconds()
        for _ in range(calls):
            start = time.perf_counter()
            self.run()
            self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append((thread_seconds() - cpu_start) / calls)


def measure(group: list[Contender], rounds: int) -> None:
    """Let the contenders take turns, in another random order each round."""
    order = random.Random(0)
    for contender in group:
        contender.run()  # the first run pays for allocations
    for _ in range(rounds):
        for contender in order.sample(group, len(group)):
            if contender.is_slow and len(contender.cpu_seconds) >= SLOW_ROUNDS:
                continue
            settle()
            contender.take_turn()


def settle() -> None:
    """Wait until no thread runs any more, but not for ever."""
    deadline = time.perf_counter() + MOST_PAUSES_SECONDS
    while time.perf_counter() < deadline:
        before = thread_seconds()
        time.sleep(PAUSE)
        if thread_seconds() - before < IDLE_SHARE * PAUSE:
            return


def thread_seconds() -> float:
    """The processor time of all threads together.

    Linux adds that of a thread which runs elsewhere to the process's own only once in a few
    milliseconds, so that each thread's clock is read (``clockid_t`` of a thread: the complement of
    its number, 3 bits further left, and 6).
    """
    threads = Path("/proc/self/task")
    if not threads.exists():
        return time.process_time()
    total = 0.0
    for task in threads.iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            total += time.clock_gettime(~int(task.name) << 3 | 6)
    return total


def give_way() -> None:
    """Put a worker thread of IREE on each core, and never take a core from one.

    IREE 3.13 wakes the calling thread before its last worker is done, and the caller then spins
    until it is. Where Linux lets the caller have that worker's core, both stand still until the end
    of a time slice, which is milliseconds. Threads of class SCHED_BATCH take no core away. Workers
    that are not bound often share a core while the other one is idle.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    runtime.flags.parse_flags(f"--task_topology_cpu_ids={cores}")
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def thread_count() -> int:
    """Threads that each contender may use; NumPy reads the same setting."""
    return int(os.environ.get(THREADS) or os.cpu_count() or 1)


def start_with(pages: str, threads: int) -> None:
    """Start this program anew, unless it runs with the settings for these already."""
    settings = PAGE_SETTINGS[pages] | {THREADS: str(threads)}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)
