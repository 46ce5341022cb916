"""Keep-alives against a minimal member, on virtual time: validity of answers, and when the client leaves a member."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import pytest

from raftkv import errors, suspend_clock
from raftkv.client.errors import LeaseLost
from raftkv.client.kv import Txn
from raftkv.client.lease import Lease, LeaseKeeper, renewals
from raftkv.client.rpc.core import Stream
from raftkv.client.scope import Scope, Space
from raftkv.client.watch import Request, Watch, Watcher, WatchHub
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fake_watches import FakeCore
from tests.client.waiting import until
from tests.virtual_loop import NodeLoop, Scheduler


class Call:
    """The member's end of one keep-alive stream."""

    def __init__(self):
        self.done = False
        self.under_way = True
        self.asked = []
        self.graces_ms = []
        self.inbox = asyncio.Queue()

    def send_nowait(self, message):
        now = asyncio.get_running_loop().time()
        request = rpc_pb2.LeaseKeepAliveRequest.FromString(message)
        self.asked.append((request.ID, now))
        self.graces_ms.append(request.disconnect_grace_ms)

    async def receive(self):
        item = await self.inbox.get()
        if isinstance(item, RpcError):
            raise item
        return item

    def cancel(self):
        self.done = True
        self.inbox.put_nowait(RpcError(errors.CANCELED, "context canceled"))

    def answer(self, lease_id, ttl, cluster_id=0):
        header = rpc_pb2.ResponseHeader(cluster_id=cluster_id)
        self.inbox.put_nowait(rpc_pb2.LeaseKeepAliveResponse(header=header, ID=lease_id, TTL=ttl).SerializeToString())


class Core:
    """The part of a client's core that the keeper and its leases need."""

    def __init__(self):
        self.endpoints = ["m0"]
        self.dead_ends = set()
        self.calls = []
        self.left = []
        self.granted = 0
        self.cluster_id = 0
        self.watches = FakeCore()
        self.refuse = None

    @property
    def endpoint(self):
        return f"m{len(self.left)}"

    async def stream(self, method, endpoint=None, *, metadata=(), timeout_s=None, eager=False):
        if self.refuse is not None:
            raise self.refuse
        self.calls.append(Call())
        self.calls[-1].under_way = endpoint not in self.dead_ends
        return Stream(self.calls[-1], method.response, endpoint)

    async def call(self, method, request, *, timeout_s):
        header = rpc_pb2.ResponseHeader(cluster_id=self.cluster_id)
        if isinstance(request, rpc_pb2.TxnRequest):
            return rpc_pb2.TxnResponse(header=header, succeeded=True)
        self.granted += 1
        return rpc_pb2.LeaseGrantResponse(header=header, ID=self.granted, TTL=request.TTL)

    def next_endpoint(self, failed):
        self.left.append(failed)

    def forget_token(self, error, token):
        return False


def run_async(test):
    scheduler = Scheduler(random.Random(1))
    task = NodeLoop(scheduler).create_task(asyncio.wait_for(test, 90))
    scheduler.run_until(120, task.done)
    task.result()
    scheduler.tear_down()


@pytest.fixture
def core():
    return Core()


@pytest.fixture
@asynccontextmanager
async def scope(core):
    keeper = LeaseKeeper(core)
    hub = WatchHub(core.watches, heard_of=keeper.heard_of)
    try:
        yield Scope(core, Space(), 5.0, hub, keeper)
    finally:
        await hub.close()
        await keeper.close()


def deadline_of(lease):
    return asyncio.get_running_loop().time() + lease.remaining_s


async def test_lease_lasts_from_time_of_request(core, scope):
    """The answer may have been delayed: its TTL counts from when the member saw the request."""
    lease = await Lease(scope, 60)
    await until(lambda: core.calls and core.calls[0].asked)
    granted = deadline_of(lease)
    await until(lambda: asyncio.get_running_loop().time() + 60 > granted + 0.2)
    (lease_id, asked_at) = core.calls[0].asked[0]
    core.calls[0].answer(lease_id, 60)
    core.calls[0].answer(lease_id, 60)  # an answer to nothing counts for nothing
    await until(core.calls[0].inbox.empty)
    assert deadline_of(lease) <= asked_at + 60 + 0.001


