"""The hub against the history: each watcher gets exactly its events, slow, compacted or replaced."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from raftkv.apply.wire import HeaderEncoder
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.replica.watch import catch_up, hub, piece, stream
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import WatchStream
from raftkv.rpc.shares import Identity
from raftkv.storage.mvcc import Store
from tests.replica.watch.fakes import FakeCall
from tests.storage.memory import MemoryBackend

KEYS = st.sampled_from([b"a", b"b", b"ba", b"c"])
RANGES = st.sampled_from(
    [(b"a", b""), (b"b", b""), (b"b", b"c"), (b"a", b"\0"), (b"", b"\0"), (b"z", b""), (b"a", b"b\0")]
)
LARGE_BYTES = 30


def _value(revision: int) -> bytes:
    """The value of every put of a revision: every third one is large."""
    return b"v" * (40 if revision % 3 == 0 else 20)


@dataclass
class Expected:
    """One event as it must arrive."""

    revision: int
    key: bytes
    is_delete: bool
    create_revision: int
    version: int
    lease: int
    previous: tuple[int, int] | None
    """(mod_revision, version) of the value before."""


@dataclass
class Asked:
    """One watcher, as its client knows it."""

    client: Client
    request: rpc_pb2.WatchCreateRequest
    first: int
    """The first revision that it may get events of."""
    created: bool = False
    cancelled_at: int | None = None
    compacted: bool = False
    is_answered: bool = False
    events: list[tuple[int, bytes, bool]] = field(default_factory=list)


class Client:
    """A stream and its watchers by id."""

    def __init__(self, hub: WatchHub) -> None:
        self.call = FakeCall()
        self.failed: list[Exception] = []
        self.stream = WatchStream(hub, self.call, 400, self.failed.append, identity="address 10.0.0.1")
        self.watchers: dict[int, Asked] = {}
        self.progress: list[int] = []


class HubMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store.open(MemoryBackend())
        header = HeaderEncoder(1, 2)
        self.cork = Cork(lambda flush: None)
        self.hub = WatchHub(self.store, lambda revision: header.encode(revision, 1), lambda: None, self.cork)
        self.store.on_changes = self.hub.changed
        self.counted: Counter[Identity] = Counter()
        self.hub.on_count = lambda queue, more: self.counted.update({queue: more})
        self.state: dict[bytes, tuple[int, int, int, int]] = {}
        self.history: list[Expected] = []
        self.clients: list[Client] = []
        self.ended: list[Asked] = []
        self.applied = 0

    # -- the store

    @rule(operations=st.lists(st.tuples(KEYS, st.booleans()), min_size=1, max_size=4, unique_by=lambda one: one[0]))
    def write(self, operations: list[tuple[bytes, bool]]) -> None:
        self._write(operations)
        self.hub.applied()
        self.cork.flush()

    @rule(turns=st.lists(st.tuples(KEYS, st.booleans()), min_size=2, max_size=30))
    def write_many_in_one_turn(self, turns: list[tuple[bytes, bool]]) -> None:
        for operation in turns:
            self._write([operation])
        self.hub.applied()
        self.cork.flush()

    def _write(self, operations: list[tuple[bytes, bool]]) -> None:
        txn = self.store.begin()
        for key, is_delete in operations:
            before = self.state.get(key)
            previous = None if before is None else (before[1], before[2])
            if is_delete:
                txn.delete_range(key)
                if before is None:
                    continue
                del self.state[key]
                self.history.append(Expected(txn.main, key, True, 0, 0, 0, previous))
            else:
                txn.put(key, _value(txn.main))
                created, version = (txn.main, 1) if before is None else (before[0], before[2] + 1)
                self.state[key] = (created, txn.main, version, 0)
                self.history.append(Expected(txn.main, key, False, created, version, 0, previous))
        txn.end()
        self.applied += 1
        self.store.set_applied(self.applied, 1)

    @precondition(lambda self: self.store.revision > max(1, self.store.compact_revision))
    @rule(back=st.integers(0, 5))
    def compact(self, back: int) -> None:
        revision = self.store.revision - back
        if revision > max(0, self.store.compact_revision):
            self.store.compact(revision)
            self.store.set_applied(self.store.applied_index, 1)
            self.store.commit()
            while self.store.compaction_step():
                self.store.commit()

    @rule(operations=st.lists(st.tuples(KEYS, st.booleans()), max_size=5))
    def restore(self, operations: list[tuple[bytes, bool]]) -> None:
        """A snapshot brings revisions that this member never applied."""
        on_changes, self.store.on_changes = self.store.on_changes, None
        for operation in operations:
            self._write([operation])
        self.store.on_changes = on_changes
        self.hub.restored()

    # -- the clients

    @precondition(lambda self: len(self.clients) < 4)
    @rule()
    def connect(self) -> None:
        self.clients.append(Client(self.hub))

    @precondition(lambda self: self.clients)
    @rule(
        client=st.integers(0, 3),
        interval=RANGES,
        start=st.sampled_from([None, -12, -6, -3, -1, 0, 1, 2, 4]),
        filters=st.sampled_from([(), (), (0,), (1,), (0, 1)]),
        prev_kv=st.booleans(),
        fragment=st.booleans(),
        progress=st.booleans(),
        keys_only=st.booleans(),
        value_bytes_max=st.sampled_from([0, 0, LARGE_BYTES]),
    )
    def watch(self, client: int, interval: tuple[bytes, bytes], start: int | None, filters: tuple[int, ...],
              prev_kv: bool, fragment: bool, progress: bool, keys_only: bool,
              value_bytes_max: int) -> None:  # fmt: skip
        one = self.clients[client % len(self.clients)]
        start_revision = 0 if start is None else max(1, self.store.revision + start)
        request = rpc_pb2.WatchCreateRequest(
            key=interval[0], range_end=interval[1], start_revision=start_revision, prev_kv=prev_kv, fragment=fragment,
            progress_notify=progress, watch_id=len(one.watchers) + 1, keys_only=keys_only,
            max_value_bytes=value_bytes_max,
        )  # fmt: skip
        request.filters.extend(filters)
        one.watchers[request.watch_id] = Asked(one, request, start_revision or self.store.revision + 1)
        one.stream.receive(rpc_pb2.WatchRequest(create_request=request).SerializeToString())
        self.cork.flush()

    @precondition(lambda self: any(client.watchers for client in self.clients))
    @rule(client=st.integers(0, 3), which=st.integers(0, 20))
    def cancel(self, client: int, which: int) -> None:
        one = self.clients[client % len(self.clients)]
        if not one.watchers:
            return
        watch_id = 1 + which % len(one.watchers)
        one.stream.receive(
            rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=watch_id)).SerializeToString()
        )
        self.cork.flush()

    @precondition(lambda self: self.clients)
    @rule(client=st.integers(0, 3))
    def ask_progress(self, client: int) -> None:
        one = self.clients[client % len(self.clients)]
        request = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
        one.stream.receive(request.SerializeToString())
        for _ in one.stream.notify_progress():
            self.cork.flush()
        self.cork.flush()

    @precondition(lambda self: self.clients)
    @rule(client=st.integers(0, 3))
    def read(self, client: int) -> None:
        self._check_client(self.clients[client % len(self.clients)])

    @rule()
    def catch_up(self) -> None:
        self.hub.catch_up()
        self.cork.flush()

    @precondition(lambda self: self.clients)
    @rule(client=st.integers(0, 3))
    def disconnect(self, client: int) -> None:
        one = self.clients.pop(client % len(self.clients))
        one.stream.close()

    @invariant()
    def the_counts_are_those_of_the_watchers(self) -> None:
        for one in self.clients:
            assert one.stream.unsynced_count == sum(
                not self.hub.is_live(watcher) for watcher in one.stream.watchers.values()
            )
        assert self.hub.unsynced_count == sum(one.stream.unsynced_count for one in self.clients)
        assert self.hub.watcher_count == sum(len(one.stream.watchers) for one in self.clients)
        assert self.hub.watcher_count == self.counted.total()
        assert {queue: count for queue, count in self.counted.items() if count} == self.hub.counts.held

    # -- the check

    def _check_client(self, client: Client) -> None:
        for response in client.call.read():
            if response.watch_id == -1:
                self._check_progress(client, list(client.watchers.values()), response.header.revision)
                continue
            asked = client.watchers[response.watch_id]
            if response.created:
                asked.created = True
                continue
            if asked.compacted and response.canceled and not asked.is_answered:
                asked.is_answered = True  # the client's own cancellation, which came too late
                continue
            assert asked.cancelled_at is None, "nothing may follow a cancellation"
            if response.canceled:
                asked.cancelled_at = response.header.revision
                asked.compacted = response.compact_revision != 0
            elif not response.events:
                assert asked.request.progress_notify
                self._check_progress(client, [asked], response.header.revision)
            else:
                self._take(asked, response)

    def _take(self, asked: Asked, response: rpc_pb2.WatchResponse) -> None:
        assert response.events
        for event in response.events:
            asked.events.append((event.kv.mod_revision, event.kv.key, event.type == event.DELETE))
        expected = self._expected(asked)[: len(asked.events)]
        wanted = [(one.revision, one.key, one.is_delete) for one in expected]
        assert asked.events == wanted, "W1, W2, W3, W7, W8"
        self._check_fields(asked, response, expected[-len(response.events) :])
        if not response.fragment:
            last = response.events[-1].kv.mod_revision
            following = self._expected(asked)[len(asked.events) :]
            assert not following or following[0].revision > last, "W4: a revision was split"
        assert not response.fragment or asked.request.fragment
        assert response.header.revision >= response.events[-1].kv.mod_revision

    def _check_fields(self, asked: Asked, response: rpc_pb2.WatchResponse, expected: list[Expected]) -> None:
        for event, one in zip(response.events, expected, strict=True):
            kv = event.kv
            assert (kv.create_revision, kv.version, kv.lease) == (one.create_revision, one.version, one.lease)
            without = one.is_delete or asked.request.keys_only
            assert kv.value == (b"" if without else _value(one.revision))
            if not asked.request.prev_kv or one.previous is None:
                assert not event.HasField("prev_kv")
            elif event.HasField("prev_kv"):
                assert (event.prev_kv.mod_revision, event.prev_kv.version) == one.previous
                value = b"" if asked.request.keys_only else _value(one.previous[0])
                assert (event.prev_kv.key, event.prev_kv.value) == (one.key, value)
            else:
                assert one.revision - 1 < self.store.compact_revision, "a previous value is missing"

    def _check_progress(self, client: Client, watchers: list[Asked], revision: int) -> None:
        for asked in watchers:
            if asked.created and asked.cancelled_at is None:
                due = [one for one in self._expected(asked) if one.revision <= revision]
                assert len(asked.events) == len(due), "W6: progress beyond what was sent, or short of it"
                assert asked.first <= revision + 1

    def _expected(self, asked: Asked) -> list[Expected]:
        request = asked.request
        key, end = request.key or b"\0", request.range_end

        def matches(one: Expected) -> bool:
            inside = one.key == key if not end else key <= one.key and (end == b"\0" or one.key < end)
            is_wanted = one.is_delete or not 0 < request.max_value_bytes < len(_value(one.revision))
            unfiltered = (1 if one.is_delete else 0) not in request.filters
            return inside and one.revision >= asked.first and unfiltered and is_wanted

        return [one for one in self.history if matches(one)]

    def teardown(self) -> None:
        for _ in range(20_000):
            more = self.hub.catch_up()
            self.cork.flush()
            for client in self.clients:
                self._check_client(client)
            if not more and not self.hub.unsynced_count:
                break
        for client in self.clients:
            assert not client.failed
            for asked in client.watchers.values():
                if asked.cancelled_at is None:
                    assert len(asked.events) == len(self._expected(asked)), "W3: an event never came"
                elif asked.compacted:
                    left = self._expected(asked)[len(asked.events) :]
                    reached = left[0].revision if left else asked.first
                    assert min(reached, asked.first) < self.store.compact_revision
        assert self.hub.unsynced_count == 0
        assert self.hub.lag_revisions == 0
        self.store.close()


@pytest.fixture(params=["roomy", "tight", "many", "steps"])
def _limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tight limits all watchers fall behind all the time; with many watchers they do so together, and in steps;
    with few units of work a step, each change is a step of its own."""
    if request.param == "many":
        monkeypatch.setattr(hub, "DELIVERIES_PER_TURN", 3)
        monkeypatch.setattr(hub, "DELIVERIES_MIN", 1)
        monkeypatch.setattr(hub, "MOVES_PER_STEP", 1)
        monkeypatch.setattr(stream, "NOTIFICATIONS_PER_STEP", 1)
    if request.param == "steps":
        monkeypatch.setattr(hub, "MATCHES_PER_TURN", 3)
        monkeypatch.setattr(hub, "BYTES_PER_TURN", 150)
        monkeypatch.setattr(hub, "MOVES_PER_STEP", 2)
        monkeypatch.setattr(catch_up, "BYTES_PER_STEP", 100)
        monkeypatch.setattr(piece, "UNITS_PER_STEP", 1)
        monkeypatch.setattr(piece, "REFERENCES_MAX", 3)
        monkeypatch.setattr(piece, "FREED_PER_STEP", 1)
    if request.param == "tight":
        monkeypatch.setattr(stream, "QUEUED_MAX_BYTES", 200)
        monkeypatch.setattr(stream, "QUEUED_LOW_BYTES", 100)
        monkeypatch.setattr(stream, "BURST_MAX_BYTES", 400)
        monkeypatch.setattr(catch_up, "REVISIONS_PER_STEP", 3)
        monkeypatch.setattr(piece, "BYTES_PER_PIECE", 150)
        monkeypatch.setattr(catch_up, "WATCHERS_PER_STEP", 2)


@pytest.mark.usefixtures("_limits")
def test_every_watcher_gets_exactly_its_events() -> None:
    run_state_machine_as_test(HubMachine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))
