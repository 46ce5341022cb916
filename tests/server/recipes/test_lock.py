"""Locks: the order of holders, and callers that must not get the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply import txn
from raftkv.apply.applier import AT_ONCE_MAX
from raftkv.loop import scheduler
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import Code
from raftkv.server.recipes.local_client import BEGUN_AT_ONCE, BYTES_AS_A_TXN, CALLED_AT_ONCE, KEYS_AT_ONCE, refusal
from raftkv.server.recipes.lock import NAMES_IN_A_TXN
from tests.server.recipes.recipes import SIZE_MAX_BYTES, RecipeMember, quiet


async def test_holders_follow_in_the_order_they_came_and_their_tokens_rise(member: RecipeMember) -> None:
    first = member.lock(b"n", 10)
    await member.settle()
    waiting = []
    for lease in (12, 11):
        waiting.append(member.lock(b"n", lease))
        await member.settle()
    tokens = [first.result().create_revision]
    for task, key in zip(waiting, (b"n/a", b"n/c"), strict=True):
        assert not task.done()
        revision = member.delete(key)
        await member.settle()
        assert task.result().header.revision == revision
        tokens.append(task.result().create_revision)
    assert tokens == [2, 3, 4]
    assert waiting[1].result().key == b"n/b"


@pytest.mark.parametrize("begin", ["lock", "campaign"])
async def test_a_name_that_no_txn_can_have_often_enough_is_refused_before_one_is_made(member, begin):
    """Seven copies of 1.4 MB, and as many of each while they were put together, took 30 ms of a turn."""

    def enter(name: bytes) -> asyncio.Task[Any]:
        return member.lock(name, 10) if begin == "lock" else member.campaign(name, 10, b"v")

    refused = enter(b"n" * (SIZE_MAX_BYTES - 100))
    await quiet()
    with pytest.raises(errors.RequestTooLargeError):
        refused.result()
    taken = enter(b"n" * (SIZE_MAX_BYTES // NAMES_IN_A_TXN - 100))
    await member.settle()
    assert taken.result().header.revision


async def test_a_release_wakes_the_next_alone(member: RecipeMember) -> None:
    tasks = []
    for lease in (10, 11, 12):
        tasks.append(member.lock(b"n", lease))
        await member.settle()
    assert [len(member.hub._on_change[key]) for key in (b"n/a", b"n/b", b"n/c")] == [1, 2, 1]
    member.delete(b"n/a")
    await quiet()
    assert len(member.node.reading) == 1  # the one that is first now asks whether it is
    member.confirm_reads()
    await quiet()
    assert [task.done() for task in tasks] == [True, True, False]
    tasks[2].cancel()


@pytest.mark.parametrize("meanwhile", ["nothing", "the one before leaves", "it leaves itself"])
async def test_a_very_long_queue_is_looked_through_in_slices(member, meanwhile, monkeypatch):
    # 200,000 keys below the name of a lock: each look for the one before held the loop for half a second.
    for name in ("TURN_S", "SLICE_S", "INLINE_S"):
        monkeypatch.setattr(scheduler, name, 1e-9)
    keys = [b"n/old%04d" % number for number in range(10 * KEYS_AT_ONCE)]
    for key in keys:
        member.put(key)
    monkeypatch.setattr(member.recipe, "find", _of_few(member.recipe.find))
    task = member.lock(b"n", 10)
    await quiet()
    member.apply()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(member.recipe.responder.slices) == 1
    # The found entry may be gone by then: a new waiter would never be told.
    if meanwhile == "the one before leaves":
        member.delete(keys.pop())
    elif meanwhile == "it leaves itself":
        member.delete(b"n/a")
    await _looked()
    await member.settle()
    if meanwhile == "it leaves itself":
        with pytest.raises(errors.SessionExpiredError):
            await task
        return
    await _looked()
    assert not task.done()
    assert [len(member.hub._on_change.get(key, ())) for key in (keys[-1], b"n/a")] == [1, 1]
    member.write(request_delete_range=rpc_pb2.DeleteRangeRequest(key=b"n/old", range_end=b"n/ole"))
    await member.settle()
    await _looked()
    await member.settle()
    assert task.result().key == b"n/a"


async def _looked() -> None:
    """Let what is looked for in slices be found."""
    for _ in range(100):
        await asyncio.sleep(0)


def _of_few(find: Callable[[rpc_pb2.RangeRequest], Any]) -> Callable[[rpc_pb2.RangeRequest], Any]:
    def found(request: rpc_pb2.RangeRequest) -> Any:
        assert not request.range_end, "a long read at once"
        return find(request)

    return found


async def test_waiters_of_one_key_are_woken_in_slices(member: RecipeMember) -> None:
    """One lease is enough for all of them, and each looks at the store when it is woken."""
    member.lock(b"n", 10)
    await member.settle()
    waiting = [member.lock(b"n", 11) for _ in range(3 * CALLED_AT_ONCE)]
    await member.settle()
    member.delete(b"n/a")
    woken: list[int] = []
    while len(member.node.reading) < len(waiting):
        before = len(member.node.reading)
        await asyncio.sleep(0)
        woken.append(len(member.node.reading) - before)
    assert max(woken) <= CALLED_AT_ONCE
    await member.settle()
    assert {task.result().key for task in waiting} == {b"n/b"}


@pytest.mark.parametrize("name", [b"n", b"n" * 15 * BYTES_AS_A_TXN], ids=["short", "long"])
async def test_a_turn_makes_some_of_very_many_entries_whose_leases_were_granted_together(member, name):
    """An entry's txn has the name seven times: 480 names of 60 KB were a turn of 0.07 s."""
    count = 2 * BEGUN_AT_ONCE
    locks = [member.lock(name + b"%d" % number, 0) for number in range(count)]
    made: list[int] = []
    while len(member.node.proposed) < count:
        before = len(member.node.proposed)
        await asyncio.sleep(0)
        made.append(len(member.node.proposed) - before)
    assert max(made) <= BEGUN_AT_ONCE // (len(name) // BYTES_AS_A_TXN + 1) + 1
    await member.settle()
    assert all(task.done() for task in locks)


