"""The reflector against a model: it reaches the store's state and reports each change once despite lost messages."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client import control as reflector_module
from raftkv.client import paging as paging_module
from raftkv.client.control import Reflector, Sparse, below
from raftkv.client.errors import CLIENT_CLOSED, HistoryReplaced, ReceivedTooLarge, UnknownStatus, WatchCanceled
from raftkv.client.operations import Delete, GetRange, Put
from raftkv.client.values import DELETE, PUT, Event, KeyValue
from raftkv.errors import CANCELED, RESOURCE_EXHAUSTED, ContextDeadlineExceededError, PermissionDeniedError
from raftkv.rpc.server.budget import CONNECTION_FULL
from raftkv.rpc.status import CLOSED_TEXT
from tests.virtual_store.direct import FakeControl, StoreWorld

PREFIX = "run/"
KEYS = ["run/a", "run/b", "run/c", "runs", "ru"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS)),
        st.tuples(st.just("delete"), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["compact", "lose", "refuse", "list", "old list", "wait"]), st.just("")),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True, scope="module")
def _short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reflector_module, "REFUSED_PAUSE_MAX_S", 0.001)
        yield


@pytest.fixture
def world() -> StoreWorld:
    return StoreWorld()


async def test_keys_between_the_parts_of_an_interval_are_neither_read_nor_kept() -> None:
    """Runs may lie below a run, between its own keys: each node of it kept what they store."""
    world, seen = StoreWorld(), list[bytes]()
    control = world.control()
    parts = (("a/round", ""), ("a/state", ""), ("a/x/", "a/x0"))
    for key in ("a/best/store", "a/round", "a/round-2/state", "a/round/head", "a/state", "a/statement", "a/x/1"):
        await control.txn((), [Put(key, "1")])
    sparse = Sparse("a/round", "a/x0", parts)
    reflector = Reflector(control, sparse, lambda changes: seen.extend(event.key for event in changes))
    reflector.start()
    await reflector.ready()
    assert sorted(seen) == sorted(reflector.items) == [b"a/round", b"a/state", b"a/x/1"]
    for key in ("a/round-2/state", "a/statement", "a/w", "a/x0", "a/x/2", "a/state"):
        await control.txn((), [Put(key, "2")])
    await reflector.reached(world.store.revision)
    assert seen[3:] == [b"a/x/2", b"a/state"]
    control.lose_watch()
    await control.txn((), [Delete("a/round"), Delete("a/round-2/state")])
    await reflector.reached(world.store.revision)
    assert seen[5:] == [b"a/round"]
    assert sorted(reflector.items) == [b"a/state", b"a/x/1", b"a/x/2"]
    reflector.close()


class Observer:
    """A reflector, and what it has reported: the changes must lead from nothing to its items, each of them once."""

    def __init__(self, control: FakeControl, *, deletes: bool = True) -> None:
        self.known: dict[bytes, KeyValue] = {}
        self.reported: list[Event] = []
        self.refused: list[Exception] = []
        self.deletes = deletes
        self.last_revision = 0
        self.reflector = Reflector(
            control, below(PREFIX), self._on_changes, deletes=deletes, on_refused=self.refused.append
        )

    def _on_changes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if event.type == DELETE:
                assert event.key in self.known, "a key that was not there has gone"
                del self.known[event.key]
            else:
                before = self.known.get(event.key)
                assert before is None or before.mod_revision < event.revision, (
                    "an old change, or one for the second time"
                )
                self.known[event.key] = event.kv
        self.reported += changes
        assert self.reflector.revision >= self.last_revision, "it went back"
        self.last_revision = self.reflector.revision
        if self.deletes:
            assert self.known == self.reflector.items


def there(world: StoreWorld) -> dict[bytes, KeyValue]:
    return {key: item for key, item in world.store.items.items() if key.startswith(PREFIX.encode())}


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 90))


@given(STEPS, st.integers(0, 1000), st.booleans())
def test_reflector_reports_each_change_once_and_matches_store(steps, seed, deletes):
    async def story() -> None:
        world = StoreWorld()
        world.store.txn((), (Put("run/a", b"before"),))
        control = world.control(seed)
        observer = Observer(control, deletes=deletes)
        observer.reflector.start()
        lists = [(list(there(world).values()), world.store.revision)]
        for number, (kind, key) in enumerate(steps):
            if kind == "put":
                world.store.txn((), (Put(key, str(number).encode()),))
            elif kind == "delete":
                world.store.txn((), (Delete(key),))
            elif kind == "compact":
                world.store.compact()
            elif kind in ("lose", "refuse") and control.watches:
                control.lose_watch(PermissionDeniedError() if kind == "refuse" else None)
            elif kind == "list":
                lists.append((list(there(world).values()), world.store.revision))
                observer.reflector.load(*lists[-1])
            elif kind == "old list":
                observer.reflector.load(*lists[seed % len(lists)])
            else:
                await settle()
        async with asyncio.timeout(90):
            await observer.reflector.ready()
        await settle()
        if deletes:
            assert observer.reflector.items == there(world)
        else:
            assert observer.reflector.items == {}
            assert {key: observer.known[key] for key in there(world)} == there(world)
        observer.reflector.close()
        await settle()
        assert not world.store.on_commit

    play(story())


async def test_a_list_that_the_caller_has_read_is_not_reported_and_not_read_again(world: StoreWorld) -> None:
    world.store.txn((), (Put("run/a", b"1"),))
    control = world.control()
    observer = Observer(control)
    page = (await control.txn((), (GetRange(PREFIX, prefix=True),))).results[0]
    asked = world.txns
    observer.reflector.start(page, page.revision)
    observer.known = dict(observer.reflector.items)
    world.store.txn((), (Put("run/b", b"2"),))
    await settle()
    assert [event.key for event in observer.reported] == [b"run/b"]
    assert world.txns == asked


async def test_keys_put_and_deleted_before_the_watch_are_seen_from_an_old_revision(world: StoreWorld) -> None:
    began = world.store.revision
    for operation in (Put("run/a", b"1"), Delete("run/a"), Put("run/b", b"2")):
        world.store.txn((), (operation,))
    observer = Observer(world.control(), deletes=False)
    observer.reflector.start(revision=began)
    await settle()
    assert [(event.type, event.value) for event in observer.reported] == [(PUT, b"1"), (PUT, b"2")]
    assert observer.reflector.items == {}


async def test_outage_is_waited_out_and_not_reported_as_refusal(world: StoreWorld) -> None:
    control = world.control(seed=3, lost=0.5)
    observer = Observer(control)
    observer.reflector.start()
    world.store.txn((), (Put("run/a", b"1"),))
    await observer.reflector.ready()
    await settle()
    assert observer.reflector.items == there(world)
    assert observer.refused == []


async def test_a_refusal_is_reported_and_the_owner_may_take_it_for_the_end(world: StoreWorld) -> None:
    control = world.control()
    observer = Observer(control)
    observer.reflector.start()
    await observer.reflector.ready()
    control.lose_watch(WatchCanceled("the client is closed"))
    assert [str(error) for error in observer.refused] == ["the client is closed"]
    assert not observer.reflector.is_following
    observer.reflector.close()
    await settle()
    tasks = [task for task in asyncio.all_tasks() if "Reflector" in repr(task)]
    assert not tasks, "it would list again"


async def test_a_client_that_is_closed_ends_it() -> None:
    control = StoreWorld().control()
    asked = 0

    async def closed(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise UnknownStatus(CANCELED, "the client is closed", definite=True)

    control.txn = closed
    observer = Observer(control)
    observer.reflector.start()
    await settle()
    assert asked == len(observer.refused) == 1
    assert not [task for task in asyncio.all_tasks() if "Reflector" in repr(task)]
    for late in (observer.reflector.ready(), observer.reflector.reached(1)):
        with pytest.raises(UnknownStatus, match="the client is closed"):
            await asyncio.wait_for(late, 90)


async def test_waiter_for_a_revision_learns_of_the_end_of_client_and_reflector(world: StoreWorld) -> None:
    control = world.control()

    async def closed(*_: Any) -> Any:
        raise UnknownStatus(CANCELED, "the client is closed", definite=True)

    observers = [Observer(control), Observer(control)]
    for observer in observers:
        observer.reflector.start()
        await observer.reflector.ready()
    waits = [asyncio.ensure_future(observer.reflector.reached(99)) for observer in observers]
    await settle()
    observers[0].reflector.close()
    await asyncio.wait_for(waits[0], 90)
    control.txn = closed
    control.lose_watch(WatchCanceled("the client is closed"))
    with pytest.raises(UnknownStatus, match="the client is closed"):
        await asyncio.wait_for(waits[1], 90)
    assert not observers[1].reflector.is_following


async def test_refusal_is_logged_once_for_continuing_owners(world, caplog):
    control = world.control()
    reflector = Reflector(control, below(PREFIX), lambda _: None)
    reflector.start()
    for _ in range(3):
        await reflector.ready()
        control.lose_watch(PermissionDeniedError())
    assert len(caplog.records) == 1
    assert "run/" in caplog.text
    reflector.close()


async def test_a_revision_can_be_waited_for(world: StoreWorld) -> None:
    observer = Observer(world.control())
    observer.reflector.start()
    await observer.reflector.ready()
    waits = [asyncio.ensure_future(observer.reflector.reached(world.store.revision + ahead)) for ahead in (2, 1)]
    world.store.txn((), (Put("run/a", b"1"),))
    await waits[1]
    assert not waits[0].done()
    world.store.txn((), (Put("run/a", b"2"),))
    await waits[0]
    await observer.reflector.reached(1)


async def test_closed_client_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A watch, a list, and what lies between both end with it, and the log stays silent."""

    def closed(*_: object, **__: object) -> Any:
        raise WatchCanceled(CLIENT_CLOSED)

    control = StoreWorld().control()
    watching = Reflector(control, below(PREFIX), lambda changes: None)
    watching.start()
    await watching.ready()

    # The first call was in flight at the end of the connection, the next finds it closed.
    ends = iter([(CLOSED_TEXT, False), (CLOSED_TEXT, True), (CLIENT_CLOSED, True)])

    async def txn(*_: object) -> object:
        text, definite = next(ends)
        raise UnknownStatus(CANCELED, text, definite=definite)

    control.txn = txn
    control.lose_watch(WatchCanceled(CLIENT_CLOSED))
    listing = Reflector(control, below(PREFIX), lambda changes: None)
    listing.start()
    await settle()
    await asyncio.sleep(0.02)
    await settle()
    between = StoreWorld().control()
    between.watch = closed
    Reflector(between, below(PREFIX), lambda changes: None).start()
    await settle()
    gc.collect()
    assert caplog.text == ""
    control.watches.clear()
    other = Reflector(control, below(PREFIX), lambda changes: None)
    other.start(revision=1)
    control.lose_watch(PermissionDeniedError())
    assert "cannot watch" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        UnknownStatus(RESOURCE_EXHAUSTED, CONNECTION_FULL),
        ReceivedTooLarge("grpc: received message larger than max"),
        ContextDeadlineExceededError(),
    ],
    ids=["member", "client", "time"],
)
async def test_list_that_is_too_large_for_one_answer_is_read_in_parts(error, monkeypatch):
    """10,000 keys of 60 KB are more than a member sends, or than comes in time: they were asked for again for ever."""
    monkeypatch.setattr(paging_module, "PAGE_BYTES", 40_000)
    world, answers = StoreWorld(), list[int]()
    for number in range(300):
        world.store.txn((), [Put(f"run/{number:03}", b"x" * (10 if number < 100 else 10_000))])
    control = world.control()
    answer = control.txn

    async def txn(*words: Any) -> Any:
        result = await answer((), [dataclasses.replace(words[1][0], revision=0)])  # nothing changes here
        answers.append(sum(len(item.value) for item in result.results[0]))
        if answers[-1] > 300_000:
            raise error
        return result

    control.txn = txn
    reflector = Reflector(control, below(PREFIX), lambda _: None)
    reflector.start()
    await reflector.ready()
    assert len(reflector.items) == 300
    assert answers[0] > 300_000
    assert max(answers[-20:]) <= 40_000, "in the end each page is as large as it should be"
    reflector.close()


