"""The lighthouse on a real cluster: daemons side by side, replicas that come and go, answers that cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from raftkv.aio import Client, connect
from raftkv.client.errors import from_status
from raftkv.errors import UNAVAILABLE, ConfigError, PermissionDeniedError
from raftkv.integrations.torchft.job import Job, Timing
from raftkv.integrations.torchft.lighthouse import HEARTBEAT, QUORUM, Lighthouse, LighthouseConfig
from raftkv.integrations.torchft.rules import (
    QUORUM_ID_MAX,
    WAITING_MAX,
    JobKeys,
    MemberRecord,
    QuorumRecord,
    Rules,
    make_ask,
)
from raftkv.pb import torchft_pb2
from raftkv.rpc import Channel, RpcError
from tests.spoiled import spoiled

DEADLINE_S = 120.0
JOB = "job"


class Replica:
    """One replica: heartbeats on a connection of its own until it dies."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.channel = Channel(f"127.0.0.1:{port}")
        self.step = 0
        self._beats = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=self.name).SerializeToString()
        while True:
            try:
                await self.channel.unary(HEARTBEAT, request, 5.0)
            except RpcError:
                pass  # the daemon may be gone for a while
            await asyncio.sleep(0.05)

    async def quorum(self, **fields: Any) -> torchft_pb2.Quorum:
        self.step += 1
        member = torchft_pb2.QuorumMember(replica_id=self.name, step=self.step, **fields)
        request = torchft_pb2.LighthouseQuorumRequest(requester=member).SerializeToString()
        answer = await self.channel.unary(QUORUM, request, DEADLINE_S)
        return torchft_pb2.LighthouseQuorumResponse.FromString(answer).quorum

    async def die(self) -> None:
        self.freeze()
        await self.channel.close()

    def freeze(self) -> None:
        self._beats.cancel()


