"""What Kubernetes' API servers ask of etcd, as they ask it, on etcd 3.5.1 and on raftkv.

`docs/reference/kubernetes.md` names the test of each row. What etcd 3.5.1 does not do (ordered progress, RangeStream)
is asked of raftkv alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.rows.test_watch_rows import WATCH, Watcher
from tests.compat.store import COMPACTED, TOO_LARGE, Store, compact, compare, delete, get, put, txn
from tests.compat.streams import Streams
from tests.compat.wire import Answer, Wire
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, wait_for

PODS, PODS_END = b"/registry/pods/", b"/registry/pods0"
COMPACT_KEY = b"compact_rev_key"
RANGE, TXN = "etcdserverpb.KV/Range", "etcdserverpb.KV/Txn"
OBJECT_MAX_BYTES = 1_500_000
EVENTS_OF_A_LEASE = 1_000
"""How many events the API server attaches to a lease before it takes another one."""
PROGRAMS = {
    "etcd": ETCD_FAST.with_flags("--experimental-watch-progress-notify-interval", "200ms"),
    "raftkv": RAFTKV.with_flags("--watch-progress-notify-interval", "200ms"),
}


def _pod(number: int) -> bytes:
    return PODS + b"default/pod-%04d" % number


def _if_at(key: bytes, mod_revision: int, change: object) -> rpc_pb2.TxnRequest:
    """The only form in which the API server writes: change an object of a known revision, else read what is there."""
    return txn([compare("MOD", "EQUAL", key, mod_revision)], [change], [get(key)])


def _fill_pods(store: Store, count: int) -> None:
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        store.ask(txn(then=[put(_pod(number), b"%d" % number) for number in numbers]))


@pytest.fixture
def watcher(store: Store) -> Iterator[Watcher]:
    with Streams(store.wire) as streams:
        yield Watcher(store, streams, len(store.wire.endpoints) - 1)


# --- optimistic writes ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_object_is_created_once_and_the_loser_reads_the_winner(store: Store) -> None:
    created = store.ask(_if_at(_pod(1), 0, put(_pod(1), b"first")))
    assert created == store.txn_answer(1, True, [rpc_pb2.PutResponse(header=store.header(1))])
    found = store.kv(_pod(1), b"first")
    lost = store.txn_answer(1, False, [store.range_answer(1, [found])])
    assert store.ask(_if_at(_pod(1), 0, put(_pod(1), b"second"))) == lost
    assert store.ask(get(_pod(1))) == store.range_answer(1, [found])


@pytest.mark.parametrize("change", [put(_pod(1), b"mine"), delete(_pod(1))], ids=["update", "delete"])
def test_a_change_of_an_old_revision_reads_the_present_one(store: Store, change: object) -> None:
    store.fill(_pod(1), _pod(1))
    present = store.kv(_pod(1), _pod(1), create=1, mod=2, version=2)
    lost = store.txn_answer(2, False, [store.range_answer(2, [present])])
    assert store.ask(_if_at(_pod(1), store.at(1), change)) == lost
    assert store.ask(_if_at(_pod(1), store.at(2), change)).succeeded
    store.ask(delete(_pod(1)))
    gone = store.ask(_if_at(_pod(1), store.at(2), change))
    assert (gone.succeeded, list(gone.responses[0].response_range.kvs)) == (False, [])


def test_one_of_many_servers_wins_each_update(store: Store) -> None:
    """Ten requests on all members at once: each loser reads the winner's object at the winner's revision."""
    store.fill(_pod(1))
    revision = store.at(1)
    for turn in range(10):
        answers = _race(store.wire, [_if_at(_pod(1), revision, put(_pod(1), b"%d-%d" % (turn, n))) for n in range(10)])
        won = [number for number, answer in enumerate(answers) if answer.message.succeeded]
        assert len(won) == 1
        revision = answers[won[0]].revision
        read = [answer.message.responses[0].response_range.kvs[0] for answer in answers if not answer.message.succeeded]
        assert {(kv.value, kv.mod_revision) for kv in read} == {(b"%d-%d" % (turn, won[0]), revision)}


def _race(wire: Wire, requests: list[rpc_pb2.TxnRequest]) -> list[Answer]:
    """Send transactions to the members in turn, all before the first answer."""
    members = itertools.cycle(range(len(wire.endpoints)))
    pending = [wire.start(TXN, request.SerializeToString(), next(members)) for request in requests]
    answers = [one.answer() for one in pending]
    assert {answer.code for answer in answers} == {"OK"}
    return answers


# --- lists in pages ---------------------------------------------------------------------------------------------------


def test_pages_are_of_one_revision_and_count_what_is_left(store: Store) -> None:
    """The first page says the revision; each further one begins behind its last key. Writes in between do not show."""
    _fill_pods(store, 250)
    found: list[bytes] = []
    request = get(PODS, PODS_END, limit=100)
    for left, more in ((250, True), (150, True), (50, False)):
        page = store.ask(request)
        assert (page.count, page.more, len(page.kvs)) == (left, more, min(left, 100))
        found += [kv.key for kv in page.kvs]
        revision = request.revision or page.header.revision
        store.ask(txn(then=[delete(_pod(0)), delete(_pod(249)), put(_pod(100) + b"-new")]))
        request = get(found[-1] + b"\0", PODS_END, limit=100, revision=revision)
    assert found == [_pod(number) for number in range(250)]


def test_a_continued_list_of_a_compacted_revision_expires_and_goes_on_at_the_present(store: Store) -> None:
    _fill_pods(store, 200)
    first = store.ask(get(PODS, PODS_END, limit=100))
    store.ask(delete(_pod(150)))
    store.ask(compact(store.ask(get(b"a")).header.revision))
    rest = first.kvs[-1].key + b"\0"
    assert store.refusal(get(rest, PODS_END, limit=100, revision=first.header.revision)) == COMPACTED
    present = store.ask(get(rest, PODS_END, limit=100))
    assert (present.count, present.more) == (99, False)


def test_objects_are_counted_without_being_read(store: Store) -> None:
    _fill_pods(store, 120)
    counted = store.ask(get(PODS, PODS_END, count_only=True))
    assert (counted.count, counted.more, list(counted.kvs)) == (120, False, [])


# --- the watch cache --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_list_from_the_cache_is_as_new_as_progress_says(raftkv_store: Store) -> None:
    """A consistent list: ask for the revision, ask for progress until it is reached; every event up to it came before.

    etcd before 3.5.8 sent progress beside the events, not behind them.
    """
    wire = raftkv_store.wire
    with Streams(wire) as streams:
        members = [Watcher(raftkv_store, streams, member) for member in range(len(wire.endpoints))]
        for watcher in members:
            watcher.create(PODS, PODS_END, prev_kv=True, progress_notify=True)
            watcher.create(b"/registry/nodes/", b"/registry/nodes0")
        seen: list[dict[bytes, int]] = [{} for _ in members]
        for turn in range(30):
            pending = [
                wire.start(TXN, txn(then=[put(_pod(n % 7), b"%d" % turn)]).SerializeToString(), n % len(members))
                for n in range(20)
            ]
            for watcher, cache in zip(members, seen, strict=True):
                asked = wire.call(RANGE, get(PODS, PODS_END))
                while (reached := _progress(watcher, cache) + raftkv_store.base) < asked.revision:
                    pass
                at = wire.call(RANGE, get(PODS, PODS_END, revision=reached)).message
                assert cache == {kv.key: kv.mod_revision for kv in at.kvs}
            for call in pending:
                assert call.answer().code == "OK"


def test_a_cache_that_is_behind_gets_its_history_before_progress(raftkv_store: Store) -> None:
    """An API server that was away asks for progress at once: progress comes behind all that it missed."""
    wire = raftkv_store.wire
    for letter in b"abcdefgh":
        raftkv_store.ask(txn(then=[put(_pod(number), bytes([letter]) * 200_000) for number in range(5)]))
    asked = raftkv_store.ask(get(PODS, PODS_END))
    with Streams(wire) as streams:
        watcher = Watcher(raftkv_store, streams)
        create = rpc_pb2.WatchCreateRequest(key=PODS, range_end=PODS_END, start_revision=raftkv_store.at(1))
        watcher.stream.send(rpc_pb2.WatchRequest(create_request=create))
        revisions: list[int] = []
        while True:
            watcher.stream.send(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))
            if (message := watcher.next()).watch_id == -1:
                break
            revisions += [event.kv.mod_revision for event in message.events]
        assert message.header.revision == asked.header.revision - raftkv_store.base
        assert len(revisions) == 40


def _progress(watcher: Watcher, cache: dict[bytes, int]) -> int:
    """Ask for progress and take events into a cache up to it; its revision."""
    watcher.stream.send(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))
    while (message := watcher.next()).watch_id != -1:
        cache.update({event.kv.key: event.kv.mod_revision for event in message.events})
    return message.header.revision


@pytest.fixture(params=long_except(PROGRAMS, {"raftkv"}))
def notifying(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A member that tells progress every 0.2 s; API servers are run with 5 s."""
    with Cluster(PROGRAMS[request.param]) as cluster, Wire(cluster.endpoints) as wire:
        yield Store(wire, request.param)


