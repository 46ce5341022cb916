"""A node's view of the record: it moves on, whatever comes late, twice or damaged."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.client.values import DELETE, PUT, Event, KeyValue
from raftkv.training.keys import RunKeys
from raftkv.training.records import BROKEN, RUNNING, Round, State
from raftkv.training.rendezvous.record_cache import RecordCache

KEYS = RunKeys("job")


def item(key: str, value: bytes, revision: int) -> KeyValue:
    return KeyValue(key.encode(), value, 1, 1, revision, 0)


def state(epoch: int, revision: int, phase: str = RUNNING) -> KeyValue:
    return item(KEYS.state, State(epoch, phase).encode(), revision)


def begun(epoch: int, revision: int) -> KeyValue:
    return item(KEYS.round, Round(epoch).encode(), revision)


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
def cache(changes: list[int]) -> RecordCache:
    return RecordCache("job", lambda: changes.append(1))


def test_it_takes_what_a_read_has_found_and_then_what_the_watch_brings(cache: RecordCache, changes: list[int]) -> None:
    cache.load([begun(1, 5), state(1, 6)], 8)
    assert (cache.round, cache.state) == (Round(1), State(1, RUNNING))
    assert (cache.round_revision, cache.state_revision, cache.revision) == (5, 6, 8)
    cache.on_events(9, [Event(PUT, begun(2, 9)), Event(PUT, state(2, 9))])
    assert (cache.round, cache.round_revision, cache.revision) == (Round(2), 9, 9)
    assert len(changes) == 2


def test_a_change_that_a_read_has_overtaken_is_passed_over(cache: RecordCache) -> None:
    cache.load([begun(3, 9), state(3, 12, BROKEN)], 12)
    cache.on_events(9, [Event(PUT, begun(2, 7)), Event(PUT, state(3, 9))])
    assert (cache.round, cache.state, cache.revision) == (Round(3), State(3, BROKEN), 12)
    cache.on_events(14, [Event(PUT, state(3, 12)), Event(PUT, state(4, 13))])
    assert (cache.state, cache.revision) == (State(4, RUNNING), 14)


def test_a_read_that_the_watch_has_overtaken_is_passed_over(cache: RecordCache) -> None:
    cache.on_events(9, [Event(PUT, begun(2, 9))])
    cache.load([begun(1, 5)], 8)
    assert (cache.round, cache.revision) == (Round(2), 9)


def test_what_is_gone_is_gone(cache: RecordCache) -> None:
    cache.load([begun(1, 5), state(1, 5)], 5)
    cache.on_events(6, [Event(DELETE, item(KEYS.state, b"", 6))])
    assert (cache.state, cache.state_revision, cache.round) == (None, 0, Round(1))
    cache.load([], 7)
    assert (cache.round, cache.round_revision) == (None, 0)


def test_what_cannot_be_read_is_told_and_changes_nothing(cache: RecordCache) -> None:
    cache.load([state(1, 5)], 5)
    cache.on_events(6, [Event(PUT, item(KEYS.state, b"\x80\x04.", 6))])
    assert cache.state == State(1, RUNNING)
    assert KEYS.state in cache.damage
    assert "\n" not in cache.damage


async def _reach(cache: RecordCache) -> list[str]:
    order: list[str] = []

    async def wait(revision: int) -> None:
        await cache.reached(revision)
        order.append(f"{revision} at {cache.revision}")

    tasks = [asyncio.ensure_future(wait(revision)) for revision in (9, 5, 7)]
    await asyncio.sleep(0)
    for revision in (6, 8, 9):
        cache.on_events(revision, [])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    await cache.reached(3)
    return order


def test_a_revision_can_be_waited_for(cache: RecordCache) -> None:
    assert asyncio.run(_reach(cache)) == ["5 at 6", "7 at 8", "9 at 9"]
