"""One record a second for all who look: shared, dropped for the slow, stopped with the last."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from raftkv.server.ui import service
from raftkv.server.ui.cluster import rates
from raftkv.server.ui.figures import Latencies, quantile
from raftkv.server.ui.service import Live, TooManyViewersError
from tests.virtual_loop import NodeLoop, Scheduler


class Collector:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 3:
            raise ValueError("a figure that cannot be read")
        return {"n": self.asked}


def run_async(test: Coroutine[Any, Any, None]) -> None:
    scheduler = Scheduler(random.Random(1))
    told = NodeLoop(scheduler).create_task(test)
    scheduler.run_until(60.0, told.done)
    scheduler.tear_down()
    told.result()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
@asynccontextmanager
async def live(collector: Collector) -> AsyncIterator[Live]:
    live = Live(collector)
    yield live
    live.close()


async def _next(records: AsyncIterator[bytes]) -> bytes:
    return await anext(records)


async def _opened(live: Live, may_look: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
    records = live.look(may_look, b"alice")
    assert await _next(records) == b"retry: 1000\n\n"
    return records


async def _close(records: Any) -> None:
    await records.aclose()


async def test_viewers_share_records_and_none_are_made_without_viewers(live: Live, collector: Collector) -> None:
    await asyncio.sleep(5)
    assert (collector.asked, live.is_running) == (0, False)
    first, second = await _opened(live), await _opened(live)
    assert [await _next(first), await _next(second)] == [b'data: {"n":1}\n\n'] * 2
    assert await _next(first) is await _next(second)
    await _close(first)
    assert live.is_running
    await _close(second)
    assert not live.is_running
    await asyncio.sleep(5)
    assert collector.asked == 2


async def test_a_slow_viewer_misses_records_and_a_failure_ends_nothing(live, collector, caplog):
    slow = await _opened(live)
    await asyncio.sleep(4.5)
    assert collector.asked == 5
    assert await _next(slow) == b'data: {"n":5}\n\n'
    assert await _next(slow) == b'data: {"n":6}\n\n'
    assert "reading the figures for the dashboard failed" in caplog.text


async def test_reader_that_lost_rights_is_cut_off_at_next_record(live: Live) -> None:
    allowed = True
    records = await _opened(live, lambda: allowed)
    await _next(records)
    allowed = False
    with pytest.raises(StopAsyncIteration):
        await _next(records)
    assert not live.is_running


async def test_viewers_are_bounded_and_end_with_the_member(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "VIEWERS_MAX", 2)
    live = Live(collector)
    never_read = live.look(lambda: True, b"alice")
    viewers = [await _opened(live), await _opened(live)]
    with pytest.raises(TooManyViewersError):
        live.look(lambda: True, b"alice")
    live.close()
    for viewer in viewers:
        with pytest.raises(StopAsyncIteration):
            await _next(viewer)
    assert not live.is_running
    await _close(never_read)


async def test_the_oldest_page_of_the_greediest_ends_for_another_user(collector, monkeypatch):
    """A user without roles opened all the pages that a member serves."""
    monkeypatch.setattr(service, "VIEWERS_MAX", 3)
    live = Live(collector)
    pages = [live.look(lambda: True, b"mallory") for _ in range(4)]
    for page in pages[:3]:
        assert await _next(page) == b"retry: 1000\n\n"
    with pytest.raises(StopAsyncIteration):
        await _next(pages[3])  # they were all asked for before one was served
    with pytest.raises(TooManyViewersError, match="user mallory has its share of the 3 pages"):
        live.look(lambda: True, b"mallory")
    honest = live.look(lambda: True, b"alice")
    assert await _next(honest) == b"retry: 1000\n\n"
    with pytest.raises(StopAsyncIteration):
        await _next(pages[0])
    assert await _next(honest) == await _next(pages[1]) == await _next(pages[2])
    for page in (honest, *pages):
        await _close(page)
    assert not live.is_running


def test_quantiles_are_of_the_last_while() -> None:
    now = 0.0
    latencies = Latencies(lambda: now)
    assert latencies.quantiles() is None
    for hundredth in range(1, 101):
        latencies.observe(hundredth / 100)
    assert latencies.quantiles() == [0.5, 0.99]
    now = 31.0
    latencies.observe(2.0)
    assert latencies.quantiles() == [2.0, 2.0]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.99, 5), (1.0, 5)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert quantile([1, 2, 3, 4, 5], share) == value


def _figures() -> Iterator[tuple[dict[str, Any], float | None]]:
    yield {"puts": 30, "uptime_s": 7}, 10.0
    yield {"puts": 3, "uptime_s": 1}, None  # started again
    yield {"uptime_s": 7}, None  # a version that does not count them


@pytest.mark.parametrize(("figures", "rate"), list(_figures()))
def test_rates_are_differences_of_one_run(figures: dict[str, Any], rate: float | None) -> None:
    assert rates((1.0, {"puts": 10, "uptime_s": 5}), 3.0, figures)["puts_per_s"] == rate
    assert rates(None, 3.0, figures)["puts_per_s"] is None
