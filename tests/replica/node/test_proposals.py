"""Callers waiting for proposals, and proposals without a waiting caller."""

from __future__ import annotations

import asyncio
import itertools
import time
from itertools import count
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.txn import LONG_WORK
from raftkv.apply.wire import MEMBER, Kind, decode, encode, identified
from raftkv.apply.wire import Caller as RequestCaller
from raftkv.loop.fair import MEMBER as OWN
from raftkv.loop.fair import FairQueue
from raftkv.pb import rpc_pb2
from raftkv.replica.node import proposals as module
from raftkv.replica.node.proposals import PROPOSAL_BYTES, Forwarded, Pace, Proposals, Waiter, new_start, request_ids
from raftkv.replica.node.waits import AwaitableNode


class Caller(Waiter):
    def __init__(self, identity: bytes = b"", deadline: float | None = None, request: Any = None) -> None:
        super().__init__(request, identity, deadline)
        self.outcome: Outcome | errors.StatusError | None = None

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def fail(self, error: errors.StatusError) -> None:
        self.outcome = error


@pytest.fixture
def proposals() -> Proposals:
    return Proposals(count(1), 7.0, clock=lambda: 0.0)


def test_the_log_gets_the_clients_bytes_unchanged(proposals: Proposals) -> None:
    request_id = proposals.add(Kind.PUT, b"body", Caller(), 0.0)
    ((_, data),) = proposals.take_unsent()
    assert decode(data) == (Kind.PUT, request_id, b"body")


@pytest.mark.parametrize("has_light", [False, True])
def test_log_holds_less_of_a_flood_while_another_identity_proposes_little(has_light: bool) -> None:
    """A put of the light one waits for all that is in the log; two floods wait before it, and share large rounds."""
    pace, now = Pace(), 0.0
    for _ in range(100):  # the log applies 10 MB/s
        is_first, room_bytes = not pace.first, pace.left_bytes
        pace.propose(1, room_bytes, now, is_first, True)
        if has_light:
            assert pace.lets_pass(FairQueue[int](), b"light", 1_000)
        now += 0.001 + room_bytes / 10_000_000
        pace.end(now)
    assert pace.limit_bytes == (64 if has_light else 128) * 1024


def test_request_without_a_waiter_is_not_proposed(proposals: Proposals) -> None:
    gone = proposals.add(Kind.PUT, b"a", Caller(), 0.0)
    kept = proposals.add(Kind.PUT, b"b", Caller(), 0.0)
    assert proposals.withdraw(gone)
    assert [request_id for request_id, _ in proposals.take_unsent()] == [kept]


@pytest.mark.parametrize("is_crowded", [True, False])
def test_withdrawn_proposal_leaves_the_queue_with_its_bytes(proposals: Proposals, is_crowded: bool) -> None:
    """Without a leader, puts of 1 MiB with time-outs of milliseconds gave their shares back, and filled the memory."""
    kept = proposals.add(Kind.PUT, bytes(100), Caller(b"alice"), 0.0)
    kept_bytes = proposals.unsent_bytes
    for _ in range(3):
        gone = [proposals.add(Kind.PUT, bytes(2 << 20), Caller(b"mallory"), 0.0) for _ in range(5)]
        if is_crowded:
            proposals.give_back(proposals.take_unsent(1 << 20))
        assert proposals.unsent_bytes > 5 * (2 << 20)
        assert [proposals.withdraw(one) for one in (*gone, gone[0])] == [True] * 5 + [False]
        assert proposals.unsent_bytes == kept_bytes
        assert set(proposals.shares.held) == {b"alice"}
    assert [request_id for request_id, _ in proposals.take_unsent()] == [kept]
    assert not proposals.withdraw(kept), "it is under way"
    assert proposals.is_waiting(kept)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def timed(clock: list[float]) -> Proposals:
    return Proposals(count(1), 7.0, clock=lambda: clock[0])