async def test_a_turn_deletes_some_of_very_many_entries_whose_waiters_leave_together(member: RecipeMember) -> None:
    """A connection had 480 of them, with names of 60 KB: a turn of 0.08 s."""
    name = b"n" * 15 * BYTES_AS_A_TXN
    member.lock(name, 10)
    await member.settle()
    waiting = [member.lock(name, 0) for _ in range(BEGUN_AT_ONCE)]
    await member.settle()
    for task in waiting:
        task.cancel()
    made: list[int] = []
    while len(member.node.proposed) < len(waiting):
        before = len(member.node.proposed)
        await asyncio.sleep(0)
        made.append(len(member.node.proposed) - before)
    assert max(made) <= BEGUN_AT_ONCE // 16 + 1
    await member.settle()
    assert member.keys() == [name + b"/a"]


async def _waiter(member: RecipeMember) -> asyncio.Task[object]:
    """A waiter with lease 11 behind the holder with lease 10."""
    holder = member.lock(b"n", 10)
    await member.settle()
    assert holder.done()
    waiter = member.lock(b"n", 11)
    await member.settle()
    assert not waiter.done()
    return waiter


async def test_a_lease_that_ends_behind_the_last_wait_is_noticed(member: RecipeMember) -> None:
    """etcd issue 11456: the holder is gone here, but what this member has not applied yet is the waiter's own end."""
    waiter = await _waiter(member)
    member.delete(b"n/a")
    await quiet()
    assert len(member.node.reading) == 1
    assert not waiter.done()
    member.delete(b"n/b")  # what the quorum knows comes before the read is confirmed
    member.confirm_reads()
    await member.settle()
    with pytest.raises(errors.SessionExpiredError):
        waiter.result()


async def test_a_waiter_outlives_its_leader(member: RecipeMember) -> None:
    waiter = await _waiter(member)
    member.delete(b"n/a")
    for error in (errors.RequestTimeoutError(), errors.WaitAppliedTimeoutError()):
        await quiet()
        member.fail_reads(error)
    await quiet()
    assert not waiter.done()
    await member.settle()
    assert waiter.done()
    assert waiter.exception() is None


async def test_key_of_caller_that_left_early_is_deleted(member: RecipeMember) -> None:
    task = member.lock(b"n", 10)
    await quiet()
    task.cancel()
    await quiet()
    member.apply()
    assert member.keys() == [b"n/a"]
    await member.settle()
    assert member.keys() == []


@pytest.mark.interpreted
@pytest.mark.parametrize("leaves", [False, True])
async def test_entry_whose_queue_cannot_be_read_is_refused_and_taken_back(member, leaves, monkeypatch):
    """A user who may write below a name made its locks fail with an internal error and leave entries behind."""

    def compacted(*arguments: Any, **options: Any) -> Any:
        raise errors.RequestTimeoutError
        yield

    monkeypatch.setattr(txn, "read_answer", compacted)
    for number in range(AT_ONCE_MAX + 1):
        member.put(b"n/%04d" % number)
    task = member.lock(b"n", 10)
    await quiet()
    if leaves:
        task.cancel()
        await quiet()
    member.apply()
    assert member.store.get(b"n/a") is not None, "it was made"
    await member.settle()
    assert member.store.get(b"n/a") is None
    if not leaves:
        with pytest.raises(errors.RequestTimeoutError):
            task.result()


async def test_taking_back_spares_a_lock_that_was_held_before(member: RecipeMember) -> None:
    first = member.lock(b"n", 10)
    await member.settle()
    again = member.lock(b"n", 10)
    await quiet()
    again.cancel()
    await member.settle()
    assert first.done()
    assert member.keys() == [b"n/a"]


async def test_taking_back_is_tried_until_it_is_decided(member: RecipeMember) -> None:
    waiter = await _waiter(member)
    waiter.cancel()
    await quiet()
    for _ in range(3):
        ((_, _, lost),) = member.node.proposed
        member.node.proposed.clear()
        lost.fail(errors.RequestTimeoutError())
        await quiet()
    await member.settle()
    assert member.keys() == [b"n/a"]


async def test_a_stopping_member_sends_waiters_away(member: RecipeMember) -> None:
    waiter = await _waiter(member)
    member.recipe.close()
    await quiet()
    with pytest.raises(errors.StoppedError):
        waiter.result()
    late = member.lock(b"n", 12)
    await member.settle()
    with pytest.raises(errors.StoppedError):
        late.result()


async def test_no_watcher_stays_behind(member: RecipeMember) -> None:
    waiter = await _waiter(member)
    member.delete(b"n/a")
    await member.settle()
    assert waiter.done()
    assert not member.hub._on_change


def test_refusals_are_passed_on_as_text_and_unavailability_as_such() -> None:
    assert refusal(errors.LeaseNotFoundError()).code == Code.UNKNOWN
    assert refusal(errors.NoSpaceError()).code == Code.UNKNOWN
    assert refusal(errors.StoppedError()).code == Code.UNAVAILABLE
    assert refusal(errors.NoLeaderError()).text == "etcdserver: no leader"
