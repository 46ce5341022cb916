"""The queue of the audit log: no line is lost while there is room, and lost lines are counted in their place."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raftkv.server.audit import trail as trail_module
from raftkv.server.audit.lines import Record
from raftkv.server.audit.trail import RECORD_BYTES, AuditTrail
from raftkv.server.logs import handler
from tests.procs import wait_for


class Memory:
    """An in-memory destination, which can stall and fail on command."""

    trouble = ""

    def __init__(self) -> None:
        self.data = b""
        self.rest = b""
        self.full = False
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.closed = False

    def write(self, lines: bytes) -> None:
        self.entered.set()
        self.open.wait(90)
        self.rest += lines
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data, self.rest = self.data + self.rest, b""

    def close(self) -> None:
        self.closed = True

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.data.splitlines()]


def record(number: int, request: bytes | None = None) -> Record:
    return Record(1.0, "call", f"a:{number}", request=request)


def test_all_is_written_in_order_before_the_end() -> None:
    memory = Memory()
    trail = AuditTrail(memory, "m1")
    for number in range(2000):
        trail.add(record(number))
    trail.close()
    assert [line["remote"] for line in memory.lines] == [f"a:{number}" for number in range(2000)]
    assert memory.closed
    assert (trail.written, trail.dropped, trail.waiting_bytes) == (2000, 0, 0)


def test_lines_are_written_while_the_member_runs() -> None:
    memory = Memory()
    trail = AuditTrail(memory, "m1")
    for number in range(3):
        trail.add(record(number))
        wait_for(lambda number=number: len(memory.lines) == number + 1, "the line")
    trail.close()


def test_dropped_lines_are_counted_where_they_are_missing() -> None:
    memory = Memory()
    memory.open.clear()
    trail = AuditTrail(memory, "m1", waiting_bytes_max=3 * RECORD_BYTES + 100)
    trail.add(record(0))
    memory.entered.wait(90)
    for number in range(1, 7):
        trail.add(record(number))
    trail.add(record(7, b"x" * 101))
    assert {sample.name: sample.value for family in trail.collect() for sample in family.samples} == {
        "raftkv_audit_dropped_lines_total": 5.0,
    }
    memory.open.set()
    wait_for(lambda: not trail.waiting_bytes, "the lines")
    trail.add(record(8))
    trail.close()
    seen = [line.get("remote") or line["request"] for line in memory.lines]
    assert seen == ["a:0", "a:1", "a:2", {"lines": 5}, "a:8"]


def test_a_full_disk_costs_nothing_but_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(handler, "RETRY_S", 0.001)
    memory = Memory()
    memory.full = True
    trail = AuditTrail(memory, "m1")
    with caplog.at_level(logging.WARNING, "raftkv"):
        for number in range(10):
            trail.add(record(number))
        wait_for(lambda: bool(memory.rest), "the first attempt")
        memory.full = False
        wait_for(lambda: len(memory.lines) == 10, "the lines")
        trail.close()
    assert [line["remote"] for line in memory.lines] == [f"a:{number}" for number in range(10)]
    assert [message.split(";")[0] for message in caplog.messages] == [
        "cannot write the audit log: No space left on device",
        "the audit log can be written again",
    ]


def test_a_stop_does_not_wait_for_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    memory.full = True
    trail = AuditTrail(memory, "m1")
    trail.add(record(1))
    trail.close()
    assert memory.closed
    assert "stopped with 1 lines of the audit log unwritten: they are lost" in caplog.messages


@pytest.mark.parametrize("place", ["line", "output"])
def test_a_lack_of_memory_loses_no_line(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The thread ended at the first one: no later call was in the audit log, and no word said so."""
    monkeypatch.setattr(handler, "RETRY_S", 0.001)
    memory = Memory()
    owner, name = (trail_module, "line") if place == "line" else (memory, "write")
    call, failures = getattr(owner, name), [MemoryError(), MemoryError()]

    def starved(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return call(*arguments)

    monkeypatch.setattr(owner, name, starved)
    trail = AuditTrail(memory, "m1")
    for number in range(3):
        trail.add(record(number))
    wait_for(lambda: len(memory.lines) == 3, "the lines")
    trail.close()
    assert [line["remote"] for line in memory.lines] == ["a:0", "a:1", "a:2"]
    assert (trail.written, trail.waiting_bytes) == (3, 0)


def test_a_record_that_makes_no_line_does_not_end_the_others(monkeypatch, caplog):
    line: Callable[[Record, str], bytes] = trail_module.line

    def broken(one: Record, member: str) -> bytes:
        if one.remote == "a:1":
            raise ZeroDivisionError
        return line(one, member)

    monkeypatch.setattr(trail_module, "line", broken)
    memory = Memory()
    trail = AuditTrail(memory, "m1")
    for number in range(3):
        trail.add(record(number))
    trail.close()
    assert [line["remote"] for line in memory.lines] == ["a:0", "a:2"]
    assert "cannot encode an audit record, it is lost: call " in caplog.messages
