"""Locks, elections and STM on real servers: exclusion, fencing, waiting, loss, and member deaths."""

from __future__ import annotations

import asyncio

import pytest

from raftkv import errors
from raftkv.aio import FenceLost, LeaseLost, LockLost, LockNotFree, StatusError, TermLost, TxnConflict, connect, put
from raftkv.client.lock import Contender
from raftkv.client.rpc import methods
from raftkv.pb import lock_pb2
from tests.client.waiting import until


async def test_a_lock_excludes_and_fences(kv):
    inside = []
    fences = []

    async def work(number):
        async with kv.lock("name") as lock:
            assert inside == []
            inside.append(number)
            fences.append(lock.fence)
            await kv.put("shared", str(number), fence=lock)
            inside.remove(number)

    await asyncio.gather(*(work(number) for number in range(10)))
    assert fences == sorted(set(fences))
    assert len(fences) == 10
    assert await kv.count("name/", prefix=True) == 0


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("what", ["release", "block", "waiting"])
async def test_lock_or_term_is_given_back_while_its_task_is_cancelled(kv, monkeypatch, what, times):
    """Let the next one have it: with a lease of its owner's the key stayed, for as long as that lived."""
    may_leave, leaving, leave = asyncio.Event(), asyncio.Event(), Contender.leave

    async def late(place, timeout_s=None):
        leaving.set()
        await may_leave.wait()
        return await leave(place, timeout_s)

    async def work(lease):
        lock = kv.lock("name", lease=lease)
        async with lock:
            if what == "release":
                await lock.release()

    first, session = kv.lock("name"), await kv.session(ttl=600)
    if what == "waiting":
        await first.acquire()
    monkeypatch.setattr(Contender, "leave", late)
    task = asyncio.create_task(work(session))
    if what == "waiting":
        await until(lambda: _are_two(kv))
        task.cancel()
    await leaving.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    monkeypatch.setattr(Contender, "leave", leave)
    if what == "waiting":
        await first.release()
    may_leave.set()
    await (await kv.lock("name").acquire(timeout_s=10)).release()
    await session.close()


async def _are_two(kv):
    return await kv.count("name/", prefix=True) == 2


async def test_the_fence_of_a_lost_lock_stops_writes(kv):
    async def write():
        async with kv.lock("name") as lock:
            assert (await kv.get(lock.key)).create_revision == lock.fence
            await kv.put("x", "1", fence=lock)
            await kv.delete(lock.key)
            await kv.put("x", "2", fence=lock)

    with pytest.raises(LockLost, match="its key is gone, or belongs to another client") as raised:
        await write()
    assert raised.value.definite
    assert isinstance(raised.value, FenceLost)
    assert (await kv.get("x")).value == b"1"
    lock = await kv.lock("name").acquire()
    await kv.delete(lock.key)
    for write in (
        lambda: kv.delete("x", fence=lock),
        lambda: kv.txn(fence=lock).when(kv.version("x") == 99).then(put("x", "3")).commit(),
        lambda: kv.put("x", "4", fence=lock),
    ):
        with pytest.raises(LockLost):
            await write()
    assert (await kv.get("x")).value == b"1"
    assert not lock.held


async def test_a_fenced_txn_tells_its_own_conditions_from_the_fence(kv):
    async with kv.lock("name") as lock:
        done = await kv.txn(fence=lock).when(kv.version("x") == 1).then(put("x", "1")).commit()
        assert (done.succeeded, done.results) == (False, ())
        done = await kv.txn(fence=lock).when(kv.version("x") == 0).then(put("x", "1")).commit()
        assert done.succeeded
        assert (await kv.delete("x", fence=lock)).deleted == 1


async def test_a_key_that_was_taken_away_is_told_at_the_end(kv):
    with pytest.raises(LockLost):
        async with kv.lock("name") as lock:
            await kv.delete(lock.key)


@pytest.mark.parametrize("many", [2, 5])
async def test_lock_wanted_by_many_tasks_is_acquired_once(kv, many):
    lock = kv.lock("name")
    tried = await asyncio.gather(*(lock.acquire() for _ in range(many)), return_exceptions=True)
    assert [type(one) for one in tried if one is not lock] == [LockNotFree] * (many - 1)
    assert lock.held
    assert await kv.count("name/", prefix=True) == 1
    held, lease = lock.fence, lock.lease.id
    with pytest.raises(LockNotFree, match="make one for each thread or task"):
        await lock.try_acquire()
    assert (lock.fence, lock.lease.id) == (held, lease)
    await lock.release()
    assert await kv.count("name/", prefix=True) == 0
    assert lease not in await kv.leases()


