"""What the model of clients does not show: failures, doors for recipes, bursts, the cost of idle watchers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.apply.response import HeaderEncoder
from raftkv.errors import StoppedError
from raftkv.pb import rpc_pb2
from raftkv.server.watch import stream as stream_module
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.stream import WatchStream
from raftkv.storage.backend.memory import MemoryBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.record import CorruptRecordError
from tests.server.watch.fakes import FakeCall


class World:
    """A store, its hub, and streams on fake calls."""

    def __init__(self) -> None:
        self.store = Store.open(MemoryBackend())
        header = HeaderEncoder(1, 2)
        self.woken = 0
        self.hub = WatchHub(self.store, lambda revision: header.encode(revision, 3), self._wake)
        self.failures: list[Exception] = []

    def _wake(self) -> None:
        self.woken += 1

    def put(self, key: bytes, value: bytes = b"v", *, deliver: bool = True) -> None:
        txn = self.store.begin()
        txn.put(key, value)
        txn.end()
        if deliver:
            self.hub.applied()

    def stream(self) -> tuple[WatchStream, FakeCall]:
        call = FakeCall()
        return WatchStream(self.hub, call, 1000, self.failures.append), call

    def watch(self, stream: WatchStream, **fields: object) -> None:
        request = rpc_pb2.WatchCreateRequest(**fields)  # type: ignore[arg-type]
        stream.receive(rpc_pb2.WatchRequest(create_request=request).SerializeToString())
        self.hub.flush()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


def test_a_failed_delivery_ends_every_stream_so_that_nothing_is_missed_unknowingly(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        world.watch(world.stream()[0], key=b"k")

    def broken(*arguments: object) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(WatchStream, "fan_out", broken)
    world.put(b"k")
    assert [type(failure) for failure in world.failures] == [StoppedError, StoppedError]
    assert "events could not be delivered" in caplog.text


def test_damage_found_while_delivering_stops_the_member(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.watch(world.stream()[0], key=b"k", prev_kv=True)
    world.put(b"k")

    def damaged(revision: int) -> bytes:
        raise CorruptRecordError("revision 2.0 is damaged")

    monkeypatch.setattr(world.store, "record", damaged)
    world.put(b"k", deliver=False)
    with pytest.raises(CorruptRecordError):
        world.hub.applied()


def test_recipes_are_called_once_a_turn_and_only_for_their_key(world: World) -> None:
    calls: list[str] = []
    cancel = world.hub.on_change(b"k", lambda: calls.append("k"))
    world.hub.on_change(b"other", lambda: calls.append("other"))
    for _ in range(3):
        world.put(b"k", deliver=False)
    world.hub.applied()
    assert calls == ["k"]
    world.put(b"elsewhere")
    assert calls == ["k"]
    cancel()
    cancel()
    world.put(b"k")
    assert calls == ["k"]


def test_recipes_are_called_when_a_snapshot_replaced_the_state(world: World) -> None:
    calls: list[str] = []
    world.hub.on_change(b"k", lambda: calls.append("k"))
    world.hub.restored()
    assert calls == ["k"]


def test_a_burst_too_large_for_one_write_is_served_watcher_by_watcher(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "BURST_MAX_BYTES", 2_000)
    monkeypatch.setattr(stream_module, "QUEUED_MAX_BYTES", 1_500)
    stream, call = world.stream()
    for _ in range(50):
        world.watch(stream, key=b"k")
    call.read()
    world.put(b"k", b"x" * 500)
    assert world.hub.unsynced_count == 50
    while world.hub.unsynced_count:
        world.hub.catch_up()
        assert call.send_buffer_size < 1_500 + 600
        call.read()
    events = [response.watch_id for response in call.responses if response.events]
    assert sorted(events) == list(range(50))


@pytest.mark.parametrize(
    ("attribute", "full", "free_again"),
    [
        ("connection_send_buffer_size", stream_module.CONNECTION_QUEUED_MAX_BYTES + 1, 0),
        pytest.param("crowded", True, False, id="the whole member is short of memory"),
    ],
)
def test_a_full_connection_holds_back_its_streams_and_no_others(
    world: World, attribute: str, full: int, free_again: int
) -> None:
    (crowded, crowded_call), (free, free_call) = world.stream(), world.stream()
    world.watch(crowded, key=b"k")
    world.watch(free, key=b"k")
    setattr(crowded_call, attribute, full)
    world.put(b"k")
    assert [len(response.events) for response in free_call.read()] == [0, 1]
    assert world.hub.catch_up() is False
    setattr(crowded_call, attribute, free_again)
    woken = world.woken
    crowded_call.read()
    assert world.woken > woken
    world.hub.catch_up()
    assert [len(response.events) for response in crowded_call.read()] == [1]


def test_changes_are_not_gathered_while_nobody_watches(world: World) -> None:
    for _ in range(3):
        world.put(b"k", deliver=False)
    assert world.hub._pending == []
    world.hub.applied()
    stream, call = world.stream()
    world.watch(stream, key=b"k")
    assert not any(response.events for response in call.read())


def test_a_closed_stream_leaves_nothing_behind(world: World) -> None:
    stream, _ = world.stream()
    world.watch(stream, key=b"k")
    world.watch(stream, key=b"a", range_end=b"z", prev_kv=True)
    world.watch(stream, key=b"a", range_end=b"\0", start_revision=1)
    assert world.hub.watcher_count == 3
    stream.close()
    assert (world.hub.watcher_count, len(world.hub.streams)) == (0, 0)
    assert not world.hub._index
    assert not world.hub._index.by_key
    assert not len(world.hub._index.ranges)
    world.put(b"k")
    assert world.hub.catch_up() is False
