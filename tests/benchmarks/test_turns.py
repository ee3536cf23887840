# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How contenders are timed side by side: whose turn it is, and what it counts."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from benchmarks import turns


def busy(seconds: float) -> None:
    """Use processor time in this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no clock for each thread")
def test_processor_time_is_that_of_all_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (busy(0.05), done.wait()))
    before = turns.thread_seconds()
    thread.start()
    busy(0.05)
    while turns.thread_seconds() - before < 0.1:
        time.sleep(0.001)
    done.set()
    thread.join()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made; each is over at once, and takes its time by the clock."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(made))
    return made


def test_a_turn_waits_until_no_thread_runs(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """Threads spin for three pauses and rest then."""
    monkeypatch.setattr(turns, "thread_seconds", lambda: min(sum(pauses), 3 * turns.PAUSE))
    turns.settle()
    assert len(pauses) == 4


def test_a_thread_that_never_rests_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(turns, "thread_seconds", lambda: sum(pauses))
    turns.settle()
    assert sum(pauses) == pytest.approx(turns.MOST_PAUSES_SECONDS, abs=turns.PAUSE)


def test_a_turn_is_one_call_and_then_the_timed_ones() -> None:
    calls: list[int] = []
    contender = turns.Contender("", lambda: calls.append(1))
    turns.measure([contender], rounds=3)
    assert len(contender.seconds) == 3 * turns.CALLS
    assert len(contender.cpu_seconds) == 3
    assert len(calls) == 1 + 3 * (1 + turns.CALLS)
    first, third = contender.quartiles
    assert first <= contender.median <= third


def test_a_slow_contender_takes_part_in_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLOW_SECONDS", 0.0)
    contender = turns.Contender("", lambda: time.sleep(0.001))
    turns.measure([contender], rounds=10)
    assert len(contender.cpu_seconds) == turns.SLOW_ROUNDS


def test_pages_and_threads_are_settings_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _program, _arguments, env: started.append(env))
    for kind, pages in turns.PAGE_SETTINGS.items():
        settings = pages | {turns.THREADS: "1"}
        for name in settings:
            monkeypatch.delenv(name, raising=False)
        turns.start_with(kind, 1)
        assert started.pop().items() >= settings.items()
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        turns.start_with(kind, 1)
        assert turns.thread_count() == 1
        assert not started, "started again with the settings in place"
