"""Leases and sessions on real servers: kept, lost, reported, established again."""

from __future__ import annotations

import asyncio
import signal

import pytest

from raftkv import errors
from raftkv.aio import LeaseLost, connect, put
from raftkv.client import lease
from tests.client.waiting import until

TTL_S = 5
"""A lease that a test revokes is missed at its next keep-alive. A shorter one would also end on a busy machine."""


async def test_a_lease_and_its_keys(kv):
    async with kv.lease(ttl=30) as lease:
        await kv.put("k", "v", lease=lease)
        await kv.txn().then(put("t", "v", lease=lease)).commit()
        assert (await kv.get("k")).lease == lease.id
        info = await lease.info(keys=True)
        assert (info.id, info.granted_ttl, sorted(info.keys)) == (lease.id, 30, [b"k", b"t"])
        assert 0 < lease.remaining_s <= 30
        assert lease.id in await kv.leases()
        other = await kv.lease(ttl=30, id=lease.id + 1)
        with pytest.raises(errors.LeaseExistsError):
            await kv.lease(ttl=30, id=other.id)
        await kv.revoke(other.id)
    assert await kv.get("k") is None
    assert not lease.lost.is_set()
    assert (await kv.lease_info(lease.id)).ttl == -1
    with pytest.raises(LeaseLost, match=rf"^lease {lease.id:x} is lost: it was revoked$"):
        await kv.put("k", "v", lease=lease)
    with pytest.raises(errors.LeaseNotFoundError):
        await kv.revoke(lease.id)


@pytest.mark.parametrize("what", ["session", "lease", "endpoint"])
async def test_lease_or_session_ends_while_its_task_is_cancelled(kv, what):
    """End it all the same: a session lived on, with its keys, as long as its client; a lease until its TTL."""
    before, ending, opened = set(await kv.leases()), asyncio.Event(), []

    async def work():
        made = {
            "session": lambda: kv.session(ttl=600), "lease": lambda: kv.lease(ttl=600),
            "endpoint": lambda: kv.endpoints("greeter").register("10.0.0.1:80", ttl=600),
        }[what]()  # fmt: skip
        async with made as opened_now:
            opened.append(opened_now)
            await kv.put("k", "v", lease=opened_now)
            ending.set()

    task = asyncio.create_task(work())
    await ending.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: _are(kv, before))
    assert await kv.get("k") is None
    assert opened[0].id not in kv.scope.keeper._leases


async def _are(kv, leases):
    return set(await kv.leases()) <= leases


async def test_a_lease_that_many_ask_for_at_once_is_granted_once(kv):
    before = set(await kv.leases())
    lease, session = kv.lease(ttl=30), kv.session(ttl=30)
    await asyncio.gather(*(lease.grant() for _ in range(5)), *(session.establish() for _ in range(5)))
    assert set(await kv.leases()) - before == {lease.id, session.id}
    await lease.revoke()
    await session.close()
    assert set(await kv.leases()) - before == set()


async def test_waiting_for_a_session_has_its_limit(kv):
    async with kv.session(ttl=30) as session:
        await session.established(timeout_s=30)
        with pytest.raises(TimeoutError, match=r"^the session was not established within 0.01 s$"):
            await session.established(2, timeout_s=0.01)


@pytest.mark.long
async def test_leases_are_kept_alive(kv):
    leases = [await kv.lease(ttl=10) for _ in range(20)]
    for _ in range(2):
        await asyncio.gather(*(renewed(lease, lease.remaining_s) for lease in leases))
    assert all(lease.alive for lease in leases)
    assert {lease.id for lease in leases} <= set(await kv.leases())


@pytest.mark.long
async def test_a_grace_and_patience_change_nothing_for_an_owner_that_is_there(kv):
    """etcd does not know of them; raftkv does."""
    lease = await kv.lease(ttl=10, disconnect_grace_s=0.1, patient=True)
    await kv.put("k", "v", lease=lease)
    for _ in range(2):
        await renewed(lease, lease.remaining_s)
    assert (await kv.get("k")).lease == lease.id
    await lease.revoke()
    assert await kv.get("k") is None
    assert not lease.alive