def test_a_watch_of_an_old_revision_gets_history_in_fragments_and_then_bookmarks(notifying: Store) -> None:
    """Bookmarks go on while other objects change, so that a quiet watch need not go back to a compacted revision."""
    for letter in (b"1", b"2"):
        notifying.ask(txn(then=[put(_pod(number), letter * 400_000) for number in range(3)]))
    notifying.ask(delete(_pod(0)))
    with Streams(notifying.wire) as streams:
        watcher = Watcher(notifying, streams)
        wish = {"prev_kv": True, "fragment": True, "progress_notify": True}
        watcher.create(PODS, PODS_END, start_revision=notifying.at(2), **wish)
        events: list[kv_pb2.Event] = []
        fragments = 0
        while len(events) < 4:
            message = watcher.next()
            fragments += message.fragment
            events += message.events
        assert [(event.type, event.kv.mod_revision - notifying.base) for event in events] == [*[(0, 2)] * 3, (1, 3)]
        assert [event.prev_kv.value[:1] for event in events] == [*[b"1"] * 3, b"2"]
        assert fragments > 0
        revision = 0
        for turn in range(2):
            notifying.fill(b"/registry/nodes/n")
            while revision < 4 + turn:
                bookmark = watcher.next()
                assert (bookmark.watch_id, list(bookmark.events)) == (0, [])
                revision = bookmark.header.revision
        notifying.ask(compact(notifying.at(revision)))
        resumed = Watcher(notifying, streams)
        resumed.create(PODS, PODS_END, start_revision=notifying.at(revision) + 1, **wish)
        notifying.fill(_pod(5))
        assert resumed.events(1) == [("PUT", _pod(5), revision + 1)]


