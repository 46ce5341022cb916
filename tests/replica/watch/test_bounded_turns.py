"""Limits on the work for watchers of a turn or a catch-up step: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.replica.watch import hub as hub_module
from raftkv.replica.watch import messages
from raftkv.replica.watch import piece as piece_module
from raftkv.replica.watch.catch_up import REVISIONS_PER_STEP, WATCHER_BYTES_PER_STEP, CatchUp
from raftkv.replica.watch.index import OPEN_END, Intervals, WatcherIndex
from raftkv.replica.watch.stream import CONNECTION_QUEUED_MAX_BYTES, FILTERS_MAX, WatchStream
from tests.replica.watch.fakes import FakeCall
from tests.replica.watch.test_hub import World

TURN_MAX_BYTES = 16 * 1024 * 1024
EVENTS_MAX = 10_000
"""Events that a turn or step may encode: each takes 1 to 2 us."""
MANY = 20_000


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


class Encoded:
    """Counts events as they are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        event = messages.event

        def counted(kv: bytes, is_delete: bool, prev_kv: bytes | None = None) -> bytes:
            self.count += 1
            return event(kv, is_delete, prev_kv)

        monkeypatch.setattr(messages, "event", counted)

    def take(self) -> int:
        """How many since the last call."""
        taken, self.count = self.count, 0
        return taken


def _queued(calls: list[FakeCall]) -> int:
    return sum(call.send_buffer_size for call in calls)


def _events(call: FakeCall) -> list[list[rpc_pb2.WatchResponse]]:
    """Responses with events, fragments of one together."""
    found: list[list[rpc_pb2.WatchResponse]] = [[]]
    for response in call.responses:
        if response.events:
            found[-1].append(response)
            if not response.fragment:
                found.append([])
    return found[:-1]


@pytest.mark.interpreted
@pytest.mark.parametrize("prev_kv", [False, True])
def test_a_large_value_that_very_many_watch_is_encoded_once_and_delivered_in_steps(world, monkeypatch, prev_kv):
    world.put(b"k", b"a" * 100_000)
    streams = [world.stream() for _ in range(300)]
    calls = [call for _, call in streams]
    for stream, _ in streams:
        world.watch(stream, key=b"k", prev_kv=prev_kv)
    before, encoded = _queued(calls), Encoded(monkeypatch)
    world.put(b"k", b"b" * 100_000)
    assert encoded.take() == 1
    assert _queued(calls) - before <= TURN_MAX_BYTES
    more = True
    while more:
        before = _queued(calls)
        more = world.catch_up()
        assert _queued(calls) - before <= TURN_MAX_BYTES
        assert encoded.take() <= 2
    for call in calls:
        call.read()
        ((response,),) = _events(call)
        assert response.events[0].kv.value == b"b" * 100_000
        assert response.events[0].prev_kv.value == (b"a" * 100_000 if prev_kv else b"")
    assert world.hub.unsynced_count == 0


def _delete_all(world: World) -> None:
    txn = world.store.begin()
    txn.delete_range(b"k", b"l")
    txn.end()


def _world_of_many(world: World) -> list[tuple[WatchStream, FakeCall]]:
    """Ten watchers of very many keys: half with previous values, some in fragments."""
    txn = world.store.begin()
    for number in range(MANY):
        txn.put(b"k%05d" % number, b"v")
    txn.end()
    world.applied()
    streams = [world.stream() for _ in range(10)]
    for number, (stream, _) in enumerate(streams):
        world.watch(stream, key=b"k", range_end=b"l", prev_kv=number % 2 == 0, fragment=number % 3 == 0)
    return streams