async def test_waiting_has_its_limits(kv):
    async with kv.lock("name") as held:
        assert not await kv.lock("name").try_acquire()
        with pytest.raises(LockNotFree, match=r"^'name' is held or waited for by others for all of 0\.1 s$"):
            await kv.lock("name").acquire(timeout_s=0.1)
        with pytest.raises(LockNotFree, match="by this very object"):
            await held.acquire()
        with pytest.raises(LockNotFree, match="with the same lease"):
            await kv.lock("name", lease=held.lease).acquire()
        assert held.held
        assert await kv.count("name/", prefix=True) == 1
        waiting = asyncio.ensure_future(kv.lock("name").acquire())
        await in_line(kv, 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await kv.count("name/", prefix=True) == 1
    again = kv.lock("name")
    assert await again.try_acquire()
    await again.release()
    assert await again.try_acquire()
    await again.release()
    await again.release()


async def in_line(kv, contenders):
    async def all_there():
        return await kv.count("name/", prefix=True) == contenders

    await until(all_there)


@pytest.mark.parametrize(("what", "lost"), [("lock", LockLost), ("campaign", TermLost)])
async def test_a_waiter_whose_key_is_taken_away_is_told_while_the_first_still_has_it(kv, what, lost):
    async def enter():
        async with getattr(kv, what)("name"):
            pass

    async with getattr(kv, what)("name") as first:
        waiting = asyncio.ensure_future(enter())
        await in_line(kv, 2)
        second = (await kv.range("name/", prefix=True, sort_by="create_revision"))[1]
        await kv.delete(second.key)
        with pytest.raises(lost):
            await asyncio.wait_for(waiting, 90)
        await kv.put("x", "1", fence=first)


@pytest.mark.long
async def test_a_lost_lease_interrupts_holder_and_waiter(kv):
    holder_lease, waiter_lease = await kv.lease(ttl=2), await kv.lease(ttl=2)
    lock = kv.lock("name", lease=holder_lease)

    async def hold():
        async with lock:
            waiting = asyncio.ensure_future(kv.lock("name", lease=waiter_lease).acquire())
            await in_line(kv, 2)
            await kv.revoke(waiter_lease.id)
            with pytest.raises((LeaseLost, LockLost)):  # its key goes with its lease: either may be seen first
                await waiting
            await kv.revoke(holder_lease.id)
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost):
        await hold()
    assert not lock.held
    with pytest.raises(LockLost, match=r"^the lock or term is lost: it is not held$"):
        await kv.put("x", "1", fence=lock)


async def test_a_session_can_lock(kv):
    async with kv.session(ttl=10) as session, kv.lock("name", lease=session) as lock:
        assert lock.lease is session.lease
    async with kv.session(ttl=10) as session:
        async with kv.lock("name", lease=session):
            pass
        assert session.alive


async def test_servers_and_this_library_stand_in_one_line(kv):
    async with kv.lock("name") as lock:
        lease = await kv.lease(ttl=30)
        request = lock_pb2.LockRequest(name=kv.scope.space.key("name"), lease=lease.id)
        server_side = asyncio.ensure_future(kv.scope.core.call(methods.LOCK, request, timeout_s=30))
        await in_line(kv, 2)
        assert not server_side.done()
        ours = asyncio.ensure_future(kv.lock("name").acquire())
        await in_line(kv, 3)
    assert (await server_side).key.endswith(b"%x" % lease.id)
    assert not ours.done()
    await lease.revoke()
    assert (await ours).fence > lock.fence


@pytest.mark.long
async def test_locks_survive_members_that_die(three):
    """Several workers count under one lock while members are killed; each fenced write must see the one before."""
    inside = []
    counts = []

    async def work(rounds):
        async with connect(three.endpoints, timeout_s=10) as kv:
            for _ in range(rounds):
                async with kv.lock("name", ttl=10) as lock:
                    inside.append(lock.fence)
                    assert len(inside) == 1
                    item = await kv.get("count")
                    count = int(item.value) + 1 if item else 1
                    await put_surely(kv, "count", str(count), lock)
                    counts.append(count)
                    inside.clear()

    async def progress():
        wanted = min(len(counts) + 2, 18)
        await until(lambda: len(counts) >= wanted)

    async def kill_each():
        for member in three.members:
            await progress()
            await asyncio.to_thread(member.kill)
            await progress()
            await asyncio.to_thread(member.restart)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(work(6))
        group.create_task(kill_each())
    assert counts == list(range(1, 19))


async def put_surely(kv, key, value, fence):
    """Repeat a put of the same value until it is acknowledged."""
    while True:
        try:
            return await kv.put(key, value, fence=fence)
        except StatusError as error:
            if error.definite:
                raise


async def _away(place, timeout_s=None):
    raise errors.NoLeaderError