@pytest.mark.parametrize("flood", [0, 500])
def test_proposal_is_not_put_into_the_log_after_its_deadline(timed: Proposals, clock: list[float], flood: int) -> None:
    """A turn tells some of thousands whose time is up; previously those who were not told yet were executed."""
    for _ in range(flood):
        timed.add(Kind.PUT, bytes(100), Caller(b"mallory"), clock[0])
    late, near, far = (Caller(b"alice", clock[0] + left_s) for left_s in (1.0, 2.1, 60.0))
    ids = [timed.add(Kind.PUT, b"a", caller, clock[0]) for caller in (late, near, far)]
    clock[0] += 2
    taken = [request_id for request_id, _ in timed.take_unsent(100_000, apply_s=0.5)]
    assert [one for one in ids if one in taken] == ids[2:]
    assert isinstance(late.outcome, errors.ContextDeadlineExceededError)
    assert isinstance(near.outcome, errors.LimitedError), "definite: it was not done, and would have been too late"
    assert (timed.late, far.outcome) == (2, None)
    while timed.unsent_bytes:
        timed.take_unsent(100_000)
    with pytest.raises(errors.ContextDeadlineExceededError):
        timed.add(Kind.PUT, b"a", Caller(b"alice", clock[0]), clock[0])
    assert timed.unsent_bytes == 0


def test_proposals_of_a_connection_that_is_lost_are_not_put_into_the_log(timed: Proposals) -> None:
    """A turn lets some of thousands of calls go; previously those that still waited were executed."""

    class Lost(Caller):
        is_over = False

    callers = [Lost(b"mallory") for _ in range(50)]
    ids = [timed.add(Kind.PUT, bytes(100), caller, 0.0) for caller in callers]
    timed.take_unsent(2000)
    for caller in callers[5:]:
        caller.is_over = True
    taken: list[int] = []
    while timed.unsent_bytes:
        taken += [request_id for request_id, _ in timed.take_unsent(2000)]
    assert taken == ids[1:5]
    assert all(caller.outcome is None for caller in callers)
    for request_id in ids:
        assert not timed.withdraw(request_id)
        timed.pop(request_id)
    assert timed.shares.held == {}


def test_identities_by_the_million_leave_nothing_behind(timed: Proposals) -> None:
    timed.shares.limit = 1 << 40
    for number in range(30_000):
        timed.add(Kind.PUT, b"", Caller(b"made up %d" % number), 0.0)
        if number % 3 == 0:
            timed.withdraw(number + 1)
    while timed.unsent_bytes:
        for request_id, _ in timed.take_unsent(1 << 20):
            timed.pop(request_id)
    assert (timed.shares.held, len(timed)) == ({}, 0)
    crowd = timed._crowd
    held = (crowd.datas, crowd.queue._lines, crowd.queue._served, crowd.queue._pace, crowd.queue._heap)
    assert sum(map(len, held)) < 500


async def test_awaited_proposal_has_the_deadline_of_its_call(timed: Proposals, clock: list[float]) -> None:
    clock[0] = 10.0
    with pytest.raises(errors.ContextDeadlineExceededError):
        await Awaited(timed).propose(Kind.TXN, b"", None, None, identity=b"alice", deadline=0.0)
    assert not timed.unsent_bytes