def test_a_revision_of_very_many_changes_is_matched_and_sent_in_steps(world, monkeypatch):
    streams = _world_of_many(world)
    encoded = Encoded(monkeypatch)
    _delete_all(world)
    world.applied()
    assert encoded.take() <= EVENTS_MAX
    more = True
    while more:
        more = world.catch_up()
        assert encoded.take() <= EVENTS_MAX
    for number, (_, call) in enumerate(streams):
        call.read()
        (response,) = _events(call)
        assert (len(response) > 1) == (number % 3 == 0), "one response, or all fragments in a row"
        events = [event for part in response for event in part.events]
        assert [event.kv.key for event in events] == [b"k%05d" % one for one in range(MANY)]
        assert all(event.HasField("prev_kv") == (number % 2 == 0) for event in events)
        assert events[-1].kv.mod_revision == world.store.revision
    assert world.hub.unsynced_count == 0


def test_unwatched_history_of_large_values_is_read_in_steps(world: World) -> None:
    """Each is read from the disk and checked: 2,000 of a megabyte, in one step, held the loop for half a second."""
    for number in range(100):
        world.put(b"large%d" % number, b"v" * 300_000)
    stream, call = world.stream()
    world.watch(stream, key=b"other", start_revision=1)
    steps = 1
    while world.catch_up():
        steps += 1
    assert steps >= 100 * 300_000 // piece_module.BYTES_PER_STEP
    world.put(b"other")
    assert call.read()[-1].events


def test_history_that_a_compaction_overtakes_is_read_again_or_ends_the_watch(world: World) -> None:
    (behind, behind_call), (at, at_call) = world.stream(), world.stream()
    world.put(b"first")
    revision = world.store.revision
    _world_of_many(world)
    _delete_all(world)
    world.put(b"last")
    world.watch(behind, key=b"\0", range_end=b"\0", start_revision=revision)
    world.watch(at, key=b"\0", range_end=b"\0", start_revision=revision + 2)
    world.catch_up()
    assert not behind_call.read()[-1].events, "it takes several steps"
    world.store.compact(revision + 2)
    world.store.commit()
    while world.store.compaction_step():
        world.store.commit()
    while world.catch_up():
        assert world.hub.lag_revisions >= 0
    assert behind_call.read()[-1].compact_revision == revision + 2
    at_call.read()
    world.catch_up()
    at_call.read()
    events = [event for parts in _events(at_call) for part in parts for event in part.events]
    assert len(events) == MANY + 1


def test_views_beyond_what_a_piece_may_hold_get_a_piece_of_their_own(world, monkeypatch):
    monkeypatch.setattr(piece_module, "REFERENCES_MAX", MANY)
    streams = [world.stream() for _ in range(7)]
    txn = world.store.begin()
    for number in range(MANY):
        txn.put(b"k%05d" % number, b"v")
    txn.end()
    for number, (stream, _) in enumerate(streams):
        world.watch(stream, key=b"k", range_end=b"l%d" % number, start_revision=1)
    while world.catch_up():
        pass
    for _, call in streams:
        call.read()
        ((response,),) = _events(call)
        assert len(response.events) == MANY


@pytest.mark.interpreted
def test_event_too_large_to_send_ends_the_stream(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_module, "PIECE_MAX_BYTES", 10_000)
    txn = world.store.begin()
    for number in range(100):
        txn.put(b"k%d" % number, b"v" * 200)
    txn.end()
    (large, large_call), (small, small_call) = world.stream(), world.stream()
    world.watch(small, key=b"k1", start_revision=1)
    world.watch(large, key=b"k", range_end=b"l", start_revision=1)
    while world.catch_up():
        pass
    assert [str(failure)[:45] for failure in world.failures] == ["raftkv: the events of one revision are too la"]
    assert [len(response.events) for response in small_call.read()] == [0, 1]
    assert [len(response.events) for response in large_call.read()] == [0]


