"""A node's view of the record: decoded, also when a key is gone or damaged; how it follows is the reflector's."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv.client.control import OnEvents, OnLost
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.training.records import RUNNING, GenerationRecord, RunKeys, State
from raftkv.training.rendezvous.world import RecordCache, new_head

KEYS = RunKeys("job")


def item(key: str, value: bytes, revision: int) -> KeyValue:
    return KeyValue(key.encode(), value, 1, 1, revision, 0)


def state(generation: int, revision: int, phase: str = RUNNING) -> KeyValue:
    return item(KEYS.state, State(generation, phase).encode(), revision)


def begun(generation: int, revision: int) -> KeyValue:
    return item(KEYS.round, GenerationRecord(generation).encode(), revision)


@pytest.fixture
def changes() -> list[int]:
    return []


class Watched:
    """A store whose watch the test feeds by hand."""

    def watch(self, key: str, end: str, start: int, on_events: OnEvents, on_lost: OnLost, **_: bool) -> object:
        self.on_events = on_events
        return lambda: None


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def cache(watched: Any, changes: list[int]) -> RecordCache:
    return RecordCache(watched, "job", lambda: changes.append(1))


def test_it_takes_what_a_read_has_found_and_then_what_the_watch_brings(cache, watched, changes):
    cache.load([begun(1, 5), state(1, 6)], 8)
    assert (cache.round, cache.state) == (GenerationRecord(1), State(1, RUNNING))
    assert (cache.round_revision, cache.state_revision, cache.revision) == (5, 6, 8)
    watched.on_events(9, [Event(PUT, item(KEYS.state, new_head(cache.roster, (), State(2, RUNNING)).encode(), 9))])
    assert (cache.round, cache.round_revision, cache.revision) == (GenerationRecord(2), 9, 9)
    assert (cache.state, cache.state_revision) == (State(2, RUNNING), 9)
    assert len(changes) == 2


def test_deleted_record_is_gone(cache: RecordCache) -> None:
    cache.load([begun(1, 5), state(1, 5)], 5)
    cache.load([begun(1, 5)], 6)
    assert (cache.state, cache.state_revision, cache.round) == (None, 0, GenerationRecord(1))
    cache.load([], 7)
    assert (cache.round, cache.round_revision) == (None, 0)


def test_unreadable_record_is_reported_and_changes_nothing(cache: RecordCache, watched: Watched) -> None:
    cache.load([state(1, 5)], 5)
    watched.on_events(6, [Event(PUT, item(KEYS.state, b"\x80\x04.", 6))])
    assert cache.state == State(1, RUNNING)
    assert KEYS.state in cache.damage
    assert "\n" not in cache.damage


def test_damage_that_was_repaired_is_told_no_more(cache: RecordCache, watched: Watched) -> None:
    cache.load([begun(1, 5), state(1, 5)], 5)
    cache.load([item(KEYS.round, b"no", 6), item(KEYS.state, b"no", 6)], 6)
    cache.load([begun(2, 7), item(KEYS.state, b"no", 6)], 7)
    assert KEYS.state in cache.damage
    watched.on_events(8, [Event(PUT, state(2, 8))])
    assert cache.damage == ""