# --- compaction by several API servers --------------------------------------------------------------------------------


def test_one_of_several_servers_compacts_each_time(store: Store) -> None:
    """Each server writes compact_rev_key at the version it knows; the one that wins compacts, the others learn."""
    versions = [0, 0, 0]
    floor = 0
    for turn in range(4):
        store.fill(_pod(turn), _pod(turn))
        answers = _race(
            store.wire,
            [
                txn(
                    [compare("VERSION", "EQUAL", COMPACT_KEY, version)],
                    [put(COMPACT_KEY, b"%d" % number)],
                    [get(COMPACT_KEY)],
                )
                for number, version in enumerate(versions)
            ],
        )
        won = [number for number, answer in enumerate(answers) if answer.message.succeeded]
        assert len(won) == 1
        for number, answer in enumerate(answers):
            if number == won[0]:
                versions[number] += 1
                continue
            kv = answer.message.responses[0].response_range.kvs[0]
            assert (kv.value, kv.version) == (b"%d" % won[0], turn + 1)
            versions[number] = kv.version
        if floor:
            store.ask(compact(floor))
            # A server that was slow compacts to the same revision: refused, and harmless.
            assert store.refusal(compact(floor)) == COMPACTED
            assert store.refusal(get(PODS, PODS_END, revision=floor - 1)) == COMPACTED
        floor = answers[won[0]].revision
    assert versions == [4, 4, 4]


# --- leases of events -------------------------------------------------------------------------------------------------


