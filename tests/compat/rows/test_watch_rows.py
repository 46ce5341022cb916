"""The rules of Watch, one by one (reference section 1.2), on etcd 3.5.1 and on raftkv: whole messages, exact texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.store import Store, compact, delete, put, txn
from tests.compat.streams import Stream, Streams
from tests.compat.wire import Wire

WATCH = "etcdserverpb.Watch/Watch"
RANGE = "etcdserverpb.KV/Range"
EMPTY_RANGE = "mvcc: watcher range is empty"
COMPACTED = "etcdserver: mvcc: required revision has been compacted"
DUPLICATE_ID = "mvcc: duplicate watch ID provided on the WatchStream"
FRAGMENT_BYTES = 400_000


class Watcher:
    """A watch stream on one member, read message by message."""

    def __init__(self, store: Store, streams: Streams, member: int = 0) -> None:
        self.stream: Stream = streams.open(WATCH, member)
        self._store = store
        self._streams = streams
        self._member = member
        self._read = 0

    def ask(self, **fields: Any) -> None:
        """Send a WatchRequest, to a member that has applied all that was answered."""
        self._store.wire.call(RANGE, rpc_pb2.RangeRequest(key=b"\0"), self._member)
        self.stream.send(rpc_pb2.WatchRequest(**fields))

    def create(self, key: bytes, range_end: bytes = b"", **fields: Any) -> rpc_pb2.WatchResponse:
        """Create a watcher; the answer."""
        self.ask(create_request=rpc_pb2.WatchCreateRequest(key=key, range_end=range_end, **fields))
        return self.next()

    def cancel(self, watch_id: int) -> None:
        """Cancel a watcher."""
        self.ask(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=watch_id))

    def progress(self) -> None:
        """Ask for progress."""
        self.ask(progress_request=rpc_pb2.WatchProgressRequest())

    def next(self) -> rpc_pb2.WatchResponse:
        """The next message; of its header only the revision, counted from the emptied store."""
        self._streams.wait(lambda: len(self.stream.messages) > self._read, "a message of the watch")
        message: rpc_pb2.WatchResponse = self.stream.messages[self._read]
        self._read += 1
        revision = message.header.revision
        message.header.CopyFrom(rpc_pb2.ResponseHeader(revision=revision and revision - self._store.base))
        return message

    def events(self, count: int) -> list[tuple[str, bytes, int]]:
        """The next events: type, key, revision."""
        found: list[tuple[str, bytes, int]] = []
        while len(found) < count:
            found += [self._short(event) for event in self.next().events]
        return found

    def _short(self, event: kv_pb2.Event) -> tuple[str, bytes, int]:
        revision = event.kv.mod_revision - self._store.base
        return kv_pb2.Event.EventType.Name(event.type), event.kv.key, revision


@pytest.fixture
def streams(wire: Wire) -> Iterator[Streams]:
    with Streams(wire) as streams:
        yield streams


@pytest.fixture
def watcher(store: Store, streams: Streams) -> Watcher:
    return Watcher(store, streams, len(store.wire.endpoints) - 1)


def _header(revision: int) -> rpc_pb2.ResponseHeader:
    return rpc_pb2.ResponseHeader(revision=revision)


# --- creating -----------------------------------------------------------------------------------------------


def test_the_answer_says_id_and_revision(watcher: Watcher, store: Store) -> None:
    store.fill(b"a")
    assert watcher.create(b"a") == rpc_pb2.WatchResponse(header=_header(1), watch_id=0, created=True)
    assert watcher.create(b"a") == rpc_pb2.WatchResponse(header=_header(1), watch_id=1, created=True)


@pytest.mark.parametrize("range_end", [b"b", b"a", b"\x01"])
def test_an_empty_range_is_refused(watcher: Watcher, range_end: bytes) -> None:
    refused = rpc_pb2.WatchResponse(
        header=_header(0), watch_id=-1, created=True, canceled=True, cancel_reason=EMPTY_RANGE
    )
    assert watcher.create(b"b", range_end) == refused
    assert watcher.create(b"b", b"c").watch_id == 0


def test_ids_are_honoured_and_never_given_twice(watcher: Watcher) -> None:
    assert watcher.create(b"a", watch_id=1).watch_id == 1
    refused = watcher.create(b"b", watch_id=1)
    assert (refused.watch_id, refused.created, refused.canceled) == (-1, True, True)
    assert refused.cancel_reason == DUPLICATE_ID
    assert [watcher.create(b"a").watch_id for _ in range(3)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("key", "range_end", "expected"),
    [
        (b"", b"", []),
        (b"", b"\0", [b"a", b"b", b"b\0", b"c"]),
        (b"b", b"", [b"b"]),
        (b"b", b"c", [b"b", b"b\0"]),
        (b"b", b"\0", [b"b", b"b\0", b"c"]),
    ],
)
def test_intervals(watcher: Watcher, store: Store, key: bytes, range_end: bytes, expected: list[bytes]) -> None:
    watcher.create(key, range_end)
    watcher.create(b"~")
    store.fill(b"a", b"b", b"b\0", b"c", b"~")
    every = watcher.events(len(expected) + (2 if range_end == b"\0" else 1))
    assert [found for _, found, _ in every if found != b"~"] == expected


# --- revisions ----------------------------------------------------------------------------------------------


def test_history_is_replayed(watcher: Watcher, store: Store) -> None:
    store.fill(b"a", b"b", b"a")
    store.ask(delete(b"a"))
    watcher.create(b"a", start_revision=store.at(1))
    assert watcher.events(3) == [("PUT", b"a", 1), ("PUT", b"a", 3), ("DELETE", b"a", 4)]
    store.ask(put(b"a"))
    live = watcher.next()
    assert (live.header.revision, live.events[0].kv.mod_revision) == (5, store.at(5))


def test_a_future_start_skips_what_comes_before(watcher: Watcher, store: Store) -> None:
    assert watcher.create(b"a", start_revision=store.at(3)).created
    store.fill(b"a", b"a", b"a", b"a")
    assert watcher.events(2) == [("PUT", b"a", 3), ("PUT", b"a", 4)]


def test_a_compacted_start_is_told_after_the_creation(watcher: Watcher, store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    store.ask(compact(store.at(2)))
    assert watcher.create(b"a", start_revision=store.at(1)).created
    assert watcher.next() == rpc_pb2.WatchResponse(
        header=_header(0), watch_id=0, canceled=True, compact_revision=store.at(2)
    )
    watcher.create(b"a", start_revision=store.at(2))
    assert watcher.events(2) == [("PUT", b"a", 2), ("PUT", b"a", 3)]


def test_the_cancel_of_a_watch_that_a_compaction_ended_is_answered_once(watcher: Watcher, store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    store.ask(compact(store.at(2)))
    assert watcher.create(b"a", start_revision=store.at(1)).created
    assert watcher.next().compact_revision
    watcher.cancel(0)
    assert watcher.next() == rpc_pb2.WatchResponse(header=_header(3), watch_id=0, canceled=True)
    watcher.cancel(0)
    assert watcher.create(b"a").created


def test_a_negative_start_is_refused(raftkv_store: Store) -> None:
    """Refuse as etcd from 3.6.6 on; 3.5.1 ends such a watch as compacted, or tells it a history that never was."""
    with Streams(raftkv_store.wire) as streams:
        watcher = Watcher(raftkv_store, streams)
        refused = rpc_pb2.WatchResponse(
            header=_header(0), watch_id=-1, created=True, canceled=True, cancel_reason=COMPACTED
        )
        assert watcher.create(b"a", start_revision=-1) == refused
        assert watcher.create(b"b", b"a", start_revision=-(2**63)) == refused
        assert watcher.create(b"a").watch_id == 0


# --- events -------------------------------------------------------------------------------------------------


def test_a_txn_comes_whole_in_the_order_of_its_operations(watcher: Watcher, store: Store) -> None:
    store.fill(b"b")
    watcher.create(b"\0", b"\0")
    store.ask(txn(then=[put(b"c"), delete(b"b"), put(b"a")]))
    message = watcher.next()
    assert message.header.revision == 2
    assert [(event.type, event.kv.key) for event in message.events] == [(0, b"c"), (1, b"b"), (0, b"a")]


def test_a_deletion_carries_key_and_revision_alone(watcher: Watcher, store: Store) -> None:
    store.fill(b"a")
    watcher.create(b"a")
    store.ask(delete(b"a"))
    assert watcher.next().events[0] == kv_pb2.Event(
        type=kv_pb2.Event.DELETE, kv=kv_pb2.KeyValue(key=b"a", mod_revision=store.at(2))
    )


def test_previous_values(watcher: Watcher, store: Store) -> None:
    watcher.create(b"a", prev_kv=True)
    store.ask(put(b"a", b"1"))
    store.ask(put(b"a", b"2"))
    store.ask(delete(b"a"))
    first, second, third = (watcher.next().events[0] for _ in range(3))
    assert not first.HasField("prev_kv")
    assert second.prev_kv == store.kv(b"a", b"1", create=1)
    assert third.prev_kv == store.kv(b"a", b"2", create=1, mod=2, version=2)


@pytest.mark.parametrize("is_late", [False, True], ids=["live", "late"])
@pytest.mark.parametrize("puts_first", [False, True], ids=["delete-put", "put-delete"])
def test_previous_values_of_a_txn_that_puts_and_deletes_a_key(watcher, store, puts_first, is_late):
    """Only an interval without an end can do that. What was before is that before the txn; what is created had none."""
    store.ask(put(b"a", b"old"))
    if not is_late:
        watcher.create(b"a", prev_kv=True)
    changes = [put(b"a", b"new"), delete(b"a", b"\0")]
    store.ask(txn(then=changes if puts_first else changes[::-1]))
    if is_late:
        watcher.create(b"a", prev_kv=True, start_revision=store.at(2))
    first, second = watcher.next().events
    old = store.kv(b"a", b"old", create=1)
    assert (first.type, first.prev_kv) == (kv_pb2.Event.PUT if puts_first else kv_pb2.Event.DELETE, old)
    if puts_first:
        assert second.prev_kv == old
    else:
        assert not second.HasField("prev_kv")


def test_compacted_previous_values_are_left_out(watcher: Watcher, store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(compact(store.at(2)))
    watcher.create(b"a", start_revision=store.at(2), prev_kv=True)
    assert not watcher.next().events[0].HasField("prev_kv")


@pytest.mark.parametrize(
    ("filters", "expected"), [([0], ["DELETE"]), ([1], ["PUT", "PUT"]), ([0, 1], []), ([7], ["PUT", "DELETE", "PUT"])]
)
def test_filters(watcher: Watcher, store: Store, filters: list[int], expected: list[str]) -> None:
    watcher.create(b"a", filters=filters)
    watcher.create(b"~")
    store.ask(put(b"a"))
    store.ask(delete(b"a"))
    store.fill(b"a", b"~")
    assert [kind for kind, key, _ in watcher.events(len(expected) + 1) if key == b"a"] == expected


def test_values_and_puts_of_large_values_are_left_out_where_the_server_knows_how(watcher, store):
    """Fields that etcd does not know, and ignores: it sends every event with its values."""
    store.ask(put(b"a", b"old"))
    watcher.create(b"a", keys_only=True, prev_kv=True)
    watcher.create(b"a", max_value_bytes=3)
    watcher.create(b"~")
    watcher.create(b"a", start_revision=store.at(1), keys_only=True, max_value_bytes=3)
    store.ask(put(b"a", b"large"))
    store.ask(put(b"a", b"new"))
    store.ask(put(b"~"))
    found: dict[int, list[tuple[bytes, bytes]]] = {watch_id: [] for watch_id in range(4)}
    while sum(map(len, found.values())) < (8 if store.program == "etcd" else 6) or not found[2]:
        message = watcher.next()
        found[message.watch_id] += [(event.kv.value, event.prev_kv.value) for event in message.events]
    if store.program == "etcd":
        assert found[0] == [(b"large", b"old"), (b"new", b"large")]
        assert [len(found[watch_id]) for watch_id in (1, 3)] == [2, 3]
    else:
        assert found == {0: [(b"", b""), (b"", b"")], 1: [(b"new", b"")], 2: [(b"", b"")], 3: [(b"", b""), (b"", b"")]}


@pytest.mark.parametrize("fragment", [True, False])
def test_large_responses_are_split_on_request(watcher: Watcher, store: Store, fragment: bool) -> None:
    keys = (b"a", b"b", b"c")
    for letter in (b"1", b"2"):
        store.ask(txn(then=[put(key, letter * FRAGMENT_BYTES) for key in keys]))
    watcher.create(b"a", b"z", start_revision=store.at(2), prev_kv=True, fragment=fragment)
    parts = [watcher.next()]
    while parts[-1].fragment:
        parts.append(watcher.next())
    assert [event.kv.key for part in parts for event in part.events] == list(keys)
    assert {event.kv.mod_revision for part in parts for event in part.events} == {store.at(2)}
    assert (len(parts) > 1) == fragment


# --- the end, and progress ----------------------------------------------------------------------------------


def test_cancelling(watcher: Watcher, store: Store) -> None:
    """A watcher that does not exist is no fault, and no answer either."""
    watcher.create(b"a", watch_id=3)
    for watch_id in (99, 3, 3):
        watcher.cancel(watch_id)
    assert watcher.next() == rpc_pb2.WatchResponse(header=_header(0), watch_id=3, canceled=True)
    store.fill(b"a")
    assert watcher.create(b"a", watch_id=3) == rpc_pb2.WatchResponse(header=_header(1), watch_id=3, created=True)


def test_progress_says_the_revision(watcher: Watcher, store: Store) -> None:
    watcher.create(b"a")
    store.fill(b"b", b"b")
    watcher.progress()
    assert watcher.next() == rpc_pb2.WatchResponse(header=_header(2), watch_id=-1)


def test_progress_of_a_stream_without_watches_is_told(watcher: Watcher, store: Store) -> None:
    """Known difference: 3.5.30 says nothing, as 3.6."""
    store.fill(b"a")
    watcher.progress()
    if store.is_newer:
        assert watcher.create(b"a").created, "this is what comes next"
        return
    assert watcher.next() == rpc_pb2.WatchResponse(header=_header(1), watch_id=-1)


def test_no_progress_is_told_before_its_time(raftkv_store: Store) -> None:
    """While a watcher waits for the future: as etcd 3.6; 3.5.1 answers always."""
    with Streams(raftkv_store.wire) as streams:
        watcher = Watcher(raftkv_store, streams)
        assert watcher.create(b"a", start_revision=raftkv_store.at(2)).created
        watcher.progress()
        raftkv_store.fill(b"b", b"a")
        assert watcher.events(1) == [("PUT", b"a", 2)]
        watcher.progress()
        assert watcher.next() == rpc_pb2.WatchResponse(header=_header(2), watch_id=-1)


def test_a_request_of_no_kind_is_ignored(watcher: Watcher) -> None:
    watcher.ask()
    assert watcher.create(b"a").created
