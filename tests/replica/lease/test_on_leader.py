"""Keep-alives on a follower: batched, forwarded to the leader, and to its successor."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from raftkv import errors, suspend_clock
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.cork import Cork
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import NONE, StateRole
from raftkv.replica.lease import lessor as lessor_module
from raftkv.replica.lease.graces import GRACE_MAX_MS, ConnectionLost, Graces
from raftkv.replica.lease.lessor import SHORTEN_MAX, Lessor
from raftkv.replica.lease.on_leader import SHORTEN, WOKEN_AT_ONCE
from raftkv.replica.lease.renewals import FAILED_AT_ONCE, RENEW_MAX, PendingKeepAlive
from raftkv.replica.lease.times import BEAT_S, LOGGED_S, OUTAGE_GRACE_S, PATIENCE_S, UNLOGGED
from raftkv.replica.node.waits import AwaitableNode, NodeSettings
from raftkv.rpc.status import Code, RpcError
from tests.apply.machine import Machine
from tests.rpc.attacks.test_work_of_a_read import Turns
from tests.virtual_loop import NodeLoop, Scheduler

pytestmark = pytest.mark.interpreted  # the lessor gets a stand-in for its node

ME, FIRST, SECOND = 1, 2, 3


class Node(AwaitableNode):
    """A member that follows."""

    def __init__(self) -> None:
        self.settings = NodeSettings(ME, 0.1, 1.0)
        self.leader = FIRST
        self.role = StateRole.FOLLOWER
        self.term = 1
        self.applied = self.committed = 0
        self.leader_lost_at = -math.inf
        self.stopped = self.is_transferring = False
        self.raw = SimpleNamespace(raft=SimpleNamespace(log=SimpleNamespace(last_index=0)))
        self.reads: list[Any] = []
        self.asked = asyncio.Event()
        self.proposed: list[tuple[int, bytes]] = []
        self._waiters: list[Any] = []
        self.failures: list[BaseException] = []
        self.on_leader_change: list[Callable[[], None]] = []
        self.on_applied: list[Callable[[], None]] = []

    def fatal(self, error: BaseException) -> None:
        self.failures.append(error)

    def read(self, reader: Any, staleness_s_max: float | None = None) -> None:
        if self.stopped:
            raise errors.StoppedError
        self.reads.append(reader)
        self.asked.set()

    def submit(self, kind: int, body: bytes, waiter: Any, caller: Any) -> int:
        self.proposed.append((kind, body))
        self._waiters.append(waiter)
        return len(self.proposed)

    def submit_ahead(self, kind: int, body: bytes, waiter: Any, caller: Any = None) -> None:
        self.submit(kind, body, waiter, caller)

    def finish(self) -> None:
        """Everything proposed is applied."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.finish(Outcome(0))

    def confirm(self) -> int:
        """Let the reads so far be confirmed; how many there were."""
        reads, self.reads = self.reads, []
        self.asked.clear()
        for reader in reads:
            reader.ready()
        return len(reads)

    def lead(self) -> None:
        self.role = StateRole.LEADER
        self.follow(ME)

    def follow(self, leader: int) -> None:
        self.leader = leader
        for callback in self.on_leader_change:
            callback()


