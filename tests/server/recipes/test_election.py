"""Elections: leadership, proclamations, and observers."""

from __future__ import annotations

import asyncio
import tracemalloc
from itertools import pairwise

import pytest

from raftkv import errors
from raftkv.loop.fair import Identity
from raftkv.pb import election_pb2
from raftkv.replica.watch.stream import QUEUED_MAX_BYTES
from raftkv.rpc.status import Code, RpcError
from raftkv.server.recipes.local_client import CALLED_AT_ONCE, CONFIRMED_AT_ONCE, RESPONSE_BYTES
from tests.server.recipes.recipes import RecipeMember, quiet


async def _elected(member: RecipeMember, lease: int, value: bytes) -> election_pb2.LeaderKey:
    task = member.campaign(b"e", lease, value)
    await member.settle()
    return task.result().leader


async def test_campaigning_again_with_a_lease_that_is_gone_resigns(member: RecipeMember) -> None:
    member.put(b"e/a", b"1")
    task = member.campaign(b"e", 10, b"1")
    await member.settle()
    assert task.result().leader.rev == 2
    member.leases.ids.remove(10)
    task = member.campaign(b"e", 10, b"2")
    await member.settle()
    with pytest.raises(errors.LeaseNotFoundError):
        task.result()
    assert member.keys() == []


async def test_a_turn_tells_some_of_very_many_observers_of_a_new_leader(member: RecipeMember) -> None:
    observing = [member.observe(b"e") for _ in range(3 * CALLED_AT_ONCE)]
    await member.settle()
    member.put(b"e/a")

    def told() -> int:
        return sum(len(spectator.sent) for spectator, _ in observing)

    counts = [0]
    while counts[-1] < len(observing):
        await asyncio.sleep(0)
        counts.append(told())
    assert max(after - before for before, after in pairwise(counts)) <= CALLED_AT_ONCE
    for _, task in observing:
        task.cancel()


async def test_a_turn_lets_some_of_very_many_observers_begin_whose_read_was_confirmed(member: RecipeMember) -> None:
    """One round confirms all of them: 2,000 at once were a turn of 0.1 s."""
    member.put(b"e/a")
    observing = [member.observe(b"e") for _ in range(3 * CONFIRMED_AT_ONCE)]
    await quiet()
    member.confirm_reads()
    counts = [0]
    while counts[-1] < len(observing):
        await asyncio.sleep(0)
        counts.append(sum(len(spectator.sent) for spectator, _ in observing))
    assert max(after - before for before, after in pairwise(counts)) <= CONFIRMED_AT_ONCE
    for _, task in observing:
        task.cancel()


async def test_an_observer_that_comes_late_begins_with_the_present(member: RecipeMember) -> None:
    await _elected(member, 10, b"1")
    member.put(b"unrelated")
    spectator, task = member.observe(b"e")
    await member.settle()
    assert spectator.sent == [(3, b"e/a", b"1")]
    task.cancel()


async def test_observer_reads_only_leader_changes(member: RecipeMember, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = await _elected(member, 10, b"1")
    spectator, task = member.observe(b"e")
    await member.settle()
    looked: list[int] = []
    oldest = member.recipe.oldest

    def counted(prefix: bytes, queue: Identity, revision: int = 0) -> object:
        looked.append(revision)
        return oldest(prefix, queue, revision)

    monkeypatch.setattr(member.recipe, "oldest", counted)
    for key in (b"e/x", b"e/y", b"e/x"):
        member.put(key)
        await quiet()
    member.delete(b"e/y")
    await quiet()
    assert looked == []
    member.delete(leader.key)
    await quiet()
    assert looked == [7]
    assert spectator.sent[-1] == (7, b"e/x", b"")
    task.cancel()


async def test_a_leader_is_read_when_the_observer_has_room_for_it(member, monkeypatch):
    leader = await _elected(member, 10, b"1")
    spectator, task = member.observe(b"e")
    await member.settle()
    spectator.reads.clear()
    looked: list[int] = []
    oldest = member.recipe.oldest

    def counted(prefix: bytes, queue: Identity, revision: int = 0) -> object:
        looked.append(revision)
        return oldest(prefix, queue, revision)

    monkeypatch.setattr(member.recipe, "oldest", counted)
    revisions = [member.put(leader.key, b"%d" % number, lease=10) for number in range(3)]
    await member.settle()
    assert looked == []
    spectator.reads.set()
    await member.settle()
    assert looked == revisions
    assert [revision for revision, _, _ in spectator.sent[1:]] == revisions
    task.cancel()


async def test_calls_that_wait_keep_no_keys_and_values(member: RecipeMember) -> None:
    """10,000 of one connection had 1.4 MB each that no budget counted."""
    size_bytes, count = 100_000, 20
    for key, lease in ((b"e/" + b"a" * size_bytes, 10), (b"e/b", 11)):
        member.put(key, bytes(size_bytes), lease=lease)
    tracemalloc.start()
    observers = [member.observe(b"e") for _ in range(count)]
    waits = [member.lock(b"e", 11) for _ in range(count)]
    await member.settle()
    for spectator, _ in observers:
        assert len(spectator.sent.pop()[2]) == size_bytes
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < count * size_bytes / 2
    for task in (*waits, *(task for _, task in observers)):
        assert not task.done()
        task.cancel()


async def _slow_observer(member: RecipeMember, proclamations: int) -> list[tuple[int, bytes, bytes]]:
    """An observer that reads nothing until so much was proclaimed that it had to fall behind; what it is sent."""
    leader = await _elected(member, 10, b"0")
    spectator, task = member.observe(b"e")
    await member.settle()
    spectator.reads.clear()
    for number in range(1, proclamations + 1):
        member.put(leader.key, b"%d" % number * 20_000, lease=10)
        await quiet()
    if member.hub.unsynced_count != 1:
        raise AssertionError("the observer was expected to fall behind")
    member.store.compact(member.store.revision if proclamations > 100 else 1)
    spectator.reads.set()
    for _ in range(proclamations):
        await member.settle()
    task.cancel()
    return spectator.sent


async def test_an_observer_that_fell_behind_misses_nothing(member: RecipeMember) -> None:
    assert QUEUED_MAX_BYTES < 60 * RESPONSE_BYTES
    sent = await _slow_observer(member, 60)
    assert [revision for revision, _, _ in sent] == list(range(2, 63))
    assert [value[:2] for _, _, value in sent[1:4]] == [b"11", b"22", b"33"]


async def test_observer_with_compacted_history_continues_from_present(member: RecipeMember) -> None:
    sent = await _slow_observer(member, 101)
    assert len(sent) < 60
    assert sent[-1][0] == member.store.revision


async def test_an_observer_that_insists_on_a_leader_is_ended_without_one(member: RecipeMember) -> None:
    _, task = member.observe(b"e")
    await member.settle()
    member.guard.lose_leader()
    await quiet()
    with pytest.raises(RpcError) as ended:
        task.result()
    assert (ended.value.code, ended.value.text) == (Code.UNAVAILABLE, "etcdserver: no leader")


async def test_a_stopping_member_ends_observers_and_leaves_no_watch(member: RecipeMember) -> None:
    _, task = member.observe(b"e")
    await member.settle()
    assert member.hub.watcher_count == 1
    member.recipe.close()
    await quiet()
    with pytest.raises(RpcError) as ended:
        task.result()
    assert ended.value.code == Code.UNAVAILABLE
    assert member.hub.watcher_count == 0
