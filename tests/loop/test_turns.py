"""The loop's turns are counted, the longest is logged once, and a long one names what it did."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from raftkv.loop import turns as turns_module
from raftkv.loop.turns import TURN_LIMIT_S, LoopTurns, MemberLoop, TurnSelector, name_work
from tests.procs import RAFTKV, Cluster, http_get

T = TypeVar("T")


def _run(turns: LoopTurns, block_s: float) -> None:
    blocked = threading.Event()

    async def work() -> None:
        blocked.wait(block_s)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: MemberLoop(TurnSelector(turns))) as runner:
        runner.run(work())


def _metrics(turns: LoopTurns) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(turns)
    lines = [line.split(" ") for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_a_long_turn_is_counted_and_named_and_its_own(caplog, monkeypatch):
    turns = LoopTurns()
    monkeypatch.setattr(turns_module, "WARNING_INTERVAL_S", 0.0)
    with caplog.at_level(logging.WARNING):
        _run(turns, block_s=0.12)
    told = [record.getMessage().split(", ") for record in caplog.records if record.name == "raftkv.loop.turns"]
    # On a busy machine, other turns may be slow too.
    took_ms, own_ms = max([float(part.split(" ms")[0].split()[-1]) for part in parts[:2]] for parts in told)
    # It slept, which is no wait for a processor; before that it may have waited for one.
    assert 0 < own_ms <= took_ms
    assert took_ms >= 120
    figures = _metrics(turns)
    assert figures["raftkv_loop_turn_seconds_count"] > figures['raftkv_loop_turn_seconds_bucket{le="0.1"}'] > 0
    assert figures["raftkv_loop_turn_seconds_sum"] >= 0.12


def test_a_turn_that_is_disregarded_is_not_counted_and_the_next_is(caplog, monkeypatch):
    selector = TurnSelector(turns := LoopTurns())
    now = 10.0
    monkeypatch.setattr(turns_module, "monotonic", lambda: now)

    async def work() -> None:
        nonlocal now
        now += 0.12
        selector.disregard()
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=lambda: MemberLoop(selector)) as runner:
        runner.run(work())
    assert not caplog.records
    figures = _metrics(turns)
    assert figures["raftkv_loop_turn_seconds_count"] > 0
    assert figures["raftkv_loop_turn_seconds_sum"] == 0


def test_the_longest_turn_begins_anew_with_each_scrape() -> None:
    turns = LoopTurns()
    _run(turns, block_s=0.01)
    assert turns.longest_s >= 0.01
    first, second = list(turns.collect()), list(turns.collect())
    assert first[1].samples[0].value >= 0.01
    assert [family.samples[0].value for family in second[1:]] == [0, 0]


def test_long_turns_are_not_logged_more_often_than_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    turns = LoopTurns()
    with caplog.at_level(logging.WARNING):
        for moment in (10.0, 10.1, 10.2, 11.5):
            turns.notable(TURN_LIMIT_S * 2, 0.01, "server.kv.range", moment)
    first, last = (record.getMessage() for record in caplog.records)
    assert first == ("slow turn of the event loop: 100 ms, 10 ms without waits for a CPU, in server.kv.range")
    assert last.endswith("in server.kv.range; 2 other long turns since the last such line")


def test_work_is_named_by_functions_of_raftkv_from_the_inside_out() -> None:
    names = {"__name__": "raftkv.storage.index", "sys": sys}
    exec("def inner(): return sys._getframe()\ndef outer(): return inner()", names)
    assert name_work(names["outer"]()) == "storage.index.inner < storage.index.outer"
    assert name_work(None) == ""


class _Pipe:
    """A socket that stays readable, and a reader that counts its calls."""

    def __init__(self, most: int, on_last: Callable[[], object], on_call: Callable[[], object] = lambda: None) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.theirs.send(b"x")
        self.calls, self._most, self._on_last, self._on_call = 0, most, on_last, on_call
        asyncio.get_running_loop().add_reader(self.ours.fileno(), self._read)

    def _read(self) -> None:
        self.calls += 1
        if self.calls == self._most:
            self.close()
            self._on_last()
        self._on_call()

    def close(self) -> None:
        """Read no more."""
        assert asyncio.get_running_loop().remove_reader(self.ours.fileno())
        self.ours.close()
        self.theirs.close()


def _on_a_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=lambda: MemberLoop(TurnSelector(LoopTurns()))) as runner:
        return runner.run(main())


@pytest.mark.parametrize("way", ["timer", "thread", "signal"])
def test_readers_that_have_always_something_to_read_are_interrupted(way: str) -> None:
    async def main() -> int:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, over.set)
        kill = partial(os.kill, os.getpid(), signal.SIGUSR1)
        wake = partial(loop.call_soon_threadsafe, over.set)

        def on_call() -> None:
            if pipe.calls == 3 and way == "timer":
                loop.call_later(0.001, over.set)
            elif pipe.calls == 3:
                threading.Timer(0.001, kill if way == "signal" else wake).start()

        pipe = _Pipe(0, over.set, on_call)
        await over.wait()
        loop.remove_signal_handler(signal.SIGUSR1)
        pipe.close()
        return pipe.calls

    assert _on_a_loop(main) >= 3


def test_a_reader_schedules_calls_and_timers() -> None:
    async def main() -> list[int]:
        loop, seen, over = asyncio.get_running_loop(), list[int](), asyncio.Event()

        def on_call() -> None:
            loop.call_soon(seen.append, pipe.calls)

        pipe = _Pipe(3, lambda: loop.call_later(0.001, over.set), on_call)
        await over.wait()
        return seen

    assert _on_a_loop(main) == [1, 2, 3]


def test_a_reader_that_raises_is_reported_and_called_again() -> None:
    async def main() -> list[str]:
        loop, reported, over = asyncio.get_running_loop(), list[str](), asyncio.Event()
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))

        def fail() -> None:
            raise ValueError("unreadable")

        _Pipe(2, over.set, fail)
        await over.wait()
        return reported

    assert _on_a_loop(main) == ["unreadable"] * 2


def test_a_reader_stops_the_loop() -> None:
    loop = MemberLoop(TurnSelector(LoopTurns()))

    async def begin() -> _Pipe:
        return _Pipe(0, lambda: None, loop.stop)

    async def end(pipe: _Pipe) -> None:
        pipe.close()

    pipe = loop.run_until_complete(begin())
    loop.run_forever()
    assert pipe.calls
    loop.run_until_complete(end(pipe))
    loop.close()


def test_a_member_tells_its_turns() -> None:
    with Cluster(RAFTKV) as cluster:
        text = http_get(cluster.endpoints[0], "/metrics")[2]
        assert "raftkv_loop_turn_seconds_bucket" in text
        assert "raftkv_loop_turn_longest_seconds" in text
        assert "raftkv_loop_turn_longest_own_seconds" in text