class Channel:
    """Another member, which answers on command."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], asyncio.Future[bytes]]] = []
        self.requests: list[tuple[str, bytes]] = []
        self._called = asyncio.Event()
        self.on_call: Callable[[], object] = int

    def unary(self, path: str, request: bytes, *_: object, **__: object) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.calls.append((list(raft_pb2.LeaseRenewRequest.FromString(request).ids), future))
        self.requests.append((path, request))
        self._called.set()
        self.on_call()
        return future

    async def wait_calls(self, count: int) -> None:
        """Wait until there were so many."""
        async with asyncio.timeout(90):
            while len(self.calls) < count:
                self._called.clear()
                await self._called.wait()

    def answer(self, number: int) -> None:
        ids, future = self.calls[number]
        future.set_result(raft_pb2.LeaseRenewResponse(ttls=[lease_id * 10 for lease_id in ids]).SerializeToString())


class Asked(PendingKeepAlive):
    """A keep-alive of a client."""

    def __init__(self, lease_id: int) -> None:
        self.lease_id = lease_id
        self.deadline = 0.0
        self.told: list[object] = []
        self.ended = asyncio.Event()

    def answer(self, ttl_s: int) -> None:
        self.told.append(ttl_s)
        self.ended.set()

    def fail(self, error: errors.StatusError) -> None:
        self.told.append(type(error))
        self.ended.set()


class Passed(Asked):
    """A keep-alive forwarded by another member."""

    is_local = False


class Follower:
    """A lessor that does not lead, and its environment."""

    def __init__(self) -> None:
        self.node = Node()
        self.channels = {FIRST: Channel(), SECOND: Channel()}
        machine = Machine()
        self.store, self.auth = machine.store, machine.applier.auth
        node: Any = self.node
        channel: Any = self.channels.get
        self.lessor = Lessor(node, machine.applier, ttl_min_s=2, channel=channel, cork=Cork())
        self.node.on_leader_change.append(self.lessor.leader_changed)

    async def confirm(self) -> int:
        """Confirm all reads so far and process them; return their number."""
        count = self.node.confirm()
        await turn()
        return count

    async def lead(self) -> None:
        """Become the leader, confirmed by a quorum."""
        self.node.lead()
        await turn()
        assert await self.confirm() == 1, "the barrier of a new leader"

    async def lead_and_lose_an_owner(self, lease_id: int) -> None:
        """Become the leader, renew a lease, and hear that the connection of its owner broke: it ends in 10 ms."""
        self.lessor.times.granted(lease_id, 60)
        await self.lead()
        assert self.lessor.times.renew(lease_id) == UNLOGGED
        self.lessor.connections_lost([ConnectionLost(lease_id, 0.01, asyncio.get_running_loop().time())])
        await turn()
        await self.confirm()

    async def wait_read(self) -> None:
        """Wait until the leadership of this member is to be confirmed."""
        await asyncio.wait_for(self.node.asked.wait(), 90)

    def ids(self, member: int) -> list[list[int]]:
        """Leases of each call to a member."""
        return [ids for ids, _ in self.channels[member].calls]

    async def ask(self, *lease_ids: int) -> list[Asked]:
        """Keep-alives of one turn."""
        asked = [Asked(lease_id) for lease_id in lease_ids]
        for one in asked:
            self.lessor.keep_alive(one)
        await turn()
        return asked


async def turn() -> None:
    """Let everything that is due happen."""
    for _ in range(5):
        await asyncio.sleep(0)


def run_async(test: Coroutine[Any, Any, None]) -> None:
    """Play on virtual time, which passes only while nothing can run."""
    scheduler = Scheduler(random.Random(1))
    task = NodeLoop(scheduler).create_task(test)
    scheduler.run_until(10_000, task.done)
    task.result()
    scheduler.tear_down()


@pytest.fixture
@asynccontextmanager
async def follower() -> AsyncIterator[Follower]:
    yield Follower()


member = follower
"""The same, where it comes to lead."""


async def test_the_keep_alives_of_a_turn_are_one_call(follower: Follower) -> None:
    asked = await follower.ask(1, 2, 1)
    assert follower.ids(FIRST) == [[1, 2, 1]]
    follower.channels[FIRST].answer(0)
    await turn()
    assert [one.told for one in asked] == [[10], [20], [10]]


class Dependent(Asked):
    """A keep-alive of a user who may have been deleted."""

    gone: ClassVar[set[int]] = set()

    def refusal(self) -> errors.StatusError | None:
        return errors.PermissionDeniedError() if self.lease_id in self.gone else None


class PassedDependent(Dependent):
    is_local = False


async def test_keep_alives_are_retried_only_for_permitted_users(follower, monkeypatch):
    monkeypatch.setattr(Dependent, "gone", set())
    auth = follower.auth
    auth.is_enabled, before = True, auth.revision
    asked = [Dependent(lease_id) for lease_id in (1, 2)]
    for one in asked:
        follower.lessor.keep_alive(one)
    await turn()
    Dependent.gone.add(1)
    auth.revision += 1
    channel = follower.channels[FIRST]
    channel.calls[0][1].set_exception(RpcError(Code.INVALID_ARGUMENT, errors.AuthOldRevisionError.text))
    await channel.wait_calls(2)
    assert follower.ids(FIRST) == [[1, 2], [2]]
    requests = [raft_pb2.LeaseRenewRequest.FromString(data) for _, data in channel.requests]
    assert [(one.auth_revision, one.asks_users) for one in requests] == [(before, True), (before + 1, True)]
    channel.answer(1)
    await turn()
    assert [one.told for one in asked] == [[errors.PermissionDeniedError], [20]]


@pytest.mark.parametrize("kind", [Dependent, PassedDependent])
async def test_leader_renews_nothing_for_deleted_users(member, monkeypatch, kind):
    """They went while the leadership was confirmed, or while this RENEW or another was on its way."""
    monkeypatch.setattr(Dependent, "gone", set())
    for lease_id in (1, 2, 3, 4):
        member.lessor.times.granted(lease_id, 60)
    await member.lead()
    member.auth.is_enabled = True
    asked = [kind(lease_id) for lease_id in (1, 2, 3, 4)]

    def ask(one: Dependent) -> None:
        member.lessor.keep_alive(one) if one.is_local else member.lessor.renew_for_member([one])

    member.node.committed = 1  # so that the leadership is confirmed first
    for one in (asked[0], asked[1], asked[3]):
        ask(one)
    await turn()
    Dependent.gone.add(1)
    member.node.committed = 0
    await member.confirm()
    assert asked[0].told == [errors.PermissionDeniedError]
    ask(asked[2])
    await member.confirm()
    Dependent.gone.update((3, 4))
    member.node.finish()
    await turn()
    assert [bool(one.told[-1:] == [60]) for one in asked] == [False, True, False, False]
    assert asked[2].told == asked[3].told == [errors.PermissionDeniedError]


async def test_further_renewals_are_batched_while_calls_are_pending(follower, monkeypatch):
    monkeypatch.setattr(lessor_module, "GATHER_MAX_S", 60.0)  # a busy machine passes 20 ms between two requests
    for lease_id in (1, 2, 3):
        await follower.ask(lease_id)
    assert follower.ids(FIRST) == [[1]]
    follower.channels[FIRST].answer(0)
    await turn()
    assert follower.ids(FIRST) == [[1], [2, 3]]


async def test_no_call_has_more_than_one_entry_renews(follower: Follower) -> None:
    count = 2 * RENEW_MAX + 5
    asked = await follower.ask(*range(1, count + 1))
    for number in range(3):
        await follower.channels[FIRST].wait_calls(number + 1)
        follower.channels[FIRST].answer(number)
        await turn()
    assert [len(ids) for ids in follower.ids(FIRST)] == [RENEW_MAX, RENEW_MAX, 5]
    assert all(one.told == [one.lease_id * 10] for one in asked)


async def test_a_turn_fails_some_of_very_many(follower: Follower) -> None:
    """Each may be the only one of its stream, which then ends."""
    loop: Any = asyncio.get_running_loop()
    number, by_turn = 0, Counter[int]()

    def turned() -> None:
        nonlocal number
        number += 1

    loop.turned = turned

    class Noted(Asked):
        def fail(self, error: errors.StatusError) -> None:
            by_turn[number] += 1
            super().fail(error)

    asked = [Noted(lease_id) for lease_id in range(5 * FAILED_AT_ONCE)]
    for one in asked:
        follower.lessor.keep_alive(one)
    await follower.channels[FIRST].wait_calls(1)
    follower.node.stopped = True
    follower.channels[FIRST].calls[0][1].set_exception(RpcError(Code.UNAVAILABLE, "gone"))
    for one in asked:
        await one.ended.wait()
    assert max(by_turn.values()) <= FAILED_AT_ONCE


async def test_very_many_that_a_leader_has_not_answered_go_to_the_next_some_at_a_time(member: Follower) -> None:
    await member.lead()
    count = 2 * RENEW_MAX + 5
    for lease_id in range(1, count + 1):
        member.lessor.times.granted(lease_id, 60)
    member.node.committed = 1  # so that the leadership is confirmed first
    asked = await member.ask(*range(1, count + 1))
    member.node.committed = 0
    while member.node.reads:
        await member.confirm()
    assert len(member.node.proposed) == 1, "the first of them are on their way into the log"
    member.node.role = StateRole.FOLLOWER
    member.node.follow(SECOND)
    for number in range(3):
        await member.channels[SECOND].wait_calls(number + 1)
        member.channels[SECOND].answer(number)
        await turn()
    assert [len(ids) for ids in member.ids(SECOND)] == [RENEW_MAX, RENEW_MAX, 5]
    assert all(one.told == [one.lease_id * 10] for one in asked)


async def test_next_batch_does_not_wait_for_a_late_answer(follower: Follower) -> None:
    for lease_id in (1, 2):
        await follower.ask(lease_id)
    await follower.channels[FIRST].wait_calls(2)
    assert follower.ids(FIRST) == [[1], [2]]


async def test_request_to_a_lost_leader_goes_to_the_next(follower: Follower) -> None:
    asked = await follower.ask(1)
    follower.node.follow(NONE)
    waiting = await follower.ask(2)
    assert follower.channels[FIRST].calls[0][1].cancelled()
    follower.node.follow(SECOND)
    await follower.channels[SECOND].wait_calls(2)
    assert sorted(follower.ids(SECOND)) == [[1], [2]]
    for number in range(2):
        follower.channels[SECOND].answer(number)
    await turn()
    assert [one.told for one in asked + waiting] == [[10], [20]]


async def test_a_failed_call_is_tried_again(follower: Follower) -> None:
    asked = await follower.ask(1)
    follower.channels[FIRST].calls[0][1].set_exception(RpcError(Code.UNAVAILABLE, "gone"))
    await follower.channels[FIRST].wait_calls(2)
    follower.channels[FIRST].answer(1)
    await turn()
    assert asked[0].told == [10]


async def test_forwarded_request_is_not_forwarded_again(follower: Follower) -> None:
    passed = Passed(1)
    follower.lessor.keep_alive(passed)
    await turn()
    assert passed.told == [errors.NotLeaderError]
    assert follower.ids(FIRST) == []


async def test_lease_is_not_granted_that_would_take_over_keys_of_a_restored_file(follower: Follower) -> None:
    """The file may lack their lease. With a TTL of a second, a user without any right would have them deleted."""
    write = follower.store.begin()
    write.put(b"of another", b"", 77)
    write.end()
    with pytest.raises(errors.LeaseExistsError):
        follower.lessor.grant_request(1, 77)
    assert follower.lessor.grant_request(1, 78).ID == 78


async def test_a_stopping_member_fails_the_waiting_calls(follower: Follower) -> None:
    under_way = await follower.ask(1)
    follower.node.follow(NONE)
    waiting = await follower.ask(2)
    follower.lessor.stop()
    await turn()
    assert [one.told for one in under_way + waiting] == [[errors.StoppedError]] * 2


async def test_a_leader_is_confirmed_again_only_after_a_possible_change(member: Follower) -> None:
    node = member.node
    await member.lead()
    first = await member.ask(1)
    assert (await member.confirm(), first[0].told) == (1, [0])
    assert [one.told for one in await member.ask(2)] == [[0]]
    assert node.reads == []
    node.committed = 1
    waiting = await member.ask(3)
    assert (list(waiting[0].told), await member.confirm(), waiting[0].told) == ([], 1, [0])
    node.committed, node.is_transferring = 0, True
    waiting = await member.ask(4)
    assert (list(waiting[0].told), await member.confirm(), waiting[0].told) == ([], 1, [0])


async def test_a_leader_whose_machine_has_slept_is_asked_again(member, monkeypatch):
    """Another may have been elected meanwhile, and have ended the lease."""
    asleep_s = 5.0
    monkeypatch.setattr(suspend_clock, "suspended_s", lambda: (asleep_s, asleep_s))
    await member.lead()
    first = await member.ask(1)
    assert (await member.confirm(), first[0].told) == (1, [0])
    assert [one.told for one in await member.ask(2)] == [[0]]
    asleep_s += 600.0
    waiting = await member.ask(3)
    assert (list(waiting[0].told), await member.confirm(), waiting[0].told) == ([], 1, [0])
    assert [one.told for one in await member.ask(4)] == [[0]]


async def test_a_broken_connection_is_told_to_the_leader_at_once(follower: Follower) -> None:
    now = asyncio.get_running_loop().time()
    alice = Caller(b"alice", 3)
    follower.lessor.connections_lost([ConnectionLost(7, 0.1, now - 2.0, alice), ConnectionLost(8, 3.5, now)])
    await turn()
    (path, data) = follower.channels[FIRST].requests[0]
    request = raft_pb2.LeaseShortenRequest.FromString(data)
    assert path == SHORTEN.path
    assert (list(request.ids), list(request.graces_ms)) == ([7, 8], [100, 3500])
    assert (list(request.users), list(request.auth_revisions)) == ([b"alice", b""], [3, 0])
    assert 2_000_000 <= request.ages_us[0] < request.ages_us[1] + 2_000_001
    follower.channels[FIRST].calls[0][1].set_exception(RpcError(Code.UNAVAILABLE, "gone"))
    await follower.channels[FIRST].wait_calls(2)
    again = raft_pb2.LeaseShortenRequest.FromString(follower.channels[FIRST].requests[1][1])
    assert again.ages_us[0] > request.ages_us[0], "it is as old as it is, not as when it was first told"
    follower.channels[FIRST].calls[1][1].set_result(b"")


async def test_the_leader_is_told_of_very_many_lost_leases_some_at_a_time(follower: Follower) -> None:
    """A stream keeps 100,000, and many streams are cut together: all at once is seconds of the leader's loop."""
    now = asyncio.get_running_loop().time()
    channel = follower.channels[FIRST]
    for first in (1, 1_501):
        follower.lessor.connections_lost([ConnectionLost(first + number, 0.1, now) for number in range(1_500)])
    told: list[int] = []
    while len(told) < 3_000:
        await channel.wait_calls(len(told) // SHORTEN_MAX + 1)
        await turn()
        assert len(channel.calls) == len(told) // SHORTEN_MAX + 1, "one at a time"
        ids = raft_pb2.LeaseShortenRequest.FromString(channel.requests[-1][1]).ids
        assert len(ids) <= SHORTEN_MAX
        told += ids
        channel.calls[-1][1].set_result(b"")
    assert told == list(range(1, 3_001))
    await turn()
    follower.lessor.connections_lost([ConnectionLost(7, 0.1, now)])
    await channel.wait_calls(4)
    channel.calls[-1][1].set_result(b"")


async def test_a_turn_of_the_leader_shortens_some_of_very_many_lost_leases(member: Follower) -> None:
    await member.lead()
    now, turns = asyncio.get_running_loop().time(), Turns()
    by_turn: Counter[int] = Counter()
    lessor: Any = member.lessor
    shorten = lessor._shorten

    def counted(lost: list[ConnectionLost]) -> None:
        by_turn[turns.number] += len(lost)
        shorten(lost)

    lessor._shorten = counted
    for first in range(5):
        lost = [ConnectionLost(first * 1_000 + number, 0.1, now) for number in range(1_000)]
        member.lessor.connections_lost(lost)
    while by_turn.total() < 5_000:
        await turn()
        member.node.confirm()
    assert max(by_turn.values()) <= SHORTEN_MAX
    turns.stop()


async def test_a_turn_asks_a_new_leader_some_of_very_many_questions(follower: Follower) -> None:
    """Clients ask for the time of leases while there is no leader: each call waits in a task."""
    follower.node.follow(NONE)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=7)
    asking = [asyncio.create_task(follower.lessor.time_to_live(request)) for _ in range(5 * WOKEN_AT_ONCE)]
    await turn()
    channel, turns = follower.channels[FIRST], Turns()
    by_turn: Counter[int] = Counter()
    channel.on_call = lambda: by_turn.update([turns.number])
    follower.node.follow(FIRST)
    await channel.wait_calls(len(asking))
    assert max(by_turn.values()) <= WOKEN_AT_ONCE
    turns.stop()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_any_grace_that_a_client_can_ask_for_can_be_told(follower: Follower) -> None:
    graces = Graces(asyncio.get_running_loop().time, follower.lessor.connections_lost)
    asked_ms = [2**63 - 1, 2**62, GRACE_MAX_MS + 1, GRACE_MAX_MS, 1]
    for lease_id, grace_ms in enumerate([*asked_ms, 0, -1, -(2**63)], 1):
        graces.answered("stream", lease_id, grace_ms, 60)
    graces.stream_ended("stream", severed=True)
    await turn()
    request = raft_pb2.LeaseShortenRequest.FromString(follower.channels[FIRST].requests[0][1])
    assert dict(zip(request.ids, request.graces_ms, strict=True)) == {
        lease_id: min(grace_ms, GRACE_MAX_MS) for lease_id, grace_ms in enumerate(asked_ms, 1)
    }
    follower.channels[FIRST].calls[0][1].set_result(b"")