def test_many_events_share_a_lease_and_end_together(store: Store, watcher: Watcher) -> None:
    keys = [b"/registry/events/default/e%04d" % number for number in range(EVENTS_OF_A_LEASE)]
    grant = store.wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=3600))
    lease = grant.message.ID
    for first in range(0, len(keys), 100):
        store.ask(txn(then=[put(key, key, lease=lease) for key in keys[first : first + 100]]))
    last = store.ask(_if_at(keys[0], store.at(1), put(keys[0], b"again", lease=lease))).header.revision
    watcher.create(b"/registry/events/", b"/registry/events0", prev_kv=True)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
    asked = store.wire.call("etcdserverpb.Lease/LeaseTimeToLive", request).message
    assert sorted(asked.keys) == keys
    assert store.wire.call("etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease)).code == "OK"
    events: list[kv_pb2.Event] = []
    while len(events) < len(keys):
        events += watcher.next().events
    assert [event.kv.key for event in events] == keys
    assert {(event.type, event.kv.mod_revision) for event in events} == {(kv_pb2.Event.DELETE, last + 1)}
    assert [event.prev_kv.value for event in events] == [b"again", *keys[1:]]
    assert store.ask(get(b"/registry/events/", b"/registry/events0", count_only=True)).count == 0


# --- large objects ----------------------------------------------------------------------------------------------------


def test_objects_of_1500_kb_are_written_listed_and_watched(store: Store, watcher: Watcher) -> None:
    watcher.create(PODS, PODS_END, prev_kv=True, fragment=True)
    values = [letter * OBJECT_MAX_BYTES for letter in (b"a", b"b")]
    revision = 0
    for value in values:
        revision = store.ask(_if_at(_pod(1), revision, put(_pod(1), value))).header.revision
    store.ask(put(_pod(2), values[0]))
    listed = store.ask(get(PODS, PODS_END))
    assert [len(kv.value) for kv in listed.kvs] == [OBJECT_MAX_BYTES] * 2
    events: list[kv_pb2.Event] = []
    while len(events) < 3:
        events += watcher.next().events
    assert [(event.kv.value, event.prev_kv.value) for event in events] == [
        (values[0], b""),
        (values[1], values[0]),
        (values[0], b""),
    ]
    assert store.refusal(_if_at(_pod(3), 0, put(_pod(3), bytes(1_572_864)))) == TOO_LARGE


# --- RangeStream, which API servers use from 1.37 on ------------------------------------------------------------------


def test_a_streamed_list_is_of_one_revision(raftkv_store: Store) -> None:
    """The list's chunks say what Range says at the list's revision, also while keys are written."""
    _fill_pods(raftkv_store, 1_000)
    raftkv_store.ask(put(_pod(1_000), bytes(OBJECT_MAX_BYTES)))
    wire = raftkv_store.wire
    raftkv_store.ask(get(_pod(0)))
    with Streams(wire) as streams:
        stream = streams.open("etcdserverpb.KV/RangeStream", len(wire.endpoints) - 1)
        stream.send(get(PODS, PODS_END))
        stream.half_close()
        writes = [wire.start(TXN, txn(then=[delete(_pod(n))]).SerializeToString()) for n in range(0, 1_000, 50)]
        streams.wait(lambda: stream.ended is not None, "the end of the list")
        for write in writes:
            assert write.answer().code == "OK"
        whole = rpc_pb2.RangeResponse()
        for message in stream.messages:
            whole.MergeFrom(message.range_response)
    assert len(stream.messages) > 1
    same = wire.call(RANGE, get(PODS, PODS_END, revision=whole.header.revision)).message
    assert (list(whole.kvs), whole.count, whole.more) == (list(same.kvs), same.count, False)


# --- the death of the leader ------------------------------------------------------------------------------------------


@pytest.fixture(params=PROGRAMS)
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(PROGRAMS[request.param], size=3) as cluster:
        yield cluster


@pytest.mark.long
def test_retries_across_a_leaders_death_create_each_object_once_and_watches_lose_none(three: Cluster) -> None:
    """A create that was answered by an error is tried again: it either succeeds, or reads what it wrote itself."""
    status = "etcdserverpb.Maintenance/Status"
    with Wire(three.endpoints) as wire, Streams(wire) as streams:
        answers = [wire.call(status, rpc_pb2.StatusRequest(), member).message for member in range(3)]
        leader = next(n for n, answer in enumerate(answers) if answer.header.member_id == answer.leader)
        left = [member for member in range(3) if member != leader]
        watch = streams.open(WATCH, left[0])
        create = rpc_pb2.WatchCreateRequest(key=PODS, range_end=PODS_END)
        watch.send(rpc_pb2.WatchRequest(create_request=create))
        streams.wait(lambda: bool(watch.messages), "the watch")
        revisions: dict[bytes, int] = {}
        for number in range(200):
            if number == 100:
                three.members[leader].kill()
            revisions[_pod(number)] = _create(wire, _pod(number), b"%d" % number, left[number % 2])
        listed = wire.call(RANGE, get(PODS, PODS_END), left[0]).message
        assert {kv.key: kv.mod_revision for kv in listed.kvs} == revisions
        assert {kv.version for kv in listed.kvs} == {1}

        def events() -> list[tuple[bytes, int]]:
            return [(event.kv.key, event.kv.mod_revision) for one in watch.messages for event in one.events]

        streams.wait(lambda: len(events()) >= len(revisions), "the events")
        assert events() == list(revisions.items())


def _create(wire: Wire, key: bytes, value: bytes, member: int) -> int:
    """Create an object as API servers do, with retries; its revision."""
    revision: list[int] = []

    def is_created() -> bool:
        answer = wire.call(TXN, _if_at(key, 0, put(key, value)), member)
        if answer.code != "OK":
            assert answer.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN"}, answer
            return False
        message = answer.message
        if not message.succeeded:
            assert message.responses[0].response_range.kvs[0].value == value
        kvs = message.responses[0].response_range.kvs
        revision.append(answer.revision if message.succeeded else kvs[0].mod_revision)
        return True

    wait_for(is_created, f"{key!r} to be created")
    return revision[0]