def test_proposal_that_cannot_be_applied_in_time_is_refused_at_once(timed: Proposals, clock: list[float]) -> None:
    for _ in range(1000):
        timed.add(Kind.PUT, bytes(100), Caller(b"mallory"), clock[0])

    def come(identity: bytes, left_s: float) -> errors.StatusError | None:
        try:
            timed.withdraw(timed.add(Kind.PUT, b"a", Caller(identity, clock[0] + left_s), clock[0]))
        except errors.StatusError as error:
            return error
        return None

    assert come(b"mallory", 0.01) is None, "no wait was measured yet"
    for _ in range(10):  # 10 a second
        timed.take_unsent(1200)
        clock[0] += 0.1
    refusal = come(b"mallory", 40.0)
    assert refusal is not None
    assert (refusal.code, str(refusal)) == (errors.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
    assert dict(refusal.trailers) == {
        errors.RETRY_AFTER: b"99000",
        errors.LIMIT_NAME: b"the deadline is too near: 99000 ms of proposals of user mallory wait",
    }
    assert come(b"mallory", 60.0) is None, "it might be in time, if all goes twice as fast"
    assert come(b"alice", 0.2) is None, "the queue of another does not count"
    assert timed.late == 1


def test_returned_requests_are_proposed_again_in_order(proposals: Proposals) -> None:
    first = proposals.add(Kind.PUT, b"a", Caller(), 0.0)
    unsent = proposals.take_unsent()
    second = proposals.add(Kind.PUT, b"b", Caller(), 0.1)
    proposals.give_back(unsent)
    assert [request_id for request_id, _ in proposals.take_unsent()] == [first, second]


@pytest.mark.parametrize("flood", [3, 5000])
def test_a_flood_of_proposals_delays_another_user_by_one_append(proposals: Proposals, flood: int) -> None:
    proposals.shares.limit = 1 << 30
    mallory = [proposals.add(Kind.PUT, bytes(100), Caller(b"mallory"), 0.0) for _ in range(flood)]
    taken = [proposals.take_unsent(250 + 2 * module.ENTRY_COST_BYTES)]
    proposals.give_back(taken.pop())
    alice = proposals.add(Kind.PUT, bytes(100), Caller(b"alice"), 0.0)
    gone = proposals.add(Kind.PUT, bytes(100), Caller(b"alice"), 0.0)
    assert proposals.withdraw(gone)
    while proposals.unsent_bytes:
        taken.append([request_id for request_id, _ in proposals.take_unsent(250 + 2 * module.ENTRY_COST_BYTES)])
    at = next(number for number, batch in enumerate(taken) if alice in batch)
    assert at <= 1 + flood // module.SORTED_AT_ONCE
    assert [one for batch in taken for one in batch if one != alice] == mallory, "each once, in order"
    assert all(len(batch) <= 2 for batch in taken)


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_appends_hold_more_of_a_user_with_more_weight(is_forwarded: bool) -> None:
    weights: dict[str | bytes, float] = {b"alice": 3.0}
    own = Proposals(count(1), 7.0, clock=lambda: 0.0, weights=weights)
    forwarded = Forwarded(lambda: 0.0, 7.0, weights)
    own.shares.limit = 1 << 30
    for user in [b"bob", b"alice"] * 2_000:
        body = user.ljust(100)
        if is_forwarded:
            forwarded.add([encode(Kind.IDENTIFIED, 2, identified(RequestCaller(user, 1), Kind.PUT, body))])
        else:
            own.add(Kind.PUT, body, Caller(user), 0.0)
    taken = forwarded.take(1 << 20) if is_forwarded else own.take_unsent(1 << 20)
    of_alice = sum(b"alice   " in data for _, data in taken)
    assert of_alice == pytest.approx(len(taken) * 3 / 4, abs=2)


def test_many_small_proposals_delay_another_user_by_one_append_too(proposals: Proposals) -> None:
    """An append takes thousands of them: to look at no more than it takes would keep the order of arrival."""
    proposals.shares.limit = 1 << 30
    mallory = [proposals.add(Kind.PUT, bytes(100), Caller(b"mallory"), 0.0) for _ in range(18_000)]
    alice = proposals.add(Kind.PUT, bytes(100), Caller(b"alice"), 0.0)
    taken = [[request_id for request_id, _ in proposals.take_unsent(1 << 20)] for _ in range(2)]
    assert len(taken[0]) < len(mallory)
    assert alice in taken[1]


def test_leader_takes_forwarded_proposals_round_robin() -> None:
    def forwarded(kind: int, member: int, user: bytes, body: bytes) -> bytes:
        request_id = next(request_ids(member, len(datas)))
        caller = identified(RequestCaller(user, 1), kind, body) if user else body
        return encode(Kind.IDENTIFIED if user else kind, request_id, caller)

    datas: list[bytes] = []
    for user, member in [(b"mallory", 2)] * 50 + [(b"", 2)] * 50 + [(b"alice", 2), (b"", 3)]:
        datas.append(forwarded(Kind.PUT, member, user, b"%04d" % len(datas) + bytes(100)))
    waiting = Forwarded(lambda: 0.0, 7.0)
    assert waiting.add(datas) == 0
    waiting.give_back(waiting.take(8_000))
    assert waiting.size_bytes == module.cost_bytes(datas)
    taken = [data for _, data in waiting.take(8_000)]
    assert {datas[100], datas[101]} <= {*taken}
    while waiting.size_bytes:
        taken += [data for _, data in waiting.take(8_000)]
    assert sorted(taken) == sorted(datas)
    assert [one for one in taken if one in datas[:50]] == datas[:50]


@pytest.mark.parametrize("bytes_max", [1 << 20, 1_000], ids=["few", "crowd"])
def test_forwarded_proposals_that_waited_too_long_are_dropped(bytes_max: int) -> None:
    now = [0.0]
    waiting = Forwarded(lambda: now[0], 7.0)
    late, others = ([encode(Kind.PUT, number, bytes(100))] * 20 for number in range(2))
    waiting.add(late)
    waiting.give_back(waiting.take(bytes_max))
    now[0] = 6.0
    waiting.add(others)
    now[0] = 7.0
    taken: list[bytes] = []
    while waiting.size_bytes:
        taken += [data for _, data in waiting.take(bytes_max)]
    assert taken == others
    waiting.add(late)  # again, and in time
    assert waiting.take(bytes_max)[0][1] == late[0]


def test_expiry_tells_sent_from_unsent(proposals: Proposals) -> None:
    sent, unsent, young = Caller(), Caller(), Caller()
    proposals.add(Kind.PUT, b"a", sent, 0.0)
    proposals.take_unsent()
    proposals.add(Kind.PUT, b"b", unsent, 0.0)
    proposals.add(Kind.PUT, b"c", young, 5.0)
    assert proposals.take_expired(7.5) == [(sent, True), (unsent, False)]
    assert len(proposals) == 1
    assert [body for _, data in proposals.take_unsent() for body in (decode(data)[2],)] == [b"c"]


def test_one_identity_alone_has_the_limit_and_another_is_taken_beside_it(proposals: Proposals) -> None:
    proposals.shares.limit = 8 * PROPOSAL_BYTES
    first = [proposals.add(Kind.PUT, b"", Caller(b"mallory"), 0.0) for _ in range(8)]
    with pytest.raises(errors.TooManyRequestsError, match="user mallory has its share of the 0 MiB of proposals"):
        proposals.add(Kind.PUT, b"", Caller(b"mallory"), 0.0)
    proposals.add(Kind.PUT, b"", Caller(b"alice"), 0.0)
    for request_id in first:
        proposals.pop(request_id)
    for _ in range(4):
        proposals.add(Kind.PUT, bytes(PROPOSAL_BYTES), Caller(b"alice"), 0.0)
    with pytest.raises(errors.TooManyRequestsError, match="user alice"):
        proposals.add(Kind.PUT, b"", Caller(b"alice"), 0.0)


class Awaited(AwaitableNode):
    """A node with only a queue of proposals."""

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: RequestCaller | None) -> int:
        return self.proposals.add(kind, body, waiter, 0.0)

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        return self.proposals.withdraw(request_id)