async def test_the_leader_does_not_wait_for_its_next_beat(follower: Follower) -> None:
    await follower.lead_and_lose_an_owner(7)
    await follower.wait_read()
    assert not follower.node.proposed, "a lease is over for a leader only when a quorum has said that it leads"
    await follower.confirm()
    (kind, body) = follower.node.proposed[0]
    assert (kind, list(raft_pb2.LeaseDecision.FromString(body).ids)) == (Kind.LEASE_EXPIRE, [7])
    follower.lessor.stop()


async def test_of_the_leases_of_a_broken_connection_the_first_to_end_is_not_waited_for(follower: Follower) -> None:
    times = follower.lessor.times
    for lease_id in (7, 8):
        times.granted(lease_id, 3600)
    await follower.lead()
    assert [times.renew(lease_id) for lease_id in (7, 8)] == [UNLOGGED] * 2
    now = asyncio.get_running_loop().time()
    follower.lessor.connections_lost([ConnectionLost(8, 3000.0, now), ConnectionLost(7, 0.01, now)])
    await turn()
    await follower.confirm()
    await follower.wait_read()
    await follower.confirm()
    assert list(raft_pb2.LeaseDecision.FromString(follower.node.proposed[0][1]).ids) == [7]
    follower.lessor.stop()


async def test_a_member_that_stops_ends_no_lease(follower: Follower) -> None:
    node = follower.node
    await follower.lead_and_lose_an_owner(7)
    node.stopped = True
    follower.lessor.start()
    await asyncio.sleep(2 * BEAT_S)
    follower.lessor.stop()
    assert not node.failures