async def test_restore_reports_only_differences(world: StoreWorld) -> None:
    """The new cluster is at an earlier revision: its list was passed over, and changes missed until it caught up."""
    world.store.txn((), [Put("run/a", "1"), Put("run/b", "1")])
    control = world.control()
    changes: list[Event] = []
    reflector = Reflector(control, below(PREFIX), changes.extend)
    reflector.start()
    await reflector.ready()
    reached = asyncio.ensure_future(reflector.reached(100))
    await asyncio.sleep(0)
    changes.clear()
    reflector.revision = 90  # of the cluster that is gone
    world.store.txn((), [Put("run/b", "2"), Delete("run/c")])
    control.lose_watch(HistoryReplaced())
    await reached
    await reflector.ready()
    assert [(event.type, event.key, event.value) for event in changes] == [(PUT, b"run/b", b"2")]
    assert reflector.revision == world.store.revision
    reflector.close()

    changes.clear()
    ended: list[Exception] = []
    news = Reflector(control, below(PREFIX), changes.extend, deletes=False)
    news.start(revision=90)
    control.lose_watch(HistoryReplaced())
    await news.ready()
    assert [event.key for event in changes] == [b"run/a", b"run/b"]
    news.close()
    mortal = Reflector(control, below(PREFIX), changes.extend, on_end=ended.append, outlives_restore=False)
    mortal.start(revision=90)
    control.lose_watch(HistoryReplaced())
    with pytest.raises(HistoryReplaced):
        await mortal.ready()
    assert [type(error) for error in ended] == [HistoryReplaced]


async def test_list_that_began_before_the_history_was_replaced_is_asked_again(world: StoreWorld) -> None:
    """Its answer, of the cluster that is gone, would be reported as the new one, and the new one as a third."""
    world.store.txn((), [Put("run/a", "1")])
    control = world.control()
    answer, cluster_id, gates = control.txn, 7, list[asyncio.Event]()

    async def txn(*words: Any) -> Any:
        result = dataclasses.replace(await answer(*words), cluster_id=cluster_id)
        if gates:
            await gates.pop(0).wait()
        return result

    control.txn = txn
    restored: list[int] = []
    reflector = Reflector(
        control, below(PREFIX), lambda _: None, on_restored=lambda: restored.append(reflector.revision)
    )
    reflector.start()
    await reflector.ready()
    late, fresh = asyncio.Event(), asyncio.Event()
    gates += [late, fresh]
    refresh = asyncio.ensure_future(reflector.refresh())
    await settle()
    cluster_id = 8
    control.lose_watch(HistoryReplaced())
    await settle()
    late.set()
    await refresh
    fresh.set()
    await reflector.ready()
    await settle()
    assert (restored, reflector.cluster_id) == ([0], 8)
    reflector.close()