async def test_contender_that_could_not_leave_the_queue_sends_no_more_keep_alives(kv, monkeypatch):
    monkeypatch.setattr(Contender, "leave", _away)
    lock = await kv.lock("name").acquire()
    with pytest.raises(errors.NoLeaderError):
        await lock.release()
    assert not lock.lease.alive
    assert (await kv.lease_info(lock.lease.id)).ttl > 0


@pytest.mark.parametrize(("what", "next_step"), [("campaign", "leave"), ("lock", "enter")])
async def test_a_place_that_could_not_be_given_back_is_not_forgotten(kv, monkeypatch, what, next_step):
    """Its key lives as long as the lease of its owner: every other contender waits for it."""
    names = {"lock": ("acquire", "release"), "campaign": ("campaign", "resign")}[what]
    async with kv.session(ttl=600) as session:
        place = getattr(kv, what)("name", lease=session)
        enter, leave = (getattr(place, name) for name in names)
        await enter()
        first, give_back = place.fence, Contender.leave
        monkeypatch.setattr(Contender, "leave", _away)
        with pytest.raises(errors.NoLeaderError):
            await leave()
        with pytest.raises(FenceLost):
            place.check()
        monkeypatch.setattr(Contender, "leave", give_back)
        if next_step == "enter":
            await enter()
            assert place.fence > first
        await leave()
        assert await kv.count("name/", prefix=True) == 0


async def test_elections(kv):
    seen = []

    async def look():
        async for leader in kv.observe("e"):
            seen.append(leader.value)
            if leader.value == b"end":
                return

    looking = asyncio.ensure_future(look())
    assert await kv.leader("e") is None
    async with kv.campaign("e", b"one") as term:
        await until(lambda: b"one" in seen)
        assert (await kv.leader("e")).value == b"one"
        assert (await kv.leader("e")).create_revision == term.fence
        second = asyncio.ensure_future(kv.campaign("e", b"two").campaign())
        with pytest.raises(LockNotFree):
            await kv.campaign("e", b"three").campaign(timeout_s=0.1)
        await term.proclaim("uno")
        await kv.put("x", "1", fence=term)
        await until(lambda: b"uno" in seen)
        assert not second.done()
    with pytest.raises(TermLost):
        await term.proclaim("late")
    two = await second
    assert two.fence > term.fence
    await until(lambda: b"two" in seen)
    await kv.delete(two.key)
    with pytest.raises(TermLost):
        await two.proclaim("lost")
    assert not two.leads
    async with kv.campaign("e", b"end"):
        await asyncio.wait_for(looking, 90)
    assert seen == [b"one", b"uno", b"two", b"end"]


async def test_stm_moves_and_never_loses(kv):
    await kv.put_many({"a": "100", "b": "0"})

    async def move(tx):
        a, b = int(await tx.get("a")), int(await tx.get("b"))
        tx.put("a", str(a - 1))
        tx.put("b", str(b + 1))
        assert await tx.get("b") == b"%d" % (b + 1)
        return a

    results = await asyncio.gather(*(kv.stm(move) for _ in range(30)))
    assert sorted(results) == list(range(71, 101))
    assert ((await kv.get("a")).text, (await kv.get("b")).text) == ("70", "30")


async def test_stm_sees_one_revision_and_guards_intervals(kv):
    await kv.put_many({"s/1": "a", "s/2": "b"})
    runs = []

    async def total(tx):
        found = await tx.range("s/", prefix=True)
        if not runs:
            await kv.put("s/3", "c")  # a phantom: a key that was not there when the interval was read
        runs.append(found)
        assert await tx.get("s/3") == found.get(b"s/3")
        tx.put("s/sum", b"".join(found.values()))
        tx.delete("s/1")
        assert list(await tx.range("s/", prefix=True)) == [*(k for k in found if k != b"s/1"), b"s/sum"]

    await kv.stm(total)
    assert [len(found) for found in runs] == [2, 3]
    assert (await kv.get("s/sum")).value == b"abc"
    assert await kv.get("s/1") is None


async def test_stm_gives_up(kv):
    async def unlucky(tx):
        await tx.get("k")
        await kv.put("k", "again")
        tx.put("j", "v")

    with pytest.raises(TxnConflict, match="3 times in a row; nothing was written") as raised:
        await kv.stm(unlucky, retries=3)
    assert raised.value.definite
    assert await kv.get("j") is None

    async def only_reads(tx):
        value = await tx.get("k")
        await kv.put("k", "more")
        return value, await tx.get("j")

    assert await kv.stm(only_reads, retries=1) == (b"again", None)

    async def broken(tx):
        tx.put("j", "v")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await kv.stm(broken)
    assert await kv.get("j") is None