async def test_lease_loss_reaches_every_user_of_the_lease(kv):
    told = []
    lease = await kv.lease(ttl=TTL_S, on_lost=told.append)
    await kv.revoke(lease.id)  # by another client, as far as the lease can know
    async with asyncio.timeout(90):
        await lease.lost.wait()
    assert told == [lease]
    text = rf"^lease {lease.id:x} is lost: the cluster no longer knows it$"
    for relied in (
        lambda: kv.put("k", "v", lease=lease),
        lambda: kv.put_many({"k": "v"}, lease=lease),
        lambda: kv.txn().then(put("k", "v", lease=lease)).commit(),
    ):
        with pytest.raises(LeaseLost, match=text) as raised:
            await relied()
        assert raised.value.definite
    late = []
    lease.on_lost(late.append)
    assert late == [lease]


async def test_a_write_finds_the_loss_first(kv):
    told = []
    lease = await kv.lease(ttl=60, on_lost=told.append)
    await kv.revoke(lease.id)
    with pytest.raises(LeaseLost):
        await kv.put("k", "v", lease=lease)
    assert told == [lease]


async def test_a_loss_interrupts_the_block(kv):
    async def interrupted():
        async with kv.lease(ttl=2) as lease:
            await kv.revoke(lease.id)
            await asyncio.Event().wait()

    async def told_at_the_end():
        async with kv.lease(ttl=2, interrupt=False) as lease:
            await kv.revoke(lease.id)
            await lease.lost.wait()

    for block in (interrupted, told_at_the_end):
        with pytest.raises(LeaseLost):
            await block()
    assert asyncio.current_task().cancelling() == 0


async def test_a_lease_that_was_never_granted(kv):
    with pytest.raises(LeaseLost, match="never granted"):
        await kv.put("k", "v", lease=kv.lease(ttl=5))
    with pytest.raises(ValueError, match="must be positive"):
        kv.lease(ttl=0)


async def test_closing_the_client_loses_its_leases(member):
    async with connect(member.endpoints) as kv:
        lease = await kv.lease(ttl=5)
    assert lease.lost.is_set()
    with pytest.raises(LeaseLost, match="the client was closed"):
        lease.check()


@pytest.mark.long
async def test_a_lease_outlives_its_members(three):
    """Every member in turn is killed; the lease of a client that looks for the next one in time is not lost."""
    async with connect(three.endpoints, timeout_s=30) as kv, kv.lease(ttl=15) as lease:
        await kv.put("k", "v", lease=lease)
        for member in three.members:
            await asyncio.to_thread(member.kill)
            before = lease.remaining_s
            await renewed(lease, before)
            await asyncio.to_thread(member.restart)
        assert (await kv.get("k")).lease == lease.id