def test_a_replaced_store_looks_at_no_single_watcher(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, call = world.stream()
    for number in range(500):
        world.watch(stream, key=b"%d" % number, range_end=b"" if number % 2 else b"%d0" % number)
    call.read()
    forgotten, forget = 0, WatcherIndex._forget

    def counted(index: WatcherIndex, key: bytes, range_end: bytes) -> None:
        nonlocal forgotten
        forgotten += 1
        forget(index, key, range_end)

    monkeypatch.setattr(WatcherIndex, "_forget", counted)
    world.hub.restored()
    assert (forgotten, world.hub.unsynced_count, stream.unsynced_count) == (0, 500, 500)
    while world.catch_up():
        pass
    assert world.hub.unsynced_count == 0
    world.put(b"499")
    assert [response.watch_id for response in call.read()] == [499]


@pytest.mark.interpreted
def test_how_far_watchers_are_behind_is_asked_of_some_of_very_many(world, monkeypatch):
    """A scrape asks for it, and clients that do not read may have 60,000 streams and a million watchers."""
    monkeypatch.setattr(hub_module, "BEHIND_MAX", 30)
    world.put(b"k")
    for _ in range(100):
        stream, call = world.stream()
        world.watch(stream, key=b"k")
        call.connection_send_buffer_size = CONNECTION_QUEUED_MAX_BYTES + 1
    world.put(b"k")
    while world.catch_up():
        pass
    assert world.hub.unsynced_count == 100
    asked: list[WatchStream] = []
    parked_revision = WatchStream.parked_revision

    def counted(stream: WatchStream) -> int:
        asked.append(stream)
        return parked_revision.__get__(stream)

    monkeypatch.setattr(WatchStream, "parked_revision", property(counted))
    assert world.hub.lag_revisions == 1
    assert len(asked) == 30


def test_a_watch_of_a_million_filters_is_refused_at_once(world: World) -> None:
    """To look for one among them took half a second; there are two kinds of filters."""
    stream, call = world.stream()
    kind = rpc_pb2.WatchCreateRequest.FilterType
    world.watch(stream, key=b"k", filters=[kind.NODELETE] * FILTERS_MAX)
    world.watch(stream, key=b"k", filters=[5] * (FILTERS_MAX + 1))
    taken, refused = call.read()
    assert (taken.created, taken.canceled) == (True, False)
    assert (refused.created, refused.canceled, refused.watch_id) == (True, True, -1)
    assert refused.cancel_reason == f"raftkv: a watch may have {FILTERS_MAX} filters"
    assert len(stream.watchers) == 1


@pytest.mark.parametrize("end", [b"z", b"\0"], ids=["bounded", "open"])
def test_a_change_that_very_many_intervals_contain_is_matched_with_some(world: World, end: bytes) -> None:
    intervals: Intervals[int] = Intervals()
    for number in range(1000):
        intervals.add(b"a%04d" % number, end if end == OPEN_END else b"%b%04d" % (end, number), number)
    assert len(intervals.containing(b"m")) == len(intervals.containing(b"m", 1000)) == 1000
    assert len(intervals.containing(b"m", 999)) == 1000
    assert intervals.containing(b"m", 10) == list(range(11))
    assert intervals.containing(b"a0003", 10) == list(range(4))


@pytest.mark.interpreted
@pytest.mark.parametrize("puts", [1, 50])
def test_a_txn_that_very_many_intervals_contain_is_served_in_steps(world, monkeypatch, puts):
    """Watchers of 240,000 intervals were found one by one for each put of a txn."""
    monkeypatch.setattr(hub_module, "DELIVERIES_PER_TURN", 200)
    monkeypatch.setattr(hub_module, "MATCHES_PER_TURN", 100)
    count = 300 if puts == 1 else 20
    stream, call = world.stream()
    for number in range(count):
        world.watch(stream, key=b"a%04d" % number, range_end=b"z%04d" % number)
    call.read()
    looked_for = 0
    containing = Intervals.containing

    def counted(intervals: Intervals[Any], key: bytes, most: int) -> list[Any]:
        nonlocal looked_for
        found = containing(intervals, key, most)
        looked_for += len(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Intervals, "containing", counted)
        txn = world.store.begin()
        for number in range(puts):
            txn.put(b"m%d" % number, b"v")
        txn.end()
        world.applied()
    assert looked_for <= 201
    while world.catch_up():
        pass
    assert [len(parts[0].events) for parts in _events(call)] == []
    call.read()
    assert [len(parts[0].events) for parts in _events(call) if parts] == [puts] * count


@pytest.mark.interpreted
def test_a_turn_delivers_to_some_of_very_many_groups(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """19,000 intervals with a watcher each, and one put: 0.25 s, most of it for those that had no room."""
    monkeypatch.setattr(hub_module, "GROUPS_PER_TURN", 100)
    delivered = 0
    fan_out = WatchStream.fan_out

    def counted(stream: WatchStream, *arguments: Any) -> bool:
        nonlocal delivered
        delivered += 1
        return fan_out(stream, *arguments)

    monkeypatch.setattr(WatchStream, "fan_out", counted)
    stream, call = world.stream()
    for number in range(60):
        world.watch(stream, key=b"a%02d" % number, range_end=b"z%02d" % number)
        world.watch(stream, key=b"k%02d" % number)
    for keys in (40, 60):
        txn = world.store.begin()
        for number in range(keys):
            txn.put(b"k%02d" % number, b"v")
        txn.end()
        call.read()
        world.applied()
        assert delivered <= 100
        delivered = 0
        while world.catch_up():
            pass
    assert sum(len(response.events) for response in call.read()) == 60 * 60 + 60


def test_bounds_of_megabytes_are_compared_a_few_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison takes 0.1 ms, and a put of such a key made thousands: 200 intervals held it for 0.26 s."""
    long = b"x" * 600_000
    stream, call = world.stream()
    for number in range(60):
        world.watch(stream, key=b"a" + long + b"%02d" % number, range_end=b"b" + long + b"%02d" % number)
    world.watch(stream, key=b"short", range_end=b"shorts")
    call.read()
    assert world.hub._index.weight(b"short") == 1
    assert world.hub._index.weight(b"y" * 600_000) > 100
    world.put(b"b" + long + b"30")
    assert (world.hub.unsynced_count, len(call.read())) == (61, 0), "for this turn it is too much"
    taken = []
    take = CatchUp._take

    def counted(catch_up: CatchUp) -> list[Any]:
        batch = take(catch_up)
        taken.append(sum(watcher.size_bytes for watcher in batch))
        return batch

    monkeypatch.setattr(CatchUp, "_take", counted)
    while world.hub.unsynced_count:
        world.catch_up()
        call.read()
    assert max(taken) <= WATCHER_BYTES_PER_STEP + 2 * 601_100
    assert sum(len(response.events) for response in call.responses) == 29
    world.put(b"short")
    assert len(call.read()[-1].events) == 1
    stream.close()
    while world.catch_up():
        pass
    assert world.hub._index.ranges.longest_bytes == 0


@pytest.mark.parametrize("flood", [1000, 4000])
def test_watchers_of_another_user_do_not_wait_for_thousands_that_are_behind(world: World, flood: int) -> None:
    for number in range(2 * REVISIONS_PER_STEP):
        world.put(b"k", b"%d" % number)
    mallory, _ = world.stream(identity=b"mallory")
    for _ in range(flood):
        world.watch(mallory, key=b"other", start_revision=1)
    world.catch_up()
    alice, call = world.stream(identity=b"alice")
    world.watch(alice, key=b"k", start_revision=world.store.revision)
    steps = 0
    while not any(response.events for response in call.read()):
        assert world.catch_up()
        steps += 1
    assert steps <= 3


def test_lagging_watchers_are_not_starved_by_restarting_ones(world: World) -> None:
    """Mallory's few watches near the head cost no events; alice's many are far behind, and paid in each step."""
    for number in range(6 * REVISIONS_PER_STEP):
        world.put(b"k", b"%d" % number)

    def start_anew() -> None:
        stream, _ = world.stream(identity=b"mallory")
        for _ in range(3):
            world.watch(stream, key=b"quiet", start_revision=world.store.revision - REVISIONS_PER_STEP)

    start_anew()
    alice, call = world.stream(identity=b"alice")
    for _ in range(600):
        world.watch(alice, key=b"k", start_revision=1)
    steps = 0
    while not any(response.events for response in call.read()):
        world.catch_up()
        start_anew()
        steps += 1
        assert steps < 20
