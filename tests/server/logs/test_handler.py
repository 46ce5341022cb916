"""The queue of the log: callers wait briefly, writable lines are never lost, and a full disk blocks nothing."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from raftkv.server.logs import handler as handler_module
from raftkv.server.logs.files import LineStream
from raftkv.server.logs.handler import ThreadedHandler

PATIENCE_S = 60.0


class Held:
    """An output that takes lines while ``open`` is set, and fails while ``error`` is."""

    trouble = ""

    def __init__(self) -> None:
        self.lines = b""
        self.open = threading.Event()
        self.open.set()
        self.error: OSError | None = None
        self.tried = threading.Semaphore(0)
        self._rest = b""

    def write(self, lines: bytes) -> None:
        self._rest += lines
        self.tried.release()
        self.open.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.lines += self._rest
        self._rest = b""

    def close(self) -> None:
        pass


@pytest.fixture
def held() -> Iterator[Held]:
    output = Held()
    yield output
    output.open.set()


def logger_of(handler: ThreadedHandler) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_line_is_written_before_log_call_returns(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handler_module, "WAIT_S", PATIENCE_S)  # on a crowded machine a thread may come late
    handler = ThreadedHandler(held)
    logger = logger_of(handler)
    for number in range(100):
        logger.info("line %d", number)
        assert held.lines.endswith(b"line %d\n" % number)
    handler.close()


def test_an_output_that_stands_still_costs_one_wait(held: Held, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    handler = ThreadedHandler(held)
    real = handler._wait

    def counting(timeout_s: float) -> None:
        waits.append(timeout_s)
        real(timeout_s)

    monkeypatch.setattr(handler, "_wait", counting)
    logger = logger_of(handler)
    held.open.clear()
    for number in range(100):
        logger.info("line %d", number)
    assert waits == [handler_module.WAIT_S]
    assert handler_module.WAIT_S < 0.05
    held.open.set()
    handler.close()
    assert held.lines.splitlines() == [b"line %d" % number for number in range(100)]


def test_an_output_that_is_slow_costs_no_more(held: Held, monkeypatch: pytest.MonkeyPatch):
    """Each line alone is written in time, all together are not waited for."""
    handler = ThreadedHandler(held)
    clock = iter(range(10_000))
    monkeypatch.setattr(handler_module, "monotonic", lambda: 100 + next(clock) * handler_module.WAIT_S / 4)
    allowed: list[float] = []
    real = handler._wait

    def counting(timeout_s: float) -> None:
        allowed.append(timeout_s)
        real(PATIENCE_S if timeout_s else 0.0)

    monkeypatch.setattr(handler, "_wait", counting)
    logger = logger_of(handler)
    for number in range(20):
        logger.info("line %d", number)
    handler.close()
    # Each wait takes a quarter of what is allowed, by this clock, and so does each look at it.
    assert [round(one / handler_module.WAIT_S, 2) for one in allowed] == [1.0, 0.75, 0.5, 0.25, *([0.0] * 16)]
    assert len(held.lines.splitlines()) == 20


def test_a_full_disk_stops_nothing_and_the_gap_is_named(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handler_module, "WAITING_BYTES_MAX", 50)
    monkeypatch.setattr(handler_module, "RETRY_S", 0.01)
    monkeypatch.setattr(handler_module, "WAIT_S", PATIENCE_S)
    handler = ThreadedHandler(held)
    logger = logger_of(handler)
    held.error = OSError(errno.ENOSPC, "No space left on device")
    handler._is_behind = True
    for number in range(100):
        logger.info("line %02d", number)
    assert handler.dropped == 100 - 50 // len("line 00\n")
    held.error = None
    handler._wait(PATIENCE_S)
    logger.info("after")
    handler.close()
    *first, gap, last = held.lines.decode().splitlines()
    assert first == [f"line {number:02d}" for number in range(6)]
    assert gap == "the log lacks 94 lines here: they could not be written"
    assert last == "after"


def test_close_flushes_lines_and_is_bounded(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handler_module, "CLOSE_S", 0.01)
    handler = ThreadedHandler(held)
    held.open.clear()
    logger_of(handler).info("line")
    began = time.monotonic()
    handler.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    logger_of(handler).info("too late")
    held.open.set()
    handler._thread.join(PATIENCE_S)
    assert held.lines == b"line\n"


PROGRAM = """
import logging, os, sys
from raftkv.config import ServerConfig
from raftkv.server.logs import handler, outputs
handler.WAIT_S = 60.0
outputs.configure(ServerConfig(log_outputs=(sys.argv[1],), log_format="console"))
logging.getLogger("x").warning("the last line")
os.kill(os.getpid(), 9)
"""


def test_a_killed_member_has_lost_no_line(tmp_path):
    path = tmp_path / "raftkv.log"
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], check=False)
    assert ran.returncode == -9
    assert path.read_text().endswith("the last line\n")


def test_a_stalled_reader_of_standard_error_delays_no_call():
    """The pipe is full: it has no reader."""
    reader, writer = os.pipe()
    handler = ThreadedHandler(LineStream(writer))
    logger = logger_of(handler)
    for _ in range(100):
        logger.info("x" * 10_000)
    left = 100 * 10_001
    while left:
        left -= len(os.read(reader, left))
    handler.close()
    os.close(reader)
    os.close(writer)
