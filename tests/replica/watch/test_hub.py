"""The hub beyond the client model: failures, callbacks for recipes, bursts, the cost of idle watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import pytest

from raftkv.apply.wire import HeaderEncoder
from raftkv.errors import CorruptionError, DamagedError, StoppedError
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.replica.metrics import watch_metrics
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.replica.watch import catch_up as catch_up_module
from raftkv.replica.watch import hub as hub_module
from raftkv.replica.watch import stream as stream_module
from raftkv.replica.watch.hub import WatchHub, WatchRunner
from raftkv.replica.watch.index import WATCHER_BYTES, Watcher, WatcherIndex
from raftkv.replica.watch.stream import WatchStream
from raftkv.rpc.server.stream import StreamCall
from raftkv.server.auth.guard import LiveCalls
from raftkv.server.streams.watch import BYTES_AS_A_REQUEST, REQUESTS_PER_PASS, WatchService
from raftkv.storage import schema
from raftkv.storage.mvcc import Store
from raftkv.storage.mvcc_range import Reader
from raftkv.storage.revision import CorruptRecordError, pack, to_key
from tests.replica.watch.fakes import FakeCall
from tests.rpc.loop import until
from tests.storage.memory import MemoryBackend


class World:
    """A store, its hub, and streams on fake calls."""

    def __init__(self) -> None:
        self.store = Store.open(MemoryBackend())
        header = HeaderEncoder(1, 2)
        self.woken = 0
        self.cork = Cork(lambda flush: None)
        self.hub = WatchHub(self.store, lambda revision: header.encode(revision, 3), self._wake, self.cork)
        self.store.on_changes = self.hub.changed
        self.failures: list[Exception] = []

    def _wake(self) -> None:
        self.woken += 1

    def put(self, key: bytes, value: bytes = b"v", *, deliver: bool = True) -> None:
        txn = self.store.begin()
        txn.put(key, value)
        txn.end()
        if deliver:
            self.applied()

    def applied(self) -> None:
        self.hub.applied()
        self.cork.flush()

    def catch_up(self) -> bool:
        more = self.hub.catch_up()
        self.cork.flush()
        return more

    def stream(self, identity: bytes = b"") -> tuple[WatchStream, FakeCall]:
        call = FakeCall()
        return WatchStream(self.hub, call, 1000, self.failures.append, identity=identity), call

    def watch(self, stream: WatchStream, **fields: object) -> None:
        request = rpc_pb2.WatchCreateRequest(**fields)
        stream.receive(rpc_pb2.WatchRequest(create_request=request).SerializeToString())
        self.cork.flush()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


@pytest.mark.interpreted
def test_a_failed_delivery_ends_every_stream_so_that_nothing_is_missed_unknowingly(world, monkeypatch, caplog):
    for _ in range(2):
        world.watch(world.stream()[0], key=b"k")

    def broken(*arguments: object) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(WatchStream, "fan_out", broken)
    world.put(b"k")
    assert [type(failure) for failure in world.failures] == [StoppedError, StoppedError]
    assert "delivering watch events failed" in caplog.text


async def test_damaged_record_ends_only_the_watch_that_needs_it(world: World) -> None:
    """A damaged history ended the run that serves those who are behind: their streams waited for ever."""
    found: list[CorruptionError] = []
    world.hub.on_damage = found.append
    world.put(b"damaged")
    world.store.commit()
    backend = world.store.backend
    assert isinstance(backend, MemoryBackend)
    backend.buckets[schema.KEY][to_key(pack(2, 0))] = b"nonsense"
    world.watch(world.stream()[0], key=b"damaged", start_revision=1)
    runner = WatchRunner()
    runner.hub = world.hub
    runner.wake()
    await until(lambda: bool(found))
    assert [type(failure) for failure in world.failures] == [DamagedError]
    assert [str(error) for error in found] == ["record of revision 2.0 is corrupt: its checksum is wrong"]
    other, call = world.stream()
    world.watch(other, key=b"whole")
    world.put(b"whole")
    assert [event.kv.key for response in call.read() for event in response.events] == [b"whole"]


def test_progress_is_told_when_it_is_first_due_and_left_out_where_an_event_was_sent(world: World) -> None:
    stream, call = world.stream()
    for key in (b"idle", b"busy"):
        world.watch(stream, key=key, progress_notify=True)
    world.put(b"busy")
    call.read()
    told = []
    for _ in range(2):
        for _pause in stream.notify_progress():
            pass
        world.cork.flush()
        told.append([(response.watch_id, response.header.revision) for response in call.read()])
    assert told == [[(0, 2)], [(0, 2), (1, 2)]]


@pytest.mark.interpreted
def test_damage_found_while_delivering_is_told_and_ends_the_streams(world, monkeypatch):
    found: list[CorruptionError] = []
    world.hub.on_damage = found.append
    world.watch(world.stream()[0], key=b"k", prev_kv=True)
    world.put(b"k")

    def damaged(reader: Reader, revision: int) -> bytes:
        raise CorruptRecordError("revision 2.0 is damaged")

    monkeypatch.setattr(Reader, "record", damaged)
    world.put(b"k")
    assert [type(failure) for failure in world.failures] == [DamagedError]
    assert [str(error) for error in found] == ["revision 2.0 is damaged"]


def test_recipes_are_called_once_a_turn_and_only_for_their_key(world: World) -> None:
    calls: list[str] = []
    cancel = world.hub.on_change(b"k", lambda: calls.append("k"))
    world.hub.on_change(b"other", lambda: calls.append("other"))
    for _ in range(3):
        world.put(b"k", deliver=False)
    world.applied()
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


def test_a_watcher_behind_at_its_start_revision_gets_nothing_earlier(world, monkeypatch):
    monkeypatch.setattr(hub_module, "BYTES_PER_TURN", -1)
    stream, call = world.stream()
    world.watch(stream, key=b"k", start_revision=world.store.revision + 2)
    for _ in range(3):
        world.put(b"k", deliver=False)
    world.applied()
    while world.hub.unsynced_count:
        world.catch_up()
    call.read()
    events = [event.kv.mod_revision for response in call.responses for event in response.events]
    assert events == [world.store.revision - 1, world.store.revision]


@pytest.mark.interpreted
def test_a_burst_too_large_for_one_write_is_served_watcher_by_watcher(world, monkeypatch):
    monkeypatch.setattr(stream_module, "BURST_MAX_BYTES", 2_000)
    monkeypatch.setattr(stream_module, "QUEUED_MAX_BYTES", 1_500)
    stream, call = world.stream()
    for _ in range(50):
        world.watch(stream, key=b"k")
    call.read()
    world.put(b"k", b"x" * 500)
    assert world.hub.unsynced_count == 50
    while world.hub.unsynced_count:
        world.catch_up()
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
def test_a_full_connection_holds_back_its_streams_and_no_others(world, attribute, full, free_again):
    (crowded, crowded_call), (free, free_call) = world.stream(), world.stream()
    world.watch(crowded, key=b"k")
    world.watch(free, key=b"k")
    setattr(crowded_call, attribute, full)
    world.put(b"k")
    assert [len(response.events) for response in free_call.read()] == [0, 1]
    assert world.catch_up() is False
    setattr(crowded_call, attribute, free_again)
    woken = world.woken
    crowded_call.read()
    assert world.woken > woken
    world.catch_up()
    assert [len(response.events) for response in crowded_call.read()] == [1]


def test_changes_are_not_gathered_without_watchers(world: World) -> None:
    for _ in range(3):
        world.put(b"k", deliver=False)
    assert world.hub._pending == []
    world.applied()
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
    assert world.catch_up() is False


def _ask_progress(stream: WatchStream) -> None:
    request = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
    stream.receive(request.SerializeToString())


def test_a_progress_request_does_not_look_at_each_watcher(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, call = world.stream()
    for number in range(500):
        world.watch(stream, key=b"%d" % number)
    call.read()
    looks = 0

    def counted(*_: object) -> bool:
        nonlocal looks
        looks += 1
        return True

    monkeypatch.setattr(WatchHub, "has_reached", counted)
    for _ in range(10):
        _ask_progress(stream)
    world.cork.flush()
    assert [response.watch_id for response in call.read()] == [-1] * 10
    assert looks < 10


def test_watchers_of_the_future_leave_nothing_behind_when_they_end(world: World) -> None:
    stream, _ = world.stream()
    for number in range(50):
        world.watch(stream, key=b"k", start_revision=100 + number)
    assert len(stream._ahead) == 50
    for watcher in list(stream.watchers.values()):
        stream.forget(watcher)
    assert len(stream._ahead) == 0, "a request for progress would have to pass them, in one turn"


def test_no_progress_while_a_watcher_starts_in_the_future_or_is_behind(world: World) -> None:
    def answers() -> int:
        _ask_progress(stream)
        world.cork.flush()
        return sum(response.watch_id == -1 for response in call.read())

    stream, call = world.stream()
    world.watch(stream, key=b"k")
    assert answers() == 1
    world.watch(stream, key=b"k", start_revision=4, watch_id=7)
    world.watch(stream, key=b"k", start_revision=1000, watch_id=8)
    for number in range(1000):
        world.watch(stream, key=b"other", start_revision=3000, watch_id=100 + number)
        stream.receive(_cancel(100 + number))
    assert len(stream._ahead) < 200, "those that have ended are not kept"

    assert answers() == 0
    stream.receive(_cancel(8))
    assert answers() == 0
    for _ in range(3):
        world.put(b"x")
    assert answers() == 1
    world.watch(stream, key=b"k", start_revision=1, watch_id=9)
    assert answers() == 0
    world.catch_up()
    assert answers() == 1


def _cancel(watch_id: int) -> bytes:
    return rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=watch_id)).SerializeToString()


@pytest.mark.interpreted
def test_very_many_watchers_leave_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOVES_PER_STEP", 10)
    (leaving, leaving_call), (staying, staying_call) = world.stream(), world.stream()
    for number in range(40):
        world.watch(leaving, key=b"k", prev_kv=number % 2 == 0)
        world.watch(leaving, key=b"k", start_revision=1)
    world.watch(staying, key=b"k")
    leaving_call.read()
    staying_call.read()
    leaving.close()
    assert (world.hub.watcher_count, world.hub.unsynced_count) == (1, 0)
    sizes = [world.hub._index.size]
    world.put(b"k")
    assert [len(response.events) for response in staying_call.read()] == [1]
    while world.catch_up():
        sizes.append(world.hub._index.size)
    assert leaving_call.read() == []
    assert max(before - after for before, after in pairwise(sizes)) <= 10
    assert world.hub._index.size == 1


@pytest.mark.interpreted
def test_a_change_that_very_many_watch_is_delivered_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "DELIVERIES_PER_TURN", 50)
    monkeypatch.setattr(hub_module, "DELIVERIES_MIN", 5)
    monkeypatch.setattr(hub_module, "MOVES_PER_STEP", 10)
    stream, call = world.stream()
    for number in range(100):
        world.watch(stream, key=b"many", prev_kv=number % 2 == 0)
    world.watch(stream, key=b"one", watch_id=1000)
    call.read()
    for _ in range(2):
        world.put(b"many", deliver=False)
        world.put(b"one", deliver=False)
    world.applied()
    assert [response.watch_id for response in call.read()] == [1000]
    assert world.hub.unsynced_count == 100
    stream.receive(_cancel(3))
    while world.catch_up():
        assert len(call.read()) <= 11
    call.read()
    got = [(response.watch_id, len(response.events)) for response in call.responses if response.events]
    assert sorted(got)[:-1] == [(number, 2) for number in range(100) if number != 3]
    world.put(b"many")
    assert world.hub.unsynced_count == 99


@pytest.mark.interpreted
def test_watchers_are_bounded_by_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "STREAM_WATCHERS_MAX_BYTES", 3 * 1200)
    world.hub.shares.limit = 5 * 1200
    (first, first_call), (second, second_call) = world.stream(), world.stream()
    for number in range(4):
        world.watch(first, key=b"%0100d" % number)
        world.watch(second, key=b"%0100d" % number)
    reason = "raftkv: the watchers of one stream may take 3600 bytes: watch ranges"
    assert [(one.created, one.canceled, one.cancel_reason) for one in first_call.read()] == [
        *[(True, False, "")] * 3,
        (True, True, reason),
    ]
    last = second_call.read()[-1]
    assert (last.watch_id, last.cancel_reason) == (
        -1,
        "raftkv: this client has its share of the 6000 bytes that the watchers of one member may take: "
        "each user, certificate or address has one",
    )
    assert (len(first.watchers), len(second.watchers)) == (3, 2)
    world.watch(second, key=b"x" * 3000)
    assert second_call.read()[-1].canceled, "a long key counts"
    first.receive(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=0)).SerializeToString())
    world.watch(second, key=b"x" * 100)
    assert len(second.watchers) == 3
    first.close()
    second.close()
    assert world.hub.shares.used == 0
    assert not first.watchers
    assert not second.watchers, "a closed stream and its watchers would hold each other"


def test_newest_watchers_of_largest_user_are_evicted_first(world: World) -> None:
    """766 watchers on keys of 1.4 MB took all there was, and no other client could watch."""

    world.hub.shares.limit = 8 * 10_000 + 8 * WATCHER_BYTES
    (first, first_call), (second, second_call) = world.stream(b"mallory"), world.stream(b"mallory")
    for number in range(5):
        world.watch(first, key=b"%010000d" % number)
        world.watch(second, key=b"%010000d" % number)
    refused = [one.cancel_reason for one in (*first_call.read(), *second_call.read()) if one.canceled]
    assert len(refused) == 2
    assert all("user mallory has its share of the" in text for text in refused)
    honest, honest_call = world.stream(b"alice")
    for number in range(5):
        world.watch(honest, key=b"%010000d" % number)
    assert [one.canceled for one in honest_call.read()] == [False] * 4 + [True], "both have half"
    ended = [(one.watch_id, one.cancel_reason) for one in (*second_call.read(), *first_call.read())]
    text = "raftkv: user mallory has most of the watchers, and others ask for theirs"
    assert ended == [(number, text) for number in (3, 2, 1, 0)], "of the newest stream, the newest first"
    world.put(b"%010000d" % 0)
    assert [len(one.events) for one in (*first_call.read(), *honest_call.read())] == [1, 1]
    for stream in (first, second, honest):
        stream.close()
    assert world.hub.shares.held == {}


class Flood(FakeCall):
    """A call whose client has sent more requests than a pass of the loop should take."""

    def __init__(self, requests: int, key_bytes: int = 0) -> None:
        super().__init__()
        self._left = requests
        self._key_bytes = key_bytes

    async def receive(self) -> bytes | None:
        if not self._left:
            return None
        self._left -= 1
        request = rpc_pb2.WatchCreateRequest(key=(b"%d" % self._left).ljust(self._key_bytes))
        return rpc_pb2.WatchRequest(create_request=request).SerializeToString()


class Guard:
    """There is always a leader."""

    def until_leader_lost(self, call: object) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class Admitted:
    """Any metadata will do."""

    throttle = None

    def check_metadata(self, call: object) -> None:
        """See ``Admission``."""


@pytest.mark.parametrize(("key_bytes", "few"), [(0, REQUESTS_PER_PASS), (10 * BYTES_AS_A_REQUEST, 19)])
async def test_a_pass_of_the_loop_takes_few_requests_of_all_streams_together(world, key_bytes, few):
    """A request counts by its bytes too: ten megabytes are no more to be parsed in one pass."""
    guard, admission = cast(LeaderGuard, Guard()), cast(Admission, Admitted())
    service = WatchService(world.hub, admission, guard, fragment_bytes=1000, progress_interval_s=0)
    calls = [Flood(3 * few, key_bytes), Flood(few, key_bytes)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.watch(cast(StreamCall, call))) for call in calls]
        before = 0
        while before < 4 * few:
            await asyncio.sleep(0)
            assert world.hub.watcher_count - before <= few
            before = world.hub.watcher_count
        for task in tasks:
            task.cancel()
    assert world.hub.watcher_count == 0


async def test_few_of_very_many_waiting_streams_are_called_in_their_order(world: World) -> None:
    guard, admission = cast(LeaderGuard, Guard()), cast(Admission, Admitted())
    service = WatchService(world.hub, admission, guard, fragment_bytes=1000, progress_interval_s=0)
    calls = [Flood(1) for _ in range(5 * REQUESTS_PER_PASS)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.watch(cast(StreamCall, call))) for call in calls]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(service._requests) >= 3 * REQUESTS_PER_PASS
        for task in tasks[REQUESTS_PER_PASS : 3 * REQUESTS_PER_PASS]:
            task.cancel()  # who is called next is not there any more: the others must not wait for ever
        before = len(service._requests)
        while len(service._requests):
            await asyncio.sleep(0)
            assert before - len(service._requests) <= REQUESTS_PER_PASS
            before = len(service._requests)
        await until(lambda: world.hub.watcher_count == 3 * REQUESTS_PER_PASS)
        for task in tasks:
            task.cancel()
    assert world.hub.watcher_count == 0


class Rights:
    """The stream of a client that may watch nothing."""

    recheck: object = None

    def __init__(self) -> None:
        self.on_changed: list[object] = []

    def of(self, call: object) -> Rights:
        return self

    def read_refusal(self, key: bytes, range_end: bytes) -> str:
        return "etcdserver: permission denied"

    refusal_to_go_on = read_refusal


async def test_a_refused_watch_is_reported_to_the_listener_of_refusals(world: World) -> None:
    heard: list[tuple[object, bytes, bytes, str]] = []
    guard, admission, live = cast(LeaderGuard, Guard()), cast(Admission, Admitted()), cast(LiveCalls, Rights())
    service = WatchService(
        world.hub,
        admission,
        guard,
        live,
        fragment_bytes=1000,
        progress_interval_s=0,
        on_refused=lambda *refused: heard.append(refused),
    )
    call = Flood(2)
    task = asyncio.get_running_loop().create_task(service.watch(cast(StreamCall, call)))
    await until(lambda: len(heard) == 2)
    task.cancel()
    assert heard == [(call, key, b"", "etcdserver: permission denied") for key in (b"1", b"0")]


@pytest.mark.interpreted
def test_a_special_watcher_is_in_no_group_but_its_own() -> None:
    index, stream = WatcherIndex(), cast(WatchStream, object())
    plain, first, second = Watcher(stream, 1, b"a"), Watcher(stream, 2, b"b"), Watcher(stream, 3, b"c")
    index.add(plain, special=False)
    index.add(first, special=True)
    index.add(second, special=True)
    assert [list(index.groups(key)[0].special) for key in (b"a", b"b", b"c")] == [[], [first], [second]]
    assert index.remove(first)
    assert not index.groups(b"b")
    assert second in index
    assert index.pop().pop() is second
    assert plain in index


@pytest.mark.parametrize("reason", ["", "etcdserver: permission denied"])
def test_fragments_leave_only_if_the_right_is_still_there(world, monkeypatch, reason):
    """They are put together in steps, and rights may change between two of them."""
    monkeypatch.setattr(catch_up_module, "BYTES_PER_STEP", 1)
    txn = world.store.begin()
    for number in range(5):
        txn.put(b"k%d" % number, b"x" * 500)
    txn.end()
    stream, call = world.stream()
    stream.checked_at, stream.refusal_to_go_on = world.hub.check_number, lambda key, range_end: reason
    world.watch(stream, key=b"k", range_end=b"l", start_revision=1, fragment=True)
    call.read()
    assert world.catch_up()
    world.hub.rights_changed()
    while world.catch_up():
        pass
    got = [(len(each.events), each.fragment, each.canceled) for each in call.read()]
    whole = [(1, True, False)] * 4 + [(1, False, False)]
    assert got == ([(0, False, True)] if reason else whole)
    assert stream.unsynced_count == 0
    assert len(stream.watchers) == (0 if reason else 1)


def test_events_count_whether_they_are_live_or_of_history(world: World) -> None:
    """etcd_debugging_mvcc_events_total: what watchers that are behind get was left out."""
    for number in range(3):
        world.put(b"a%d" % number)
    stream, call = world.stream()
    world.watch(stream, key=b"a", range_end=b"b", start_revision=1)
    while world.catch_up():
        pass
    assert world.hub.events_total == 3
    world.watch(stream, key=b"a", range_end=b"b")
    world.watch(stream, key=b"a", range_end=b"b", prev_kv=True)
    world.put(b"a0")
    assert world.hub.events_total == 3 + 3
    sent = [len(response.events) for response in call.read()]
    assert sum(sent) == world.hub.events_total


def test_responses_are_timed_by_kind(world: World) -> None:
    times = world.hub.send_times
    stream, _ = world.stream()
    world.watch(stream, key=b"a", range_end=b"b")
    assert (times.control.count, times.responses.count, times.events.count) == (1, 0, 0)
    world.put(b"a1", deliver=False)
    world.put(b"a2")
    assert (times.control.count, times.responses.count) == (1, 1), "one response with two events"
    assert times.events.total == pytest.approx(times.responses.total / 2)
    stream.receive(rpc_pb2.WatchRequest(progress_request={}).SerializeToString())
    world.put(b"a3")
    assert (times.control.count, times.responses.count) == (2, 2)
    families = {family.name: family for family in watch_metrics(world.hub)}
    name = "etcd_debugging_server_watch_send_loop_{}_seconds".format
    counts = {
        part: next(one.value for one in families[name(part)].samples if one.name.endswith("_count"))
        for part in ("watch_stream_duration", "watch_stream_duration_per_event", "control_stream_duration")
    }
    assert set(counts.values()) == {2.0}
    assert [one.labels["le"] for one in families[name("progress_duration")].samples if "le" in one.labels][:2] == [
        "0.001",
        "0.002",
    ]