async def test_a_member_that_does_not_answer_in_time_is_left_with_all_leases(core, scope):
    leases = [await Lease(scope, ttl) for ttl in (1, 60, 60)]
    await until(lambda: len(core.calls) == 2 and len(core.calls[1].asked) == 3)
    assert core.calls[0].done
    assert core.left == ["m0"]
    assert {lease_id for lease_id, _ in core.calls[1].asked} == {lease.id for lease in leases}
    core.calls[1].answer(leases[0].id, 1)
    await until(lambda: [one for one, _ in core.calls[1].asked].count(leases[0].id) == 2)
    assert all(lease.alive for lease in leases)


async def test_losses_by_word_and_by_time(core, scope):
    told = []
    by_word, by_time = await Lease(scope, 60), await Lease(scope, 1)
    by_word.on_lost(told.append)
    by_time.on_lost(told.append)
    taken_back = by_time.on_lost(lambda lease: told.append("never"))
    taken_back()
    await until(lambda: core.calls and core.calls[0].asked)
    core.calls[0].answer(by_word.id, 0)
    await by_word.lost.wait()
    core.refuse = errors.NoLeaderError()
    core.calls[-1].inbox.put_nowait(RpcError(errors.UNAVAILABLE, "gone"))
    await by_time.lost.wait()
    assert told == [by_word, by_time]
    with pytest.raises(LeaseLost, match=r"no keep-alive was confirmed within 1 s \(last failure: etcdserver: no l"):
        by_time.check()
    assert by_time.remaining_s == 0.0


async def test_a_callback_that_fails_harms_no_other(core, scope):
    """The loop hears of it, and neither the lease's other callbacks nor the client's other leases notice."""
    told, failures = [], []
    asyncio.get_running_loop().call_exception_handler = lambda context: failures.append(context["exception"])
    first, second = await Lease(scope, 60), await Lease(scope, 1)
    first.on_lost(lambda lease: 1 / 0)
    first.on_lost(told.append)
    await until(lambda: core.calls and {first.id, second.id} <= {one for one, _ in core.calls[0].asked})
    core.calls[0].answer(second.id, 1)
    core.calls[0].answer(first.id, 0)
    await first.lost.wait()
    assert told == [first]
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
    await until(lambda: [one for one, _ in core.calls[0].asked].count(second.id) == 2)


async def test_a_process_that_slept_through_its_lease_knows_before_it_does_anything(core, scope, monkeypatch):
    told = []
    lease = await Lease(scope, 60)
    lease.on_lost(told.append)
    loop = asyncio.get_running_loop()
    awake = loop.time
    monkeypatch.setattr(loop, "time", lambda: awake() + 61)
    assert not lease.alive
    with pytest.raises(LeaseLost, match=r"no keep-alive was confirmed within 60 s"):
        lease.check()
    assert told == [lease]
    assert lease.lost.is_set()


async def test_a_machine_that_slept_has_lost_its_leases_when_it_wakes_up(core, scope, monkeypatch):
    """The clock of the loop stood still meanwhile: locks and leases were held, for as long as the TTL that was left."""
    lease = await Lease(scope, 60)
    await until(lambda: core.calls)
    monkeypatch.setattr("raftkv.client.lease._sleep", suspend_clock.SuspendClock())
    at_least, at_most = suspend_clock.suspended_s()
    monkeypatch.setattr(suspend_clock, "suspended_s", lambda: (at_least + 0.0005, at_most + 0.0005))
    assert lease.remaining_s > 59
    monkeypatch.setattr(suspend_clock, "suspended_s", lambda: (at_least + 61, at_most + 61))
    assert not lease.alive
    with pytest.raises(LeaseLost, match=r"no keep-alive was confirmed within 60 s"):
        lease.check()
    assert (await Lease(scope, 60)).remaining_s > 59


