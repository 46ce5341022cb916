"""Long entries are applied in slices: the loop keeps running, and no entry is seen or committed half applied."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply import applier
from raftkv.apply.applier import Outcome
from raftkv.apply.txn import LONG_WORK
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry
from raftkv.replica.node import applying
from raftkv.rpc.shares import Identity
from raftkv.storage import mvcc
from tests.client.waiting import until
from tests.compat.store import delete, put
from tests.replica.node.node_world import Caller, World

KEYS = 1_000
PASSES_MAX = 5_000
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _one_piece_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "SLICE_S", 0.0)
    monkeypatch.setattr(mvcc, "KEYS_PER_PIECE", 5)


class _Read:
    """Records the number of keys found when served."""

    is_over = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: int | None = None

    def ready(self) -> None:
        self.found = count(self.world)

    def fail(self, error: errors.StatusError) -> None:
        raise error


def count(world: World) -> int:
    return world.machine.store.range(b"\0", b"\0", count_only=True).count


def propose(world: World, request: Any, kind: int) -> Caller:
    caller = Caller(request)
    world.node.submit(kind, request.SerializeToString(), caller, None)
    return caller


async def leader() -> World:
    """A cluster of one with a thousand keys."""
    world = World((1,))
    world.node.raw.campaign()
    world.node._wake()
    await world.turns()
    for number in range(KEYS):
        propose(world, put(b"k%04d" % number), Kind.PUT)
    await world.turns()
    assert count(world) == KEYS
    return world


async def passes(world: World, done: Any) -> int:
    """Wait for a condition; the disk may take its time."""
    async with asyncio.timeout(TIMEOUT_S):
        for number in itertools.count():
            if done():
                return number
            await asyncio.sleep(0)
    raise AssertionError


async def begun() -> tuple[World, Caller]:
    """A deletion of everything, half done."""
    world = await leader()
    deletion = propose(world, delete(b"\0", b"\0", prev_kv=True), Kind.DELETE_RANGE)
    await passes(world, lambda: len(world.machine.store._txn.changes) >= KEYS // 2)
    return world, deletion


@pytest.mark.interpreted
async def test_an_entry_under_way_holds_back_what_follows_and_nothing_else() -> None:
    world, deletion = await begun()
    applied = world.node.applied
    read, later = _Read(world), propose(world, put(b"new"), Kind.PUT)
    world.node.read(read)
    await passes(world, lambda: world.node.raw.raft.log.committed == applied + 2)
    # The log goes on: the put is committed, but not applied, and readers see what was before.
    assert (world.node.applied, deletion.outcome, later.outcome) == (applied, None, None)
    assert not world.node.applying.is_whole
    assert count(world) == KEYS
    assert world.machine.store.durable_index <= applied
    await passes(world, lambda: later.outcome is not None and read.found is not None)
    assert isinstance(deletion.outcome, Outcome)
    assert deletion.outcome.error is None
    assert read.found in (0, 1)  # the deletion is seen, the put perhaps
    assert count(world) == 1
    assert (world.node.applied, world.node.applying.is_whole) == (applied + 2, True)
    assert world.failures == []
    assert world.machine.reopened().store.applied_index == applied + 2


class _InOrder(Caller):
    """A caller that adds itself to those with an outcome."""

    def __init__(self, request: Any, order: list[Caller], identity: Identity, work: int = 0) -> None:
        super().__init__(request)
        self.identity, self.work = identity, work
        self._order = order

    def finish(self, outcome: Outcome) -> None:
        super().finish(outcome)
        self._order.append(self)


def _submit_long(world: World, order: list[Caller], count: int) -> list[Caller]:
    long: list[Caller] = []
    for number in range(count):
        request = delete(b"k%d" % number, b"k%d" % (number + 1))
        long.append(_InOrder(request, order, b"busy", LONG_WORK + 1))
        world.node.submit(Kind.DELETE_RANGE, request.SerializeToString(), long[-1], None)
    return long


async def test_a_short_entry_waits_for_one_long_entry_at_most() -> None:
    world, order = await leader(), list[Caller]()
    long = _submit_long(world, order, 3)
    short = _InOrder(put(b"short"), order, b"busy")
    world.node.submit(Kind.PUT, short.request.SerializeToString(), short, None)
    await passes(world, lambda: len(order) == 4)
    assert order == [long[0], short, *long[1:]]


@pytest.mark.interpreted
@pytest.mark.parametrize("is_alone", [True, False])
async def test_others_have_time_after_a_long_entry(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next long entry comes four times as much later as the last one took, if others wait."""
    world, order = await leader(), list[Caller]()
    clock = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(applying, "perf_counter", lambda: next(clock))
    long = _submit_long(world, order, 2)
    others = 0 if is_alone else 20
    for number in range(others):
        short = _InOrder(put(b"short%d" % number), order, b"other")
        world.node.submit(Kind.PUT, short.request.SerializeToString(), short, None)
        await passes(world, partial(lambda count: len(order) >= count, number + 2))
    if is_alone:
        await passes(world, lambda: order == long)
    assert [caller.outcome is None for caller in long] == [False, not is_alone]
    assert len(order) == 1 + (others or 1)