async def test_a_quorum_that_was_away_may_have_been_away_for_owners_too(follower, monkeypatch):
    monkeypatch.setattr(lessor_module, "QUORUM_LATE_S", -1.0)  # however soon it answers, it is late
    node, times = follower.node, follower.lessor.times
    await follower.lead_and_lose_an_owner(7)
    await follower.wait_read()
    await follower.confirm()
    assert not node.proposed
    assert 0 < times.remaining_s(7) <= PATIENCE_S


@pytest.mark.parametrize(
    ("lost_s_ago", "left_s"), [(1.0, 1.0 + LOGGED_S), (10.0, OUTAGE_GRACE_S), (math.inf, OUTAGE_GRACE_S)]
)
async def test_the_first_leader_after_an_outage_leaves_owners_time_to_return(follower, lost_s_ago, left_s):
    loop, times = asyncio.get_running_loop(), follower.lessor.times
    times.granted(7, 1)
    follower.node.leader_lost_at = loop.time() - lost_s_ago
    await follower.lead()
    assert times.remaining_s(7) == pytest.approx(left_s, abs=0.2)


async def test_a_loss_that_another_member_reported_is_not_passed_on(follower: Follower) -> None:
    with pytest.raises(errors.NotLeaderError):
        await follower.lessor.shorten([ConnectionLost(7, 0.1, 0.0)], is_local=False)
    assert not follower.channels[FIRST].calls