async def test_answer_to_a_keep_alive_before_the_machine_slept_counts_from_its_sending(core, scope, monkeypatch):
    lease = await Lease(scope, 60)
    monkeypatch.setattr("raftkv.client.lease._sleep", suspend_clock.SuspendClock())
    await until(lambda: core.calls and core.calls[0].asked)
    at_least, at_most = suspend_clock.suspended_s()
    monkeypatch.setattr(suspend_clock, "suspended_s", lambda: (at_least + 61, at_most + 61))
    core.calls[0].answer(lease.id, 60)
    await until(core.calls[0].inbox.empty)
    assert not lease.alive


async def test_the_stream_ends_with_the_last_lease(core, scope):
    lease = await Lease(scope, 60)
    await until(lambda: core.calls and core.calls[0].asked)
    lease.stop()
    await until(lambda: core.calls[0].done)
    assert core.left == []
    again = await Lease(scope, 60)
    await until(lambda: len(core.calls) == 2 and core.calls[1].asked)
    assert again.alive


async def test_a_lease_that_comes_as_the_last_one_leaves_is_kept_at_the_same_endpoint(core, scope):
    """The stream that was ended for want of leases was taken for a member that fails, which all calls then left."""
    first = await Lease(scope, 60)
    await until(lambda: core.calls and not core.calls[0].done)
    call, cancel, second = core.calls[0], core.calls[0].cancel, Lease(scope, 60)

    def end():
        cancel()
        second.id, second._granted = 99, True
        scope.keeper.add(second)

    call.cancel = end
    first.stop()
    await until(lambda: len(core.calls) == 2 and core.calls[1].asked)
    assert [lease_id for lease_id, _ in core.calls[1].asked] == [99]
    assert core.left == []
    assert scope.keeper.failures == {}
    second.stop()


async def test_endpoints_that_do_not_connect_cost_a_moment_each(core, scope):
    """Two of three swallow every packet; a TTL of a second allows no more."""
    core.endpoints = ["m0", "m1", "m2"]
    core.dead_ends = {"m0", "m1"}
    started = asyncio.get_running_loop().time()
    lease = await Lease(scope, 60, disconnect_grace_s=0.25)
    await until(lambda: len(core.calls) == 3 and core.calls[2].asked)
    assert core.calls[2].asked[0][1] - started < lease.ttl / 3, "not when the next keep-alive is due"
    assert core.left == ["m0", "m1"]
    assert core.calls[2].graces_ms == [250]
    core.calls[2].answer(lease.id, 60)
    core.calls[2].inbox.put_nowait(RpcError(errors.UNAVAILABLE, "gone"))
    core.dead_ends = {"m3"}
    await until(lambda: len(core.calls) == 5 and core.calls[4].asked)
    assert list(scope.keeper.failures.values())[-1] == "no connection to m3 within 0.1 s"


async def test_lease_with_grace_is_renewed_right_after_grant(core, scope):
    await Lease(scope, 60)
    await until(lambda: core.calls and len(core.calls[0].asked) == 1)
    late = await Lease(scope, 60)
    soon = await Lease(scope, 60, disconnect_grace_s=0.0001)
    await until(lambda: len(core.calls[0].asked) == 2)
    assert core.calls[0].asked[1][0] == soon.id
    assert core.calls[0].graces_ms == [0, 1]
    assert late.alive


async def test_a_patient_lease_is_lost_on_the_clusters_word_alone(core, scope):
    lease = await Lease(scope, 1, patient=True)
    with pytest.raises(LeaseLost, match="never granted"):
        Lease(scope, 1, patient=True).check()
    core.refuse = errors.NoLeaderError()
    await until(lambda: lease.remaining_s == 0.0)
    await until(lambda: len(core.left) > 1)
    lease.check()
    assert lease.alive
    core.refuse = None
    await until(lambda: core.calls and core.calls[-1].asked and not core.calls[-1].done)
    core.calls[-1].answer(lease.id, 0)
    await lease.lost.wait()
    with pytest.raises(LeaseLost, match="the cluster no longer knows it"):
        lease.check()


async def txn(scope, lease):
    await Txn(scope).commit()


async def grant(scope, lease):
    await Lease(scope, 60)