async def test_earlier_entries_are_answered_before_a_long_one() -> None:
    world = await leader()
    before = propose(world, put(b"before"), Kind.PUT)
    deletion = propose(world, delete(b"k", b"l"), Kind.DELETE_RANGE)
    await passes(world, lambda: before.outcome is not None)
    assert deletion.outcome is None
    await passes(world, lambda: deletion.outcome is not None)
    assert count(world) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("end", ["stop", "fatal"])
async def test_the_end_of_a_member_in_the_middle_leaves_the_entry_before(end: str) -> None:
    world, deletion = await begun()
    applied = world.node.applied
    if end == "stop":
        world.node.stop()
    else:
        world.node.fatal(errors.InvariantError("something else"))
    for _ in range(10):
        world.machine.store.commit()
        await asyncio.sleep(0)
    assert isinstance(deletion.outcome, errors.StoppedError)
    again = world.machine.reopened()
    assert again.store.applied_index <= applied
    # The database may have some of the log by then, but nothing of the deletion.
    assert again.store.range(b"\0", b"\0", count_only=True).count in (0, KEYS)
    assert again.store.revision <= KEYS + 1


@pytest.mark.interpreted
async def test_an_error_in_the_middle_stops_the_member_and_reaches_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = await begun()
    revision = world.machine.store.revision
    monkeypatch.setattr(world.machine.store._index, "tombstone", lambda key, revision: 1 // 0)
    await passes(world, lambda: world.node.stopped)
    assert "ZeroDivisionError" in str(world.failures[0])
    assert world.machine.reopened().store.revision <= revision


@pytest.mark.interpreted
async def test_a_snapshot_in_the_middle_replaces_the_entry() -> None:
    world, deletion = await begun()
    index = world.node.applied + 100
    world.node.applying.replaced(index)
    assert isinstance(deletion.outcome, errors.RequestTimeoutError)
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.node.applying.is_whole
    assert world.failures == []
    with pytest.raises(errors.InvariantError, match=f"entry {index} follows applied index {index}"):
        world.node.applying.take([Entry(1, index)])


async def test_small_entries_are_applied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying.Applying, "_slice", lambda *_: pytest.fail("nothing here takes long"))
    world = await leader()
    deletion = propose(world, delete(b"k0000", b"k%04d" % (applier.AT_ONCE_MAX - 1)), Kind.DELETE_RANGE)
    await world.turns()
    assert isinstance(deletion.outcome, Outcome)