class Stage:
    """A cluster's client, daemons and replicas; all end with the test."""

    def __init__(self, endpoints: list[str], kv: Client) -> None:
        self.kv = kv
        self.daemons: list[tuple[Lighthouse, asyncio.Task[None], Client]] = []
        self.replicas: list[Replica] = []
        self._endpoints = endpoints

    async def daemon(
        self, *, min_replicas: int = 2, timeout_s: float = 30.0, join_timeout_s: float = 60.0, lease_ttl_s: int = 5
    ) -> int:
        """Start one; returns its port."""
        kv = connect(self._endpoints)
        config = LighthouseConfig(
            rules=Rules(min_replicas, join_timeout_s),
            timing=Timing(heartbeat_timeout_s=timeout_s),
            lease_ttl_s=lease_ttl_s,
        )
        lighthouse = Lighthouse(kv, config)
        ((_, port),) = await lighthouse.listen("127.0.0.1", 0, JOB)
        self.daemons.append((lighthouse, asyncio.ensure_future(lighthouse.run()), kv))
        return port

    async def stop(self, index: int) -> None:
        _, task, kv = self.daemons.pop(index)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kv.close()

    def replica(self, name: str, port: int) -> Replica:
        self.replicas.append(Replica(name, port))
        return self.replicas[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  the objects watched have no events for tests
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.die()
        while self.daemons:
            await self.stop(-1)


@pytest.fixture
@asynccontextmanager
async def stage(raftkv_cluster: Any) -> AsyncIterator[Stage]:
    """A cluster that has no keys."""
    async with connect(raftkv_cluster.endpoints) as kv:
        made = Stage(raftkv_cluster.endpoints, kv)
        try:
            yield made
        finally:
            await made.close()


def names(quorum: torchft_pb2.Quorum) -> str:
    return "".join(member.replica_id for member in quorum.participants)


async def together(*replicas: Replica, **fields: Any) -> torchft_pb2.Quorum:
    """One step of all; they got the same answer."""
    quorums = await asyncio.gather(*(replica.quorum(**fields) for replica in replicas))
    assert len({quorum.SerializeToString() for quorum in quorums}) == 1
    return quorums[0]


async def joined(newcomer: Replica, *others: Replica) -> torchft_pb2.Quorum:
    """Steps of the others until one is with the newcomer: a quorum that has lost no replica waits for none."""
    joining = asyncio.ensure_future(newcomer.quorum())
    while newcomer.name not in names(quorum := await together(*others)):
        assert not joining.done()
    assert (await joining) == quorum
    return quorum


async def test_members_are_told_all_that_they_have_said(stage: Stage):
    port = await stage.daemon()
    a, b = stage.replica("a", port), stage.replica("b", port)
    quorum = await together(a, b, address="http://a", data='{"x": 1}', reconfigure_handle="h")
    assert (quorum.quorum_id, names(quorum)) == (1, "ab")
    member = quorum.participants[1]
    assert (member.address, member.data, member.reconfigure_handle, member.step) == ("http://a", '{"x": 1}', "h", 1)
    assert quorum.created.seconds > 0


async def test_a_step_of_the_same_members_writes_nothing(stage: Stage):
    port = await stage.daemon()
    a, b = stage.replica("a", port), stage.replica("b", port)
    first = await together(a, b)
    before = (await stage.kv.range("x")).revision
    for step in range(2, 6):
        quorum = await together(a, b)
        assert (quorum.quorum_id, quorum.participants[0].step) == (first.quorum_id, step)
    assert (await stage.kv.range("x")).revision == before
    assert (await together(a, b, commit_failures=1)).quorum_id == first.quorum_id + 1
    assert (await together(a, b)).quorum_id == first.quorum_id + 1


@pytest.mark.long
async def test_a_closed_connection_is_a_death_and_silence_is_one_later(stage: Stage):
    port = await stage.daemon(timeout_s=3.0)
    a, b, c, d = (stage.replica(name, port) for name in "abcd")
    await stage.until(lambda: len(stage.daemons[0][0].jobs[JOB].roster.replicas) == 4)
    first = await together(a, b, c, d)
    assert names(first) == "abcd"
    survivors = [asyncio.ensure_future(replica.quorum()) for replica in (a, b, c)]
    await d.die()
    second = (await asyncio.gather(*survivors))[0]
    assert (names(second), second.quorum_id) == ("abc", first.quorum_id + 1)
    c.freeze()
    third = await together(a, b)
    assert (names(third), third.quorum_id) == ("ab", second.quorum_id + 1)


async def test_replica_that_withdrew_is_in_no_quorum(stage: Stage):
    port = await stage.daemon()
    a, b = stage.replica("a", port), stage.replica("b", port)
    job = stage.daemons[0][0].jobs[JOB]
    waiting = a.channel.unary(QUORUM, _ask("a"), DEADLINE_S)
    await stage.until(lambda: "a" in job.roster.asks())
    waiting.cancel()
    await stage.until(lambda: not job.roster.asks())
    waits = asyncio.ensure_future(b.quorum())
    await stage.until(lambda: "b" in job.roster.asks())
    quorum = await a.quorum()
    assert names(quorum) == "ab"
    assert (await waits).quorum_id == quorum.quorum_id


def _ask(name: str) -> bytes:
    member = torchft_pb2.QuorumMember(replica_id=name, step=1)
    return torchft_pb2.LighthouseQuorumRequest(requester=member).SerializeToString()


async def test_invalid_request_is_refused(stage: Stage):
    replica = stage.replica("a", await stage.daemon())
    for path, body in ((QUORUM, b""), (QUORUM, _ask("")), (HEARTBEAT, b""), (QUORUM, b"\xff")):
        with pytest.raises(RpcError, match=r"requester|replica_id|not a message"):
            await replica.channel.unary(path, body, DEADLINE_S)


async def test_so_many_wait_for_the_quorum_of_a_replica_and_no_more(stage: Stage):
    replica = stage.replica("a", await stage.daemon())
    waiting = [asyncio.ensure_future(replica.channel.unary(QUORUM, _ask("a"), DEADLINE_S)) for _ in range(WAITING_MAX)]
    with pytest.raises(RpcError, match="wait for the quorum of this replica already"):
        await replica.channel.unary(QUORUM, _ask("a"), DEADLINE_S)
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_daemons_side_by_side_decide_as_one(stage: Stage):
    ports = [await stage.daemon(min_replicas=3) for _ in range(3)]
    a, b, c = (stage.replica(name, port) for name, port in zip("abc", ports, strict=True))
    quorum_ids = [(await together(a, b, c)).quorum_id for _ in range(4)]
    assert quorum_ids == [1, 1, 1, 1]
    d = stage.replica("d", ports[0])
    assert names(await joined(d, a, b, c)) == "abcd"
    assert (await together(a, b, c, d, shrink_only=True)).quorum_id == 2
    survivors = [asyncio.ensure_future(replica.quorum()) for replica in (a, c, d)]
    await b.die()
    shrunk = await asyncio.gather(*survivors)
    assert [(names(quorum), quorum.quorum_id) for quorum in shrunk] == [("acd", 3)] * 3


async def test_another_daemon_takes_over_from_one_that_died_with_its_replicas(stage: Stage):
    ports = [await stage.daemon(min_replicas=1) for _ in range(2)]
    await stage.until(lambda: any(daemon.jobs[JOB].is_arbiter for daemon, _, _ in stage.daemons))
    arbiter = next(index for index, (daemon, _, _) in enumerate(stage.daemons) if daemon.jobs[JOB].is_arbiter)
    lost, kept = stage.replica("lost", ports[arbiter]), stage.replica("kept", ports[1 - arbiter])
    first = await lost.quorum()
    both = await joined(kept, lost)
    assert (names(both), both.quorum_id) == ("keptlost", first.quorum_id + 1)
    await lost.die()
    survivor = asyncio.ensure_future(kept.quorum())
    await stage.stop(arbiter)
    quorum = await survivor
    assert names(quorum) == "kept"
    assert quorum.quorum_id > both.quorum_id


async def test_arbiter_key_without_a_lease_is_taken_over(stage: Stage):
    """No daemon would ever have decided: the key of a stranger does not end."""
    arbiter = JobKeys(JOB).arbiter
    await stage.kv.put(arbiter, "stranger")
    ports = [await stage.daemon(min_replicas=2) for _ in range(2)]
    a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
    assert names(await together(a, b)) == "ab"
    await stage.kv.put(arbiter, "stranger")  # over that of a daemon
    assert names(await joined(stage.replica("c", ports[0]), a, b)) == "abc"


@pytest.mark.long
@pytest.mark.parametrize("name", [b"\xff" * 10_000, "the daemon's own"])
async def test_arbiter_key_under_a_lease_that_is_no_daemons_is_taken_over(stage: Stage, name):
    """No daemon decided for as long as a stranger kept its lease alive, under any name."""
    arbiter = JobKeys(JOB).arbiter
    async with stage.kv.lease(30) as stranger:
        await stage.kv.put(arbiter, "stranger", lease=stranger)
        ports = [await stage.daemon(min_replicas=2, lease_ttl_s=1) for _ in range(2)]
        a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
        assert names(await together(a, b)) == "ab"
        value = name if isinstance(name, bytes) else stage.daemons[0][0].id
        await stage.kv.put(arbiter, value, lease=stranger)  # over that of a daemon
        assert names(await joined(stage.replica("c", ports[0]), a, b)) == "abc"


async def test_deleted_quorum_is_decided_anew(stage: Stage):
    """The arbiter compared with the deleted key for ever, and asked the store again without a pause."""
    ports = [await stage.daemon() for _ in range(2)]
    a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
    first = await together(a, b)
    await stage.kv.delete(JobKeys(JOB).quorum)
    again = await together(a, b)
    assert (names(again), again.quorum_id > first.quorum_id) == ("ab", True)


async def test_quorum_with_the_last_id_is_decided_anew(stage: Stage):
    """One more was decided, which the other daemons refused to read: their replicas waited for ever."""
    ports = [await stage.daemon() for _ in range(2)]
    a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
    await together(a, b)
    for last in (QUORUM_ID_MAX, QUORUM_ID_MAX - 1):
        kept = QuorumRecord.decode((await stage.kv.get(JobKeys(JOB).quorum)).value)
        await stage.kv.put(JobKeys(JOB).quorum, replace(kept, quorum_id=last).encode())
        assert names(await together(a, b)) == "ab"
        assert names(await together(a, b)) == "ab"


@pytest.mark.long
async def test_the_id_goes_on_where_it_was_when_all_daemons_are_new(stage: Stage):
    ids = []
    for life in range(3):
        port = await stage.daemon(timeout_s=1.0)
        a, b = stage.replica(f"a{life}", port), stage.replica(f"b{life}", port)
        ids.append((await together(a, b)).quorum_id)
        await a.die()
        await b.die()
        await stage.stop(0)
    assert ids == [1, 2, 3]
    left = await stage.kv.range("/raftkv/torchft/", prefix=True)
    assert [item.key for item in left] == [b"/raftkv/torchft/job/head/quorum"]


async def test_unreadable_quorum_is_decided_anew(stage: Stage):
    port = await stage.daemon()
    a, b = stage.replica("a", port), stage.replica("b", port)
    last = (await together(a, b)).quorum_id
    record = QuorumRecord(5, {"a": "d/1"}, {"a": "AAAA"}, 1.0, "c").encode()
    for value in (b"[]", b"\xff", *spoiled(record, (None, -1, 2**63, "\u00e9", "x"))):
        await stage.kv.put(JobKeys(JOB).quorum, value)
    found = await together(a, b)
    assert (names(found), found.quorum_id > last) == ("ab", True)


async def test_a_new_daemon_waits_for_the_members_to_come_back(stage: Stage):
    port = await stage.daemon(min_replicas=1)
    a, b = stage.replica("a", port), stage.replica("b", port)
    await stage.until(lambda: len(stage.daemons[0][0].jobs[JOB].roster.replicas) == 2)
    first = await together(a, b)
    assert names(first) == "ab"
    await a.die()
    await b.die()
    await stage.stop(0)
    port = await stage.daemon(min_replicas=1)
    waits = asyncio.ensure_future(stage.replica("a", port).quorum())
    job = stage.daemons[0][0].jobs[JOB]
    await stage.until(lambda: "a" in job.roster.asks() and "1 of 2" in job.decision.reason)
    again = await stage.replica("b", port).quorum()
    assert (await waits).quorum_id == again.quorum_id == first.quorum_id
    assert names(again) == "ab"


@pytest.mark.long
async def test_a_lost_lease_is_replaced_and_steps_go_on(stage: Stage):
    ports = [await stage.daemon() for _ in range(2)]
    a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
    first = await together(a, b)
    for lease in await stage.kv.leases():
        await stage.kv.revoke(lease)
    # Those present get it again without a new request.
    while await stage.kv.count("/raftkv/torchft/job/member/", prefix=True) < 2:  # noqa: ASYNC110  as above
        await asyncio.sleep(0.01)
    last = await together(a, b)
    while names(last) != "ab":
        last = await together(a, b)
    assert last.quorum_id >= first.quorum_id


class HeldCore:
    """Calls of a daemon's client, whose first word of a replica is held up, and said again by the daemon."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.late: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        if self.late is None and method.path.endswith("Txn") and b"/member/" in request.SerializeToString():
            self.late = lambda: self._core.call(method, request, timeout_s=DEADLINE_S)
            raise from_status(UNAVAILABLE, "connection lost", definite=False)
        return await self._core.call(method, request, timeout_s=timeout_s)


async def test_a_replica_that_is_gone_does_not_come_back_with_a_word_that_was_held_up(stage: Stage):
    first = await stage.daemon(min_replicas=1)
    a = stage.replica("a", first)
    assert names(await a.quorum()) == "a"
    second = await stage.daemon(min_replicas=1)
    kv = stage.daemons[-1][2]
    kv.scope.core = held = HeldCore(kv.scope.core)
    b = stage.replica("b", second)
    await joined(b, a)
    await b.die()
    while await stage.kv.count("/raftkv/torchft/job/member/", prefix=True) > 1:  # noqa: ASYNC110  as above
        await asyncio.sleep(0.01)
    await held.late()
    assert await stage.kv.count("/raftkv/torchft/job/member/", prefix=True) == 1
    c = stage.replica("c", first)
    await joined(c, a)
    await c.die()
    assert names(await a.quorum()) == "a"  # it is more than half of those that are there


@pytest.mark.long
async def test_losing_the_whole_store_delays_a_step_and_no_more(stage: Stage, raftkv_cluster):
    ports = [await stage.daemon() for _ in range(2)]
    a, b = (stage.replica(name, port) for name, port in zip("ab", ports, strict=True))
    first = await together(a, b)
    (member,) = raftkv_cluster.members
    await asyncio.to_thread(member.kill)
    waiting = asyncio.ensure_future(together(a, b))
    await stage.until(lambda: all(daemon.jobs[JOB].roster.asks() for daemon, _, _ in stage.daemons))
    await asyncio.to_thread(member.restart)
    assert (await waiting).quorum_id == first.quorum_id


async def test_a_refusal_is_told_once(stage: Stage, caplog, monkeypatch):
    async def refuse(self: Job) -> None:
        raise PermissionDeniedError

    monkeypatch.setattr(Job, "_turn", refuse)
    stage.replica("a", await stage.daemon())
    await stage.until(lambda: any("permission denied" in line for line in caplog.messages))
    monkeypatch.undo()
    second = stage.replica("b", await stage.daemon())
    assert names(await together(stage.replicas[0], second)) == "ab"
    assert sum("permission denied" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("job", ["", "a b", "a/b", "x" * 201])
async def test_a_job_has_a_name_that_can_be_a_key(stage: Stage, job):
    lighthouse = Lighthouse(stage.kv, LighthouseConfig(rules=Rules(1)))
    with pytest.raises(ConfigError, match="job name"):
        await lighthouse.listen("127.0.0.1", 0, job)


async def test_record_of_a_member_speaks_for_its_own_key(stage: Stage):
    """Who may write below one daemon names neither a replica of another daemon, nor an ask of one."""
    for name, ask in (("c", make_ask(_member("a"), "other/1")), ("d", make_ask(_member("d"), "another/1"))):
        await stage.kv.put(JobKeys(JOB).member("other", name), MemberRecord.of(ask).encode())
    port = await stage.daemon()
    assert names(await together(stage.replica("a", port), stage.replica("b", port))) == "ab"


async def test_member_without_a_lease_is_not_there(stage: Stage):
    """Copies of keys, as a mirror of another cluster writes them, were most of the job: no quorum came together."""
    for name in "cde":
        await stage.kv.put(JobKeys(JOB).member("other", name), MemberRecord().encode())
    replica = stage.replica("a", await stage.daemon(min_replicas=1))
    assert names(await replica.quorum()) == "a"


def _member(name: str) -> bytes:
    return torchft_pb2.QuorumMember(replica_id=name).SerializeToString()