async def test_flood_of_a_client_without_a_user_takes_nothing_from_the_member(proposals: Proposals) -> None:
    """Locks of all clients without a user had one share with the member's own alarms, which it then refused."""
    proposals.shares.limit = 8 * PROPOSAL_BYTES
    node, client = Awaited(proposals), "address 10.0.0.7"
    tasks = [asyncio.create_task(node.propose(Kind.TXN, b"", None, None, identity=client)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(errors.ShareError, match=client):
        await node.propose(Kind.TXN, b"", None, None, identity=client)
    tasks.append(asyncio.create_task(node.propose(Kind.ALARM, b"", None, MEMBER, identity=OWN)))
    await asyncio.sleep(0)
    assert set(proposals.shares.held) == {client, OWN}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_finished_request_frees_its_bytes_however_it_ends(proposals: Proposals) -> None:
    def add(now: float) -> int:
        return proposals.add(Kind.PUT, b"body", Caller(b"alice"), now)

    proposals.pop(add(0.0))
    add(0.0)
    assert len(proposals.take_expired(7.5)) == 1
    assert proposals.shares.held == {}
    proposals.observe(lambda seconds: None, lambda: 8.0)
    proposals.pop(add(8.0))
    add(8.0)
    proposals.close()
    assert proposals.shares.held == {}


def test_stopping_fails_all_waiters(proposals: Proposals) -> None:
    callers = [Caller(), Caller()]
    for caller in callers:
        proposals.add(Kind.PUT, b"", caller, 0.0)
    proposals.close()
    assert all(isinstance(caller.outcome, errors.StoppedError) for caller in callers)
    assert not proposals.take_unsent()


def test_pending_requests_are_measured_on_demand(proposals: Proposals) -> None:
    measured: list[float] = []
    before, during, after = (proposals.add(Kind.PUT, b"", Caller(), now) for now in (1.0, 2.0, 3.0))
    proposals.observe(measured.append, lambda: 4.5)
    assert (len(proposals), proposals.is_waiting(before)) == (3, True)
    proposals.pop(before)
    proposals.pop(before)
    proposals.pop(during)
    assert measured == [3.5, 2.5]
    proposals.observe(None, lambda: 4.5)
    assert proposals.pop(after) is not None
    assert measured == [3.5, 2.5]


def test_two_starts_at_the_same_time_have_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock nothing keeps begins at the same moment each time."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_790_000_000_000_000_000)
    first, second = (
        {next(ids) for _ in range(1000)} for ids in (request_ids(7, new_start()), request_ids(7, new_start()))
    )
    assert first.isdisjoint(second)
    assert {number >> 48 for number in first | second} == {7}


@pytest.mark.interpreted
def test_expired_proposals_are_taken_in_batches(proposals: Proposals, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a quorum 20,000 calls were answered in one turn of the loop.
    monkeypatch.setattr(module, "EXPIRED_AT_ONCE", 2)
    callers = [Caller() for _ in range(5)]
    for caller in callers:
        proposals.add(Kind.PUT, b"a", caller, 0.0)
    taken = [proposals.take_expired(7.5) for _ in range(4)]
    assert [len(some) for some in taken] == [2, 2, 1, 0]
    assert [caller for some in taken for caller, _ in some] == callers
    assert proposals.failed == 5


def long_caller(identity: bytes) -> Caller:
    caller = Caller(identity)
    caller.work = LONG_WORK + 1
    return caller


def test_the_keys_of_a_txn_are_counted_when_its_turn_comes() -> None:
    """10,000 calls of Lock that arrive together find an empty queue, and each is applied after those before it."""
    keys = [0]
    proposals = Proposals(count(1), 7.0, clock=lambda: 0.0, keys_of=lambda request: keys[0])
    mallory = [
        proposals.add(Kind.TXN, b"lock", Caller(b"mallory", request=rpc_pb2.TxnRequest()), 0.0) for _ in range(9)
    ]
    keys[0] = 10_000
    rounds = []
    while proposals.unsent_bytes:
        rounds += [[request_id for request_id, _ in proposals.take_unsent(module.PACE_MIN_BYTES)]]
    assert rounds == [[request_id] for request_id in mallory]


@pytest.mark.parametrize("is_returned", [False, True])
def test_an_entry_counts_the_keys_that_it_looks_at(proposals: Proposals, is_returned: bool) -> None:
    """10,000 calls of Lock looked at each other's keys, 200 bytes each: a put waited for 6 s behind them in the log."""
    mallory = []
    for _ in range(20):
        caller = Caller(b"mallory")
        caller.work = 10_000
        mallory.append(proposals.add(Kind.TXN, b"lock", caller, 0.0))
    alice = proposals.add(Kind.PUT, b"put", Caller(b"alice"), 0.0)
    if is_returned:
        proposals.give_back(proposals.take_unsent(1))
    rounds = []
    while proposals.unsent_bytes:
        rounds.append([request_id for request_id, _ in proposals.take_unsent(module.PACE_MIN_BYTES)])
        looking = set(rounds[-1]) & set(mallory)
        assert len(looking) <= 1
        assert proposals.taken_work_bytes == len(looking) * 10_000 * module.KEY_COST_BYTES
    assert alice in rounds[0] + rounds[1]
    assert sorted(itertools.chain(*rounds)) == [*mallory, alice]


def test_a_txn_that_has_not_waited_is_tried_whatever_the_estimate_says() -> None:
    """An estimate from a slow time refused all nested txns, and none could correct it."""
    proposals = Proposals(count(1), 7.0, clock=lambda: 0.0)
    caller = Caller(b"alice", deadline=5.0, request=rpc_pb2.TxnRequest())
    number = proposals.add(Kind.TXN, b"txn", caller, 0.0)
    assert [request_id for request_id, _ in proposals.take_unsent(module.PACE_MIN_BYTES, 6.0)] == [number]


def unsent(proposals: Proposals) -> list[int]:
    return [request_id for request_id, _ in proposals.take_unsent()]


def test_one_long_entry_at_a_time_is_in_the_log_and_identities_take_turns(proposals: Proposals) -> None:
    """A client with 12 txns that each read 500 MB had the puts of all others wait for 7 s."""
    first, second, third = (proposals.add(Kind.TXN, b"long", long_caller(b"mallory"), 0.0) for _ in range(3))
    put = proposals.add(Kind.PUT, b"short", Caller(b"alice"), 0.0)
    other = proposals.add(Kind.TXN, b"long", long_caller(b"alice"), 0.0)
    assert unsent(proposals) == [first, put]
    assert unsent(proposals) == []
    for following in (second, other, third):
        assert proposals.end_long()
        assert unsent(proposals) == [following]
    assert not proposals.end_long()
    assert proposals.unsent_bytes == 0


def test_the_next_long_entry_follows_one_that_is_withdrawn_unsent(proposals: Proposals) -> None:
    first, second, third = (proposals.add(Kind.TXN, b"long", long_caller(b"mallory"), 0.0) for _ in range(3))
    assert proposals.withdraw(second)
    assert proposals.withdraw(first)
    assert unsent(proposals) == [third]
    assert not proposals.withdraw(third), "it is in the log, and others wait until it is applied"
    fourth = proposals.add(Kind.TXN, b"long", long_caller(b"mallory"), 0.0)
    assert unsent(proposals) == []
    proposals.end_long()
    assert unsent(proposals) == [fourth]
    assert set(proposals.shares.held) == {b"mallory"}


def test_a_long_entry_that_is_lost_does_not_hold_up_others_for_ever(proposals: Proposals) -> None:
    lost = proposals.add(Kind.TXN, b"long", long_caller(b"mallory"), 0.0)
    kept = proposals.add(Kind.TXN, b"long", long_caller(b"mallory"), 6.0)
    assert unsent(proposals) == [lost]
    assert [sent for _, sent in proposals.take_expired(7.5)] == [True]
    assert unsent(proposals) == [kept]
