"""The loop's turns are counted, the longest is logged once, and a long one names what it did."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from raftkv.loop.turns import TURN_LIMIT_S, LoopTurns, TurnSelector, name_work
from tests.procs import RAFTKV, Cluster, http_get


def _run(turns: LoopTurns, block_s: float) -> None:
    blocked = threading.Event()

    async def work() -> None:
        blocked.wait(block_s)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TurnSelector(turns))) as runner:
        runner.run(work())


def _metrics(turns: LoopTurns) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(turns)
    lines = [line.split(" ") for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_a_long_turn_is_counted_and_named_and_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = LoopTurns()
    with caplog.at_level(logging.WARNING):
        _run(turns, block_s=0.12)
    (record,) = [record for record in caplog.records if record.name == "raftkv.loop.turns"]
    took_ms, own_ms = (float(part.split(" ms")[0].split()[-1]) for part in record.getMessage().split(", ")[:2])
    # It slept, which is no wait for a processor; before that it may have waited for one.
    assert 0 < own_ms <= took_ms
    assert took_ms >= 120
    figures = _metrics(turns)
    assert figures["raftkv_loop_turn_seconds_count"] > figures['raftkv_loop_turn_seconds_bucket{le="0.1"}'] > 0
    assert figures["raftkv_loop_turn_seconds_sum"] >= 0.12


def test_a_turn_that_is_disregarded_is_not_counted_and_the_next_is(caplog: pytest.LogCaptureFixture) -> None:
    selector = TurnSelector(turns := LoopTurns())

    async def work() -> None:
        threading.Event().wait(0.12)
        selector.disregard()
        await asyncio.sleep(0)

    with (
        caplog.at_level(logging.WARNING),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        runner.run(work())
    assert not caplog.records
    figures = _metrics(turns)
    assert figures["raftkv_loop_turn_seconds_count"] > 0
    assert figures["raftkv_loop_turn_seconds_sum"] < 0.12


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
    assert first == ("a turn of the event loop took 100 ms, 10 ms without waits for a processor, in server.kv.range")
    assert last.endswith("in server.kv.range; 2 other long turns since the last such line")


def test_work_is_named_by_functions_of_raftkv_from_the_inside_out() -> None:
    names = {"__name__": "raftkv.storage.index", "sys": sys}
    exec("def inner(): return sys._getframe()\ndef outer(): return inner()", names)
    assert name_work(names["outer"]()) == "storage.index.inner < storage.index.outer"
    assert name_work(None) == ""


def test_a_member_tells_its_turns() -> None:
    with Cluster(RAFTKV) as cluster:
        text = http_get(cluster.endpoints[0], "/metrics")[2]
        assert "raftkv_loop_turn_seconds_bucket" in text
        assert "raftkv_loop_turn_longest_seconds" in text
        assert "raftkv_loop_turn_longest_own_seconds" in text
