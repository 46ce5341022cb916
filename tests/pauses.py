"""A plugin: tests in a random order, each with a pause at a random moment. No result may depend on either.

    $ python -m pytest -p tests.pauses --pauses-seed=7 --all tests/client

A pause stops this process, the processes that it started, one of these, or all, for 2.5 s. It needs no processor time,
and finds more limits that are too short than load does. The seed determines the order, the processes and the moment.
A failure names its pause.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

WHAT = ("this process", "its children", "one child", "all")
DELAY_LOG10_S = (-2.5, 0.5)
"""From the start of a test to its pause: 3 ms to 3 s."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pauses-seed", type=int, default=1, help="what order and pauses follow from")
    parser.addoption("--pauses-s", type=float, default=2.5, help="how long each pause is; 0: only the order is changed")


def pytest_report_header(config: pytest.Config) -> str:
    return f"pauses: --pauses-seed={config.getoption('pauses_seed')} --pauses-s={config.getoption('pauses_s')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests of each file; then pytest groups the tests that share a fixture."""
    rng = random.Random(config.getoption("pauses_seed"))
    files = [list(group) for _, group in itertools.groupby(items, lambda item: item.path)]
    for group in files:
        rng.shuffle(group)
    rng.shuffle(files)
    items[:] = itertools.chain.from_iterable(files)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Pause once during the test, and note that in its failure.

    Raises:
        BaseException: what the test raises.
    """
    pause_s = item.config.getoption("pauses_s")
    if not pause_s:
        return (yield)
    pause = Pause(random.Random(f"{item.config.getoption('pauses_seed')} {item.nodeid}"), pause_s)
    pause.start()
    try:
        return (yield)
    except BaseException as error:
        error.add_note(f"pauses: {pause.outcome}")
        raise
    finally:
        pause.is_over.set()
        pause.join()


class Pause(threading.Thread):
    """One pause, unless the test ends before its moment; it also ends with the test."""

    def __init__(self, rng: random.Random, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self.outcome = "the test failed before its pause"
        self._rng = rng
        self._pause_s = pause_s
        self._delay_s = 10 ** rng.uniform(*DELAY_LOG10_S)
        self._what = rng.choice(WHAT)

    def run(self) -> None:
        if self.is_over.wait(self._delay_s):
            return
        stopped = [] if self._what == "this process" else descendants(os.getpid())
        if self._what == "one child" and stopped:
            stopped = [self._rng.choice(stopped)]
        self.outcome = f"{self._what} ({len(stopped)}) stopped after {self._delay_s:.3f} s for {self._pause_s} s"
        _send(signal.SIGSTOP, stopped)
        if self._what in ("this process", "all"):
            ctypes.PyDLL(None).usleep(int(self._pause_s * 1e6))  # keeps the interpreter's lock, so no thread runs
        else:
            self.is_over.wait(self._pause_s)
        _send(signal.SIGCONT, stopped)


def descendants(process: int) -> list[int]:
    """List the processes that one has started, and those that they have, except those that a test has stopped."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended
        states[int(path.parent.name)] = state
        children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return [each for each in found[1:] if states[each] != "T"]


def _send(number: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