async def test_a_confirmed_leader_answers_a_logged_lease_within_the_turn(member: Follower) -> None:
    times = member.lessor.times
    times.granted(7, 60)
    await member.lead()
    first = await member.ask(7)
    assert (await member.confirm(), first[0].told) == (1, []), "it waits for a RENEW"
    member.node.finish()
    assert first[0].told == [60]
    at_once = Asked(7)
    member.lessor.keep_alive(at_once)
    assert at_once.told == [60], "no turn of the loop lies between a keep-alive and its answer"


async def test_only_a_lease_whose_renewal_is_in_the_log_is_renewed_at_once(member: Follower) -> None:
    """The next leader has to know of it: what no member has logged is not to be answered from memory."""
    times = member.lessor.times
    times.granted(7, 60)
    times.granted(8, 60)
    await member.lead()
    await member.ask(7)
    await member.confirm()
    member.node.finish()
    assert [member.lessor.renew_at_once(lease_id) for lease_id in (7, 8, 9)] == [60, 0, 0]
    member.node.applied -= 1  # a lease may have ended in what is to be applied
    member.lessor.flush()
    assert member.lessor.renew_at_once(7) == 0


async def test_the_keep_alives_of_a_turn_share_a_renewal_however_they_come(member: Follower) -> None:
    for lease_id in range(1, 10):
        member.lessor.times.granted(lease_id, 60)
    await member.lead()
    await member.ask(100)
    await member.confirm()
    asked = [Asked(lease_id) for lease_id in range(1, 10)]
    for one in asked:
        member.lessor.keep_alive(one)
    assert (member.node.proposed, [one.told for one in asked]) == ([], [[]] * 9)
    await turn()
    ((kind, body),) = member.node.proposed
    assert (kind, list(raft_pb2.LeaseDecision.FromString(body).ids)) == (Kind.LEASE_RENEW, list(range(1, 10)))
    member.node.finish()
    assert [one.told for one in asked] == [[60]] * 9


async def test_response_of_wrong_length_is_not_an_answer(follower: Follower) -> None:
    asked = await follower.ask(1, 2)
    wrong = raft_pb2.LeaseRenewResponse(ttls=[10]).SerializeToString()
    follower.channels[FIRST].calls[0][1].set_result(wrong)
    await follower.channels[FIRST].wait_calls(2)
    assert [one.told for one in asked] == [[], []]
    follower.channels[FIRST].answer(1)
    await turn()
    assert [one.told for one in asked] == [[10], [20]]


@pytest.mark.parametrize(("leader", "error"), [(NONE, errors.NoLeaderError), (FIRST, errors.RequestTimeoutError)])
async def test_request_without_a_leader_in_time_fails_as_in_etcd(follower, leader, error):
    follower.lessor._timeout_s = 0.1
    follower.channels.clear()
    follower.node.follow(leader)
    asked = Asked(1)
    follower.lessor.keep_alive(asked)
    await asyncio.wait_for(asked.ended.wait(), 90)
    assert asked.told == [error]