@pytest.mark.interpreted
@pytest.mark.parametrize("error", [None, errors.MapFullError("it grows without readers"), errors.SpaceError("no room")])
async def test_entries_wait_for_a_database_that_is_far_behind(error, monkeypatch):
    # Requests of 9 KB that keep 100 values of 1.4 MB were applied faster than the database took these: 12 took 2 GB.
    is_full = type(error) is errors.SpaceError
    world = await leader()
    world.node.settings = replace(world.node.settings, unwritten_max_bytes=250)
    monkeypatch.setattr(applying, "ENTRIES_PER_LOOK", 1)
    store = world.machine.store
    commit, asked = store.commit, 0

    def note() -> None:
        nonlocal asked
        asked += 1

    commit()
    assert store.unwritten_bytes == 0
    monkeypatch.setattr(store, "commit", note)
    monkeypatch.setattr(store._overlay, "space_error", error)
    callers = [propose(world, put(b"new%d" % number, bytes(96)), Kind.PUT) for number in range(10)]
    if is_full:  # what makes room is among the entries
        await until(lambda: count(world) == KEYS + 10)
        return
    await until(lambda: asked > 1)
    assert count(world) == KEYS + 3
    assert store.unwritten_bytes == 300
    monkeypatch.setattr(store, "commit", commit)
    await until(lambda: all(isinstance(caller.outcome, Outcome) for caller in callers))
    assert count(world) == KEYS + 10
    assert world.failures == []


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", [Kind.PUT, Kind.TXN])
async def test_applying_is_bounded_per_turn(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of 1 ms each: many short ones, of one Ready or of several, are too long for a turn too."""
    now = 0.0
    monkeypatch.setattr(applying, "perf_counter", lambda: now)
    world = await leader()
    begin, took = world.node.applier.begin, 0

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal now, took
        now += 0.001
        took += 1
        return begin(*arguments, **options)

    monkeypatch.setattr(world.node.applier, "begin", slow)
    puts = [put(b"new%d" % number) for number in range(200)]
    if kind == Kind.PUT:
        callers = [propose(world, one, kind) for one in puts]
    else:
        txns = [rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=one)]) for one in puts]
        callers = [propose(world, one, kind) for one in txns]
    # What is no put may be much work: the clock is looked at after each.
    a_turn_max = applying.TURN_S / 0.001 + (applying.ENTRIES_PER_LOOK if kind == Kind.PUT else 1)
    turns = 0
    while not all(isinstance(caller.outcome, Outcome) for caller in callers):
        took = 0
        await asyncio.sleep(0)
        assert took <= a_turn_max
        assert world.node.applied >= KEYS, "what was applied is a unit, and noted"
        turns += 1
        assert turns < PASSES_MAX
    assert turns >= 200 / a_turn_max
    assert count(world) == KEYS + 200
    assert world.failures == []


@pytest.mark.interpreted
async def test_a_snapshot_replaces_what_a_turn_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "TURN_S", 0.0)
    monkeypatch.setattr(applying, "ENTRIES_PER_LOOK", 1)
    world = World((1,))
    world.node.raw.campaign()
    world.node._wake()
    await world.turns()
    callers = [propose(world, put(b"k%d" % number), Kind.PUT) for number in range(10)]
    await passes(world, lambda: callers[2].outcome is not None)
    index = world.node.applied + 100
    world.node.applying.replaced(index)
    await world.turns()
    assert [caller.outcome is None for caller in callers[4:]] == [True] * 6
    assert world.failures == []


@pytest.mark.interpreted
async def test_log_says_whose_entry_was_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(applying, "SLOW_S", 0.0)
    world, deletion = await begun()
    await passes(world, lambda: deletion.outcome is not None)
    assert sum(use.seconds for _, use in world.node.uses.figures()) > 0, "its time counts, too"
    (record,) = [one for one in caplog.records if "slow apply" in one.getMessage()]
    assert record.getMessage().startswith("slow apply: an entry (DELETE_RANGE) took ")
    assert record.getMessage().endswith("from 'member'")