async def renewed(lease, before_s):
    """Wait for the next renewal that is confirmed: only that moves the lease's deadline on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + before_s

    def moved_on():
        lease.check()
        return loop.time() + lease.remaining_s > deadline + 0.001

    await until(moved_on)


@pytest.mark.long
async def test_without_a_cluster_a_lease_is_lost_in_time(member):
    """No member answers any more: the lease is over when its TTL has passed on its own clock."""
    async with connect(member.endpoints) as kv:
        lease = await kv.lease(ttl=2)
        try:
            await asyncio.to_thread(member.members[0].kill)
            await lease.lost.wait()
            assert lease.remaining_s == 0
            text = rf"^lease {lease.id:x} is lost: no keep-alive was confirmed within 2 s"
            with pytest.raises(LeaseLost, match=text):  # a reason follows, if there was time to try
                lease.check()
        finally:
            await asyncio.to_thread(member.members[0].restart)


@pytest.mark.parametrize(
    "make",
    [
        lambda kv: kv.lease(3600),
        lambda kv: kv.session(3600),
        lambda kv: kv.lock("x", ttl=3600),
        lambda kv: kv.campaign("y", ttl=3600),
    ],
    ids=["lease", "session", "lock", "campaign"],
)
def test_ctrl_c_in_a_block_is_not_held_up_by_a_cluster_that_is_away(member, monkeypatch, make):
    monkeypatch.setattr(lease, "FAREWELL_S", 0.05)
    server = member.members[0].process

    async def scenario():
        async with connect(member.endpoints, timeout_s=3600) as kv, make(kv):
            server.send_signal(signal.SIGSTOP)
            raise asyncio.CancelledError("Ctrl-C")

    try:
        with pytest.raises(asyncio.CancelledError, match="Ctrl-C"):
            asyncio.run(asyncio.wait_for(scenario(), 90))
    finally:
        server.send_signal(signal.SIGCONT)


async def test_a_session_comes_back_with_its_keys(kv):
    told = []
    session = kv.session(
        ttl=TTL_S,
        on_lost=lambda session: told.append(("lost", session.generation)),
        on_established=lambda session: told.append(("established", session.generation)),
    )
    with pytest.raises(LeaseLost, match="never established"):
        await kv.put("early", "v", lease=session)
    async with session:
        await session.keep("kept", "1")
        await session.keep("dropped", "1")
        await session.drop("dropped")
        await kv.put("bound", "2", lease=session)
        first = session.id
        await kv.revoke(first)
        async with asyncio.timeout(90):
            await session.established(2)
        assert told == [("lost", 1), ("established", 2)]
        assert session.id != first
        assert (await kv.get("kept")).lease == session.id
        assert await kv.get("bound") is None
        assert await kv.get("dropped") is None
    assert await kv.get("kept") is None
    assert told == [("lost", 1), ("established", 2)]


async def test_session_drops_no_key_that_another_client_has_put_since(kv):
    async with kv.session(ttl=TTL_S) as session, kv.session(ttl=60) as other:
        for name in ("plain", "of another session"):
            await session.keep(name, "1")
        await kv.put("plain", "2")
        await other.keep("of another session", "2")
        for name in ("plain", "of another session"):
            await session.drop(name)
            assert (await kv.get(name)).value == b"2"


@pytest.mark.long
async def test_session_that_comes_back_takes_no_key_that_another_client_has_put_since(kv, caplog):
    async with kv.session(ttl=TTL_S) as session, kv.session(ttl=60) as other:
        for name in ("mine", "plain", "of another session"):
            await session.keep(name, "1")
        await kv.put("plain", "2")
        await other.keep("of another session", "2")
        for generation in (2, 3):
            await kv.revoke(session.id)
            async with asyncio.timeout(90):
                await session.established(generation)
            found = {item.key: (item.value, item.lease) for item in await kv.range("", prefix=True)}
            assert found == {b"mine": (b"1", session.id), b"plain": (b"2", 0), b"of another session": (b"2", other.id)}
        await session.keep("plain", "3")  # asked for again, it is this session's again
        assert (await kv.get("plain")).lease == session.id
    assert [record.args for record in caplog.records if "no longer maintains it" in record.msg] == [
        (b"plain",),
        (b"of another session",),
    ]


def hold_puts_of(session):
    """Have the session's puts wait after they were done: returns what is set at the first, and what lets them go on."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    put_now = session._put_again

    async def put_and_wait(*args):
        done = await put_now(*args)
        begun.set()
        await go_on.wait()
        return done

    session._put_again = put_and_wait
    return begun, go_on


@pytest.mark.long
async def test_keys_kept_and_dropped_while_a_session_comes_back_count(kv):
    async with kv.session(ttl=TTL_S) as session:
        for name in ("changed", "dropped", "last"):
            await session.keep(name, "1")
        begun, go_on = hold_puts_of(session)
        await kv.revoke(session.id)
        async with asyncio.timeout(90):
            await begun.wait()
        for name in ("changed", "late"):
            with pytest.raises(LeaseLost):
                await session.keep(name, "2")
        await session.drop("dropped")
        go_on.set()
        async with asyncio.timeout(90):
            await session.established(2)
        found = {item.key: (item.value, item.lease == session.id) for item in await kv.range("", prefix=True)}
        assert found == {b"changed": (b"2", True), b"last": (b"1", True), b"late": (b"2", True)}


@pytest.mark.long
async def test_a_session_that_is_closed_while_it_comes_back_leaves_nothing(kv):
    session = await kv.session(ttl=TTL_S)
    await session.keep("kept", "1")
    begun, _ = hold_puts_of(session)
    await kv.revoke(session.id)
    async with asyncio.timeout(90):
        await begun.wait()
    await session.close()
    assert await kv.get("kept") is None


async def test_a_session_whose_keys_cannot_be_put_keeps_no_lease_of_an_attempt(kv):
    async with kv.session(ttl=TTL_S) as session:
        await session.keep("kept", "1")
        put_now, failures = session._put_again, []

        async def put_in_vain(name, value, lease, own):
            if len(failures) == 3:
                return await put_now(name, value, lease, own)
            failures.append(lease)
            if len(failures) == 2:
                await put_now(name, value, lease, own)  # it came through, and its answer was lost
            raise errors.NoSpaceError()

        session._put_again = put_in_vain
        await kv.revoke(session.id)
        async with asyncio.timeout(90):
            await session.established(2)
        assert len(failures) == 3
        assert not any(lease.alive for lease in failures)
        assert (await kv.get("kept")).lease == session.id