async def confirm_watcher(scope, lease):
    Watch(scope.hub, Space(), Watcher(Request(b"k"), 1000), 5.0)
    await until(lease.lost.is_set)


@pytest.mark.parametrize("answer", [txn, grant, confirm_watcher])
async def test_any_answer_of_a_restored_cluster_ends_the_leases_of_the_one_before(core, scope, answer):
    core.cluster_id = 7
    old, patient = [await Lease(scope, 60), await Lease(scope, 60, patient=True)]
    core.cluster_id = 0  # unknown
    unknown = await Lease(scope, 60)
    await txn(scope, old)
    assert old.alive
    assert patient.alive
    core.cluster_id = core.watches.cluster_id = 8
    await answer(scope, old)
    assert not old.alive
    assert not patient.alive
    assert unknown.alive
    with pytest.raises(LeaseLost, match="another cluster has granted it"):
        patient.check()


def test_no_grace_is_negative():
    with pytest.raises(ValueError, match=r"^the grace of a lease is from 0 to 9000000000 s, not -0.1 s$"):
        Lease(SimpleNamespace(), 1, disconnect_grace_s=-0.1)


async def take(scope, count, first_answer_s=60.0):
    async with aclosing(renewals(scope, 7, first_answer_s)) as answers:
        return [(await anext(answers)).TTL for _ in range(count)]


async def test_renewals_of_a_foreign_lease_give_out_every_answer(core, scope):
    taking = asyncio.create_task(take(scope, 2))
    await until(lambda: core.calls and core.calls[0].asked)
    core.calls[0].answer(7, 1)
    await until(lambda: len(core.calls[0].asked) == 2)  # the TTL of the answer counts from here on
    core.calls[0].answer(7, 5)
    assert await taking == [1, 5]
    taking = asyncio.create_task(take(scope, 3))  # of a lease without an owner here, in either cluster
    for number, cluster_id in enumerate((7, 8, 8), 1):
        await until(lambda number=number: not core.calls[-1].done and len(core.calls[-1].asked) == number)
        core.calls[-1].answer(7, 1, cluster_id)
    assert await taking == [1, 1, 1]
    taking = asyncio.create_task(take(scope, 1))
    await until(lambda: core.calls[-1].asked and not core.calls[-1].done)
    core.calls[-1].answer(7, 0)
    with pytest.raises(StopAsyncIteration):
        await taking


async def test_renewal_errors_carry_their_reason(core, scope):
    core.refuse = errors.NoLeaderError()
    with pytest.raises(errors.ContextDeadlineExceededError) as failed:
        await take(scope, 1, 0.3)
    assert failed.value.failures["m0"] == "etcdserver: no leader"
    core.refuse = errors.PermissionDeniedError()
    with pytest.raises(errors.PermissionDeniedError):
        await take(scope, 1)


async def test_lease_without_write_right_is_lost_alone(core, scope):
    """Members end the stream over it and name no lease: the others must not end with it."""
    leases = [await Lease(scope, 60) for _ in range(4)]
    denied = leases[2]
    await until(lambda: core.calls and len(core.calls[-1].asked) == 4)
    core.calls[-1].inbox.put_nowait(RpcError(errors.PERMISSION_DENIED, errors.PermissionDeniedError.text))
    await until(lambda: len(core.calls) == 2)
    asked = set()
    while not denied.lost.is_set():
        await until(lambda: denied.lost.is_set() or {one for one, _ in core.calls[-1].asked} - asked)
        for lease_id, _ in list(core.calls[-1].asked):
            if lease_id in asked or denied.lost.is_set():
                continue
            asked.add(lease_id)
            if lease_id == denied.id:
                text = errors.PermissionDeniedError.text
                core.calls[-1].inbox.put_nowait(RpcError(errors.PERMISSION_DENIED, text))
            else:
                core.calls[-1].answer(lease_id, 60)
    assert [lease.alive for lease in leases] == [True, True, False, True]
    with pytest.raises(LeaseLost, match="permission denied"):
        denied.check()
    others = {lease.id for lease in leases} - {denied.id}
    await until(lambda: len(core.calls) == 3 and {one for one, _ in core.calls[-1].asked} == others)
